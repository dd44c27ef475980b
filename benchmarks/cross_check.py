"""Whether another pair of tools finds the same cost: CPU per request of a gateway by ours and by theirs.

The other tools are a directory with mock.c (`mock FIRST_PORT PORTS`) and lg.c (`lg -t NAME:PORT -c N -d S
-w S -k KEY -p PIDS`, JSON with `cpu_s` and, per target, `ok`). Each pair measures the gateway in front of
its own mock engine, in alternation. Says nothing of which of the two is right.
"""

import contextlib
import json
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import lab
from lab import BUILD, KEY, WORKERS, Cores, NotMeasured
from peers import Peer

AGREEMENT = 0.15
SECONDS = 3.0
RunGateway = Callable[[Peer, Sequence[int], Cores], contextlib.AbstractContextManager[Any]]


def run(directory: pathlib.Path, chosen: Sequence[Peer], rounds: int, run_gateway: RunGateway) -> int:
    """Prints one line a gateway; 1 when any differs by more than AGREEMENT."""
    theirs = lab.compile_tool(directory / "lg.c", BUILD / "cross_check_lg")
    their_mock = lab.compile_tool(directory / "mock.c", BUILD / "cross_check_mock")
    cores = Cores.of_this_machine()
    agreed = True
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(lab.mock_engine(cores))
        their_port = lab.free_ports(WORKERS)
        log = BUILD / "cross_check_mock.log"
        process = stack.enter_context(
            lab.running([str(their_mock), str(their_port), str(WORKERS)], core=cores.mock, log=log)
        )
        lab.wait_for_port(their_port + WORKERS - 1, process, log, 5.0)
        for peer in chosen:
            try:
                pairs = [
                    (
                        _our_cost(peer, mock.ports, cores, run_gateway),
                        _their_cost(peer, range(their_port, their_port + WORKERS), cores, run_gateway, theirs),
                    )
                    for _ in range(rounds)
                ]
            except NotMeasured as error:
                print(f"{peer.name}: not measured: {error}")
                continue
            ours_us, theirs_us = (statistics.median(costs) for costs in zip(*pairs, strict=True))
            difference = ours_us / theirs_us - 1
            agreed = agreed and abs(difference) <= AGREEMENT
            verdict = "agree" if abs(difference) <= AGREEMENT else "DIFFER"
            both = f"{ours_us:.1f} µs per request by ours, {theirs_us:.1f} by theirs"
            print(f"{peer.name}: {both} ({difference:+.1%}): {verdict}", flush=True)
    return 0 if agreed else 1


def _our_cost(peer: Peer, ports: Sequence[int], cores: Cores, run_gateway: RunGateway) -> float:
    with run_gateway(peer, ports, cores) as (port, process, _):
        found = lab.generate_load(cores, {"gateway": port}, seconds=SECONDS, gateway_process=process.pid)
    return float(found["cpu_seconds"] / found["targets"]["gateway"]["answers"] * 1e6)


def _their_cost(
    peer: Peer, ports: Sequence[int], cores: Cores, run_gateway: RunGateway, generator: pathlib.Path
) -> float:
    with run_gateway(peer, ports, cores) as (port, process, _):
        watched = ",".join(map(str, lab.process_tree(process.pid)))
        command = [
            str(generator),
            "-t",
            f"gateway:{port}",
            "-c",
            "64",
            "-d",
            str(SECONDS),
            "-w",
            "1",
            "-k",
            KEY,
            "-p",
            watched,
        ]
        found = json.loads(lab.run_tool(command, core=cores.generator, patience_s=SECONDS + lab.TOOL_PATIENCE_S))
    return float(found["cpu_s"] / found["targets"][f"gateway:{port}"]["ok"] * 1e6)

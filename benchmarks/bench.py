"""What a gateway costs: Evenflow beside its peers, each alone on one core, against the same mock engine.

Usable from a fresh clone: compiles its two tools with cc, installs the peers from PyPI into environments of
their own below .venv-bench/, measures them in alternation and writes a Markdown table and a JSON file. A
gateway that cannot be installed or started is a row that says so. Never sends traffic to anything but
127.0.0.1. See README.md beside this file.
"""

import argparse
import contextlib
import datetime
import http.client
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import cross_check
import lab
import peers
import phases
import report
from lab import BENCHMARKS, BUILD, KEY, Cores, LabError, Mock, NotMeasured
from peers import Peer, Site, Start
from phases import Figures, NotMeasuredInPart, Running
from report import Row

QUICK_GATEWAYS = ("evenflow-round-robin", "nginx")


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    _raise_file_limit()
    try:
        if options.cross_check is not None:
            return cross_check.run(options.cross_check, _chosen(options), options.rounds, run_gateway)
        return run(options)
    except LabError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ", ".join(peer.name for peer in peers.ALL)
    parser = argparse.ArgumentParser(prog="bench.py", description="Overhead of gateways, side by side.")
    parser.add_argument("--gateways", help=f"comma-separated, of: {names}")
    parser.add_argument("--rounds", type=int, help="how often each is measured (default 5; 2 with --quick)")
    parser.add_argument("--seconds", type=float, help="of each measurement (default 4; 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help=f"under two minutes: {', '.join(QUICK_GATEWAYS)}")
    parser.add_argument(
        "--output", type=pathlib.Path, help="results, path without ending (default results/overhead-DATE)"
    )
    parser.add_argument(
        "--cross-check", type=pathlib.Path, metavar="DIRECTORY", help="compare with another mock.c and lg.c"
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.seconds = options.seconds or (3.0 if options.quick else 4.0)
    unknown = set((options.gateways or "").split(",")) - {peer.name for peer in peers.ALL} - {""}
    if unknown:
        parser.error(f"unknown gateway {', '.join(sorted(unknown))}; there are: {names}")
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds and --seconds must be above zero")
    return options


def _chosen(options: argparse.Namespace) -> list[Peer]:
    if options.gateways:
        names = [name for name in options.gateways.split(",") if name]
        return sorted((peer for peer in peers.ALL if peer.name in names), key=lambda peer: names.index(peer.name))
    if options.quick or options.cross_check:
        return [peer for peer in peers.ALL if peer.name in QUICK_GATEWAYS]
    return [peer for peer in peers.ALL if peer.by_default]


def _raise_file_limit() -> None:
    """Thousands of streams are thousands of sockets, for the tools and for the gateways alike."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(options: argparse.Namespace) -> int:
    chosen = _chosen(options)
    command = "make bench" if not sys.argv[1:] else f"benchmarks/bench.py {' '.join(sys.argv[1:])}"
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "machine": report.machine(),
    }
    cores = Cores.of_this_machine()
    os.sched_setaffinity(0, {cores.generator})
    started = time.monotonic()
    with lab.mock_engine(cores) as mock:
        rows = measure_all(chosen, options, mock, cores)
    markdown = report.to_markdown(rows, facts)
    facts["run_seconds"] = round(time.monotonic() - started)
    stem = options.output or _default_output(options)
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(markdown)
    stem.with_suffix(".json").write_text(json.dumps(report.to_json(rows, facts), indent=1) + "\n")
    print(f"\n{markdown}\nwritten: {stem}.md and .json, after {facts['run_seconds']} s")
    return 0


def _default_output(options: argparse.Namespace) -> pathlib.Path:
    """A full run is a result to keep; a partial one shall not overwrite it."""
    if options.quick or options.gateways:
        return BUILD / "overhead-partial"
    return BENCHMARKS / "results" / f"overhead-{datetime.datetime.now(datetime.UTC).date().isoformat()}"


def measure_all(chosen: Sequence[Peer], options: argparse.Namespace, mock: Mock, cores: Cores) -> list[Row]:
    """All gateways in each round, in an order that turns by one: none always comes first."""
    rows = {peer.name: Row(peer) for peer in chosen}
    for number in range(options.rounds):
        for peer in [*chosen[number % len(chosen) :], *chosen[: number % len(chosen)]]:
            row = rows[peer.name]
            if number == 0:
                _progress(f"behaviour: {peer.name}")
                row.behaviour = measure(peer, row, BEHAVIOUR, options, mock, cores)
            if row.behaviour is None:
                continue  # could not be installed or started: it will not be now
            _progress(f"round {number + 1} of {options.rounds}: {peer.name}")
            row.rounds.append(measure(peer, row, COST, options, mock, cores) or {})
    return list(rows.values())


# In this order: the slow reader last, since some gateways never recover. 2,000 streams are too much for some
# as well: the cost is measured in a process that has not seen them.
BEHAVIOUR = (phases.client_leaves, phases.memory, phases.slow_reader)
COST = (phases.closed_loop, phases.open_loop, phases.paced_streams)
Phase = Callable[[Running], Figures]


def measure(
    peer: Peer, row: Row, sequence: Sequence[Phase], options: argparse.Namespace, mock: Mock, cores: Cores
) -> Figures | None:
    """The figures of a gateway that is started for them; None when it does not start.

    What goes wrong becomes a remark in its row, and the rest of the run goes on.
    """
    try:
        with run_gateway(peer, mock.ports, cores) as (port, process, version):
            row.version = version
            gateway = Running(peer, port, process, mock, cores, options.seconds)
            for phase in sequence:
                _measure(phase, gateway, row)
                if process.poll() is not None:
                    break
            return gateway.figures
    except NotMeasured as error:
        row.remark(str(error))
        _progress(f"  not measured: {error}")
        return None


def _measure(phase: Phase, gateway: Running, row: Row) -> None:
    name = phase.__name__.replace("_", " ")
    try:
        found = phase(gateway)
    except (NotMeasured, LabError, OSError, http.client.HTTPException) as error:
        found = error.figures if isinstance(error, NotMeasuredInPart) else {}
        row.remark(f"{name}: {error}")
        _progress(f"  {name} not measured: {error}")
    gateway.figures.update(found)
    if found:
        _progress(f"  {name}: " + ", ".join(f"{figure} {value:,.1f}" for figure, value in found.items()))


@contextlib.contextmanager
def run_gateway(
    peer: Peer, worker_ports: Sequence[int], cores: Cores
) -> Iterator[tuple[int, subprocess.Popen[bytes], str]]:
    """The gateway, started and answering: its port, its process, its version."""
    directory = BUILD / peer.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    port = lab.free_ports(2)
    start: Start = peer.prepare(Site(directory, port, port + 1, tuple(worker_ports), KEY))
    log = directory / "output.log"
    with lab.running(start.command, core=cores.gateway, log=log, environment=start.environment) as process:
        _wait_for_answer(port, process, log, peer.startup_s)
        yield port, process, start.version


def _wait_for_answer(port: int, process: subprocess.Popen[bytes], log: pathlib.Path, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    last = "it does not listen"
    while time.monotonic() < until:
        if process.poll() is not None:
            raise NotMeasured(f"ended at start with status {process.returncode}: {lab.last_line(log)}")
        try:
            status = _ask(port)
        except (OSError, http.client.HTTPException) as error:
            last = "it does not listen" if isinstance(error, ConnectionRefusedError) else repr(error)
        else:
            if status == 200:
                return
            last = f"it answers {status}"
        time.sleep(0.1)
    raise NotMeasured(f"no answer after {patience_s:.0f} s ({last}): {lab.last_line(log)}")


def _ask(port: int) -> int:
    body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def _progress(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

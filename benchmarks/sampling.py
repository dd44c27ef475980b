"""What parallel sampling costs and saves.

    .venv/bin/python benchmarks/sampling.py [--seconds 4] [--rounds 3] [--pure] [--output FILE]

First the gateway's CPU for each relayed chunk: 200 streams of one choice passed through, and 25 streams of 8 choices
that are made of 200 streams of one, paced as engines send them (a chunk each 20 ms). Then what an engine computes and
how long a caller waits for eight choices of a prompt of some 800 tokens, on real engines: the engine's own `n`, the
gateway's groups, and eight calls that go wherever there is room.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import pathlib
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import lab
from lab import KEY, ROOT, Cores

from evenflow.fleet.engines.embedded import ALIAS_DEFAULT, EngineProcess

STREAMS, CHOICES = 200, 8
GAP_US = 20_000
ENDLESS = 10_000_000
PROMPT = "The river carries boats and birds and trains along its banks. " * 60
TOKENS = (8, 64)
SLOTS = 8
CONFIGURATION = """\
listen: {{host: 127.0.0.1, port: {port}}}
workers:
{workers}
timeouts: {{first_byte_s: 300}}
scheduling: {scheduling}
log: {{level: warning, access: "{log}"}}
"""


@contextlib.contextmanager
def gateway(
    workers: list[str], cores: Cores, python: str, *, scheduling: str = "{}"
) -> Iterator[tuple[int, int]]:
    """Evenflow before workers and with a `scheduling` that are written as YAML: its port and its process."""
    port = lab.free_ports(1)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "evenflow.yaml"
        lines = "\n".join(f"  - {worker}" for worker in workers)
        log = f"{directory}/access.log"
        path.write_text(CONFIGURATION.format(port=port, workers=lines, scheduling=scheduling, log=log))
        output = pathlib.Path(directory) / "output.log"
        command = [python, "-P", "-m", "evenflow", "serve", "--config", str(path)]
        with lab.running(command, core=cores.gateway, log=output) as process:
            lab.wait_for_port(port, process, output, 20.0)
            yield port, process.pid


def cpu_per_chunk(mock: lab.Mock, cores: Cores, python: str, seconds: float, choices: int) -> float:
    """Microseconds of the gateway's CPU for each chunk that a caller received."""
    n_max = "" if choices == 1 else ", n_max: 1"
    workers = [f'{{url: "http://127.0.0.1:{port}", models: [mock], slots: 2000{n_max}}}' for port in mock.ports]
    with gateway(workers, cores, python) as (port, process):
        mock.control(gap_us=GAP_US)
        report = lab.generate_load(
            cores,
            {"gateway": port},
            seconds=seconds,
            warmup=1.0,
            ramp=1.0,
            connections=STREAMS // choices,
            chunks=ENDLESS,
            choices=choices,
            gateway_process=process,
        )
        mock.control(gap_us=0)
    return float(report["cpu_seconds"] / report["targets"]["gateway"]["chunks"] * 1e6)


def ask(url: str, **fields: Any) -> Any:
    body = json.dumps({"model": ALIAS_DEFAULT, "temperature": 1.0, **fields}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=300) as page:
        return json.load(page)


def computed(engines: list[EngineProcess]) -> int:
    """Prompt tokens that the engines have computed since they started."""
    total = 0
    for engine in engines:
        with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as page:
            for line in page.read().decode().splitlines():
                if line.startswith("llamacpp:prompt_tokens_total"):
                    total += int(float(line.split()[-1]))
    return total


def scattered(url: str, tokens: int, prompt: str) -> None:
    """Eight calls of one choice, as a caller without `n` makes them."""
    with concurrent.futures.ThreadPoolExecutor(CHOICES) as pool:
        list(pool.map(lambda seed: ask(url, prompt=prompt, max_tokens=tokens, seed=seed), range(CHOICES)))


def together(url: str, tokens: int, prompt: str) -> None:
    answer = ask(url, prompt=prompt, max_tokens=tokens, n=CHOICES, seed=0)
    assert len(answer["choices"]) == CHOICES


def engine_rows(cores: Cores, python: str, rounds: int) -> list[str]:
    engines = [EngineProcess("--instances", "2", "--slots", str(SLOTS)) for _ in range(2)]
    rows = []
    try:
        for engine in engines:
            engine.wait_ready()
        own = [f'{{url: "{engine.url}"}}' for engine in engines]
        capped = [worker[:-1] + ", n_max: 4}" for worker in own]
        alone = [worker[:-1] + ", n_max: 1}" for worker in own]
        ways: list[tuple[str, list[str] | None, Callable[[str, int, str], None]]] = [
            ("the engine's own n, asked directly", None, together),
            ("gateway, one group of 8", own, together),
            ("gateway, two groups of 4", capped, together),
            ("gateway, one choice at a time", alone, together),
            ("eight calls, wherever there is room", own, scattered),
        ]
        for tokens in TOKENS:
            native = 0.0
            for name, workers, call in ways:
                with contextlib.ExitStack() as stack:
                    url = engines[0].url
                    if workers is not None:
                        port, _ = stack.enter_context(gateway(workers, cores, python))
                        url = f"http://127.0.0.1:{port}"
                        time.sleep(2.0)  # until it knows which engines these are
                    times, counts = [], []
                    for number in range(rounds):
                        prompt = f"{name} {tokens} {number} {time.time()} {PROMPT}"
                        before, began = computed(engines), time.monotonic()
                        call(url, tokens, prompt)
                        times.append(time.monotonic() - began)
                        counts.append(computed(engines) - before)
                taken = statistics.median(times)
                native = native or taken
                count = statistics.median(counts)
                rows.append(f"| {name} | {tokens} | {count:,.0f} | {taken:.2f} | {taken / native:.2f} |")
                print(rows[-1], file=sys.stderr, flush=True)
    finally:
        for engine in engines:
            engine.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pure", action="store_true", help="the checkout instead of the compiled package")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    cores = Cores.of_this_machine()
    python = sys.executable if options.pure else str(ROOT / ".venv-fast" / "bin" / "python")
    figures: dict[int, list[float]] = {1: [], CHOICES: []}
    with lab.mock_engine(cores) as mock:
        for _ in range(options.rounds):
            for choices, found in figures.items():
                found.append(cpu_per_chunk(mock, cores, python, options.seconds, choices))
                print(f"n = {choices}: {found[-1]:.1f} us per chunk", file=sys.stderr, flush=True)
    plain, emulated = (statistics.median(found) for found in figures.values())
    package = "pure Python" if options.pure else "the compiled package"
    lines = [
        f"# Parallel sampling, {datetime.datetime.now(datetime.UTC).date().isoformat()}",
        "",
        f"`benchmarks/sampling.py`, {package}, medians of {options.rounds}.",
        "",
        "| 200 paced streams of engines | CPU µs per chunk |",
        "|---|---|",
        f"| passed through, n = 1 | {plain:.1f} |",
        f"| 25 callers with n = {CHOICES}, made of single choices | {emulated:.1f} ({emulated / plain:.2f} ×) |",
        "",
        f"Eight choices of a prompt of some 740 tokens, two embedded engines of {SLOTS} slots:",
        "",
        "| way | tokens each | prompt tokens computed | seconds | times the engine's own n |",
        "|---|---|---|---|---|",
        *engine_rows(cores, python, options.rounds),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()

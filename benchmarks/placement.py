"""What choosing a worker costs, and what it brings.

    .venv-fast/bin/python benchmarks/placement.py [--trace FILE] [--no-engines] [--output FILE]

First the time of a choice among 8, 64 and 256 workers, and of hashing a prompt of 30 KB. Then, with `--trace`, a
recorded conversation trace (Mooncake's conversation_trace.jsonl: 12,031 requests, 366 of 1,000 prompt tokens could be
cached by one endless cache) in simulated time on eight engines at three loads, placed by each policy. Then two real
engines before which conversations with long beginnings take turns, placed by least work and in turn.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import pathlib
import platform
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from statistics import fmean

import lab
from sampling import gateway

import evenflow.policy.placement.least_work as least_work_module
from evenflow.fleet.engines.embedded import ALIAS_DEFAULT, EngineProcess
from evenflow.policy.fairness import Group, Tier
from evenflow.policy.placement import PLACEMENTS, Ask, block_hashes, placement_named
from evenflow.sim.engine import PROFILES
from evenflow.sim.measure import quantiles
from evenflow.sim.model import Result, Scenario
from evenflow.sim.traffic import read_trace, scale
from evenflow.sim.world import run

PROMPT_BYTES = 30_000
CHOICES = 20_000
FLEETS = (8, 64, 256)
SPEEDS = (1.0, 1.5, 2.0)
ENGINES = 8
# Mooncake keeps caches in the hosts' memory: nothing is evicted within the hour of the trace.
PROFILE = replace(PROFILES["h100-70b"], prefix_cache=True, kv_tokens=100_000_000)
TIERS = (Tier("standard", 0.0, (Group("keys", 10.0),)),)
CONVERSATIONS, TURNS = 8, 6
BEGINNING = "The committee of chapter {number} met to weigh all that was said of rivers, mills and bridges. " * 30


class Worker:
    """What a policy sees of one."""

    __slots__ = ("in_flight", "live", "name", "slots", "speed", "tokens", "tokens_max", "work")

    def __init__(self, number: int, rng: random.Random) -> None:
        self.name = f"worker-{number}"
        self.live = True
        self.slots = 64
        self.in_flight = rng.randrange(32)
        self.work = self.in_flight * rng.uniform(100.0, 900.0)
        self.speed = 1.0
        self.tokens = self.in_flight * 500.0
        self.tokens_max = 400_000.0 if number % 2 else inf


def per_call_us(times: int, call: Callable[[int], object]) -> float:
    """The least of five rounds."""
    best = inf
    for _ in range(5):
        began = time.perf_counter()
        for number in range(times):
            call(number)
        best = min(best, (time.perf_counter() - began) / times)
    return best * 1e6


def decisions() -> str:
    """Prompts of 30 KB of which 200 families share the first half; a choice, and its entry in the index."""
    rng = random.Random(1)
    families = [rng.randbytes(PROMPT_BYTES // 2) for _ in range(200)]
    prompts = [families[number % 200] + rng.randbytes(PROMPT_BYTES // 2) for number in range(400)]
    hashes = [block_hashes(prompt, "m") for prompt in prompts]
    asks = [Ask(blocks, 7500.0, 115.0, 0.0, session=number + 1) for number, blocks in enumerate(hashes)]
    hashing = per_call_us(400, lambda number: block_hashes(prompts[number], "m"))
    lines = ["| policy | " + " | ".join(f"{count} workers" for count in FLEETS) + " |", "|---|" + "---|" * len(FLEETS)]
    for name in PLACEMENTS:
        cells = []
        for count in FLEETS:
            workers = tuple(Worker(number, rng) for number in range(count))
            policy = placement_named(name)(random.Random(2))
            placed = getattr(policy, "placed", None)
            for ask in asks if placed else ():
                placed(workers[policy.choose(workers, 1, ask)], ask)

            def short(number: int, policy=policy, workers=workers) -> int:  # type: ignore[no-untyped-def]
                return policy.choose(workers, 1)  # type: ignore[no-any-return]

            def long(number: int, policy=policy, workers=workers) -> int:  # type: ignore[no-untyped-def]
                return policy.choose(workers, 1, asks[number % 400])  # type: ignore[no-any-return]

            cells.append(f"{per_call_us(CHOICES, short):.2f} / {per_call_us(CHOICES, long):.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    compiled = not (least_work_module.__file__ or "").endswith(".py")
    return (
        f"Microseconds of a choice, of a short prompt / of one of 30 KB ({'compiled' if compiled else 'pure Python'}); "
        f"hashing the 30 KB takes {hashing:.1f} µs beside it.\n\n" + "\n".join(lines)
    )


def replayed(trace: str) -> str:
    traffic = read_trace(trace)
    lines = [
        "| policy | " + " | ".join(f"load {speed:g}: hits, wait mean / p90" for speed in SPEEDS) + " |",
        "|---|" + "---|" * len(SPEEDS),
    ]
    loads = [scale(traffic, speed=speed) for speed in SPEEDS]
    for name in PLACEMENTS:
        cells = [hits_and_waits(run(scenario)) for scenario in [
            Scenario(load, (PROFILE,) * ENGINES, TIERS, kv_told=True, placement=name) for load in loads
        ]]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hits_and_waits(result: Result) -> str:
    """The part of all prompt tokens that a cache had; seconds from arrival to first token."""
    begun = [record for record in result.records if record.first_token_s is not None]
    asked = sum(record.arrival.input_tokens for record in begun)
    cached = sum(record.cached_tokens for record in begun)
    waits = [record.first_token_s - record.arrival.time_s for record in begun if record.first_token_s is not None]
    return f"{cached / asked:.3f}, {fmean(waits):.2f} / {quantiles(waits).p90:.2f} s"


@contextlib.contextmanager
def two_engines() -> Iterator[list[EngineProcess]]:
    engines = [EngineProcess("--slots", "4") for _ in range(2)]
    try:
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def live(cores: lab.Cores, python: str) -> str:
    """Eight conversations by two callers each in turn; every question comes after the whole beginning."""
    lines = ["| policy | first questions, TTFT p50 | later ones, p50 | p90 |", "|---|---|---|---|"]
    for name in ("round_robin", "least_work"):
        with two_engines() as engines:
            workers = [f'{{url: "{engine.url}", slots: 4}}' for engine in engines]
            with gateway(workers, cores, python, scheduling=f"{{placement: {name}}}") as (port, _):
                time.sleep(2.0)
                url = f"http://127.0.0.1:{port}"
                first, later = [], []
                with concurrent.futures.ThreadPoolExecutor(2) as pool:
                    for turn in range(TURNS):
                        order = random.Random(turn).sample(range(CONVERSATIONS), CONVERSATIONS)
                        took = list(pool.map(first_token_s, [url] * len(order), order, [turn] * len(order)))
                        (later if turn else first).extend(took)
        ordered = sorted(later)
        p90 = ordered[int(len(ordered) * 0.9)]
        lines.append(
            f"| {name} | {statistics.median(first):.2f} s | {statistics.median(later):.2f} s | {p90:.2f} s |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def first_token_s(url: str, conversation: int, turn: int) -> float:
    """Seconds until the first event of the stream with a text in it."""
    messages = [
        {"role": "system", "content": BEGINNING.format(number=conversation)},
        {"role": "user", "content": f"Question {turn}: who spoke?"},
    ]
    body = {"model": ALIAS_DEFAULT, "messages": messages, "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.monotonic()
    took = 0.0
    with urllib.request.urlopen(request, timeout=300) as page:
        for line in page:
            if not took and line.startswith(b"data: {") and b'"content":"' in line and b'"content":""' not in line:
                took = time.monotonic() - began
    return took or time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="Mooncake's conversation_trace.jsonl; without it nothing is replayed")
    parser.add_argument("--no-engines", action="store_true", help="leave the real engines out")
    parser.add_argument("--output", help="where the report goes (results/placement-DATE.md)")
    args = parser.parse_args()
    today = datetime.datetime.now().astimezone().date()
    parts = [f"# Placement, {today}", f"`benchmarks/placement.py`, Python {platform.python_version()}."]
    parts += ["## What a choice costs", decisions()]
    print(parts[-1], flush=True)
    if args.trace:
        parts += [
            "## A recorded trace in simulated time",
            f"Eight engines ({PROFILE.name}, nothing evicted), the trace at 1, 1.5 and 2 times its speed.",
            replayed(args.trace),
        ]
        print(parts[-1], flush=True)
    if not args.no_engines:
        parts += [
            "## Two real engines",
            f"{CONVERSATIONS} conversations of {TURNS} questions each, every question behind the same beginning of "
            f"some {len(BEGINNING) // 1000} KB; two at a time, on two cores with the engines beside the gateway.",
            live(lab.Cores.of_this_machine(), sys.executable),
        ]
    output = pathlib.Path(args.output or pathlib.Path(__file__).parent / f"results/placement-{today}.md")
    output.write_text("\n\n".join(parts) + "\n")
    print(f"written: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

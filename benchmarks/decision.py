"""What one scheduling decision costs: the real queue with 10,000 tenants and 100,000 waiting tickets.

    .venv/bin/python benchmarks/decision.py [--decisions 100000]

A decision is what the gateway does when a slot becomes free under load: finish one ticket (with a corrected cost),
look who is next, start it, and take in a new one. `quiet` is the way of a request that finds an idle fleet.
"""

import argparse
import gc
import os
import platform
import random
import sys
import time
from dataclasses import dataclass

from evenflow.policy.fairness import FairQueue, Group, Tenant, Ticket, Tier

TENANTS, WAITING = 10_000, 100_000
TIERS = (
    Tier("high", groups=(Group("web", 300.0),)),
    Tier("standard", groups=(Group("keys", 10.0), Group("anonymous", 1.0), Group("batch", 2.5))),
    Tier("low", 0.05, (Group("background", 1.0),)),
)
WHERE = (("web", 0), ("keys", 1), ("keys", 1), ("anonymous", 1), ("batch", 1), ("background", 2))
RUNNING = 256


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds."""

    mean: float
    p50: float
    p99: float


def measure(decisions: int = 100_000, seed: int = 1) -> tuple[Figures, Figures]:
    """(under load, quiet)."""
    rng = random.Random(seed)
    queue = FairQueue(TIERS)
    tenants = []
    for number in range(TENANTS):
        group, tier = rng.choice(WHERE)
        limit = 4 if number % 3 == 0 else None
        tenants.append((Tenant(f"t{number}", group, rng.choice((1.0, 10.0, 30.0)), concurrency=limit), tier))

    def ticket() -> Ticket:
        tenant, tier = rng.choice(tenants)
        return Ticket(tenant, tier, "lane", 1, rng.uniform(10.0, 2000.0))

    for _ in range(WAITING):
        queue.submit(ticket())
    running: list[Ticket] = []
    while len(running) < RUNNING and (head := queue.peek()) is not None:
        queue.start(head)
        running.append(head)
    fresh = [ticket() for _ in range(decisions)]
    costs = [rng.uniform(0.5, 1.5) for _ in range(decisions)]
    gc.collect()
    gc.freeze()
    gc.disable()
    times = []
    clock = time.perf_counter_ns
    for new, factor in zip(fresh, costs, strict=True):
        done = running[rng.randrange(len(running))]
        began = clock()
        queue.finish(done, done.estimate * factor)
        queue.submit(new)
        head = queue.peek()
        assert head is not None
        queue.start(head)
        times.append(clock() - began)
        running[running.index(done)] = head
    idle = FairQueue(TIERS)
    quiet = []
    for _ in range(decisions // 4):
        one = ticket()
        began = clock()
        idle.start_now(one)
        idle.finish(one, 100.0)
        quiet.append(clock() - began)
    gc.enable()
    return figures(times), figures(quiet)


def figures(times_ns: list[int]) -> Figures:
    times_ns.sort()
    count = len(times_ns)
    return Figures(
        sum(times_ns) / count / 1e3, times_ns[count // 2] / 1e3, times_ns[min(count - 1, count * 99 // 100)] / 1e3
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--decisions", type=int, default=100_000)
    options = parser.parse_args()
    load, quiet = measure(options.decisions)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}; {sys.argv[0]}")
    print(f"{TENANTS:,} tenants, {WAITING:,} waiting, three tiers, a third of the tenants with a concurrency limit\n")
    print("| decision | mean µs | p50 µs | p99 µs |\n|---|---|---|---|")
    for name, row in (("finish, submit, peek and start under load", load), ("start and finish, nothing waits", quiet)):
        print(f"| {name} | {row.mean:.2f} | {row.p50:.2f} | {row.p99:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The schedule against others, in simulated time: what is fair, what it costs, and how slots and charging matter.

    .venv/bin/python benchmarks/schedule.py --traces DIR      some ten seconds; writes results/schedule-DATE.md

DIR holds two public traces: vtc_arena/arena_27tenants.csv (the chat log of 27 tenants that "Fairness in Serving Large
Language Models", Sheng et al., OSDI 2024, replays) and servegen/mmid_20min_10rps.csv (34 bursty tenants, after
ServeGen). One engine model for all: `a10g-7b` is fitted to the throughput that the paper's artifact reports.
"""

import argparse
import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from evenflow.policy.fairness import Group, Tier
from evenflow.sim.engine import PROFILES
from evenflow.sim.measure import quantiles, summary
from evenflow.sim.model import Arrival, Result, Scenario, TenantSpec, Traffic
from evenflow.sim.traffic import read_trace, scale
from evenflow.sim.world import run

RESULTS = Path(__file__).parent / "results"
TIERS = (Tier("standard", 0.0, (Group("keys", 10.0),)),)
POLICIES = ("fcfs", "round_robin", "least_counter", "vtc", "fair")
CHARGING = ("estimate", "progress", "completion", "max_tokens")
# The arena log at slightly other speeds: a largest difference is one window, and moves by a third from run to run.
SPEEDS = (0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06, 1.08)
ISOLATION_S = 600.0


def arena(traffic: Traffic, engines: int = 1, **how: object) -> dict[str, float]:
    how = {"slots": "auto", "kv_told": True, **how}
    return summary(run(Scenario(traffic, (PROFILES["a10g-7b"],) * engines, TIERS, **how)))  # type: ignore[arg-type]


def reference(traffic: Traffic) -> dict[str, float]:
    """First come, first served, with all requests in the engine's own queue: what everything is measured against."""
    return arena(traffic, policy="fcfs", slots=None, kv_told=False)


def row(name: str, figures: dict[str, float], base: dict[str, float]) -> str:
    return (
        f"| {name} | {figures['difference_max']:.0f} | {figures['difference_mean']:.0f} | "
        f"{figures['difference_max'] / base['difference_max']:.2f} | {figures['tokens_per_s']:.0f} | "
        f"{figures['tokens_per_s'] / base['tokens_per_s'] - 1:+.1%} | {figures['light_first_token_p90_s']:.1f} s | "
        f"{figures['jain']:.3f} |"
    )


HEAD = (
    "| | largest difference | average | of FCFS | tokens/s | against FCFS | TTFT p90 of light tenants | Jain |\n"
    "|---|---|---|---|---|---|---|---|"
)


def policies(trace: Traffic) -> str:
    base = reference(trace)
    lines = [HEAD, row("FCFS, no limit on running requests (the reference)", base, base)]
    lines += [row(f"{policy}, learned slots", arena(trace, policy=policy), base) for policy in POLICIES]
    return "\n".join(lines)


def slots(trace: Traffic) -> str:
    base = reference(trace)
    lines = [HEAD]
    lines += [
        row(f"fair, {count or 'no limit on'} slots", arena(trace, slots=count, kv_told=False), base)
        for count in (8, 16, 24, 32, 64, None)
    ]
    lines.append(row("fair, learned from the queue alone", arena(trace, kv_told=False), base))
    lines.append(row("fair, learned, and the engine tells its memory (default)", arena(trace), base))
    return "\n".join(lines)


def varied(trace: Traffic) -> str:
    """The same over several speeds of the trace: means of the ratios."""
    traces = [scale(trace, speed=speed) for speed in SPEEDS]
    bases = [reference(one) for one in traces]
    lines = ["| | largest difference, of FCFS | tokens/s, of FCFS | TTFT p90 of light tenants |", "|---|---|---|---|"]
    for policy in POLICIES:
        all_ = [arena(one, policy=policy) for one in traces]
        pairs = list(zip(all_, bases, strict=True))
        lines.append(
            f"| {policy} | {fmean(a['difference_max'] / b['difference_max'] for a, b in pairs):.2f} | "
            f"{fmean(a['tokens_per_s'] / b['tokens_per_s'] for a, b in pairs):.3f} | "
            f"{fmean(a['light_first_token_p90_s'] for a in all_):.1f} s |"
        )
    return "\n".join(lines)


def charging(arena_trace: Traffic, servegen: Traffic) -> str:
    lines = [
        "| rule | arena × 4 on 4 engines: largest / average, Jain, light p90 | servegen × 2 on 4 engines: the same |",
        "|---|---|---|",
    ]
    quadruple = scale(arena_trace, speed=4.0, repeat=4 * len(arena_trace.arrivals))
    double = scale(servegen, speed=2.0)
    for rule in CHARGING:
        one = arena(quadruple, 4, charging=rule)
        other = summary(
            run(Scenario(double, (PROFILES["l4-8b"],) * 4, TIERS, charging=rule, slots="auto", kv_told=True))
        )
        lines.append(f"| {rule} | {_short(one)} | {_short(other)} |")
    return "\n".join(lines)


def _short(figures: dict[str, float]) -> str:
    return (
        f"{figures['difference_max']:.0f} / {figures['difference_mean']:.0f}, {figures['jain']:.3f}, "
        f"{figures['light_first_token_p90_s']:.1f} s"
    )


@dataclass(frozen=True, slots=True)
class Isolation:
    """Times to first token, p99 in seconds, of a tenant that uses half of its share."""

    solo_s: float
    beside_flood_s: float
    beside_flood_fcfs_s: float
    # Mean time from dispatch to the last token, alone.
    service_s: float


def isolation() -> Isolation:
    """Two tenants of equal weight on four engines: one uses half of its share, the other asks for ten times its own."""
    profile = (PROFILES["l4-8b"],) * 4
    full = _run(profile, _poisson("flood", 200.0, 60.0, 1))
    capacity = len(full.records) / full.ended_s
    quiet = _poisson("quiet", capacity / 4, ISOLATION_S, 2)
    flood = _poisson("flood", capacity / 2 * 10, ISOLATION_S, 3)
    solo = _run(profile, quiet)
    ended = [one for one in solo.records if one.ended_s is not None and one.dispatched_s is not None]
    return Isolation(
        _p99(solo),
        _p99(_run(profile, [*quiet, *flood])),
        _p99(_run(profile, [*quiet, *flood], policy="fcfs")),
        fmean(one.ended_s - one.dispatched_s for one in ended),  # type: ignore[operator]
    )


def _run(profile: tuple[object, ...], arrivals: list[Arrival], **how: object) -> Result:
    arrivals = sorted(arrivals, key=lambda arrival: arrival.time_s)
    tenants = tuple(TenantSpec(name) for name in sorted({arrival.tenant for arrival in arrivals}))
    traffic = Traffic("isolation", tenants, arrivals)
    return run(Scenario(traffic, profile, TIERS, slots="auto", kv_told=True, until_s=ISOLATION_S, **how))  # type: ignore[arg-type]


def _poisson(tenant: str, rate: float, until_s: float, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    arrivals, now = [], rng.expovariate(rate)
    while now < until_s:
        lengths = max(1, int(rng.lognormvariate(5.7, 0.8))), max(1, int(rng.lognormvariate(4.8, 0.7)))
        arrivals.append(Arrival(now, tenant, *lengths))
        now += rng.expovariate(rate)
    return arrivals


def _p99(result: Result) -> float:
    waits = [
        one.first_token_s - one.arrival.time_s
        for one in result.records
        if one.arrival.tenant == "quiet" and one.first_token_s is not None
    ]
    return quantiles(waits).p99


def backlogged(servegen: Traffic) -> str:
    lines = [
        "| requests a second | tokens/s | Jain over backlogged windows | TTFT p99 of light tenants |",
        "|---|---|---|---|",
    ]
    for rate in (10.0, 15.0, 20.0):
        figures = summary(
            run(Scenario(scale(servegen, rate=rate), (PROFILES["l4-8b"],) * 4, TIERS, slots="auto", kv_told=True))
        )
        lines.append(
            f"| {rate:.0f} | {figures['tokens_per_s']:.0f} | {figures['jain']:.4f} | "
            f"{figures['light_first_token_p99_s']:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with vtc_arena/ and servegen/")
    args = parser.parse_args()
    log = read_trace(args.traces / "vtc_arena" / "arena_27tenants.csv")
    servegen = read_trace(args.traces / "servegen" / "mmid_20min_10rps.csv")
    alone = isolation()
    today = time.strftime("%Y-%m-%d")
    text = f"""# The schedule in simulated time, {today}

`benchmarks/schedule.py`, Python {platform.python_version()}. Service differences: cost per second, as in the paper.

## The arena log on one engine: policies side by side

{policies(log)}

With another pace of the same log, means over {len(SPEEDS)} paces from {SPEEDS[0]} to {SPEEDS[-1]}:

{varied(log)}

## Fixed and learned slots

{slots(log)}

## When to charge, on several engines

{charging(log, servegen)}

## 34 bursty tenants on four engines

{backlogged(servegen)}

## A quiet tenant beside a flood

A tenant that uses half of its share, while another of equal weight asks for ten times its own: TTFT p99
{alone.beside_flood_s:.2f} s beside the flood, {alone.solo_s:.2f} s alone, {alone.beside_flood_fcfs_s:.0f} s first come,
first served; a request takes {alone.service_s:.1f} s alone.
"""
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"schedule-{today}.md").write_text(text)


if __name__ == "__main__":
    main()

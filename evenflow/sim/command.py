"""`evenflow sim`: replays traffic against a configuration in simulated time, and answers what would be if.

    evenflow sim                                              a small example that shows what fairness does
    evenflow sim --trace FILE --config evenflow.yaml          your configuration under a recorded load
    ... --compare 'premium 50: weight.premium=50'             what if premium had weight 50?
    ... --find-engines 'p99_ttft_s<2'                         how many engines for a p99 TTFT under 2 s?
    evenflow sim --fit access.log > engine.yaml               a profile of your engine, from a measured run

Every option is also a setting of `--set` and `--compare`, by its name with `_` for `-`. Promises: the same command
prints the same; a mistake costs one line that names the option and the next step. Never opens a socket.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from evenflow.sim import report
from evenflow.sim.engine import PROFILES
from evenflow.sim.fit import FitError, fit_log, profile_yaml
from evenflow.sim.measure import summary
from evenflow.sim.model import Record, Result, Scenario
from evenflow.sim.setup import (
    ENGINES_MAX,
    OPTIONS,
    Mistake,
    Notes,
    Setup,
    Traffics,
    fault_of,
    scenario,
    touched,
    with_option,
    with_setting,
)
from evenflow.sim.traffic import TraceError
from evenflow.sim.world import World, run

DONE, CANNOT_RUN = 0, 2

# Runs that are compared at most.
COMPARED_MAX = 12
# Events between two looks at the fairness bound.
BOUND_EVERY = 64
# Seconds between two drawings of the progress bar.
REDRAW_S = 0.1

# What a bare `evenflow sim` shows: ten tenants alike on an engine with room to spare, and one of them floods it.
EXAMPLE = Setup(tenants=10, requests=1500, rate=0.6, skew=0.0, flood=20.0, engine=PROFILES["a10g-7b"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `evenflow sim`."""
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar=option.metavar, help=option.help)
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND:...",
        help="dead|hanging|stale_reports:ENGINE:FROM:UNTIL, slow:ENGINE:FROM:UNTIL:FACTOR, leave_storm:AT:PART; "
        "engines count from 0, times are seconds; may repeat",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any option above by its name, or weight.NAME (of a tenant or a group), group.TENANT, concurrency.TENANT, "
        "queued.TENANT, min_share.TIER, max_wait_s.TIER, engine.FIELD; may repeat",
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="'NAME: KEY=VALUE,...'",
        help="run once more with these settings and tell what changes; may repeat",
    )
    parser.add_argument(
        "--find-engines",
        metavar="'FIGURE<SECONDS'",
        help="the fewest engines for p50|p90|p99_ttft_s|wait_s|latency_s, of all or .TENANT, such as 'p99_ttft_s<2'",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw service, waits and limits over time")
    parser.add_argument("--json", metavar="FILE", help="write all figures; - is standard output, instead of the table")
    parser.add_argument(
        "--fit", metavar="ACCESS_LOG", help="print the profile of an engine, measured by a gateway, and end"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    try:
        if args.fit is not None:
            return _fit(args)
        return _simulate(args)
    except (Mistake, TraceError, FitError, report.NoPlot) as mistake:
        sys.stderr.write(f"evenflow sim: {mistake}\n")
        return CANNOT_RUN


def _fit(args: argparse.Namespace) -> int:
    setup = _setup(args)
    found = fit_log(args.fit, setup.engine or next(iter(PROFILES.values())))
    _say(f"# {found.equations:,} equations from {args.fit}; they miss by {found.error:.1%} (root mean square).")
    _say(f"# Up to {found.sequences} sequences ran at once on a worker. Set kv_tokens and sequences_max by hand.")
    _say(profile_yaml(found.profile).rstrip())
    return DONE


def _simulate(args: argparse.Namespace) -> int:
    """1. A bare command is the example. 2. How many engines is asked for: found first. 3. Else all are run once."""
    setup = _setup(args)
    _require_writable(args)
    example = _is_bare(args)
    if example:  # (1)
        setup = EXAMPLE
    setups = _compared(setup, ["first come, first served: policy=fcfs"] if example else args.compare)
    sources, notes = Traffics(), Notes()
    answers = []
    if args.find_engines is not None:  # (2)
        wanted = _condition(args.find_engines)
        found = [_find(name, one, wanted, sources, notes) for name, one in setups]
        results = [result for result, _ in found]
        answers = [answer for _, answer in found]
    else:  # (3)
        made = [scenario(name, one, sources, notes) for name, one in setups]
        results = [_run(one) for one in made]
        for (_, one), result in zip(setups[1:], results[1:], strict=True):
            about = touched(one.changes[len(setup.changes) :], result.scenario)
            answers.append(report.comparison(results[0], result, about))
    if example:
        answers.append(_example_says(results))
    if args.json == "-":
        _say(_as_json(results, answers))
    else:
        _say("\n".join([_about(results[0]), *notes.lines, "", report.table(results)]))
        if answers:
            _say("\n" + "\n".join(answers))
    if args.json not in (None, "-"):
        _write(args.json, _as_json(results, answers))
    if args.plot is not None:
        report.plot(results, args.plot)
    return DONE


# ----------------------------------------------------------------------------------------------------
# From arguments to setups


def _setup(args: argparse.Namespace) -> Setup:
    setup = Setup()
    for name in OPTIONS:
        text = getattr(args, name)
        if text is not None:
            setup = with_option(setup, name, text, f"--{name.replace('_', '-')}")
    setup = replace(setup, faults=tuple(fault_of(text) for text in args.fault))
    for text in args.set:
        setup = with_setting(setup, text, "--set")
    return setup


def _compared(base: Setup, texts: Sequence[str]) -> list[tuple[str, Setup]]:
    """The base and each comparison, by name."""
    named: list[tuple[str, Setup]] = [(base.policy, base)]
    for text in texts:
        name, colon, settings = text.partition(":")
        if not colon or not name.strip() or not settings.strip():
            raise Mistake(f"--compare: '{text}' is not 'NAME: KEY=VALUE,...'; such as 'premium 50: weight.premium=50'")
        one = base
        for setting in settings.split(","):
            one = with_setting(one, setting.strip(), f"--compare: {name.strip()}")
        named.append((name.strip(), one))
    if len(named) > COMPARED_MAX:
        raise Mistake(f"--compare: {len(texts)} are too many to read; give at most {COMPARED_MAX - 1}")
    return named


def _is_bare(args: argparse.Namespace) -> bool:
    given = [name for name in OPTIONS if getattr(args, name) is not None]
    return not (given or args.fault or args.set or args.compare or args.find_engines)


def _require_writable(args: argparse.Namespace) -> None:
    """Said before a long run, not after it."""
    for option, path in (("--plot", args.plot), ("--json", args.json)):
        if path not in (None, "-") and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise Mistake(f"{option}: {path} cannot be written; name a file in a directory that exists")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise Mistake("--plot: matplotlib is not there; install evenflow[sim] for the plot")




# ----------------------------------------------------------------------------------------------------
# Running


def _run(one: Scenario, about: str = "") -> Result:
    bar = _Bar(about or one.name, len(one.traffic.arrivals)) if sys.stderr.isatty() else None
    bound = _Bound() if one.policy == "fair" else None
    try:
        result = run(one, check=bound, progress=bar)
    finally:
        if bar is not None:
            bar.clear()
    if bound is not None:
        result.bound_ratio = max(result.bound_ratio, bound.ratio)
    return result


class _Bound:
    """Looks at the fairness bound now and then."""

    def __init__(self) -> None:
        self.ratio = 0.0
        self._events = 0

    def __call__(self, world: World) -> None:
        self._events += 1
        if not self._events % BOUND_EVERY and world.queue.waiting:
            self.ratio = max(self.ratio, world.queue.bound_ratio())


class _Bar:
    """One line on the terminal that is drawn over itself: percentage, requests, speed, time left."""

    def __init__(self, about: str, requests: int) -> None:
        self._about = about
        self._requests = requests
        self._began_s = self._drawn_s = perf_counter()

    def __call__(self, part: float) -> None:
        now = perf_counter()
        if now - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now
        sys.stderr.write("\r\x1b[K" + bar_line(self._about, self._requests, part, now - self._began_s))
        sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def bar_line(about: str, requests: int, part: float, took_s: float) -> str:
    ended = round(part * requests)
    full = int(part * 24)
    left_s = took_s / part * (1.0 - part) if part > 0.0 else inf
    left = f"{left_s:,.0f} s left" if left_s < inf else "…"
    speed = ended / took_s if took_s > 0.0 else 0.0
    return (
        f"{about[:24]:<24} [{'#' * full}{'-' * (24 - full)}] {part:4.0%}  "
        f"{ended:,} of {requests:,}  {speed:,.0f}/s  {left}"
    )


# ----------------------------------------------------------------------------------------------------
# How many engines


class Condition(NamedTuple):
    """A figure of all requests, or of one tenant's, that has to be below a number of seconds."""

    text: str
    part: float
    figure: str
    tenant: str | None
    below_s: float


_FIGURES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.first_token_s,
    "wait": lambda record: record.dispatched_s,
    "latency": lambda record: record.ended_s,
}


def _condition(text: str) -> Condition:
    found = re.fullmatch(r"\s*p(\d{1,2})_(ttft|wait|latency)_s(?:\.(\S+?))?\s*<\s*([0-9.]+)\s*(?:s)?\s*", text)
    try:
        below_s = float(found[4]) if found else 0.0
    except ValueError:
        below_s = 0.0
    if found is None or below_s <= 0.0:
        raise Mistake(
            f"--find-engines: '{text}' is no condition; write p50|p90|p99, _ttft_s|_wait_s|_latency_s, < and seconds, "
            "such as 'p99_ttft_s<2'"
        )
    return Condition(text.strip(), int(found[1]) / 100.0, found[2], found[3], below_s)


def figure(wanted: Condition, records: Sequence[Record]) -> float:
    """The figure, by nearest rank; who was refused or failed waits for ever. Whose clients left do not count."""
    when = _FIGURES[wanted.figure]
    values = []
    for record in records:
        arrival = record.arrival
        if wanted.tenant in (None, arrival.tenant) and record.outcome != "left":
            at_s = when(record) if record.outcome == "ok" else None
            values.append(inf if at_s is None else at_s - arrival.time_s)
    values.sort()
    return values[min(len(values) - 1, int(wanted.part * len(values)))] if values else 0.0


def _find(name: str, setup: Setup, wanted: Condition, sources: Traffics, notes: Notes) -> tuple[Result, str]:
    """The fewest engines with which it holds: doubled until it does, then halved between."""
    tried: dict[int, float] = {}
    # The run with the fewest engines so far with which it held, or else the last one.
    kept: list[Result] = []

    def holds(engines: int) -> bool:
        made = scenario(f"{name}, {engines} engine{'s' if engines > 1 else ''}", setup, sources, notes, engines)
        if wanted.tenant is not None and wanted.tenant not in {one.name for one in made.traffic.tenants}:
            raise Mistake(f"--find-engines: nobody named '{wanted.tenant}' sends anything; leave the name out for all")
        result = _run(made)
        tried[engines] = figure(wanted, result.records)
        held = tried[engines] < wanted.below_s
        if held or not kept or engines == max(tried):
            kept[:] = [result]
        return held

    low, high = 0, 1 + max((fault.engine for fault in setup.faults), default=0)
    while not holds(high):
        low, high = high, high * 2
        if high > ENGINES_MAX:
            answer = f"{name}: {wanted.text} does not hold with {low} engines either: {_shown(tried[low])}"
            return kept[0], answer
    while high - low > 1 and low:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    answer = f"{name}: {wanted.text} needs {high} engine{'s' if high > 1 else ''}: {_shown(tried[high])}"
    if low:
        answer += f", with {low} {_shown(tried[low])}"
    return kept[0], answer


def _shown(value: float) -> str:
    return f"{report.seconds(value)} s" if value < inf else "never, since some are refused or fail"


# ----------------------------------------------------------------------------------------------------
# Telling


def _about(result: Result) -> str:
    """What was run, in a line."""
    made = result.scenario
    engines: dict[str, int] = defaultdict(int)
    for profile in made.engines:
        engines[profile.name] += 1
    arrivals = made.traffic.arrivals
    span_s = arrivals[-1].time_s - arrivals[0].time_s
    slots = "no limit" if made.slots is None else f"slots {made.slots}"
    return (
        f"{len(arrivals):,} requests of {len(made.traffic.tenants):,} tenants in {span_s:,.0f} s "
        f"({made.traffic.name}), on {', '.join(f'{count} × {name}' for name, count in engines.items())}, {slots}"
    )


def _example_says(results: Sequence[Result]) -> str:
    fair, fcfs = (
        report.seconds(report.first_token(result, lambda tenant: tenant != "tenant-0").p90) for result in results
    )
    return f"""
What this shows: ten tenants share an engine, and tenant-0 sends twenty times what each of the others does, more than
the engine can take. First come, first served, all the others wait behind it: {fcfs} s to the first token (p90).
With fair queueing they wait {fair} s, and the engine does the same work. Try next:
  evenflow sim --tenants 5 --rate 2 --compare 'more for the first: weight.tenant-0=50'
  evenflow sim --tenants 5 --rate 2 --find-engines 'p99_ttft_s<2'
  evenflow sim --help"""


def _as_json(results: Sequence[Result], answers: Sequence[str]) -> str:
    """Figures only; times in seconds."""
    told = {"answers": list(answers), "scenarios": [_scenario_json(result) for result in results]}
    return json.dumps(told, indent=2, allow_nan=False)


def _scenario_json(result: Result) -> dict[str, Any]:
    made = result.scenario
    figures = summary(result)
    del figures["took_s"]
    return {
        "name": made.name,
        "traffic": made.traffic.name,
        "policy": made.policy,
        "charging": made.charging,
        "placement": made.placement,
        "slots": made.slots,
        "engines": [profile.name for profile in made.engines],
        "seed": made.seed,
        "figures": figures,
        "tenants": [report.row_figures(row) for row in report.tenant_rows(result)],
    }


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise Mistake(f"--json: {path} cannot be written ({error.strerror}); choose another file") from None


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")

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
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from evenflow.config import ConfigErrors, Settings, load
from evenflow.config.problems import did_you_mean
from evenflow.policy.fairness import Group, Tier
from evenflow.policy.placement import PLACEMENTS
from evenflow.sim import report
from evenflow.sim.engine import PROFILES
from evenflow.sim.fit import FitError, fit_log, profile_value, profile_yaml, read_profile
from evenflow.sim.measure import summary
from evenflow.sim.model import (
    Arrival,
    Charging,
    EngineProfile,
    Fault,
    FaultKind,
    Policy,
    Record,
    Result,
    Scenario,
    TenantSpec,
    Traffic,
)
from evenflow.sim.traffic import Flood, Lengths, TraceError, TrafficError, generate, read_trace, scale
from evenflow.sim.world import World, run

DONE, CANNOT_RUN = 0, 2

# More engines are never tried.
ENGINES_MAX = 1024
# Runs that are compared at most.
COMPARED_MAX = 12
# Events between two looks at the fairness bound.
BOUND_EVERY = 64
# Seconds between two drawings of the progress bar.
REDRAW_S = 0.1
# What is made up when no trace is given.
REQUESTS, RATE = 1000, 1.0
# Who calls without a key, as in the gateway.
ANONYMOUS, WEIGHT = "anonymous", 10.0


class Mistake(Exception):
    """The command cannot run as it was given: one line that ends in the next step."""


# ----------------------------------------------------------------------------------------------------
# What can be set


@dataclass(frozen=True, slots=True)
class Setup:
    """All that makes a scenario, as it was written and checked; a comparison changes some of it."""

    # Traffic that is read, or made up.
    trace: str | None = None
    tenants: int = 10
    requests: int | None = None
    rate: float | None = None
    speed: float | None = None
    skew: float = 1.2
    burst: float = 1.0
    flood: float | None = None
    one_shot: int = 0
    input_tokens: float = 400.0
    output_tokens: float = 150.0
    seed: int = 0
    # Who shares with whom; None: all are equal.
    config: Settings | None = None
    # Engines; None: the first profile that holds the longest request; as many as the configuration has, or one.
    engine: EngineProfile | None = None
    engines: int | None = None
    kv_told: bool = False
    # The gateway; None: as the configuration says, or as the gateway does by itself.
    slots: Any = None
    policy: Policy = "fair"
    charging: Charging = "estimate"
    placement: str | None = None
    cost: str | None = None
    queue_timeout_s: float | None = None
    queued: int | None = None
    until_s: float | None = None
    faults: tuple[Fault, ...] = ()
    # Settings with a dot: (of what, whose, value), in the order they were given.
    changes: tuple[tuple[str, str, str], ...] = ()


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not re.fullmatch(r"\d{1,12}", text) or int(text) < least:
            raise ValueError(f"'{text}' is no whole number of {least} or more; give such a number")
        return int(text)

    return convert


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not isfinite(number) or number <= 0.0:
        raise ValueError(f"'{text}' is no number above 0; give such a number")
    return number


def _not_below_0(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _number(text)


def _one_of(names: Sequence[str]) -> Callable[[str], Any]:
    def convert(text: str) -> str:
        if text not in names:
            near = did_you_mean(text, list(names))
            raise ValueError(f"there is no '{text}'{near}; choose one of {', '.join(names)}" if near.startswith(",")
                             else f"there is no '{text}'; choose one of {', '.join(names)}")
        return text

    return convert


def _slots(text: str) -> Any:
    if text in ("auto", "none"):
        return text
    try:
        return _whole(1)(text)
    except ValueError:
        raise ValueError(f"'{text}' is no limit; give auto, none, or a whole number of 1 or more") from None


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"'{text}' is neither true nor false; give one of them")
    return text == "true"


def _engine(text: str) -> EngineProfile:
    if text in PROFILES:
        return PROFILES[text]
    if not Path(text).is_file():
        near = did_you_mean(text, list(PROFILES))
        raise ValueError(f"there is no profile or file '{text}'{near}; `evenflow sim --fit ACCESS_LOG` makes one")
    return read_profile(text)


def _config(text: str) -> Settings:
    try:
        return load(text, environ={**os.environ})
    except ConfigErrors as errors:
        first, *more = str(errors).splitlines()
        rest = f" (and {len(more)} more; `evenflow config check {text}` tells them all)" if more else ""
        raise ValueError(f"{first}{rest}") from None


@dataclass(frozen=True, slots=True)
class Option:
    convert: Callable[[str], Any]
    metavar: str
    help: str


OPTIONS: dict[str, Option] = {
    "trace": Option(str, "FILE", "a recorded load (docs/SIMULATION.md tells the formats); without it one is made up"),
    "tenants": Option(_whole(1), "N", "tenants that are made up, or given to a trace that names none (10)"),
    "requests": Option(_whole(1), "N", f"requests; a trace is cut, or repeated, to so many ({REQUESTS})"),
    "rate": Option(_number, "R", f"requests per second on average ({RATE:g}; of a trace: its own)"),
    "speed": Option(_number, "X", "a trace so many times as fast"),
    "skew": Option(_not_below_0, "Z", "exponent of Zipf over the tenants; 0: all send alike (1.2)"),
    "burst": Option(_number, "CV", "coefficient of variation of the times between a tenant's requests (1: Poisson)"),
    "flood": Option(_number, "FACTOR", "the first tenant sends so many times what it would"),
    "one_shot": Option(_whole(0), "N", "of the requests, those of tenants that send one only (0)"),
    "input_tokens": Option(_number, "N", "median of the prompts that are made up (400)"),
    "output_tokens": Option(_number, "N", "median of the answers that are made up (150)"),
    "seed": Option(_whole(0), "S", "another seed, another run; the same one, the same run (0)"),
    "config": Option(_config, "FILE", "a gateway's configuration: tiers, groups, tenants, number of workers, limits"),
    "engine": Option(_engine, "PROFILE|FILE", f"the engines: {', '.join(PROFILES)}, or a file that --fit wrote"),
    "engines": Option(_whole(1), "N", "how many engines (as many as the configuration has workers, else 1)"),
    "kv_told": Option(_truth, "true|false", "the engines tell how much their KV cache holds, and are kept within it"),
    "slots": Option(_slots, "auto|none|N", "requests the gateway lets run on each engine (auto)"),
    "policy": Option(_one_of(get_args(Policy)), "NAME", f"who is next: {', '.join(get_args(Policy))} (fair)"),
    "charging": Option(_one_of(get_args(Charging)), "NAME", f"when: {', '.join(get_args(Charging))} (estimate)"),
    "placement": Option(_one_of(list(PLACEMENTS)), "NAME", f"where: {', '.join(PLACEMENTS)} (least_work)"),
    "cost": Option(_one_of(("tokens", "sequences")), "NAME", "what is charged: tokens, sequences (tokens)"),
    "queue_timeout_s": Option(_number, "S", "requests that waited longer are refused (never)"),
    "queued": Option(_whole(1), "N", "requests that wait at once; more are refused"),
    "until_s": Option(_number, "S", "end the run at this virtual time (when all has ended)"),
}
# What is set for one tenant, group, tier, or all engines, as KIND.NAME=VALUE.
KINDS = {
    "weight": "a tenant or a group",
    "group": "a tenant",
    "concurrency": "a tenant",
    "queued": "a tenant",
    "min_share": "a tier",
    "max_wait_s": "a tier",
    "engine": "a field of the profile",
}


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
    _say(f"# Fitted to {found.equations:,} equations from {args.fit}; they miss by {found.error:.1%} (root mean square).")
    _say(f"# Up to {found.sequences} sequences ran at once on one worker. Set kv_tokens and sequences_max by hand.")
    _say(profile_yaml(found.profile).rstrip())
    return DONE


def _simulate(args: argparse.Namespace) -> int:
    """1. A bare command is the example. 2. How many engines were asked for: found first. 3. Else all are run."""
    setup = _setup(args)
    _require_writable(args)
    example = _is_bare(args)
    if example:  # (1)
        setup = EXAMPLE
    setups = _compared(setup, ["fcfs: policy=fcfs"] if example else args.compare)
    sources = _Traffics()
    wanted = None if args.find_engines is None else _condition(args.find_engines)
    results, answers, notes = [], [], _Notes()
    for name, one in setups:
        if wanted is not None:  # (2)
            result, answer = _find(name, one, wanted, sources, notes)
            answers.append(answer)
        else:  # (3)
            result = _run(_scenario(name, one, sources, notes))
        results.append(result)
    base = setups[0][1]
    for (_, one), result in zip(setups[1:], results[1:], strict=True):
        answers.append(report.comparison(results[0], result, _touched(base, one, result)))
    if args.json == "-":
        _say(_as_json(results, answers))
        return DONE
    _say("\n".join([_about(results[0]), *notes.lines, "", report.table(results), ""]))
    _say("\n".join([*answers, *([_example_says(results)] if example else [])]))
    if args.json is not None:
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
            setup = _with(setup, name, text, f"--{name.replace('_', '-')}")
    setup = replace(setup, faults=tuple(_fault(text) for text in args.fault))
    for text in args.set:
        setup = _with_set(setup, text, "--set")
    return setup


def _compared(base: Setup, texts: Sequence[str]) -> list[tuple[str, Setup]]:
    """The base and each comparison, by name."""
    named = [(base.policy, base)]
    for text in texts:
        name, colon, settings = text.partition(":")
        if not colon or not name.strip() or not settings.strip():
            raise Mistake(f"--compare: '{text}' is not 'NAME: KEY=VALUE,...'; such as 'premium 50: weight.premium=50'")
        one = base
        for setting in settings.split(","):
            one = _with_set(one, setting.strip(), f"--compare: {name.strip()}")
        named.append((name.strip(), one))
    if len(named) > COMPARED_MAX:
        raise Mistake(f"--compare: {len(texts)} are too many to read; give at most {COMPARED_MAX - 1}")
    return named


def _with_set(setup: Setup, text: str, option: str) -> Setup:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key or not value:
        raise Mistake(f"{option}: '{text}' is not KEY=VALUE; such as slots=24 or weight.NAME=50")
    kind, dot, name = key.partition(".")
    if dot:
        if kind not in KINDS or not name:
            raise Mistake(f"{option}: there is no setting '{key}'; with a dot there are {', '.join(KINDS)}")
        return replace(setup, changes=(*setup.changes, (kind, name, value)))
    key = key.replace("-", "_")
    if key not in OPTIONS:
        names = [*OPTIONS, *(f"{kind}.NAME" for kind in KINDS)]
        near = did_you_mean(key, names)
        raise Mistake(f"{option}: there is no setting '{key}'{near}; `evenflow sim --help` lists them")
    return _with(setup, key, value, f"{option}: {key}")


def _with(setup: Setup, key: str, text: str, option: str) -> Setup:
    try:
        value = OPTIONS[key].convert(text)
    except FitError:
        raise
    except ValueError as error:
        raise Mistake(f"{option}: {error}") from None
    return replace(setup, **{key: value})


_FAULTS = {"dead": 3, "hanging": 3, "stale_reports": 3, "slow": 4, "leave_storm": 2}
assert set(_FAULTS) == set(get_args(FaultKind))


def _fault(text: str) -> Fault:
    kind, *parts = text.split(":")
    if kind not in _FAULTS:
        raise Mistake(f"--fault: there is no '{kind}'; choose one of {', '.join(_FAULTS)}")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != _FAULTS[kind] or not all(isfinite(number) and number >= 0.0 for number in numbers):
        shape = {2: "AT:PART", 3: "ENGINE:FROM:UNTIL", 4: "ENGINE:FROM:UNTIL:FACTOR"}[_FAULTS[kind]]
        raise Mistake(f"--fault: '{text}' does not tell when; write {kind}:{shape}, times in seconds")
    if kind == "leave_storm":
        if numbers[1] > 1.0:
            raise Mistake(f"--fault: a part of {numbers[1]:g} is above 1; give the part of the clients that leave")
        return Fault("leave_storm", numbers[0], numbers[0], factor=numbers[1])
    engine, from_s, until_s = numbers[:3]
    if not engine.is_integer() or until_s <= from_s:
        wrong = "ends before it begins" if engine.is_integer() else "names no engine"
        raise Mistake(f"--fault: '{text}' {wrong}; write {kind}:ENGINE:FROM:UNTIL, engines count from 0")
    factor = numbers[3] if kind == "slow" else 0.0
    if kind == "slow" and factor <= 0.0:
        raise Mistake(f"--fault: '{text}' is infinitely fast; give a factor above 0, such as 3 for a third of the speed")
    return Fault(kind, from_s, until_s, int(engine), factor)  # type: ignore[arg-type]


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
# From a setup to a scenario


class _Notes:
    """What a reader should know of how the scenarios were made; each said once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, text: str) -> None:
        if f"note: {text}" not in self.lines:
            self.lines.append(f"note: {text}")


class _Traffics:
    """Traffic by what makes it, so that comparisons share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Traffic] = {}

    def of(self, setup: Setup, tenants: int) -> Traffic:
        key = (
            (setup.trace, tenants, setup.requests, setup.rate, setup.speed, setup.skew, setup.burst, setup.flood)
            + (setup.one_shot, setup.input_tokens, setup.output_tokens, setup.seed)
        )  # fmt: skip
        if key not in self._known:
            try:
                self._known[key] = _traffic(setup, tenants)
            except TrafficError as error:
                field, _, wrong = str(error).partition(": ")
                raise Mistake(f"--{field.replace('_', '-')}: {wrong}") from None
        return self._known[key]


def _traffic(setup: Setup, tenants: int) -> Traffic:
    if setup.trace is None:
        return generate(
            tenants=tenants,
            requests=setup.requests or REQUESTS,
            rate=setup.rate or RATE,
            skew=setup.skew,
            burst=setup.burst,
            input_tokens=Lengths(setup.input_tokens, 1.0),
            output_tokens=Lengths(setup.output_tokens, 0.8, 4096),
            one_shot=setup.one_shot,
            flood=None if setup.flood is None else Flood(0, setup.flood),
            seed=setup.seed,
        )
    traffic = read_trace(setup.trace, tenants=tenants, seed=setup.seed)
    return scale(traffic, rate=setup.rate, speed=setup.speed, repeat=setup.requests, limit=setup.requests)


def _scenario(name: str, setup: Setup, sources: _Traffics, notes: _Notes, engines: int | None = None) -> Scenario:
    settings = setup.config
    named = len(settings.tenants) if settings is not None else 0
    traffic = sources.of(setup, named or setup.tenants)
    tiers: tuple[Tier, ...] = (Tier("all", groups=(Group("keys", WEIGHT),)),)
    if settings is not None:
        tiers = _tiers(settings)
        traffic = _dealt(traffic, settings, notes)
    traffic, tiers = _changed(traffic, tiers, setup.changes)
    count = engines or setup.engines or (max(1, len(settings.workers)) if settings else 1)
    for fault in setup.faults:
        if fault.engine >= count:
            raise Mistake(f"--fault: there is no engine {fault.engine} of {count}; they count from 0, see --engines")
    profile = _profile(setup, traffic, notes)
    scenario = Scenario(
        traffic,
        (profile,) * count,
        tiers,
        policy=setup.policy,
        charging=setup.charging,
        slots=None if setup.slots == "none" else setup.slots or "auto",
        placement=setup.placement or "least_work",
        cost=setup.cost or "tokens",
        faults=setup.faults,
        seed=setup.seed,
        queue_timeout_s=setup.queue_timeout_s,
        until_s=setup.until_s,
        kv_told=setup.kv_told,
        name=name,
    )
    if setup.queued is not None:
        scenario = replace(scenario, queued_max=setup.queued)
    if settings is not None:
        scenario = _as_configured(scenario, setup, settings, notes)
    if setup.policy != "fair" and (len(tiers) > 1 or len({one.group for one in traffic.tenants}) > 1):
        notes.add(f"{setup.policy} knows neither tiers nor groups")
    return scenario


def _as_configured(scenario: Scenario, setup: Setup, settings: Settings, notes: _Notes) -> Scenario:
    """What the command line left to the configuration."""
    scheduling, limits = settings.scheduling, settings.limits
    if setup.slots is None and settings.workers:
        slots = {worker.slots for worker in settings.workers}
        scenario = replace(scenario, slots=settings.workers[0].slots)
        if len(slots) > 1:
            notes.add(f"all engines have the {settings.workers[0].slots} slots of the first worker")
    costs = scheduling.token_cost
    if (costs.input, costs.cached, costs.output) != (1.0, 0.1, 2.0):
        notes.add("scheduling.token_cost is not simulated: tokens cost 1, 0.1 cached, 2 in answers")
    if any(one.limits.requests_per_minute or one.limits.tokens_per_minute for one in settings.tenants):
        notes.add("limits per minute are not simulated")
    return replace(
        scenario,
        placement=setup.placement or scheduling.placement,
        cost=setup.cost or scheduling.cost,
        queued_max=setup.queued or limits.queued,
        queue_timeout_s=setup.queue_timeout_s or limits.queue_timeout_s,
    )


def _profile(setup: Setup, traffic: Traffic, notes: _Notes) -> EngineProfile:
    """The one that was asked for, or the first that can run the longest request; with its changes."""
    longest = max(one.input_tokens + max(1, one.output_tokens) for one in traffic.arrivals)
    fitting = [profile for profile in PROFILES.values() if profile.kv_tokens >= longest]
    profile = setup.engine or (fitting or [max(PROFILES.values(), key=lambda one: one.kv_tokens)])[0]
    for kind, name, text in setup.changes:
        if kind == "engine":
            if name not in {field.name for field in fields(EngineProfile)}:
                names = ", ".join(field.name for field in fields(EngineProfile))
                raise Mistake(f"--set: engine.{name}: a profile has no such field; it has {names}")
            value = {"true": True, "false": False}.get(text, text) if name == "prefix_cache" else text
            profile = replace(profile, **{name: profile_value(name, value, f"--set: engine.{name}")})
    if profile.step_s + profile.step_per_sequence_s <= 0.0:
        raise Mistake("--set: engine.step_s: a step would take no time; give it or step_per_sequence_s above 0")
    over = sum(one.input_tokens + max(1, one.output_tokens) > profile.kv_tokens for one in traffic.arrivals)
    if over:
        notes.add(
            f"{over:,} requests are longer than the {profile.kv_tokens:,} tokens of the engine's KV cache and fail; "
            "see --engine"
        )
    return profile


def _tiers(settings: Settings) -> tuple[Tier, ...]:
    return tuple(
        Tier(
            tier.name,
            tier.min_share,
            tuple(Group(group.name, group.weight) for group in tier.groups),
            tier.max_wait_s,
        )
        for tier in settings.scheduling.tiers
    )


def _dealt(traffic: Traffic, settings: Settings, notes: _Notes) -> Traffic:
    """The traffic as that of the tenants of a configuration.

    1. It names tenants of the trace: each is itself, and the others are callers without a key.
    2. It names none of them: they are dealt to its tenants in turn.
    3. It has no tenants: all are callers without a key.
    """
    tier_of = {group.name: index for index, tier in enumerate(settings.scheduling.tiers) for group in tier.groups}
    specs = {
        one.name: TenantSpec(
            one.name, one.group, one.weight, tier_of[one.group], one.limits.concurrency, one.limits.queued
        )
        for one in settings.tenants
    }
    group = ANONYMOUS if ANONYMOUS in tier_of else settings.scheduling.tiers[-1].groups[-1].name
    specs.setdefault(ANONYMOUS, TenantSpec(ANONYMOUS, group, WEIGHT, tier_of[group]))
    named = [tenant.name for tenant in traffic.tenants]
    if any(name in specs for name in named):  # (1)
        becomes = {name: name if name in specs else ANONYMOUS for name in named}
        others = len(set(named) - set(specs))
        if others:
            notes.add(f"{others} tenants of the trace are not in the configuration: callers without a key")
    elif settings.tenants:  # (2)
        becomes = {name: settings.tenants[i % len(settings.tenants)].name for i, name in enumerate(named)}
        if setup_names := len(named) - len(settings.tenants):
            notes.add(
                f"the {len(named)} tenants of the trace are dealt to the {len(settings.tenants)} of the configuration"
            ) if setup_names > 0 else None
    else:  # (3)
        becomes = dict.fromkeys(named, ANONYMOUS)
        notes.add("the configuration names no tenants: all are callers without a key")
    arrivals = [
        Arrival(
            one.time_s,
            becomes[one.tenant],
            one.input_tokens,
            one.output_tokens,
            one.prefix,
            one.max_tokens,
            one.leaves_after_s,
        )
        for one in traffic.arrivals
    ]
    used = set(becomes.values())
    return replace(traffic, tenants=tuple(spec for spec in specs.values() if spec.name in used), arrivals=arrivals)

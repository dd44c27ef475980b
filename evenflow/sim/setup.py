"""From what the user wrote to a scenario: settings by name, traffic, engines, and who shares with whom.

`Setup` holds what was written, each value checked as it comes in; `scenario` builds what runs. A setting is the same
on the command line (`--one-shot 5`), in `--set one_shot=5` and in a comparison. Raises `Mistake`, one line that names
the setting and the next step. Reads files; runs nothing.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, get_args

from evenflow.config import ConfigErrors, Settings, load
from evenflow.config.problems import did_you_mean
from evenflow.policy.fairness import Group, Tier
from evenflow.policy.placement import PLACEMENTS
from evenflow.sim.engine import PROFILES
from evenflow.sim.fit import FitError, profile_value, read_profile
from evenflow.sim.model import (
    Arrival,
    Charging,
    EngineProfile,
    Fault,
    FaultKind,
    Policy,
    Scenario,
    TenantSpec,
    Traffic,
)
from evenflow.sim.traffic import TENANTS_MAX, Flood, Lengths, TrafficError, generate, read_trace, scale

# What is made up when no trace is given.
REQUESTS, RATE = 1000, 1.0
# Longest prompt and answer that are made up, unless their median asks for more: together they fit in any cache.
INPUT_MAX, OUTPUT_MAX = 6000, 2000
# More engines, requests, or seconds of traffic are not simulated: they would take hours, or all memory.
ENGINES_MAX, REQUESTS_MAX, SPAN_S_MAX = 1024, 10_000_000, 10_000_000.0
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
    # Settings with a dot, in the order they were given.
    changes: tuple["Change", ...] = ()


class Change(NamedTuple):
    """Of what (a key of `KINDS`), whose, its value as text, and the option that asked for it."""

    kind: str
    name: str
    text: str
    option: str

    @property
    def place(self) -> str:
        return f"{self.option}: {self.kind}.{self.name}"


def _whole(least: int, most: int = 1_000_000_000) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise ValueError(f"'{text}' is no whole number from {least:,} to {most:,}; give such a number")
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
            raise ValueError(f"there is no '{text}'; choose one of {', '.join(names)}")
        return text

    return convert


def _slots(text: str) -> Any:
    if text in ("auto", "none"):
        return text
    try:
        return _whole(1)(text)
    except ValueError:
        raise ValueError(f"'{text}' is no limit; give auto, none, or a whole number above 0") from None


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
    "tenants": Option(_whole(1, TENANTS_MAX), "N", "tenants that are made up, or given to a trace without any (10)"),
    "requests": Option(_whole(1, REQUESTS_MAX), "N", f"requests; a trace is cut, or repeated, to so many ({REQUESTS})"),
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
    "engines": Option(_whole(1, ENGINES_MAX), "N", "how many (as many as the configuration has workers, else 1)"),
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


# ----------------------------------------------------------------------------------------------------
# Reading settings


def with_setting(setup: Setup, text: str, option: str) -> Setup:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key or not value:
        raise Mistake(f"{option}: '{text}' is not KEY=VALUE; such as slots=24 or weight.NAME=50")
    kind, dot, name = key.partition(".")
    if dot:
        if kind not in KINDS or not name:
            raise Mistake(f"{option}: there is no setting '{key}'; with a dot there are {', '.join(KINDS)}")
        return replace(setup, changes=(*setup.changes, Change(kind, name, value, option)))
    key = key.replace("-", "_")
    if key not in OPTIONS:
        names = [*OPTIONS, *(f"{kind}.NAME" for kind in KINDS)]
        near = did_you_mean(key, names)
        raise Mistake(f"{option}: there is no setting '{key}'{near}; `evenflow sim --help` lists them")
    return with_option(setup, key, value, f"{option}: {key}")


def with_option(setup: Setup, key: str, text: str, option: str) -> Setup:
    try:
        value = OPTIONS[key].convert(text)
    except FitError:
        raise
    except ValueError as error:
        raise Mistake(f"{option}: {error}") from None
    return replace(setup, **{key: value})


_FAULTS = {"dead": 3, "hanging": 3, "stale_reports": 3, "slow": 4, "leave_storm": 2}
assert set(_FAULTS) == set(get_args(FaultKind))


def fault_of(text: str) -> Fault:
    kind, *parts = text.split(":")
    if kind not in _FAULTS:
        raise Mistake(f"--fault: there is no '{kind}'; choose one of {', '.join(_FAULTS)}")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != _FAULTS[kind] or not all(0.0 <= number <= SPAN_S_MAX for number in numbers):
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
        raise Mistake(f"--fault: '{text}' is infinitely fast; give a factor above 0: 3 is a third of the speed")
    return Fault(kind, from_s, until_s, int(engine), factor)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------
# From a setup to a scenario


_TRAFFIC = ("trace", "requests", "rate", "speed", "skew", "burst", "flood", "one_shot", "input_tokens", "output_tokens",
            "seed")  # fmt: skip


class Notes:
    """What a reader should know of how the scenarios were made; each said once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, text: str) -> None:
        if f"note: {text}" not in self.lines:
            self.lines.append(f"note: {text}")


class Traffics:
    """Traffic by what makes it, so that comparisons share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Traffic] = {}

    def of(self, setup: Setup, tenants: int) -> Traffic:
        made_of = (getattr(setup, name) for name in _TRAFFIC)
        key = (tenants, *made_of)
        if key not in self._known:
            try:
                self._known[key] = _traffic(setup, tenants)
            except TrafficError as error:
                field, _, wrong = str(error).partition(": ")
                raise Mistake(f"--{field.replace('_', '-')}: {wrong}") from None
            span_s = self._known[key].arrivals[-1].time_s
            if span_s > SPAN_S_MAX:
                most = f"{SPAN_S_MAX / 86400:.0f} days"
                raise Mistake(
                    f"--rate: the traffic lasts {span_s / 86400:,.0f} days, more than {most}; give a higher --rate, "
                    "or fewer --requests"
                )
        return self._known[key]


def _traffic(setup: Setup, tenants: int) -> Traffic:
    if setup.trace is None:
        return generate(
            tenants=tenants,
            requests=setup.requests or REQUESTS,
            rate=setup.rate or RATE,
            skew=setup.skew,
            burst=setup.burst,
            input_tokens=_lengths(setup.input_tokens, 1.0, INPUT_MAX),
            output_tokens=_lengths(setup.output_tokens, 0.8, OUTPUT_MAX),
            one_shot=setup.one_shot,
            flood=None if setup.flood is None else Flood(0, setup.flood),
            seed=setup.seed,
        )
    traffic = read_trace(setup.trace, tenants=tenants, seed=setup.seed)
    return scale(traffic, rate=setup.rate, speed=setup.speed, repeat=setup.requests, limit=setup.requests)


def _lengths(median: float, sigma: float, maximum: int) -> Lengths:
    return Lengths(median, sigma, max(maximum, int(median * 10.0)))


def scenario(name: str, setup: Setup, sources: Traffics, notes: Notes, engines: int | None = None) -> Scenario:
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
    made = Scenario(
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
        made = replace(made, queued_max=setup.queued)
    if settings is not None:
        made = _as_configured(made, setup, settings, notes)
    if setup.policy != "fair" and (len(tiers) > 1 or len({one.group for one in traffic.tenants}) > 1):
        notes.add(f"{setup.policy} knows neither tiers nor groups")
    return made


def _as_configured(scenario: Scenario, setup: Setup, settings: Settings, notes: Notes) -> Scenario:
    """What the command line left to the configuration."""
    scheduling, limits = settings.scheduling, settings.limits
    if setup.slots is None and settings.workers:
        # Unset, they are learned from an engine that tells its queue, as the simulated ones do.
        slots = [worker.slots or "auto" for worker in settings.workers]
        scenario = replace(scenario, slots=slots[0])
        if len(set(slots)) > 1:
            notes.add(f"all engines have the slots of the first worker: {slots[0]}")
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


def _profile(setup: Setup, traffic: Traffic, notes: Notes) -> EngineProfile:
    """The one that was asked for, or the first that can run the longest request; with its changes."""
    longest = max(one.input_tokens + max(1, one.output_tokens) for one in traffic.arrivals)
    fitting = [profile for profile in PROFILES.values() if profile.kv_tokens >= longest]
    profile = setup.engine or (fitting or [max(PROFILES.values(), key=lambda one: one.kv_tokens)])[0]
    for change in setup.changes:
        if change.kind == "engine":
            profile = _with_field(profile, change)
    over = sum(one.input_tokens + max(1, one.output_tokens) > profile.kv_tokens for one in traffic.arrivals)
    if over:
        notes.add(
            f"{over:,} requests are longer than the {profile.kv_tokens:,} tokens of the engine's KV cache and fail; "
            "see --engine"
        )
    return profile


def _with_field(profile: EngineProfile, change: Change) -> EngineProfile:
    names = [field.name for field in fields(EngineProfile)]
    if change.name not in names:
        raise Mistake(f"{change.place}: a profile has no such field; it has {', '.join(names)}")
    text: object = change.text
    if change.name == "prefix_cache":
        text = {"true": True, "false": False}.get(change.text, change.text)
    changed = replace(profile, **{change.name: profile_value(change.name, text, change.place)})
    if changed.step_s + changed.step_per_sequence_s <= 0.0:
        raise Mistake(f"{change.place}: a step would take no time; give a number above 0")
    return changed


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


def _dealt(traffic: Traffic, settings: Settings, notes: Notes) -> Traffic:
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
        keyed = [tenant.name for tenant in settings.tenants]
        becomes = {name: keyed[index % len(keyed)] for index, name in enumerate(named)}
        if len(named) > len(keyed):
            notes.add(f"the {len(named)} tenants of the trace are dealt to the {len(keyed)} of the configuration")
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


def _changed(
    traffic: Traffic, tiers: tuple[Tier, ...], changes: Sequence[Change]
) -> tuple[Traffic, tuple[Tier, ...]]:
    """With the settings for one tenant, group or tier."""
    tenants = {tenant.name: tenant for tenant in traffic.tenants}
    for change in changes:
        kind, name, text, _ = change
        place = change.place
        if kind in ("min_share", "max_wait_s"):
            tiers = _with_tier(tiers, kind, name, text, place)
        elif kind == "weight":
            of, named = _weighed(name, tenants, tiers, place)
            weight = _value(_number, text, place)
            if of == "tenants":
                tenants[named] = replace(tenants[named], weight=weight)
            else:
                tiers = _with_group(tiers, Group(named, weight))
        elif kind != "engine":
            tenant = _tenant(name, tenants, place)
            tenants[name] = _with_tenant(tenant, tiers, kind, text, place)
    return replace(traffic, tenants=tuple(tenants.values())), tiers


def _weighed(name: str, tenants: dict[str, TenantSpec], tiers: Sequence[Tier], place: str) -> tuple[str, str]:
    """Whether a tenant or a group is meant, and which: `NAME`, `tenants.NAME` or `groups.NAME`."""
    groups = {group.name for tier in tiers for group in tier.groups}
    of, dot, named = name.partition(".")
    if dot and of in ("tenants", "groups") and named in (tenants if of == "tenants" else groups):
        return of, named
    if name in tenants and name in groups:
        raise Mistake(f"{place}: is a tenant and a group; write weight.tenants.{name} or weight.groups.{name}")
    if name in groups:
        return "groups", name
    return "tenants", _tenant(name, tenants, place, [*tenants, *groups]).name


def _tenant(
    name: str, tenants: dict[str, TenantSpec], place: str, names: Sequence[str] | None = None
) -> TenantSpec:
    if name in tenants:
        return tenants[name]
    known = list(tenants) if names is None else names
    near = did_you_mean(name, known) or f"; there are {', '.join(known[:6])} and {len(known) - 6} more"
    raise Mistake(f"{place}: nobody of that name sends anything{near}")


def _with_tenant(tenant: TenantSpec, tiers: Sequence[Tier], kind: str, text: str, place: str) -> TenantSpec:
    if kind == "concurrency":
        return replace(tenant, concurrency=_value(_whole(1), text, place))
    if kind == "queued":
        return replace(tenant, queued_max=_value(_whole(1), text, place))
    tier_of = {group.name: index for index, tier in enumerate(tiers) for group in tier.groups}
    if text not in tier_of:
        raise Mistake(f"{place}: there is no group '{text}'{did_you_mean(text, list(tier_of))}; see --config")
    return replace(tenant, group=text, tier=tier_of[text])


def _with_group(tiers: tuple[Tier, ...], changed: Group) -> tuple[Tier, ...]:
    return tuple(
        replace(tier, groups=tuple(changed if group.name == changed.name else group for group in tier.groups))
        for tier in tiers
    )


def _with_tier(tiers: tuple[Tier, ...], kind: str, name: str, text: str, place: str) -> tuple[Tier, ...]:
    names = [tier.name for tier in tiers]
    if name not in names:
        raise Mistake(f"{place}: there is no tier '{name}'{did_you_mean(name, names)}; see --config")
    value = _value(_not_below_0, text, place)
    if kind == "min_share" and value >= 1.0:
        raise Mistake(f"{place}: {text} is not below 1; give the part of the service that is its floor")
    return tuple(replace(tier, **{kind: value}) if tier.name == name else tier for tier in tiers)


def _value(convert: Callable[[str], Any], text: str, place: str) -> Any:
    try:
        return convert(text)
    except ValueError as error:
        raise Mistake(f"{place}: {error}") from None


def touched(changes: Sequence[Change], made: Scenario) -> list[str]:
    """The tenants that such settings are about: all of a group, when it is about one."""
    tenants = {tenant.name: tenant for tenant in made.traffic.tenants}
    names: dict[str, None] = {}
    for change in changes:
        if change.kind in ("group", "concurrency", "queued"):
            names[change.name] = None
        elif change.kind == "weight":
            of, named = _weighed(change.name, tenants, made.tiers, change.place)
            mine = [named] if of == "tenants" else [name for name, one in tenants.items() if one.group == named]
            names |= dict.fromkeys(mine)
    return list(names)

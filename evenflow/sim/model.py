"""The nouns of a simulation: what is asked, of which engines, under which schedule, with which faults.

Plain frozen data, ready to run; reading files and checking what a user wrote is done elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from evenflow.policy.fairness import Tier

# How the queue decides; "fair" is ours, the others are there to be compared with.
Policy = Literal["fair", "fcfs", "round_robin", "least_counter", "vtc"]
# When a fair queue charges a request: its estimate at dispatch, corrected as it runs and at its end ("estimate");
# input at dispatch and output as it is produced ("progress"); all of it when it has ended ("completion"); or input
# and the caller's max_tokens at dispatch, corrected at the end ("max_tokens").
Charging = Literal["estimate", "progress", "completion", "max_tokens"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, as the world sends it."""

    time_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    # Ids of the blocks of its prompt, each standing for itself and all before it; empty when nothing is shared.
    prefix: tuple[int, ...] = ()
    max_tokens: int | None = None
    # Seconds after its arrival at which its client leaves, whatever has happened by then.
    leaves_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class TenantSpec:
    name: str
    group: str = "keys"
    weight: float = 10.0
    # Index into the scenario's tiers.
    tier: int = 0
    concurrency: int | None = None
    queued_max: int | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals sorted by time, and everybody they name."""

    name: str
    tenants: tuple[TenantSpec, ...]
    arrivals: Sequence[Arrival]
    # Tokens in a block of `Arrival.prefix`.
    block_tokens: int = 512


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """A continuously batching engine. A step yields one token for each running sequence."""

    name: str
    # Room of its KV cache, in tokens; sequences it batches at most.
    kv_tokens: int
    sequences_max: int
    # Length of a decode step: fixed + for each sequence in the batch + for each token in the KV cache.
    step_s: float
    step_per_sequence_s: float
    step_per_kv_token_s: float
    # Uncached prompt tokens computed in a second; decoding stands still meanwhile.
    prefill_tokens_per_s: float
    # Whether prompts that share blocks with earlier ones skip computing them.
    prefix_cache: bool = False
    # What the gateway is told of its speed.
    speed: float = 1.0


FaultKind = Literal["dead", "slow", "hanging", "stale_reports", "leave_storm"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong from one time to another."""

    kind: FaultKind
    from_s: float
    until_s: float
    # Index of the engine; not used by a storm.
    engine: int = 0
    # How many times slower ("slow"), or the part of the waiting and running clients that leave ("leave_storm").
    factor: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole run; equal scenarios give equal results."""

    traffic: Traffic
    engines: tuple[EngineProfile, ...]
    tiers: tuple[Tier, ...]
    policy: Policy = "fair"
    charging: Charging = "estimate"
    # Sequences the gateway lets run on each engine: a number, "auto" to learn it, None for no limit.
    slots: int | Literal["auto"] | None = "auto"
    placement: str = "least_work"
    # "tokens" or "sequences".
    cost: str = "tokens"
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    # Requests that waited longer in the gateway are refused; None: never.
    queue_timeout_s: float | None = None
    # Requests that wait at most before the flood is shed.
    queued_max: int = 10_000_000
    # Virtual time at which the run is cut; None: when everything has ended.
    until_s: float | None = None
    # Whether the engines tell how many tokens their KV caches hold, so that the gateway keeps within it.
    kv_told: bool = False
    name: str = "scenario"


@dataclass(slots=True)
class Record:
    """What became of one request. Times are in seconds of virtual time; None: it never came to that."""

    arrival: Arrival
    # "ok", "refused", "left" or "failed".
    outcome: str = ""
    dispatched_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    engine: int = -1
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 0


@dataclass(slots=True)
class Result:
    """All that a run left behind. `service` holds (time_s, tenant, input_tokens, output_tokens) as they were computed,
    in order of time: the input when its prefill ended, the output in steps."""

    scenario: Scenario
    records: list[Record] = field(default_factory=list)
    service: list[tuple[float, str, int, int]] = field(default_factory=list)
    # (time_s, engine, limit) at each change of a learned limit.
    limits: list[tuple[float, int, int]] = field(default_factory=list)
    # Largest bound ratio that was seen, over all pools and times it was looked at.
    bound_ratio: float = 0.0
    # Virtual time at the end, and seconds of real time it took.
    ended_s: float = 0.0
    took_s: float = 0.0

"""Random scenarios of every kind, each from one seed and small enough to be watched after every event."""

import random

from evenflow.policy.fairness import Group, Tier
from evenflow.sim.model import Arrival, EngineProfile, Fault, Scenario, TenantSpec, Traffic

GROUPS = ("web", "keys", "anonymous")
WEIGHTS = (0.1, 1.0, 2.0, 10.0, 30.0, 1000.0)
FAULTS = ("dead", "slow", "hanging", "stale_reports", "leave_storm")

SMALL = EngineProfile("small", 2000, 8, 0.02, 0.001, 0.000001, 2000.0)


def random_scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    tiers = random_tiers(rng)
    tenants = random_tenants(rng, len(tiers))
    engines = tuple(random_engine(rng, index) for index in range(rng.randint(1, 4)))
    seconds = rng.choice((3.0, 10.0, 30.0))
    return Scenario(
        traffic=Traffic("random", tenants, random_arrivals(rng, tenants, seconds), block_tokens=16),
        engines=engines,
        tiers=tiers,
        policy=rng.choice(("fair", "fair", "fair", "fair", "fcfs", "round_robin", "least_counter", "vtc")),
        charging=rng.choice(("estimate", "estimate", "progress", "completion", "max_tokens")),
        slots=rng.choice(("auto", "auto", None, 1, 3, 8)),
        placement=rng.choice(("least_work", "least_work", "round_robin")),
        cost=rng.choice(("tokens", "tokens", "sequences")),
        faults=tuple(random_fault(rng, len(engines), seconds) for _ in range(rng.choice((0, 0, 1, 2, 4)))),
        seed=seed,
        queue_timeout_s=rng.choice((None, None, None, None, 2.0, 10.0)),
        queued_max=rng.choice((10_000, 10_000, 10_000, 10_000, 20, 5)),
        kv_told=rng.random() < 0.3,
        name=f"random {seed}",
    )


def random_tiers(rng: random.Random) -> tuple[Tier, ...]:
    """One to three, which list some of the groups; the lower ones may have a floor, or let tickets move up."""
    tiers = []
    for index in range(rng.choice((1, 1, 2, 3))):
        listed = [Group(name, rng.choice((1.0, 10.0, 300.0))) for name in GROUPS if rng.random() < 0.7]
        share = rng.choice((0.0, 0.05, 0.3)) if index else 0.0
        max_wait_s = rng.choice((None, None, 1.0)) if index else None
        tiers.append(Tier(f"tier {index}", share, tuple(listed), max_wait_s))
    return tuple(tiers)


def random_tenants(rng: random.Random, tiers: int) -> tuple[TenantSpec, ...]:
    return tuple(
        TenantSpec(
            f"tenant {index}",
            rng.choice(GROUPS),
            0.0 if rng.random() < 0.05 else rng.choice(WEIGHTS),
            rng.randrange(tiers),
            rng.choice((None, None, 1, 3)),
            rng.choice((None, None, None, None, None, None, 4)),
        )
        for index in range(rng.randint(2, 9))
    )


def random_engine(rng: random.Random, index: int) -> EngineProfile:
    return EngineProfile(
        f"engine {index}",
        kv_tokens=rng.choice((250, 1000, 5000)),
        sequences_max=rng.choice((2, 6, 32)),
        step_s=rng.choice((0.005, 0.03)),
        step_per_sequence_s=rng.choice((0.0, 0.001)),
        step_per_kv_token_s=rng.choice((0.0, 0.000002)),
        prefill_tokens_per_s=rng.choice((500.0, 5000.0)),
        prefix_cache=rng.random() < 0.5,
        speed=rng.choice((1.0, 2.0)),
    )


def random_arrivals(rng: random.Random, tenants: tuple[TenantSpec, ...], seconds: float) -> list[Arrival]:
    """Each tenant comes for some part of the time, in a steady flow or in bursts."""
    arrivals: list[Arrival] = []
    for tenant in tenants:
        from_s = rng.random() * seconds
        until_s = from_s + rng.random() * (seconds - from_s)
        burst = rng.choice((1, 1, 5, 20))
        for _ in range(rng.choice((1, 3, 8))):
            time_s = from_s + rng.random() * (until_s - from_s)
            arrivals += [random_arrival(rng, tenant.name, time_s) for _ in range(burst)]
    arrivals.sort(key=lambda arrival: arrival.time_s)
    return arrivals[:220]


def random_arrival(rng: random.Random, tenant: str, time_s: float) -> Arrival:
    output_tokens = rng.choice((0, 1, 5, 40, 150))
    return Arrival(
        time_s,
        tenant,
        rng.choice((1, 20, 90, 240)),
        output_tokens,
        prefix=tuple(range(rng.randint(0, 6))) if rng.random() < 0.5 else (),
        max_tokens=rng.choice((None, output_tokens, 2 * output_tokens + 1, 16)),
        leaves_after_s=rng.choice((None, None, None, None, rng.random() * 5.0)),
    )


def random_fault(rng: random.Random, engines: int, seconds: float) -> Fault:
    kind = rng.choice(FAULTS)
    from_s = rng.random() * seconds
    return Fault(
        kind,  # type: ignore[arg-type]
        from_s,
        from_s + rng.random() * 5.0,
        rng.randrange(engines),
        rng.choice((0.3, 1.0)) if kind == "leave_storm" else rng.choice((2.0, 10.0)),
    )

"""The watch: it is silent in a sound world, and each thing it looks at is caught when it is broken."""

from typing import Any

import pytest
from sim.scenarios import SMALL, random_scenario

from evenflow.policy.fairness import FairQueue, Group, Ticket, Tier
from evenflow.policy.placement import PLACEMENTS
from evenflow.sim import world
from evenflow.sim.baselines import QUEUES, Fcfs
from evenflow.sim.engine import Engine
from evenflow.sim.invariants import Watch
from evenflow.sim.model import Arrival, Scenario, TenantSpec, Traffic
from evenflow.sim.world import World, run

TIERS = (Tier("standard", 0.0, (Group("keys", 1.0),)), Tier("low", 0.2, (Group("keys", 1.0),)))


def busy(**changes: Any) -> Scenario:
    """Three tenants that flood one worker, one of them below the others."""
    tenants = (TenantSpec("a"), TenantSpec("b", concurrency=2), TenantSpec("c", tier=1))
    names = "a" * 60 + "b" * 30 + "c" * 20
    arrivals = [Arrival(0.01 * index, name, 20 + index % 5, 30) for index, name in enumerate(names)]
    settings: dict[str, Any] = {"slots": 4, "seed": 77, **changes}
    return Scenario(Traffic("busy", tenants, arrivals), (SMALL,), TIERS, **settings)


def caught(scenario: Scenario, match: str) -> None:
    with pytest.raises(AssertionError, match=match) as error:
        run(scenario, check=Watch(scenario))
    assert f"seed {scenario.seed}, at " in str(error.value)


class Oldest(FairQueue):
    """First come, first served, that calls itself fair."""

    def peek(self, lanes: Any = None) -> Ticket | None:
        heads = [
            line.head()
            for tier in self._tiers
            for account in tier.accounts.values()
            for line in account.lines.values()
            if line.entry is not None
        ]
        return min(heads, key=lambda ticket: ticket.sequence, default=None)


class Favourite(Oldest):
    """One tenant goes first, always, and the bound is said to hold."""

    def peek(self, lanes: Any = None) -> Ticket | None:
        for tier in self._tiers:
            for tenant, account in tier.accounts.items():
                for line in account.lines.values():
                    if tenant.name == "a" and line.entry is not None:
                        return line.head()
        return super().peek(lanes)

    def bound_ratio(self) -> float:
        return 0.0


class NoFloor(FairQueue):
    """A lower tier is never served before a higher one, whatever its `min_share`."""

    def _credited(self, lanes: Any) -> Ticket | None:
        return None


class Forgetful(FairQueue):
    """Now and then it says that nobody may start."""

    def peek(self, lanes: Any = None) -> Ticket | None:
        return None if self.waiting % 5 == 3 else super().peek(lanes)


class LastInFirstOut(Fcfs):
    def peek(self, lanes: Any = None) -> Ticket | None:
        newest = [
            account.tickets[-1]
            for tenant, account in self._backlogged.items()
            if tenant.concurrency is None or tenant.in_flight < tenant.concurrency
        ]
        return max(newest, key=lambda ticket: ticket.sequence, default=None)

    def start(self, ticket: Ticket) -> None:
        account = self._accounts[ticket.tenant]
        account.tickets.rotate(1)
        super().start(ticket)
        account.tickets.rotate(-1)


class Unlimited(Fcfs):
    """It does not know of concurrency."""

    def peek(self, lanes: Any = None) -> Ticket | None:
        heads = [account.tickets[0] for account in self._backlogged.values()]
        return min(heads, key=lambda ticket: ticket.sequence, default=None)


class MiscountsTenants(FairQueue):
    def start(self, ticket: Ticket) -> None:
        super().start(ticket)
        ticket.tenant.queued += 1


class MiscountsItself(FairQueue):
    def cancel(self, ticket: Ticket) -> None:
        super().cancel(ticket)
        self.waiting += 1


class Everywhere:
    """Placement that does not know of slots."""

    def __init__(self, rng: Any) -> None:
        pass

    def choose(self, workers: Any, sequences: int) -> int:
        return 0


def test_a_sound_world_is_not_accused() -> None:
    for changes in ({}, {"cost": "sequences"}, {"policy": "fcfs"}, {"policy": "vtc"}, {"slots": "auto"}):
        scenario = busy(**changes)
        result = run(scenario, check=Watch(scenario))
        assert {record.outcome for record in result.records} == {"ok"}


@pytest.mark.parametrize(
    ("queue", "changes", "match"),
    [
        (Oldest, {}, "fairness bound is used"),
        (Favourite, {"cost": "sequences"}, "starves: a had"),
        (NoFloor, {}, "Tier 1 starves"),
        (Forgetful, {}, "is below its concurrency, and has no turn"),
        (MiscountsTenants, {}, "running and .* waiting"),
        (MiscountsItself, {"queue_timeout_s": 1.0}, "The queue counts"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_fair_queue_is_caught(
    monkeypatch: pytest.MonkeyPatch, queue: type[FairQueue], changes: dict[str, Any], match: str
) -> None:
    monkeypatch.setitem(QUEUES, "fair", queue)
    caught(busy(**changes), match)


@pytest.mark.parametrize(
    ("queue", "match"), [(LastInFirstOut, "overtook its request"), (Unlimited, "beside its limit 2")]
)
def test_a_broken_plain_queue_is_caught(
    monkeypatch: pytest.MonkeyPatch, queue: type[Fcfs], match: str
) -> None:
    monkeypatch.setitem(QUEUES, "fcfs", queue)
    caught(busy(policy="fcfs"), match)


def test_one_that_is_starved_in_another_group_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUEUES, "fair", Favourite)
    tenants = (TenantSpec("a", "web"), TenantSpec("b", "keys"))
    arrivals = [Arrival(0.01 * index, "ab"[index % 2], 20, 30) for index in range(100)]
    tiers = (Tier("standard", 0.0, (Group("web", 3.0), Group("keys", 1.0))),)
    scenario = Scenario(Traffic("groups", tenants, arrivals), (SMALL,), tiers, slots=2, cost="sequences")
    caught(scenario, r"\(0, 'keys'\) starves")


def test_a_lease_that_leaks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: World, call: Any, worker: Any) -> None:
        sound(self, call, worker)
        worker.in_flight += call.number == 20

    sound = World._release
    monkeypatch.setattr(World, "_release", release)
    caught(busy(), "Worker 0 counts 4 running, and 3 are leased")


def test_slots_that_are_exceeded_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACEMENTS, "least_work", Everywhere)
    caught(busy(), "runs 5 with 4 slots")


def test_a_request_that_ends_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: World, call: Any, outcome: str) -> None:
        sound(self, call, outcome)
        if call.number == 20:
            assert self.log is not None
            self.log.append((world.CLOSED, call, 0, 0))

    sound = World._close
    monkeypatch.setattr(World, "_close", close)
    caught(busy(), "Request 20 ended twice")


def test_a_request_that_is_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: World, call: Any, outcome: str) -> None:
        sound(self, call, outcome)
        if call.number == 20:
            self.arrived += 1

    sound = World._close
    monkeypatch.setattr(World, "_close", close)
    caught(busy(), "requests .* ended and .* live")


def test_a_request_that_ends_twice_is_refused_by_the_world_itself() -> None:
    one = World(busy())
    record = world.Record(Arrival(0.0, "a", 1, 1))
    call = world.Call(0, record.arrival, record)
    one.calls[0] = call
    one._close(call, "ok")
    with pytest.raises(AssertionError, match="request 0 of seed 77 ended twice"):
        one._close(call, "ok")


def test_an_engine_over_its_cache_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_steps_to_room", lambda self, run: 0)
    arrivals = [Arrival(0.0, "a", 900, 100) for _ in range(5)]
    scenario = Scenario(Traffic("big", (TenantSpec("a"),), arrivals), (SMALL,), TIERS, slots=8)
    caught(scenario, "Engine 0 is over its room")


def test_work_that_is_not_given_back_is_caught_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: World, call: Any, worker: Any) -> None:
        sound(self, call, worker)
        worker.work += 1.0

    sound = World._release
    monkeypatch.setattr(World, "_release", release)
    caught(busy(), "still holds")


def test_a_broken_queue_does_not_get_past_random_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUEUES, "fair", Oldest)
    failed = 0
    for seed in range(80):
        scenario = random_scenario(seed)
        try:
            run(scenario, check=Watch(scenario))
        except AssertionError:
            failed += 1
    assert failed >= 5

"""The scheduler over several lanes and pools: nothing that waits is forgotten when the fleet changes."""

import random
from typing import Any

from evenflow.config import WorkerSettings
from evenflow.fleet.registry import Registry, Worker
from evenflow.observe.metrics import MICRO_SECONDS, Histogram
from evenflow.policy.fairness import Group, Tenant, Ticket, Tier
from evenflow.policy.placement import PLACEMENTS
from evenflow.request.place import Scheduler

TIERS = (Tier("standard", 0.0, (Group("keys", 1.0),)),)


class FakeRequest:
    def __init__(self, model: str) -> None:
        self.model = model


class FakeCall:
    """What the scheduler reads and writes of a call."""

    def __init__(self, model: str) -> None:
        self.request = FakeRequest(model)
        self.ticket: Any = None
        self.lease: Any = None
        self.failed_on: Any = None
        self.part: Any = None
        self.rivals: Any = None


class World:
    """A registry and a scheduler whose relay only notes what was started, whose settle only what was refused."""

    def __init__(self, **workers: tuple[str, ...]) -> None:
        self.registry = Registry()
        placement = PLACEMENTS["least_work"](random.Random(1))
        self.scheduler = Scheduler(self.registry, TIERS, placement, Histogram(MICRO_SECONDS))
        self.started: list[FakeCall] = []
        self.refused: list[FakeCall] = []
        self.scheduler.start = lambda call, lease: self.started.append(call)  # type: ignore[assignment, arg-type]
        self.scheduler.no_worker = self.refused.append  # type: ignore[assignment, arg-type]
        for port, (name, models) in enumerate(workers.items(), 1):
            worker = Worker(WorkerSettings(url=f"http://127.0.0.1:{port}", name=name, models=models, slots=1))
            self.registry.add(worker)
            self.registry.probe_succeeded(worker)

    def submit(self, tenant: Tenant, model: str, slots: int = 1) -> FakeCall:
        call = FakeCall(model)
        lane = self.registry.lanes[model]
        call.ticket = Ticket(tenant, 0, lane, slots, 10.0, call)
        self.scheduler.submit(call.ticket)
        return call

    def finish(self, call: FakeCall) -> None:
        self.scheduler.finish(call.ticket, call.lease, 10.0)

    def worker(self, name: str) -> Worker:
        return self.registry.workers[name]


def test_one_pool_for_lanes_that_share_a_worker() -> None:
    world = World(a=("m", "n"), b=("n",), c=("other",))
    assert [len(pool.lanes) for pool in world.scheduler.pools] == [2, 1]


def test_a_full_lane_holds_up_no_other() -> None:
    world = World(a=("m", "n"), b=("n",))
    tenant = Tenant("t", "keys")
    running = world.submit(tenant, "m")
    waiting = world.submit(tenant, "m")
    other = world.submit(tenant, "n")
    assert world.started == [running, other]
    world.finish(running)
    assert world.started[-1] is waiting


def test_what_concurrency_holds_back_moves_when_pools_are_regrouped() -> None:
    world = World(a=("m",), b=("other",))
    tenant = Tenant("t", "keys", concurrency=1)
    running = world.submit(tenant, "m")
    held = [world.submit(tenant, "m") for _ in range(3)]
    world.registry.set_models(world.worker("b"), frozenset(("m", "other")))  # one pool from now on
    assert world.scheduler.waiting() == tenant.queued == 3
    assert len(world.scheduler.pools) == 1
    for call in (running, *held):
        assert world.started[-1] is call
        world.finish(call)
    assert world.started == [running, *held]
    assert (tenant.queued, tenant.in_flight, world.scheduler.waiting()) == (0, 0, 0)


def test_slots_of_a_pool_that_was_regrouped_serve_the_new_one() -> None:
    world = World(a=("m",), b=("other",))
    tenant = Tenant("t", "keys")
    running = world.submit(tenant, "m")
    waiting = world.submit(tenant, "m")
    world.registry.set_models(world.worker("a"), frozenset(("m", "new")))
    world.registry.set_models(world.worker("b"), frozenset(("other", "new")))
    assert world.started == [running]
    world.finish(running)
    assert world.started == [running, waiting]


def test_a_call_given_back_after_a_regrouping_waits_in_the_new_pool() -> None:
    world = World(a=("m",), b=("other",))
    tenant = Tenant("t", "keys")
    running = world.submit(tenant, "m")
    world.registry.set_models(world.worker("b"), frozenset(("m", "other")))
    world.registry.unreachable(world.worker("a"), "connection refused")
    world.scheduler.give_back(running, world.worker("a"))  # type: ignore[arg-type]
    assert world.started == [running, running]
    assert running.lease.worker is world.worker("b")
    world.finish(running)
    assert (tenant.queued, tenant.in_flight, world.scheduler.waiting()) == (0, 0, 0)


def test_a_model_that_goes_refuses_all_that_wait_for_it() -> None:
    world = World(a=("m",), b=("m", "kept"))
    tenant = Tenant("t", "keys", concurrency=1)
    running = world.submit(tenant, "m")
    held = [world.submit(tenant, "m") for _ in range(2)]
    for name in ("a", "b"):
        world.registry.set_models(world.worker(name), frozenset(("kept",)))
    assert world.refused == held
    world.finish(running)
    assert (tenant.queued, tenant.in_flight) == (0, 0)


def test_a_lane_without_live_workers_refuses_also_what_concurrency_holds_back() -> None:
    world = World(a=("m",), b=("other",))
    tenant = Tenant("t", "keys", concurrency=1)
    running = world.submit(tenant, "other")
    held = [world.submit(tenant, "m") for _ in range(2)]
    assert world.started == [running]
    world.registry.unreachable(world.worker("a"), "connection refused")
    world.scheduler.each_second()
    assert world.refused == held
    assert world.scheduler.waiting() == tenant.queued == 0


def test_a_call_given_back_lets_its_tenant_run_elsewhere() -> None:
    """S26: what was given back holds no place under the concurrency while it waits for another worker."""
    world = World(a=("m",), b=("other",))
    tenant = Tenant("t", "keys", concurrency=1)
    running = world.submit(tenant, "m")
    elsewhere = world.submit(tenant, "other")
    world.registry.unreachable(world.worker("a"), "connection refused")
    world.scheduler.give_back(running, world.worker("a"))  # type: ignore[arg-type]
    assert world.started == [running, elsewhere]
    assert tenant.in_flight == 1


def test_a_call_that_needs_many_slots_is_not_overtaken() -> None:
    world = World(a=("m",))
    world.worker("a").slots = 2
    tenant, other = Tenant("t", "keys"), Tenant("o", "keys")
    first = world.submit(other, "m")
    large = world.submit(tenant, "m", slots=2)
    small = world.submit(tenant, "m")
    assert world.started == [first]
    world.finish(first)
    assert world.started == [first, large]
    world.finish(large)
    assert world.started == [first, large, small]


def test_a_wide_ticket_that_leaves_lets_the_others_through() -> None:
    """One that needs more slots than are free holds its lane; when its client leaves, nothing may stay held."""
    world = World(a=("m",))
    world.worker("a").slots = 3
    tenant = Tenant("t", "keys")
    world.submit(tenant, "m")
    wide = world.submit(tenant, "m", slots=3)
    narrow = [world.submit(tenant, "m") for _ in range(2)]
    assert len(world.started) == 1
    world.scheduler.cancel(wide.ticket)
    assert world.started[1:] == narrow


def test_a_call_goes_back_to_a_worker_that_failed_it_before_all_wait_for_another() -> None:
    """Another worker is better, but a full one is not worth an idle one and a lane that stands."""
    world = World(a=("m",), b=("m",))
    tenant = Tenant("t", "keys")
    first, second = world.submit(tenant, "m"), world.submit(tenant, "m")
    failed = first if first.lease.worker.name == "a" else second
    world.scheduler.give_back(failed, failed.lease.worker)  # type: ignore[arg-type]
    assert failed.lease.worker.name == "a"  # b is full, a lives
    world.registry.unreachable(failed.lease.worker, "gone")
    world.scheduler.give_back(failed, failed.lease.worker)  # type: ignore[arg-type]
    assert failed.lease is None  # a is gone: it waits for b
    other = second if failed is first else first
    world.finish(other)
    assert failed.lease.worker.name == "b"


def test_memory_is_a_limit_where_it_is_told() -> None:
    world = World(a=("m",))
    worker = world.worker("a")
    worker.slots, worker.tokens_max = 10, 100.0
    world.registry.lanes["m"].bounded = True
    calls = []
    for _ in range(4):
        call = FakeCall("m")
        call.ticket = Ticket(Tenant("t", "keys"), 0, world.registry.lanes["m"], 1, 10.0, call)
        call.ticket.tokens = 40.0
        world.scheduler.submit(call.ticket)
        calls.append(call)
    assert world.started == calls[:2]
    world.finish(calls[0])
    assert world.started == calls[:3]
    for call in calls[1:3]:
        world.finish(call)
    assert (worker.tokens, worker.in_flight) == (40.0, 1)
    world.finish(calls[3])
    assert (worker.tokens, worker.work, worker.in_flight) == (0.0, 0.0, 0)

"""What must hold in any world after every event, whatever goes wrong in it.

    run(scenario, check=Watch(scenario))

The watch keeps its own books, from the messages in `World.log`, and compares them with what the world, its queue and
its engines say. It raises AssertionError with the seed and the virtual time in its message, so that the scenario can
be run again up to there. It changes nothing.

Looked at: leases (never leaked, never beyond a worker's slots when they are given), engines (never beyond their KV
cache and batch), work conservation, tenants' concurrency, FIFO inside a tenant, that every request ends once, the
fairness bound, that nobody starves, and that all counters are at rest at the end.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Hashable
from typing import NoReturn

from evenflow.policy.fairness import Tenant
from evenflow.sim.model import Scenario
from evenflow.sim.world import CLOSED, GIVEN_BACK, GRANTED, QUEUED, Call, World

# What rounding may add to a ratio or a sum.
ROUNDING = 1e-9
# With more tenants than so many, what looks at all of them is done at each second event, or third, and so on.
TENANTS_EACH_EVENT = 32


class Watch:
    """Give a new one to each run."""

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._now = 0.0
        self._events = 0
        self._every = 1 + len(scenario.traffic.tenants) // TENANTS_EACH_EVENT
        # By number: what waits, by tenant and in order of age; who runs what; what has ended.
        self._waiting: dict[str, list[int]] = defaultdict(list)
        self._calls: dict[int, Call] = {}
        self._running: dict[int, int] = {}
        self._closed: set[int] = set()
        self._leases = [0] * len(scenario.engines)
        self._in_flight: dict[str, int] = defaultdict(int)
        self._starved = Starved(scenario)

    def __call__(self, world: World) -> None:
        self._now = world.now
        self._events += 1
        for what, call, in_flight, slots in world.log or ():
            if what in (QUEUED, GIVEN_BACK):
                self._wait(call, given_back=what == GIVEN_BACK)
            elif what == GRANTED:
                self._grant(call, in_flight, slots)
            elif what == CLOSED:
                self._close(call)
        self._check_books(world)
        self._check_engines(world)
        self._check_idle(world)
        if not self._events % self._every:
            self._check_tenants(world)
            self._check_bound(world)
        if world.finished:
            self._check_rest(world)

    def fail(self, what: str) -> NoReturn:
        raise AssertionError(f"{what} (seed {self._seed}, at {self._now:.6f} s of virtual time)")

    # -- messages --------------------------------------------------------------------------------------------

    def _wait(self, call: Call, *, given_back: bool) -> None:
        number = call.number
        if given_back:
            self._leave_worker(call, "was given back")
        if number in self._closed or number in self._calls:
            self.fail(f"Request {number} waits although it has ended or waits already")
        self._calls[number] = call
        insort(self._waiting[call.owner], number)
        self._starved.waits(call, given_back=given_back)

    def _grant(self, call: Call, in_flight: int, slots: int) -> None:
        """A call got a lease: within the worker's slots, and no older one of its tenant and tier waits."""
        number, worker = call.number, call.record.engine
        if number in self._running or number in self._closed:
            self.fail(f"Request {number} was started although it runs or has ended")
        if in_flight > slots:
            self.fail(f"Worker {worker} runs {in_flight} with {slots} slots")
        for older in self._waiting[call.owner]:
            if older >= number:
                break
            if self._calls[older].ticket.tier == call.ticket.tier:
                self.fail(f"Request {number} of tenant {call.owner} overtook its request {older}")
        waited = self._calls.pop(number, None)
        if waited is not None:
            self._waiting[call.owner].remove(number)
        self._running[number] = worker
        self._leases[worker] += 1
        self._in_flight[call.owner] += 1
        tenant = call.ticket.tenant
        if tenant.concurrency is not None and self._in_flight[call.owner] > tenant.concurrency:
            self.fail(f"Tenant {tenant.name} runs {self._in_flight[call.owner]} beside its limit {tenant.concurrency}")
        starved = self._starved.granted(call, waited=waited is not None)
        if starved is not None:
            self.fail(starved)

    def _close(self, call: Call) -> None:
        number = call.number
        if number in self._closed:
            self.fail(f"Request {number} ended twice")
        self._closed.add(number)
        if number in self._running:
            self._leave_worker(call, "ended")
            self._starved.ended(call)
        elif self._calls.pop(number, None) is not None:
            self._waiting[call.owner].remove(number)
            self._starved.gone(call)

    def _leave_worker(self, call: Call, how: str) -> None:
        worker = self._running.pop(call.number, None)
        if worker is None:
            self.fail(f"Request {call.number} {how} although it did not run")
        self._leases[worker] -= 1
        self._in_flight[call.owner] -= 1

    # -- after every event -----------------------------------------------------------------------------------

    def _check_books(self, world: World) -> None:
        """Leases are in one account, and every request in one place."""
        for worker in world.workers:
            leases = self._leases[worker.index]
            if worker.in_flight != leases:
                self.fail(f"Worker {worker.index} counts {worker.in_flight} running, and {leases} are leased")
        if world.queue.waiting != len(self._calls):
            self.fail(f"The queue counts {world.queue.waiting} and {len(self._calls)} wait")
        if len(world.calls) != len(self._calls) + len(self._running):
            self.fail(f"{len(world.calls)} live, {len(self._calls)} wait and {len(self._running)} run")
        if world.arrived != world.ended + len(world.calls) or world.ended != len(self._closed):
            self.fail(f"Of {world.arrived} requests {world.ended} ended and {len(world.calls)} live")

    def _check_engines(self, world: World) -> None:
        for worker in world.workers:
            engine, profile = worker.engine, worker.engine.profile
            report = engine.report(world.now)
            if not 0 <= report.kv_tokens <= profile.kv_tokens or report.running > profile.sequences_max:
                self.fail(f"Engine {worker.index} is over its room: {report}")
            if report.waiting < 0:
                self.fail(f"Engine {worker.index} counts {report.waiting} in its queue")

    def _check_idle(self, world: World) -> None:
        """Nothing waits while it might run: the next in turn has no room, or all that wait are at their concurrency."""
        if not self._calls:
            return
        ticket = world.queue.peek()
        if ticket is not None:
            if world.room_for(ticket.call):
                self.fail(f"Request {ticket.call.number} waits while a worker has room")
            return
        for name, numbers in self._waiting.items():
            if numbers and not _is_full(world.tenants[name]):
                self.fail(f"Tenant {name} waits, is below its concurrency, and has no turn")

    def _check_tenants(self, world: World) -> None:
        for name, tenant in world.tenants.items():
            if tenant.in_flight != self._in_flight[name] or tenant.queued != len(self._waiting[name]):
                self.fail(
                    f"Tenant {name} counts {tenant.in_flight} running and {tenant.queued} waiting; "
                    f"{self._in_flight[name]} run and {len(self._waiting[name])} wait"
                )

    def _check_bound(self, world: World) -> None:
        ratio = world.queue.bound_ratio()
        if ratio > world.result.bound_ratio:
            world.result.bound_ratio = ratio
        if ratio > 1.0 + ROUNDING:
            self.fail(f"The fairness bound is used {ratio:.6f} times over")

    def _check_rest(self, world: World) -> None:
        """Everything has ended, so everything is back."""
        for worker in world.workers:
            held = (worker.in_flight, worker.work, worker.tokens, worker.engine.waiting)
            if any(held):
                self.fail(f"Worker {worker.index} still holds {held}")
        for name, tenant in world.tenants.items():
            if tenant.in_flight or tenant.queued:
                self.fail(f"Tenant {name} still counts {tenant.in_flight} running and {tenant.queued} waiting")
        if world.queue.waiting or self._calls or self._running:
            self.fail(f"{world.queue.waiting} still wait")
        for record in world.result.records:
            if record.outcome not in ("ok", "refused", "left", "failed") or record.ended_s is None:
                self.fail(f"The request of {record.arrival.time_s} s has no end")


class Starved:
    """Whether anybody who waits is passed over for longer than the fair queue allows.

    1. Where each costs the same and just that (`cost="sequences"`): since a tenant that may run came to wait, or was
       last served, another of its group has at most w/w' + 1 starts, and one for each that was taken back from it. The
       same for groups of a tier. It follows that every wait is bounded by the weights alone.
    2. A lower tier with a `min_share` waits at most for as much cost above it as earns the largest it has to start,
       one start more, and what the lower tiers above it had saved.

    Nothing is checked where tickets move up a tier, or the queue is not the fair one.
    """

    def __init__(self, scenario: Scenario) -> None:
        tiers = scenario.tiers
        watched = scenario.policy == "fair" and not any(tier.max_wait_s is not None for tier in tiers)
        self._exact = watched and scenario.cost == "sequences" and scenario.charging != "completion"
        self._floors = {
            index: tier.min_share
            for index, tier in enumerate(tiers)
            if watched and index and tier.min_share > 0.0 and scenario.charging != "completion"
        }
        self._weights: dict[Hashable, float] = {}
        for spec in scenario.traffic.tenants:
            self._weights[spec.name] = spec.weight
            own = {group.name: group.weight for group in tiers[spec.tier].groups}
            # A guest of its tier has a weight that the queue gives it; its starts are not counted against any due.
            self._weights[spec.tier, spec.group] = own.get(spec.group, 0.0)
        # Of each tenant: its tier and group, how many of it wait, and the tenant itself; of each group its tenants that
        # may run.
        self._queued: dict[str, int] = defaultdict(int)
        self._in_flight: dict[str, int] = defaultdict(int)
        self._able: dict[tuple[int, str], set[str]] = defaultdict(set)
        # Of each tenant or group that waits and may run: the starts of its rivals since it came, or was served.
        self._passed: dict[Hashable, dict[Hashable, int]] = {}
        self._refunds: dict[Hashable, int] = defaultdict(int)
        # Of each floor: the cost started above it meanwhile; of each tier its largest cost.
        self._above: dict[int, float] = {}
        self._largest: dict[int, float] = defaultdict(float)

    def waits(self, call: Call, *, given_back: bool) -> None:
        tier = call.ticket.tier
        self._largest[tier] = max(self._largest[tier], call.ticket.estimate)
        self._queued[call.owner] += 1
        if given_back:
            self._in_flight[call.owner] -= 1
            self._refund(call)
        self._update(call)

    def gone(self, call: Call) -> None:
        """It waits no more, and never ran."""
        self._queued[call.owner] -= 1
        self._update(call)

    def ended(self, call: Call) -> None:
        self._in_flight[call.owner] -= 1
        if call.record.outcome == "failed":
            self._refund(call)
        self._update(call)

    def granted(self, call: Call, *, waited: bool) -> str | None:
        """What is wrong with it, if anything."""
        name, tier = call.owner, call.ticket.tier
        group = (tier, call.ticket.tenant.group)
        wrong = None
        if waited:
            self._queued[name] -= 1
            wrong = self._pass_over(name, group) or self._earn(tier, call.ticket.estimate)
        else:
            self._largest[tier] = max(self._largest[tier], call.ticket.estimate)
        self._in_flight[name] += 1
        for served in (name, group):
            if served in self._passed:
                self._passed[served].clear()
        self._update(call)
        return wrong

    # -- parts -----------------------------------------------------------------------------------------------

    def _refund(self, call: Call) -> None:
        self._refunds[call.owner] += 1
        self._refunds[call.ticket.tier, call.ticket.tenant.group] += 1

    def _update(self, call: Call) -> None:
        """Who may run now begins to be counted for; who may not ends."""
        name, tenant, tier = call.owner, call.ticket.tenant, call.ticket.tier
        group = (tier, tenant.group)
        full = tenant.concurrency is not None and self._in_flight[name] >= tenant.concurrency
        able = self._able[group]
        if self._queued[name] and not full:
            able.add(name)
            self._passed.setdefault(name, {})
            self._passed.setdefault(group, {})
            if tier in self._floors:
                self._above.setdefault(tier, 0.0)
            return
        able.discard(name)
        self._passed.pop(name, None)
        if not able:
            self._passed.pop(group, None)
            if not any(others for (other, _), others in self._able.items() if other == tier):
                self._above.pop(tier, None)

    def _pass_over(self, name: str, group: tuple[int, str]) -> str | None:
        """A tenant of a group was served: all others of the group were passed over, and all other groups."""
        if not self._exact:
            return None
        groups = [other for other in self._able if other[0] == group[0]]
        for served, others in ((name, self._able[group]), (group, groups)):
            for other in others:
                passed = self._passed.get(other)
                if other == served or passed is None or not self._weights[other] or not self._weights[served]:
                    continue
                passed[served] = starts = passed.get(served, 0) + 1
                most = self._weights[served] / self._weights[other] + 1 + self._refunds[served]
                if starts > most * (1.0 + ROUNDING):
                    return f"{other} starves: {served} had {starts} starts meanwhile, {most:.2f} are its due"
        return None

    def _earn(self, tier: int, cost: float) -> str | None:
        """Something was started in a tier: floors below it have earned, its own is served."""
        largest = max(self._largest.values())
        saved = 0.0
        for floor, share in self._floors.items():
            if floor == tier and floor in self._above:
                self._above[floor] = 0.0
            elif floor > tier and floor in self._above:
                self._above[floor] = above = self._above[floor] + cost
                most = self._largest[floor] / share + largest + saved
                if above > most * (1.0 + ROUNDING):
                    return f"Tier {floor} starves: {above:.0f} was started above it, {most:.0f} earn its share"
            saved += self._largest[floor]
        return None


def _is_full(tenant: Tenant) -> bool:
    return tenant.concurrency is not None and tenant.in_flight >= tenant.concurrency

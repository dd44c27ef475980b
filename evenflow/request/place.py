"""Stage 5: whose turn it is, and which worker takes it.

The scheduler holds a fair queue for each pool of workers. A ticket waits there until a worker of its lane has room,
since fairness exists only where the queue is; then the queue says whose turn it is, placement says where, and the
relay is handed a lease. The seam is message-shaped: `submit`, `cancel`, `give_back`, `progress` and `finish` come in,
`start` of the relay and `refuse` of settle go out. Never waits, never touches a socket.
"""

import logging
from collections.abc import Callable, Iterable
from math import inf
from time import monotonic, perf_counter

from evenflow.fleet.registry import Lane, Registry, Worker
from evenflow.observe.metrics import Histogram
from evenflow.observe.why import rivals_of
from evenflow.policy.fairness import FairQueue, Tenant, Ticket, Tier
from evenflow.policy.placement import Ask, Placement, block_hashes, hooks_of, session_of
from evenflow.policy.placement.prefix import BLOCK_BYTES, PROMPT_BYTES_HASHED_MAX
from evenflow.request import Call, Lease
from evenflow.wire.openai import Request

# How fast the measured rate of a pool follows: the share of the newest second.
RATE_STEP = 0.2
# Until a rate is known: cost per second of one slot of a middling engine.
RATE_PER_SLOT_UNSEEN = 50.0
log = logging.getLogger("evenflow.request")

# A shorter prompt is computed sooner than it is looked for in caches.
PROMPT_BYTES_ASKED = 2 * BLOCK_BYTES


class Pool:
    """Lanes that share workers, directly or through others, and the one fair queue before them."""

    __slots__ = ("lanes", "models", "queue", "rate", "running", "served")

    def __init__(self, queue: FairQueue, lanes: tuple[Lane, ...]) -> None:
        self.queue = queue
        # None once the pool was regrouped away; then nothing waits in it, and what runs ends.
        self.lanes = lanes
        # The names that callers use for what these lanes run.
        self.models: frozenset[str] = frozenset()
        # Cost served since the rate was last taken, and that rate in cost per second.
        self.served = 0.0
        self.rate = 0.0
        # Guards `_dispatch` against being entered from within itself.
        self.running = False

    def rate_or_guess(self) -> float:
        """Cost per second."""
        if self.rate > 0.0:
            return self.rate
        return RATE_PER_SLOT_UNSEEN * max(1, sum(worker.slots for worker in self.workers()))

    def workers(self) -> set[Worker]:
        return {worker for lane in self.lanes for worker in lane.workers}

    def running_cost(self) -> float:
        """Estimated cost of all that its workers run."""
        return sum(worker.work for worker in self.workers())

    def take_rate(self) -> None:
        """Once a second: what was served in it goes into the rate. A second in which nothing ran says nothing."""
        if self.served or any(worker.in_flight for worker in self.workers()):
            self.rate += RATE_STEP * (self.served - self.rate) if self.rate else self.served
            self.served = 0.0


class Scheduler:
    """All pools. `start` and `refuse` are set by the gateway when it joins the stages."""

    def __init__(
        self, registry: Registry, tiers: tuple[Tier, ...], placement: Placement, decisions: Histogram
    ) -> None:
        self._registry = registry
        self._tiers = tiers
        self.place_by(placement)
        self._decisions = decisions
        self.pools: list[Pool] = []
        self.start: Callable[[Call, Lease], None]
        self.no_worker: Callable[[Call], None]
        registry.on_lanes_changed = self.regroup
        registry.on_room = self.worker_has_room
        self._ages = any(tier.max_wait_s is not None for tier in tiers)

    def tier_names(self) -> list[str]:
        """From the highest to the lowest."""
        return [tier.name for tier in self._tiers]

    def place_by(self, placement: Placement) -> None:
        """Places by this policy from now on; what the last one has learned is gone with it."""
        self.placement = placement
        self._faults_told = 0
        hooks = hooks_of(placement)
        # What it wants to know of a request, and what to tell it: see `Hooks`.
        self._asks_session = hooks.session
        self._asks_from_bytes: float = PROMPT_BYTES_ASKED if hooks.blocks else inf
        self._score = hooks.score
        self._score_of_work = hooks.by_work
        self._saved = hooks.saved
        self._placed = hooks.placed
        self.answered = hooks.answered
        self._registry.on_kv_use = hooks.reported
        self._registry.on_lost = hooks.forget

    def wants_ask(self, lane: Lane, request: Request, session: str) -> bool:
        """Whether there is anything to tell placement of a call."""
        if not lane.has_choice:
            return False
        return request.prompt_bytes >= self._asks_from_bytes or (self._asks_session and session != "")

    def ask(
        self, request: Request, prompt: bytes, prompt_work: float, cached_saves: float, session: str
    ) -> Ask | None:
        """What placement is told of a call; None when that would change nothing.

        `prompt` is the beginning of its prompt, at least all of it that is hashed; `prompt_work` what all of it costs,
        and `cached_saves` the part of that which a cache saves.
        """
        blocks: tuple[int, ...] = ()
        if request.prompt_bytes >= self._asks_from_bytes:
            blocks = block_hashes(prompt, request.model)
        number = session_of(session) if session and self._asks_session else 0
        if not blocks and not number:
            return None
        saved = prompt_work * cached_saves / request.prompt_bytes
        beyond = max(0, request.prompt_bytes - PROMPT_BYTES_HASHED_MAX)
        return Ask(blocks, prompt_work, saved * BLOCK_BYTES, saved * beyond, number)

    # -- messages in ---------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Runs the ticket's call at once if it may, else queues it."""
        lane: Lane = ticket.lane
        pool = lane.pool
        queue = pool.queue
        if not queue.waiting:
            workers = lane.workers if not lane.bounded else with_memory(lane.workers, ticket)
            index = self._choose(lane, workers, ticket)
            if index >= 0 and queue.start_now(ticket):
                self._grant(ticket, workers, index)
                return
        queue.submit(ticket)
        self._dispatch(pool)

    def cancel(self, ticket: Ticket) -> None:
        """Takes a waiting ticket out; nothing was charged. It may have held its lane, waiting for many slots."""
        lane: Lane = ticket.lane
        pool = lane.pool
        pool.queue.cancel(ticket)
        if pool.queue.waiting:
            self._dispatch(pool)

    def give_back(self, call: Call, failed_on: Worker) -> None:
        """The call's worker failed before it began: back to the head of its queue, uncharged, and on to another."""
        ticket, lease = call.ticket, call.lease
        assert ticket is not None and lease is not None
        call.failed_on = failed_on
        call.lease = None
        lease.give_back()
        lane: Lane = ticket.lane
        pool = lane.pool
        pool.queue.give_back(ticket)
        self._resume_elsewhere(ticket.tenant, pool)
        if lane in pool.lanes:
            self._dispatch(pool)
        else:  # regrouped away while it ran: it waits where others wait now
            self._move_waiting(pool, lane)

    def progress(self, ticket: Ticket, cost: float) -> None:
        """Charges a running ticket up to `cost`. Another may be next then, and find room where the last did not."""
        lane: Lane = ticket.lane
        pool = lane.pool
        pool.queue.progress(ticket, cost)
        if pool.queue.waiting:
            self._dispatch(pool)

    def finish(self, ticket: Ticket, lease: Lease, cost: float) -> None:
        """Returns the slots, corrects the charge to the true cost, and lets the next ones run."""
        lease.give_back()
        lane: Lane = ticket.lane
        pool = lane.pool
        pool.served += cost
        queue = pool.queue
        queue.finish(ticket, cost)
        self._resume_elsewhere(ticket.tenant, pool)
        if queue.waiting:
            self._dispatch(pool)
        elif not pool.lanes:  # regrouped away while this ran: its slots are of other pools now
            for other in self.pools:
                self._dispatch(other)

    def _resume_elsewhere(self, tenant: Tenant, pool: Pool) -> None:
        """The tenant runs one less: what its concurrency held back in other pools competes again."""
        if tenant.concurrency is not None:
            for other in self.pools:
                if other is not pool:
                    other.queue.resume(tenant)
                    self._dispatch(other)

    # -- what the fleet tells ------------------------------------------------------------------------------------

    def worker_has_room(self, worker: Worker) -> None:
        for pool in self.pools:
            if pool.queue.waiting and any(worker in lane.workers for lane in pool.lanes):
                self._dispatch(pool)

    def reschedule(self, tiers: tuple[Tier, ...], lowered: Callable[[Ticket], int]) -> None:
        """Other tiers, groups or weights hold from now on: what waits queues anew in its order, at `lowered`'s tier.

        Virtual times begin again, so that nobody's debt under the old weights counts under the new ones.
        """
        self._tiers = tiers
        self._ages = any(tier.max_wait_s is not None for tier in tiers)
        old, self.pools = self.pools, []
        self.regroup()
        for pool in old:
            pool.lanes = ()
            self._move_waiting(pool, tier_of=lowered)

    def regroup(self) -> None:
        """Forms the pools anew after lanes changed. A pool that still has one of its models keeps its counters.

        1. The same lanes: nothing changes.
        2. Other lanes for the same models, as when a worker came or went: what waits finds its place in them.
        3. Pools that became one: the counters of the one with most in common hold for all.
        """
        old = self.pools
        names: dict[Lane, set[str]] = {}
        for model, lane in self._registry.lanes.items():
            names.setdefault(lane, set()).add(model)
        self.pools, changed = [], []
        for lanes in connected(self._registry.all_lanes()):
            models = frozenset().union(*[names.get(lane, ()) for lane in lanes])
            pool = max(old, key=lambda pool: len(pool.models & models), default=None)
            if pool is None or not pool.models & models:
                pool = Pool(FairQueue(self._tiers), lanes)
            else:
                old = [other for other in old if other is not pool]
                if pool.lanes != lanes:  # (2)
                    pool.lanes = lanes
                    changed.append(pool)
            pool.models = models
            for lane in lanes:
                lane.pool = pool
            self.pools.append(pool)
        for pool in old:  # (3)
            pool.lanes = ()
        for pool in (*changed, *old):
            self._move_waiting(pool)

    def _move_waiting(
        self,
        old: Pool,
        lane: Lane | None = None,
        tier_of: Callable[[Ticket], int] = lambda ticket: ticket.tier,
    ) -> None:
        """What waits in a pool, or in one of its lanes, queues anew where its model is served now."""
        for ticket in old.queue.take_all(lane):
            call: Call = ticket.call
            assert call.request is not None
            target = self._registry.lanes.get(call.request.model)
            if target is not None and call.part is not None and len(ticket.lane.workers) == 1:
                # A part that goes to the worker that has its prompt, if that is still there.
                target = self._registry.pinned.get(ticket.lane.workers[0], target)
            if target is None:
                self.no_worker(call)
            else:
                call.ticket = moved = Ticket(
                    ticket.tenant, tier_of(ticket), target, ticket.slots, ticket.estimate, call
                )
                moved.tokens, moved.length, moved.since_s = ticket.tokens, ticket.length, ticket.since_s
                moved.prompt_work, moved.ask = ticket.prompt_work, ticket.ask
                self.submit(moved)

    def resume(self, tenants: Iterable[Tenant]) -> None:
        """Their concurrency may have been raised: what it held back competes again."""
        for pool in self.pools:
            for tenant in tenants:
                pool.queue.resume(tenant)
            self._dispatch(pool)

    def each_second(self) -> None:
        """Takes the rates, tells of faults of placement, and refuses what waits for a lane without a live worker."""
        faults = getattr(self.placement, "faults", 0)  # of a class of the user's own
        if faults > self._faults_told:
            self._faults_told = faults
            log.warning("placement: %s (%d times so far)", getattr(self.placement, "problem", ""), faults)
        for pool in self.pools:
            pool.take_rate()
            if self._ages and pool.queue.waiting and pool.queue.promote(monotonic()):
                self._dispatch(pool)
            if pool.queue.waiting:
                for lane in pool.lanes:
                    if not lane.live:
                        for ticket in pool.queue.take_all(lane):
                            self.no_worker(ticket.call)

    def waiting(self) -> int:
        return sum([pool.queue.waiting for pool in self.pools])

    def length(self) -> float:
        """The lengths of all that waits together: see `Ticket.length`."""
        return sum([pool.queue.length for pool in self.pools])

    # -- decisions -----------------------------------------------------------------------------------------------

    def _dispatch(self, pool: Pool) -> None:
        """Starts tickets in the queue's order for as long as the workers have room.

        1. A ticket whose lane has room starts.
        2. A ticket whose lane has none holds that lane: none of the lane's others overtakes it, or one that needs
           many slots would wait for ever. Other lanes of the pool go on.
        """
        if pool.running:
            return
        pool.running = True
        queue = pool.queue
        lanes: list[Lane] | None = list(pool.lanes) if len(pool.lanes) > 1 else None
        try:
            while queue.waiting:
                began = perf_counter()
                ticket = queue.peek(lanes)
                if ticket is None:
                    break
                lane: Lane = ticket.lane
                workers = self._candidates(ticket, lane)
                index = self._choose(lane, workers, ticket)
                if index < 0 and ticket.call.failed_on is not None:
                    # Better there again, if it lives, than that it idles while all behind this ticket wait.
                    workers = with_memory(lane.workers, ticket) if lane.bounded else lane.workers
                    index = self._choose(lane, workers, ticket)
                if index >= 0:  # (1)
                    queue.start(ticket)
                    self._decisions.observe(perf_counter() - began)
                    self._grant(ticket, workers, index)
                    continue
                for worker in lane.learners:
                    if worker.learned is not None and worker.in_flight + ticket.slots > worker.slots:
                        worker.learned.reached = True
                if lanes is None:  # (2)
                    break
                lanes.remove(lane)
                if not lanes:
                    break
        finally:
            pool.running = False

    def _choose(self, lane: Lane, workers: tuple[Worker, ...], ticket: Ticket) -> int:
        """As `Placement.choose`, and never one that is due to have sent a heartbeat."""
        index = self.placement.choose(workers, ticket.slots, ticket.ask)
        if lane.beats:
            now = monotonic()
            while index >= 0 and workers[index].expires_s <= now:
                self._registry.expired(workers[index])
                index = self.placement.choose(workers, ticket.slots, ticket.ask)
        return index

    @staticmethod
    def _candidates(ticket: Ticket, lane: Lane) -> tuple[Worker, ...]:
        """The lane's workers with the memory, without the one that has just failed this call if there is another."""
        call: Call = ticket.call
        failed_on = call.failed_on
        if failed_on is not None:
            others = tuple(worker for worker in lane.workers if worker is not failed_on)
            if any(worker.live for worker in others):
                return with_memory(others, ticket) if lane.bounded else others
        return with_memory(lane.workers, ticket) if lane.bounded else lane.workers

    def _grant(self, ticket: Ticket, workers: tuple[Worker, ...], index: int) -> None:
        worker = workers[index]
        slots = ticket.slots
        if slots > worker.slots:
            slots = worker.slots
        call: Call = ticket.call
        ask = ticket.ask
        if len(workers) > 1:
            score = None if ask is None and self._score_of_work else self._score
            call.rivals = rivals_of(workers, worker, score, ask)
        work, prompt_work = ticket.estimate, ticket.prompt_work
        if ask is not None:
            if self._saved is not None and prompt_work:
                saved = min(self._saved(worker, ask), prompt_work)
                work -= saved
                prompt_work -= saved
            if self._placed is not None:
                self._placed(worker, ask)
        call.lease = lease = Lease(worker, slots, work, prompt_work, ticket.tokens)
        self.start(call, lease)


def with_memory(workers: tuple[Worker, ...], ticket: Ticket) -> tuple[Worker, ...]:
    """Those that can hold the ticket's tokens beside what they run. One that runs nothing may try whatever it is."""
    tokens = ticket.tokens
    for worker in workers:
        if worker.tokens + tokens > worker.tokens_max and worker.in_flight:
            break
    else:
        return workers
    return tuple(
        [worker for worker in workers if worker.tokens + tokens <= worker.tokens_max or not worker.in_flight]
    )


def connected(lanes: Iterable[Lane]) -> list[tuple[Lane, ...]]:
    """Groups lanes that share a worker, directly or through other lanes, in a stable order."""
    groups: list[tuple[set[Worker], list[Lane]]] = []
    for lane in dict.fromkeys(lanes):
        workers, members = set(lane.workers), [lane]
        apart = []
        for group in groups:
            if group[0] & workers:
                workers |= group[0]
                members = group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (workers, members)]
    return [tuple(members) for _, members in groups]

"""A whole run in virtual time: arrivals, the gateway's queue and placement, engines, and what goes wrong.

What decides is the real code of `policy/`; what stands around it does as `request/place.py` and its neighbours do,
with one lane of workers. `run` is a loop over one heap of events; between two events nothing happens. The same
scenario gives the same result: every draw is from one source seeded with `scenario.seed`, and ties go by number.

Left out of the gateway: rate limits, deadlines, several models, and the wait limit that shrinks for queues that do
not drain. The way to a worker takes no time, save that a dead one refuses after `CONNECT_S`.
"""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from time import perf_counter

from evenflow.policy.cost import BYTES_PER_TOKEN, CostModel
from evenflow.policy.fairness import Tenant, Ticket
from evenflow.policy.placement import Ask, hooks_of, placement_named, session_of
from evenflow.policy.placement.prefix import BLOCK_BYTES, BLOCKS_HASHED_MAX
from evenflow.policy.retry import RetryBudget
from evenflow.policy.slots import KV_SHARE, LearnedSlots
from evenflow.sim.baselines import CHARGES, QUEUES, Queue
from evenflow.sim.engine import CHARGE_STEP, NEVER, OUT, Engine, Run
from evenflow.sim.model import Arrival, Charging, EngineProfile, Fault, Record, Result, Scenario

# Engines report, and workers are probed, so often; output is written down, and the second's work done, each other time.
REPORT_EVERY_S = 0.5
# After so long a dead worker has refused the connection.
CONNECT_S = 0.001
# Slots of a worker without a limit.
UNLIMITED = 1 << 30
# What is charged by `max_tokens` for a request that names none, as clients' libraries do.
MAX_TOKENS_UNSET = 1024
# The one model, and the one lane of workers that has it.
MODEL = LANE = "model"

# Kinds of events.
ENGINE, REFUSED, LEAVE, TIMEOUT, TICK, BEGIN, CEASE = range(7)
# What a watcher is told of a call: waits; was started at once or from the queue; waits again; has ended.
QUEUED, GRANTED, GIVEN_BACK, CLOSED = range(4)

# (time, number, kind, what it is about, a number that tells whether it still holds)
_Event = tuple[float, int, int, "Worker | Call | Fault | None", int]


class Worker:
    """An engine as the gateway knows it; what placement chooses among."""

    __slots__ = (
        "engine",
        "in_flight",
        "index",
        "learned",
        "live",
        "name",
        "scheduled_s",
        "slots",
        "speed",
        "stale",
        "tokens",
        "tokens_max",
        "touched",
        "work",
    )

    def __init__(self, index: int, profile: EngineProfile, scenario: Scenario) -> None:
        self.index = index
        self.name = f"engine-{index}"
        self.engine = Engine(profile, scenario.traffic.block_tokens)
        self.speed = profile.speed
        slots = scenario.slots
        self.learned = LearnedSlots() if slots == "auto" else None
        self.slots = self.learned.limit if self.learned else slots if isinstance(slots, int) else UNLIMITED
        self.live = True
        self.in_flight = 0
        self.work = 0.0
        self.tokens = 0.0
        self.tokens_max = profile.kv_tokens * KV_SHARE if scenario.kv_told else inf
        # How many faults keep its reports away.
        self.stale = 0
        # The time of its newest event in the heap, and whether it has to be planned anew.
        self.scheduled_s = inf
        self.touched = False


class Call(Run):
    """A request from its arrival to its end."""

    __slots__ = (
        "arrival",
        "ask",
        "attempts",
        "expected",
        "failed_on",
        "prompt_work",
        "record",
        "ticket",
        "work",
        "worker",
    )

    def __init__(self, number: int, arrival: Arrival, record: Record) -> None:
        output_tokens = arrival.output_tokens
        if arrival.max_tokens is not None and arrival.max_tokens < output_tokens:
            output_tokens = arrival.max_tokens
        super().__init__(number, arrival.tenant, arrival.input_tokens, output_tokens, arrival.prefix)
        self.arrival = arrival
        self.record = record
        self.ticket: Ticket
        # What placement is told of it; None where that is nothing.
        self.ask: Ask | None = None
        # What its worker has to do for it, and the part of that which its prompt takes.
        self.work = 0.0
        self.prompt_work = 0.0
        # Who runs it; None while it waits.
        self.worker: Worker | None = None
        self.failed_on: Worker | None = None
        self.attempts = 0
        # Output tokens up to which its ticket's estimate covers it.
        self.expected = 0


# -- when a request is charged: what at dispatch, and up to which output that is enough -----------------------------


def _by_estimate(cost: CostModel, call: Call) -> tuple[float, int]:
    output = cost.output_tokens(call.owner, MODEL, call.arrival.max_tokens)
    return cost.charge(call.input_tokens, output, 1), int(output)


def _by_progress(cost: CostModel, call: Call) -> tuple[float, int]:
    return cost.charge(call.input_tokens, 0.0, 1), 0


def _by_completion(cost: CostModel, call: Call) -> tuple[float, int]:
    return 0.0, NEVER


def _by_max_tokens(cost: CostModel, call: Call) -> tuple[float, int]:
    output = call.arrival.max_tokens
    if output is None:
        output = MAX_TOKENS_UNSET
    return cost.charge(call.input_tokens, output, 1), output


CHARGINGS: dict[Charging, Callable[[CostModel, Call], tuple[float, int]]] = {
    "estimate": _by_estimate,
    "progress": _by_progress,
    "completion": _by_completion,
    "max_tokens": _by_max_tokens,
}


class World:
    """The state of a run. Made by `run`; a watcher may read all of it, and change nothing."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.result = Result(scenario)
        self.now = 0.0
        self.tenants = {
            spec.name: Tenant(
                spec.name, spec.group, spec.weight, concurrency=spec.concurrency, queued_max=spec.queued_max
            )
            for spec in scenario.traffic.tenants
        }
        self._tier_of = {spec.name: spec.tier for spec in scenario.traffic.tenants}
        self.queue: Queue = QUEUES[scenario.policy](scenario.tiers)
        self.workers = tuple(Worker(index, profile, scenario) for index, profile in enumerate(scenario.engines))
        # Arrived and not ended, by number; how many arrived and ended in all.
        self.calls: dict[int, Call] = {}
        self.arrived = 0
        self.ended = 0
        # True once nothing can happen any more.
        self.finished = False
        # (what, call, its worker's running and slots) since the last event; None while nobody watches.
        self.log: list[tuple[int, Call, int, int]] | None = None
        self._random = random.Random(scenario.seed)
        self._placement = placement_named(scenario.placement)(self._random)
        self._hooks = hooks_of(self._placement)
        # Blocks of a prompt that the gateway looks at; none where no engine keeps any, or there is nothing to choose.
        self._blocks_max = 0
        block_tokens = scenario.traffic.block_tokens
        if len(self.workers) > 1 and any(profile.prefix_cache for profile in scenario.engines):
            self._blocks_max = int(BLOCKS_HASHED_MAX * BLOCK_BYTES / BYTES_PER_TOKEN / block_tokens)
        self._cost = CostModel(by_tokens=scenario.cost == "tokens")
        self._estimate = CHARGINGS[CHARGES.get(scenario.policy, scenario.charging)]
        self._budget = RetryBudget()
        self._bounded = scenario.kv_told
        # Whether the next in turn found no room where another might.
        self._held = False
        self._ages = any(tier.max_wait_s is not None for tier in scenario.tiers)
        self._ticks = 0
        self._events: list[_Event] = []
        self._number = 0
        self._touched: list[Worker] = []

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, check: Callable[["World"], None] | None, progress: Callable[[float], None] | None) -> None:
        if check is not None:
            self.log = []
        self._begin(progress)
        arrivals, events = self.scenario.traffic.arrivals, self._events
        until_s = self.scenario.until_s if self.scenario.until_s is not None else inf
        arrivals_count = len(arrivals)
        handlers = (
            self._on_engine,
            self._on_refused,
            self._on_leave,
            self._on_timeout,
            self._on_tick,
            self._on_begin,
            self._on_cease,
        )
        while self.arrived < arrivals_count or self.calls:
            arriving_s = arrivals[self.arrived].time_s if self.arrived < arrivals_count else inf
            if events[0][0] <= arriving_s:
                time_s, _, kind, about, key = heappop(events)
                if time_s > until_s:
                    break
                if kind == ENGINE and about.engine.next_s != time_s:  # type: ignore[union-attr]
                    continue
                self.now = time_s
                handlers[kind](about, key)  # type: ignore[arg-type]
            elif arriving_s > until_s:
                break
            else:
                self.now = arriving_s
                self._on_arrival(arrivals[self.arrived])
            if self._touched:
                self._plan()
            if check is not None:
                check(self)
                self.log = []
        self._end(check)

    def _begin(self, progress: Callable[[float], None] | None) -> None:
        self._progress = progress
        for fault in self.scenario.faults:
            self._push(fault.from_s, BEGIN, fault, 0)
            if fault.kind != "leave_storm":
                self._push(fault.until_s, CEASE, fault, 0)
        self._push(REPORT_EVERY_S, TICK, None, 0)
        for worker in self.workers:
            if worker.learned is not None:
                self.result.limits.append((0.0, worker.index, worker.slots))

    def _end(self, check: Callable[["World"], None] | None) -> None:
        self.finished = self.arrived == len(self.scenario.traffic.arrivals) and not self.calls
        if not self.finished and self.scenario.until_s is not None:
            self.now = self.scenario.until_s
        self._write_output()
        self.result.ended_s = self.now
        if check is not None:
            check(self)

    def _push(self, time_s: float, kind: int, about: "Worker | Call | Fault | None", key: int) -> None:
        self._number = number = self._number + 1
        heappush(self._events, (time_s, number, kind, about, key))

    def _touch(self, worker: Worker) -> None:
        if not worker.touched:
            worker.touched = True
            self._touched.append(worker)

    def _plan(self) -> None:
        """Whoever had something changed says when it next does something by itself."""
        for worker in self._touched:
            worker.touched = False
            engine = worker.engine
            engine.plan(self.now)
            if engine.next_s != worker.scheduled_s:
                worker.scheduled_s = engine.next_s
                if engine.next_s < inf:
                    self._push(engine.next_s, ENGINE, worker, 0)
        self._touched.clear()

    # -- events ----------------------------------------------------------------------------------------------

    def _on_arrival(self, arrival: Arrival) -> None:
        """A request comes.

        1. Nobody lives, or its tenant's own queue is full: refused.
        2. Nothing waits, and a worker has room: it runs at once.
        3. It waits; while too many do, the flood is shed.
        """
        record = Record(arrival)
        self.result.records.append(record)
        call = Call(self.arrived, arrival, record)
        self.arrived += 1
        self.calls[call.number] = call
        tenant, queue = self.tenants[arrival.tenant], self.queue
        estimate, call.expected = self._estimate(self._cost, call)
        call.ticket = ticket = Ticket(tenant, self._tier_of[arrival.tenant], LANE, 1, estimate, call)
        full = tenant.queued_max is not None and tenant.queued >= tenant.queued_max
        if full or not self.any_live():  # (1)
            self._close(call, "refused")
            return
        ticket.since_s = self.now
        if self._bounded:
            ticket.prompt_work = self._cost.prompt_work(call.input_tokens)
        ticket.tokens = call.input_tokens + self._cost.output_tokens(call.owner, MODEL, arrival.max_tokens)
        if arrival.leaves_after_s is not None:
            self._push(self.now + arrival.leaves_after_s, LEAVE, call, 0)
        self._budget.deposit()
        if arrival.prefix and self._blocks_max:
            call.ask = self._ask(arrival)
        if not queue.waiting:  # (2)
            workers = self._candidates(call)
            index = self._choose(workers, call)
            if index >= 0 and queue.start_now(ticket):
                self._grant(call, workers[index])
                return
        queue.submit(ticket)  # (3)
        self._wait(call, QUEUED)
        self._dispatch()
        while queue.waiting > self.scenario.queued_max:
            victim = queue.shed(ticket.tier)
            if victim is None:
                break
            self._close(victim.call, "refused")
            self._dispatch()

    def _on_engine(self, worker: Worker, key: int) -> None:
        engine, now, cost, learned = worker.engine, self.now, self._cost, worker.learned
        slots = worker.slots
        worker.scheduled_s = inf
        engine.advance(now)
        call: Call
        for call in engine.begun:  # type: ignore[assignment]
            record = call.record
            record.first_token_s = now
            record.cached_tokens = call.cached_tokens
            self.result.service.append((now, call.owner, call.input_tokens, 0))
            worker.work -= call.prompt_work
            call.work -= call.prompt_work
            call.prompt_work = 0.0
            if record.dispatched_s is not None:
                if learned is not None:
                    learned.first_token(now - record.dispatched_s)
                    self._learned(worker)
                if self._hooks.answered is not None:
                    self._hooks.answered(worker, now - record.dispatched_s)
        for call, produced in engine.due:  # type: ignore[assignment]
            self.queue.progress(call.ticket, cost.actual(call.input_tokens, 0, produced, 1))
        for call in engine.done:  # type: ignore[assignment]
            output = call.output_tokens
            cost.learn(call.owner, MODEL, output)
            call.record.output_tokens = output
            self._finish(call, "ok", cost.actual(call.input_tokens, call.cached_tokens, output, 1))
        # A charge may have put somebody else first, for whom there is room.
        if worker.slots > slots or (self._held and engine.due):
            self._dispatch()
        engine.begun.clear()
        engine.due.clear()
        engine.done.clear()
        self._touch(worker)

    def _on_refused(self, call: Call, attempt: int) -> None:
        """A dead worker refused the connection, or a living one a call that is too long for it."""
        worker = call.worker
        if worker is None or call.attempts != attempt:
            return
        if not worker.engine.fits(call):
            self._finish(call, "failed", 0.0)
        else:
            worker.live = False
            self._fail(call, worker)

    def _on_leave(self, call: Call, key: int) -> None:
        """Its client has gone: out of the queue for nothing, or charged for what was produced."""
        if call.number not in self.calls:
            return
        worker = call.worker
        if worker is None:
            self.queue.cancel(call.ticket)
            self._close(call, "left")
            # It may have held the lane: the worker that had failed it was none of its candidates.
            self._dispatch()
            return
        produced = 0
        if call.stage != OUT:
            produced = worker.engine.cancel(self.now, call)
            self._touch(worker)
        call.record.output_tokens = produced
        self._finish(call, "left", self._cost.actual(call.input_tokens, 0, produced, 1))

    def _on_timeout(self, call: Call, key: int) -> None:
        if call.number in self.calls and call.worker is None:
            self.queue.cancel(call.ticket)
            self._close(call, "refused")
            self._dispatch()

    def _on_tick(self, about: None, key: int) -> None:
        """Reports and probes; each second also what a second brings."""
        self._ticks += 1
        room = False
        for worker in self.workers:
            engine = worker.engine
            if engine.dead:
                # What this one failed before may now have nobody else to go to.
                room |= worker.live
                worker.live = False
                continue
            if not worker.live:
                worker.live = room = True
            if not worker.stale and not engine.hung:
                if self._bounded and self._hooks.reported is not None:
                    self._hooks.reported(worker, engine.report(self.now).kv_tokens / engine.profile.kv_tokens)
                if worker.learned is not None:
                    room |= self._take_report(worker, worker.learned)
        if self._ticks % 2 == 0:
            room |= self._each_second()
        if room:
            self._dispatch()
        self._push((self._ticks + 1) * REPORT_EVERY_S, TICK, None, 0)

    def _take_report(self, worker: Worker, learned: LearnedSlots) -> bool:
        """Whether the worker takes more than before."""
        before = worker.slots
        maximum = worker.engine.profile.sequences_max
        if learned.maximum != maximum:
            learned.learn_maximum(maximum)
        learned.report(self.now, worker.engine.report(self.now).waiting, worker.in_flight)
        self._learned(worker)
        return worker.slots > before

    def _learned(self, worker: Worker) -> None:
        assert worker.learned is not None
        if worker.slots != worker.learned.limit:
            worker.slots = worker.learned.limit
            self.result.limits.append((self.now, worker.index, worker.slots))

    def _each_second(self) -> bool:
        """Whether anything moved up a tier."""
        queue = self.queue
        self._write_output()
        if self._progress is not None:
            self._progress(self.ended / max(1, len(self.scenario.traffic.arrivals)))
        if not queue.waiting:
            return False
        if not self.any_live():
            for ticket in queue.take_all(LANE):
                self._close(ticket.call, "refused")
            return False
        return self._ages and queue.promote(self.now) > 0

    def _write_output(self) -> None:
        output: dict[str, int] = {}
        for worker in self.workers:
            worker.engine.take_output(self.now, output)
        service, now = self.result.service, self.now
        for owner, tokens in output.items():
            service.append((now, owner, 0, tokens))

    def _on_begin(self, fault: Fault, key: int) -> None:
        """A fault begins."""
        if fault.kind == "leave_storm":
            for client in list(self.calls.values()):
                if self._random.random() < fault.factor:
                    self._on_leave(client, 0)
            return
        worker = self.workers[fault.engine]
        engine = worker.engine
        self._touch(worker)
        if fault.kind == "slow":
            engine.slow(fault.factor)
        elif fault.kind == "hanging":
            engine.hang(self.now)
        elif fault.kind == "stale_reports":
            worker.stale += 1
        elif not engine.dead:
            lost = engine.die(self.now)
            worker.live = not lost and worker.live
            if self._hooks.forget is not None:
                self._hooks.forget(worker)
            call: Call
            for call, produced in lost:  # type: ignore[assignment]
                call.record.output_tokens = produced
                self._fail(call, worker)

    def _on_cease(self, fault: Fault, key: int) -> None:
        """A fault ends. Two of a kind on one engine end with the first."""
        worker = self.workers[fault.engine]
        self._touch(worker)
        if fault.kind == "slow":
            worker.engine.unslow(fault.factor)
        elif fault.kind == "hanging":
            worker.engine.unhang(self.now)
        elif fault.kind == "stale_reports":
            worker.stale -= 1
        else:
            worker.engine.revive()

    # -- decisions, as `request/place.py` makes them -----------------------------------------------------------

    def _ask(self, arrival: Arrival) -> Ask:
        """What the gateway makes of a prompt's bytes. A session is what shares the first block of its own."""
        blocks: tuple[int, ...] = ()
        session = 0
        hooks, cost, tokens = self._hooks, self._cost, arrival.input_tokens
        if hooks.blocks:
            blocks = arrival.prefix[: self._blocks_max]
        if hooks.session and len(arrival.prefix) > 1:
            session = session_of(str(arrival.prefix[1]))
        prompt_work = cost.charge(tokens, 0.0, 1)
        saved = 1.0 - cost.cached_weight / cost.input_weight
        block_work = prompt_work * saved * self.scenario.traffic.block_tokens / max(1, tokens)
        tail_work = max(0.0, len(arrival.prefix) - self._blocks_max) * block_work
        return Ask(blocks, prompt_work, block_work, tail_work, session)

    def _candidates(self, call: Call) -> tuple[Worker, ...]:
        """The workers with the memory, without the one that has just failed this call if there is another."""
        workers = self.workers
        if call.failed_on is not None:
            others = tuple([worker for worker in workers if worker is not call.failed_on])
            if any(worker.live for worker in others):
                workers = others
        if not self._bounded:
            return workers
        tokens = call.ticket.tokens
        return tuple([one for one in workers if one.tokens + tokens <= one.tokens_max or not one.in_flight])

    def _choose(self, workers: tuple[Worker, ...], call: Call) -> int:
        ask = call.ask
        return self._placement.choose(workers, 1) if ask is None else self._placement.choose(workers, 1, ask)

    def any_live(self) -> bool:
        return any(worker.live for worker in self.workers)

    def room_for(self, call: Call) -> bool:
        """Whether a worker could take the call now; for watchers."""
        return any(worker.live and worker.in_flight < worker.slots for worker in self._candidates(call))

    def _dispatch(self) -> None:
        """Starts calls in the queue's order for as long as the workers have room."""
        queue = self.queue
        while queue.waiting:
            ticket = queue.peek()
            if ticket is None:
                return
            call: Call = ticket.call
            workers = self._candidates(call)
            index = self._choose(workers, call)
            if index < 0:
                for worker in self.workers:
                    if worker.learned is not None:
                        worker.learned.reached = True
                self._held = self._bounded or call.failed_on is not None
                return
            queue.start(ticket)
            self._grant(call, workers[index])

    def _grant(self, call: Call, worker: Worker) -> None:
        """The call goes to the worker."""
        ticket, record, engine = call.ticket, call.record, worker.engine
        worker.in_flight += 1
        ask, hooks = call.ask, self._hooks
        call.work, call.prompt_work = ticket.estimate, ticket.prompt_work
        if ask is not None and hooks.saved is not None and call.prompt_work:
            saved = min(hooks.saved(worker, ask), call.prompt_work)
            call.work -= saved
            call.prompt_work -= saved
        worker.work += call.work
        worker.tokens += ticket.tokens
        call.worker = worker
        if ask is not None and hooks.placed is not None:
            hooks.placed(worker, ask)
        call.attempts += 1
        record.attempts = call.attempts
        record.dispatched_s = self.now
        record.engine = worker.index
        if self.log is not None:
            self.log.append((GRANTED, call, worker.in_flight, worker.slots))
        if engine.dead or not engine.fits(call):
            self._push(self.now + CONNECT_S, REFUSED, call, call.attempts)
        else:
            expected = call.expected
            call.charge_at = (expected // CHARGE_STEP + 1) * CHARGE_STEP if self._cost.by_tokens else NEVER
            engine.submit(call)
            self._touch(worker)

    def _release(self, call: Call, worker: Worker) -> None:
        """The worker has the call's slot back."""
        worker.in_flight -= 1
        if worker.in_flight:
            worker.work -= call.work
            worker.tokens -= call.ticket.tokens
        else:  # no rounding may outlive the calls it came from
            worker.work = worker.tokens = 0.0
        call.worker = None

    def _finish(self, call: Call, outcome: str, cost: float) -> None:
        """A running call has ended: its slot goes back, its tenant is charged, and the next may run."""
        assert call.worker is not None
        self._release(call, call.worker)
        self.queue.finish(call.ticket, cost)
        self._close(call, outcome)
        if self.queue.waiting:
            self._dispatch()

    def _fail(self, call: Call, worker: Worker) -> None:
        """The call's worker is gone.

        1. Nothing was shown, somebody else lives, and a retry is earned: back to the queue's head, uncharged.
        2. It fails, and is charged for what was shown.
        """
        shown = call.record.output_tokens
        if not shown and self.any_live() and self._budget.withdraw(call.attempts):  # (1)
            call.failed_on = worker
            call.record.dispatched_s = None
            self._release(call, worker)
            self.queue.give_back(call.ticket)
            self._wait(call, GIVEN_BACK)
            self._dispatch()
            return
        self._finish(call, "failed", self._cost.actual(call.input_tokens, 0, shown, 1) if shown else 0.0)  # (2)

    def _wait(self, call: Call, why: int) -> None:
        if self.log is not None:
            self.log.append((why, call, 0, 0))
        timeout_s = self.scenario.queue_timeout_s
        if timeout_s is not None:
            self._push(max(self.now, call.arrival.time_s + timeout_s), TIMEOUT, call, 0)

    def _close(self, call: Call, outcome: str) -> None:
        """Every call ends here, once."""
        record = call.record
        assert not record.outcome, f"request {call.number} of seed {self.scenario.seed} ended twice"
        record.outcome = outcome
        record.ended_s = self.now
        del self.calls[call.number]
        self.ended += 1
        if self.log is not None:
            self.log.append((CLOSED, call, 0, 0))


def run(
    scenario: Scenario,
    *,
    check: Callable[[World], None] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """Runs a scenario to its end. `check` is called after every event, and once more at the end, when `finished` may be
    set; `progress` about once a virtual second, with the part of all requests that has ended."""
    began = perf_counter()
    world = World(scenario)
    world.run(check, progress)
    world.result.took_s = perf_counter() - began
    return world.result

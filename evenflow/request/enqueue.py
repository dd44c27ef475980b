"""Stage 4: a call becomes a ticket in the fair queue, or is refused with a time at which to try again.

Checks what can be checked at once: the model is known and somebody serves it, the tenant's own rate and queue have
room, the gateway as a whole has room, the call's deadline can be met. Refusals cost the caller nothing. Never waits.
"""

from time import monotonic

from evenflow.config import LimitSettings
from evenflow.fleet.registry import Lane, Registry
from evenflow.observe.why import Waited
from evenflow.policy.cost import CostModel
from evenflow.policy.fairness import Ticket
from evenflow.policy.limits import TenantLimits
from evenflow.policy.patience import Patience
from evenflow.policy.placement.prefix import PROMPT_BYTES_HASHED_MAX
from evenflow.policy.sampling import must_split
from evenflow.request import Call
from evenflow.request.authenticate import unknown_key
from evenflow.request.fanout import Fanout
from evenflow.request.place import Pool, Scheduler
from evenflow.request.settle import Settler
from evenflow.tenancy.directory import Member
from evenflow.wire.faults import CallerError, OverloadError
from evenflow.wire.openai import SAMPLED, Request, prompt_of

RETRY_NO_WORKER_S = 2.0
# A body of so many bytes counts as one more request in the length of a queue, so that one measure serves the bounds in
# requests and in bytes, and whoever fills either is the longest.
REQUEST_BYTES = 100 * 1024
# Of what runs, so much is thought to be left when another comes.
RUNNING_LEFT = 0.5
# OpenAI's service tiers that ask for less; all others ask for what the key allows.
LOWEST_TIER = "flex"


def splits(request: Request, lane: Lane) -> bool:
    """Whether a call is more than one request to one worker, or its answer must be put together here.

    1. It is a stream of several choices, and nobody has seen yet whether its workers make them: some make one.
    2. Its workers can be cancelled only as streams, or count badly: passed through is a plain stream of one choice.
    3. It asks for what they do not do as callers know it.
    4. It asks for more choices, or prompts, than one of them should have.
    """
    sequences, prompts = request.sequences, request.prompts
    if request.stream and request.n > 1 and not lane.makes_n:  # (1)
        return True
    if lane.joined and not (request.stream and sequences == 1):  # (2)
        return True
    if request.special and lane.heals_completions:  # (3)
        return True
    return sequences > 1 and must_split(  # (4)
        prompts=prompts,
        n=request.n,
        best_of=sequences // prompts,
        n_max=lane.n_max,
        slots_max=lane.slots_max,
        workers=lane.live,
    )


class Enqueuer:
    __slots__ = (
        "_bytes_max",
        "_cost",
        "_queued_max",
        "_registry",
        "_scheduler",
        "_settler",
        "_tiers",
        "queue_timeout_s",
    )

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        cost: CostModel,
        settler: Settler,
        *,
        limits: LimitSettings,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._cost = cost
        self._settler = settler
        self.configure(limits)

    def configure(self, limits: LimitSettings) -> None:
        """Takes what is configured, at the start or when it has changed."""
        # Name → index, 0 is the highest.
        self._tiers = {name: index for index, name in enumerate(self._scheduler.tier_names())}
        self._queued_max = limits.queued
        self._bytes_max = limits.queued_bytes
        self.queue_timeout_s = limits.queue_timeout_s

    def enqueue(self, call: Call) -> None:
        """Submits the call's ticket. Raises CallerError or OverloadError, after which nothing is held.

        1. Nobody has the model: 404; nobody who has it lives: 503.
        2. The tenant's own queue or its rate is full: 429.
        3. The ticket runs at once, or waits.
        """
        tenant, request, route = call.tenant, call.request, call.route
        assert tenant is not None and request is not None and route is not None
        model = request.model
        if tenant.removed:  # while the body came
            raise unknown_key()
        lane = self._registry.lanes.get(model)
        if lane is None or not lane.live:  # (1)
            raise self.unserved(model)
        tier, head = tenant.tier, call.head
        if head.tier or request.service_tier is not None:
            tier = self._lowered(tier, head.tier, request.service_tier)
        sequences, cost = request.sequences, self._cost
        input_tokens = cost.input_tokens(tenant.name, model, request.prompt_bytes)
        if route.generates:
            output_tokens = cost.output_tokens(tenant.name, model, request.max_tokens) * sequences
            estimate = cost.charge(input_tokens, output_tokens, sequences)
        else:
            output_tokens = 0.0
            estimate = cost.charge(input_tokens, 0.0, request.prompts)
        if tenant.queued_max is not None and tenant.queued >= tenant.queued_max:  # (2)
            raise self._queue_full(call)
        if tenant.limits is not None:
            self._reserve(call, tenant.limits, input_tokens + output_tokens)
        if (
            (sequences > 1 or request.special or lane.joined)
            and route.kind in SAMPLED
            and (call.form is not None or splits(request, lane))
        ):
            self._fan_out(call, lane, tier)
            return
        call.ticket = ticket = Ticket(tenant, tier, lane, sequences, estimate, call)
        ticket.tokens = input_tokens + output_tokens
        ticket.prompt_work = cost.prompt_work(input_tokens)
        ticket.length = 1.0 + len(call.body) / REQUEST_BYTES
        ticket.since_s = call.accepted_s
        scheduler = self._scheduler
        if route.generates and scheduler.wants_ask(lane, request, head.session):
            prompt = prompt_of(route.kind, call.body, PROMPT_BYTES_HASHED_MAX)
            work = cost.charge(input_tokens, 0.0, 1)
            ticket.ask = scheduler.ask(request, prompt, work, cost.cached_saves(), head.session)
        scheduler.submit(ticket)  # (3)
        if call.lease is None and not call.ended:
            self._wait(call, ticket)

    def _fan_out(self, call: Call, lane: Lane, tier: int) -> None:
        """The call's workers do not make all its choices themselves: it becomes parts."""
        self._registry.pin()
        call.fanout = fanout = Fanout(
            call, lane, tier, self._cost, self._scheduler, self._settler, self._registry
        )
        fanout.start()
        ticket = fanout.parts[0].ticket
        if fanout.waiting and not call.ended and ticket is not None:
            self._wait(call, ticket)

    def split(self, call: Call) -> None:
        """A worker made fewer choices of the call than it was asked for, and nothing of that was shown."""
        ticket, request = call.ticket, call.request
        assert ticket is not None and request is not None
        call.ticket = None
        lane = self._registry.lanes.get(request.model)
        try:
            if lane is None or not lane.live:
                raise self.unserved(request.model)
            self._fan_out(call, lane, ticket.tier)
        except (CallerError, OverloadError) as fault:
            self._settler.refuse(call, fault)

    def _wait(self, call: Call, ticket: Ticket) -> None:
        """The call has to wait for its turn.

        1. Its deadline would pass before: refused at once, as long as the pool's rate is known.
        2. The gateway's queue is over one of its bounds: the longest queue per weight of the lowest tier loses its
           newest, be it this one, until it is not.
        """
        tenant, client = call.tenant, call.client
        assert tenant is not None
        pool = ticket.lane.pool
        queue = pool.queue
        estimate_s = self._estimate_s(pool, tenant, ticket.tier, own=ticket.estimate)
        share = queue.share(tenant, ticket.tier)
        is_held = tenant.concurrency is not None and tenant.in_flight >= tenant.concurrency
        call.waited = Waited(
            tenant.queued - 1,
            queue.waiting - 1,
            queue.waiting_above(ticket.tier),
            tenant.concurrency if is_held else None,
            share,
            estimate_s,
        )
        limit_s = self.queue_timeout_s
        if tenant.patience is not None:
            if tenant.queued == 1:
                tenant.patience = None
            else:
                limit_s = tenant.patience.limit_s(limit_s)
        deadline_s = call.head.deadline_s
        if deadline_s is not None:
            if pool.rate > 0.0 and estimate_s > deadline_s:  # (1)
                self._settler.refuse(call, self._too_late(deadline_s, estimate_s))
                return
            limit_s = min(limit_s, deadline_s)
        if client is not None:
            client.wait_in_queue(limit_s)
        while self._scheduler.waiting() > self._queued_max or self._bytes() > self._bytes_max:  # (2)
            if not self._shed(ticket):
                break

    def _bytes(self) -> float:
        """Bytes of all bodies that wait."""
        return (self._scheduler.length() - self._scheduler.waiting()) * REQUEST_BYTES

    def _lowered(self, tier: int, asked: str, service_tier: str | None) -> int:
        """The tier that a call asks for if it is lower than its tenant's; a higher one is no mistake, but not given."""
        if asked:
            index = self._tiers.get(asked)
            if index is None:
                raise CallerError(
                    f"The header x-evenflow-tier names a tier that does not exist here. Use one of "
                    f"{', '.join(self._tiers)}, or leave it out.",
                    param="x-evenflow-tier",
                )
            tier = max(tier, index)
        if service_tier is not None:
            index = self._tiers.get(service_tier)
            if index is None and service_tier == LOWEST_TIER:
                index = len(self._tiers) - 1
            if index is not None:
                tier = max(tier, index)
        return tier

    def unserved(self, model: str) -> CallerError | OverloadError:
        """Why nobody takes a call for this model now."""
        registry = self._registry
        if model in registry.lanes or not registry.knows_all() or not registry.workers:
            return OverloadError(
                "No live worker serves this model right now. Try again shortly; the gateway takes workers back by "
                "itself as soon as they answer.",
                status=503,
                code="no_worker",
                retry_after_s=RETRY_NO_WORKER_S,
            )
        shown = model if len(model) <= 100 else model[:100] + "..."
        return CallerError(
            f"The model {shown!r} does not exist here. GET /v1/models lists the models that do.",
            param="model",
            code="model_not_found",
            status=404,
        )

    def timed_out(self, call: Call, now: float) -> OverloadError:
        """What a call is told that waited as long as it may."""
        tenant, deadline_s = call.tenant, call.head.deadline_s
        waited_s = now - call.accepted_s
        if deadline_s is not None and waited_s >= deadline_s:
            return self._too_late(deadline_s, self._wait_s(call))
        if tenant is not None:
            if tenant.patience is None:
                tenant.patience = Patience()
            tenant.patience.waited_in_vain(now, self.queue_timeout_s)
        return OverloadError(
            f"The request waited {waited_s:.0f} s in the queue without its turn coming. Try again later, or ask the "
            "operator for more workers or weight.",
            status=503,
            code="overloaded",
            retry_after_s=self._wait_s(call),
        )

    def refuse_unserved(self, call: Call) -> None:
        """The call waited for a model that nobody serves any more."""
        assert call.request is not None
        if call.part is not None and call.fanout is not None and call.fanout.reroute(call):
            return
        self._settler.refuse(call, self.unserved(call.request.model))

    def _too_late(self, deadline_s: float, estimate_s: float) -> OverloadError:
        return OverloadError(
            f"The turn of this request would come after its deadline of {deadline_s * 1e3:.0f} ms "
            "(x-evenflow-deadline-ms). Try again when Retry-After says, or with a later deadline.",
            status=503,
            code="overloaded",
            retry_after_s=estimate_s,
        )

    def _reserve(self, call: Call, limits: TenantLimits, tokens: float) -> None:
        """Takes the call's tokens out of its tenant's rate, as many as it is thought to use. Settle corrects it."""
        refused = limits.reserve(monotonic(), tokens)
        if refused is not None:
            raise OverloadError(
                f"You have used up your {refused.which} per minute at this gateway. Try again when Retry-After says.",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=refused.retry_after_s,
            )
        call.reserved, call.reserved_from = tokens, limits

    def _queue_full(self, call: Call) -> OverloadError:
        return OverloadError(
            "Your queue at this gateway is full. Wait for your running requests, or send fewer at a time.",
            status=429,
            code="queue_full",
            retry_after_s=self._wait_s(call),
        )

    def _wait_s(self, call: Call) -> float:
        """Seconds until the call's tenant has been served what it has waiting now."""
        tenant, request, ticket = call.tenant, call.request, call.ticket
        lane = self._registry.lanes.get(request.model) if request is not None else None
        if tenant is None or lane is None:
            return 1.0
        tier = tenant.tier if ticket is None else ticket.tier
        # Nobody waits longer than that, so in that time there is room again.
        return min(self._estimate_s(lane.pool, tenant, tier), self.queue_timeout_s)

    @staticmethod
    def _estimate_s(pool: Pool, tenant: Member, tier: int, own: float = 0.0) -> float:
        running = pool.running_cost() * RUNNING_LEFT
        return pool.queue.wait_estimate_s(tenant, tier, pool.rate_or_guess(), running=running, own=own)

    def _shed(self, ticket: Ticket) -> bool:
        """Refuses one that waits; False when nothing of this ticket's tier or a lower one does."""
        victim = ticket.lane.pool.queue.shed(ticket.tier)
        if victim is None:
            return False
        loser: Call = victim.call
        self._settler.refuse(
            loser,
            OverloadError(
                "The gateway's queue is full, and yours is its longest for your weight. Try again later.",
                status=503,
                code="overloaded",
                retry_after_s=self._wait_s(loser),
            ),
        )
        return True

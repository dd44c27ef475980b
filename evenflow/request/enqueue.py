"""Stage 4: a call becomes a ticket in the fair queue, or is refused with a time at which to try again.

Checks what can be checked at once: the model is known and somebody serves it, the tenant's own rate and queue have
room, the gateway as a whole has room. Refusals cost the caller nothing. Never waits.
"""

from time import monotonic

from evenflow.config import LimitSettings
from evenflow.fleet.registry import Registry
from evenflow.policy.cost import BYTES_PER_TOKEN, CostModel
from evenflow.policy.fairness import Ticket
from evenflow.policy.limits import TenantLimits
from evenflow.request import Call
from evenflow.request.place import Scheduler
from evenflow.request.settle import Settler
from evenflow.wire.faults import CallerError, OverloadError

# Routes whose answer is no generated text: nothing but their input costs.
WITHOUT_OUTPUT = frozenset(("embeddings", "rerank", "score", "tokenize", "detokenize"))
RETRY_NO_WORKER_S = 2.0


class Enqueuer:
    __slots__ = ("_cost", "_queued_max", "_registry", "_scheduler", "_settler", "queue_timeout_s")

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
        self._queued_max = limits.queued
        self.queue_timeout_s = limits.queue_timeout_s

    def enqueue(self, call: Call) -> None:
        """Submits the call's ticket. Raises CallerError or OverloadError, after which nothing is held.

        1. Nobody has the model: 404; nobody who has it lives: 503.
        2. The tenant's rate or its own queue is full: 429.
        3. The ticket runs at once, or waits.
        4. It waits, and the gateway's queue is over its bound: the longest queue per weight of the lowest tier
           loses its newest, be it this one.
        """
        tenant, request, route = call.tenant, call.request, call.route
        assert tenant is not None and request is not None and route is not None
        lane = self._registry.lanes.get(request.model)
        if lane is None or not lane.live:  # (1)
            raise self.unserved(request.model)
        sequences = request.sequences
        estimate = self._cost.estimate(
            tenant.name,
            request.model,
            request.prompt_bytes,
            sequences,
            request.max_tokens,
            route.name not in WITHOUT_OUTPUT,
        )
        if tenant.queued_max is not None and tenant.queued >= tenant.queued_max:  # (2)
            raise self._queue_full(call)
        if tenant.limits is not None:
            self._reserve(call, tenant.limits)
        call.ticket = ticket = Ticket(tenant, tenant.tier, lane, sequences, estimate, call)
        self._scheduler.submit(ticket)  # (3)
        if call.lease is None and not call.ended:
            client = call.client
            if client is not None:
                client.wait_in_queue(self.queue_timeout_s)
            if self._scheduler.waiting() > self._queued_max:  # (4)
                self._shed(call, ticket)

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

    def timed_out(self, call: Call) -> OverloadError:
        """What a call is told that waited as long as it may."""
        return OverloadError(
            f"The request waited {self.queue_timeout_s:g} s in the queue without its turn coming. Try again later, "
            "or ask the operator for more workers or weight.",
            status=503,
            code="overloaded",
            retry_after_s=self._wait_s(call),
        )

    def refuse_unserved(self, call: Call) -> None:
        """The call waited for a model that nobody serves any more."""
        assert call.request is not None
        self._settler.refuse(call, self.unserved(call.request.model))

    def _reserve(self, call: Call, limits: TenantLimits) -> None:
        """Takes the call's tokens out of its tenant's rate, as many as it is thought to use. Settle corrects it."""
        request = call.request
        assert request is not None
        tokens = request.prompt_bytes / BYTES_PER_TOKEN + (request.max_tokens or 0) * request.sequences
        refused = limits.reserve(monotonic(), tokens)
        if refused is not None:
            raise OverloadError(
                f"You have used up your {refused.which} per minute at this gateway. Try again when Retry-After says.",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=refused.retry_after_s,
            )
        call.reserved = tokens

    def _queue_full(self, call: Call) -> OverloadError:
        return OverloadError(
            "Your queue at this gateway is full. Wait for your running requests, or send fewer at a time.",
            status=429,
            code="queue_full",
            retry_after_s=self._wait_s(call),
        )

    def _wait_s(self, call: Call) -> float:
        """Seconds until the call's tenant has been served what it has waiting now."""
        tenant, request = call.tenant, call.request
        lane = self._registry.lanes.get(request.model) if request is not None else None
        if tenant is None or lane is None:
            return 1.0
        pool = lane.pool
        return pool.queue.wait_estimate_s(tenant, tenant.tier, pool.rate_or_guess())

    def _shed(self, call: Call, ticket: Ticket) -> None:
        victim = ticket.lane.pool.queue.shed(ticket.tier)
        if victim is not None:
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

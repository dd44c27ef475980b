"""What the schedule is doing and why: every queue with its shares, and what one request waited for.

Read-only views of state that others own, as JSON under /admin/v1/. Operators see everything; a tenant that asks with
its own key may see its own requests, since "why did I wait?" is asked by whoever waited. Never shows a key or a prompt.
"""

from collections import deque
from time import monotonic
from typing import Any

import msgspec

from evenflow.api.local import GET, LocalRoutes, percent_decoded
from evenflow.observe.why import explain
from evenflow.policy.fairness import Ticket
from evenflow.request import Call
from evenflow.request.accept import Front, LocalAnswer, LocalRoute
from evenflow.request.authenticate import Authenticator
from evenflow.request.place import Pool, Scheduler
from evenflow.request.settle import Settler
from evenflow.wire.faults import CallerError

REQUESTS = b"/admin/v1/requests/"
# Shares that were served are measured over so long, from one look at the queues to the next.
SHARES_OVER_S = 60.0
LOOKS_MAX = 600


class AdminRoutes:
    def __init__(
        self,
        front: Front,
        local: LocalRoutes,
        scheduler: Scheduler,
        settler: Settler,
        authenticator: Authenticator,
    ) -> None:
        self._front = front
        self._local = local
        self._scheduler = scheduler
        self._settler = settler
        self._authenticator = authenticator
        # (time, served cost by (pool, tier, tenant)) of each look at the queues.
        self._looks: deque[tuple[float, dict[tuple[int, str, str], float]]] = deque(maxlen=LOOKS_MAX)

    def mount(self) -> None:
        self._front.local[b"/admin/v1/queues"] = LocalRoute(GET, self.queues, for_operators=True)
        self._front.local_under[REQUESTS] = LocalRoute(GET, self.request, for_operators=True)

    # -- queues --------------------------------------------------------------------------------------------------

    def queues(self, call: Call) -> LocalAnswer:
        """Every pool of workers with its tiers, their groups and tenants."""
        self._local.operators_only(call)
        now = monotonic()
        pools = [self._pool(number, pool) for number, pool in enumerate(self._scheduler.pools)]
        served = {
            (number, tier["name"], tenant["name"]): tenant["served_cost"]
            for number, pool in enumerate(pools)
            for tier in pool["tiers"]
            for group in tier["groups"]
            for tenant in group["tenants"]
        }
        while self._looks and now - self._looks[0][0] > SHARES_OVER_S:
            self._looks.popleft()
        since_s, before = self._looks[0] if self._looks else (now, {})
        self._looks.append((now, served))
        over_s = now - since_s
        for number, pool in enumerate(pools):
            _add_served_shares(number, pool, before)
        answer = {"shares_served_over_s": round(over_s, 3) if before else None, "pools": pools}
        return LocalAnswer(msgspec.json.encode(answer))

    def _pool(self, number: int, pool: Pool) -> dict[str, Any]:
        queue, rate = pool.queue, pool.rate_or_guess()
        tiers = queue.snapshot()
        members = queue.tenants()
        for index, tier in enumerate(tiers):
            for group in tier["groups"]:
                for tenant in group["tenants"]:
                    member = members[tenant["name"]]
                    tenant["share_by_weight"] = round(queue.share(member, index), 6)
                    wait_s = queue.wait_estimate_s(member, index, rate) if tenant["waiting"] else 0.0
                    tenant["wait_estimate_ms"] = round(wait_s * 1e3, 1)
        workers = {worker.name: worker for lane in pool.lanes for worker in lane.workers}
        return {
            "pool": number,
            "models": sorted(pool.models),
            "workers": [
                {
                    "name": worker.name,
                    "live": worker.live,
                    "in_flight": worker.in_flight,
                    "slots": worker.slots,
                    "learned": worker.learned is not None and worker.learned.reported_s is not None,
                }
                for worker in workers.values()
            ],
            "waiting": queue.waiting,
            "rate_cost_per_s": round(pool.rate, 3) if pool.rate > 0.0 else None,
            "bound_ratio": round(queue.bound_ratio(), 6),
            "tiers": tiers,
        }

    # -- one request ---------------------------------------------------------------------------------------------

    def request(self, call: Call) -> LocalAnswer:
        """What a request waited for, by its id; while it waits or runs, and as long as it is remembered."""
        owner = None
        if not self._local.is_operator(call):
            owner = self._authenticator.by_head(call.head)
            if owner is None:
                self._local.operators_only(call)
        request_id = percent_decoded(call.head.path.removeprefix(REQUESTS))
        name = None if owner is None else owner.name
        found = self._under_way(request_id, name) or self._settler.recent.find(request_id, name)
        if found is None:
            raise CallerError(
                "No request with that id is remembered. Ids come in the header x-request-id; the last requests are "
                "kept for a while, older ones are in the access log.",
                code="not_found",
                status=404,
            )
        return LocalAnswer(msgspec.json.encode(found))

    def _under_way(self, request_id: str, tenant: str | None) -> dict[str, Any] | None:
        wanted = request_id.encode("utf-8", "replace")
        for connection in self._front.connections:
            call = connection.call
            if call is not None and call.request_id == wanted and call.tenant is not None:
                if tenant is not None and call.tenant.name != tenant:
                    continue
                ticket = call.ticket
                if call.fanout is not None:
                    ticket = next((part.ticket for part in call.fanout.parts if part.ticket is not None), None)
                if ticket is not None:
                    return self._shown(call, ticket)
        return None

    def _shown(self, call: Call, ticket: Ticket) -> dict[str, Any]:
        assert call.tenant is not None and call.request is not None
        now, lease = monotonic(), call.lease
        worker = None if lease is None else lease.worker.name
        waited_until = now if lease is None else call.dispatched_s
        return {
            "request_id": call.request_id.decode("ascii"),
            "tenant": call.tenant.name,
            "model": call.request.model,
            "state": "waiting" if lease is None else "running",
            "tier": ticket.tier_name,
            "worker": worker,
            "queue_ms": round((waited_until - call.accepted_s) * 1e3, 1),
            "attempts": call.attempts,
            "estimate": round(ticket.estimate, 1),
            "output_tokens": call.output_tokens,
            "why": explain(call.waited, call.rivals, worker),
        }


def _add_served_shares(
    number: int, pool: dict[str, Any], before: dict[tuple[int, str, str], float]
) -> None:
    """Adds to each tenant its part of what the pool served since then; None while nothing was."""
    tenants = [
        (tenant, tenant["served_cost"] - before.get((number, tier["name"], tenant["name"]), 0.0))
        for tier in pool["tiers"]
        for group in tier["groups"]
        for tenant in group["tenants"]
    ]
    total = sum(served for _, served in tenants)
    for tenant, served in tenants:
        tenant["share_served"] = round(served / total, 6) if total > 0.0 else None

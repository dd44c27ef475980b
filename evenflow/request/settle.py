"""Stage 7: how every request ends, whatever happened to it.

`end` runs exactly once for each call: the slots go back, the tenant is charged what was really computed, the limits
are settled, counts and one log line are written. `refuse` ends a call that has shown nothing yet with an error in
OpenAI's shape. Never waits.
"""

import time
from time import monotonic

from evenflow.observe.access_log import AccessLog, Line
from evenflow.observe.metrics import OTHER, Metrics
from evenflow.policy.cost import BYTES_PER_TOKEN, CostModel
from evenflow.request import Call
from evenflow.request.place import Scheduler
from evenflow.wire.faults import Fault, error_body, retry_after_value
from evenflow.wire.openai import Usage

CLIENT_GONE = 499


class Settler:
    __slots__ = ("_access_log", "_clock_offset", "_cost", "_metrics", "_scheduler", "live")

    def __init__(self, scheduler: Scheduler, cost: CostModel, metrics: Metrics, access_log: AccessLog) -> None:
        self._scheduler = scheduler
        self._cost = cost
        self._metrics = metrics
        self._access_log = access_log
        # Wall-clock time of monotonic zero; taken anew now and then by the gateway.
        self._clock_offset = time.time() - monotonic()
        # Calls begun and not ended.
        self.live = 0

    def each_second(self) -> None:
        self._clock_offset = time.time() - monotonic()

    def refuse(self, call: Call, fault: Fault) -> None:
        """Tells the caller why there is no answer, and ends the call."""
        client = call.client
        self.end(call, fault.status, "refused" if fault.status < 500 else "failed", fault)
        if client is not None:
            extra = b""
            if fault.retry_after_s is not None:
                extra = b"retry-after: %s\r\n" % retry_after_value(fault.retry_after_s)
            elif fault.allow is not None:
                extra = b"allow: %b\r\n" % fault.allow.encode("ascii")
            elif fault.status == 401:
                extra = b"www-authenticate: Bearer\r\n"
            client.answer(call, fault.status, b"application/json", error_body(fault), extra)

    def left(self, call: Call) -> None:
        """The client has gone; what was produced until now is charged."""
        call.client = None
        self.end(call, CLIENT_GONE, "cancelled", None)

    def end(self, call: Call, status: int, outcome: str, fault: Fault | None) -> None:
        """Gives back all that the call holds and writes it down. `outcome`: ok, refused, failed or cancelled."""
        if call.ended:
            return
        call.ended = True
        self.live -= 1
        now = monotonic()
        usage, cost = self._charge(call, status, outcome)
        if call.reserved is not None:
            self._settle_rate(call, now, usage)
        self._count(call, status, now, usage)
        self._log(call, status, outcome, now, usage, cost, fault)
        call.ticket = None
        call.connection = None

    def _charge(self, call: Call, status: int, outcome: str) -> tuple[Usage | None, float | None]:
        """Settles ticket and lease; returns what was used and its cost, None for a call that never ran.

        1. Never dispatched: out of the queue, nothing charged.
        2. Answered with an error, or failed before anything came: nothing was computed that one could bill.
        3. The engine told its usage: that. Else what was relayed, and the prompt by its size.
        """
        ticket, lease, request = call.ticket, call.lease, call.request
        if ticket is None or request is None:
            return None, None
        if lease is None:  # (1)
            self._scheduler.cancel(ticket)
            return None, None
        usage = call.usage
        if usage is None:
            if status >= 400 and outcome != "cancelled" and not call.output_tokens:  # (2)
                self._scheduler.finish(ticket, lease, 0.0)
                return None, 0.0
            usage = Usage(int(request.prompt_bytes / BYTES_PER_TOKEN), 0, call.output_tokens)  # (3)
        cost = self._cost.actual(usage.input_tokens, usage.cached_tokens, usage.output_tokens, request.sequences)
        if outcome == "ok" and usage.output_tokens:
            self._cost.learn(ticket.tenant.name, request.model, usage.output_tokens / request.sequences)
        self._scheduler.finish(ticket, lease, cost)
        return usage, cost

    def _settle_rate(self, call: Call, now: float, usage: Usage | None) -> None:
        """Corrects what was reserved of the tenant's rate: all of it back for a call that was refused."""
        tenant, reserved = call.tenant, call.reserved
        assert tenant is not None and tenant.limits is not None and reserved is not None
        if usage is None and call.lease is None:
            tenant.limits.refund(now, reserved)
        else:
            tokens = usage.input_tokens + usage.output_tokens if usage is not None else 0
            tenant.limits.settle(now, reserved, tokens)

    def _count(self, call: Call, status: int, now: float, usage: Usage | None) -> None:
        route = call.route
        tenant, request = call.tenant, call.request
        # A model becomes a label only when somebody serves it, which a ticket proves.
        model = request.model if request is not None and call.ticket is not None else OTHER
        metrics = self._metrics
        series = metrics.series(tenant.name if tenant is not None else OTHER, model, route.name if route else OTHER)
        statuses = series.statuses
        statuses[status] = statuses.get(status, 0) + 1
        if usage is not None:
            series.input_tokens += usage.input_tokens
            series.cached_tokens += usage.cached_tokens
            series.output_tokens += usage.output_tokens
        if call.lease is not None:
            times = metrics.times(model)
            times.request.observe(now - call.accepted_s)
            times.queue_wait.observe(call.dispatched_s - call.accepted_s)
            if call.first_byte_s:
                times.first_token.observe(call.first_byte_s - call.accepted_s)

    def _log(
        self,
        call: Call,
        status: int,
        outcome: str,
        now: float,
        usage: Usage | None,
        cost: float | None,
        fault: Fault | None,
    ) -> None:
        began = call.accepted_s
        tenant, request, lease = call.tenant, call.request, call.lease
        line = Line(
            round(now + self._clock_offset, 3),
            call.request_id.decode("ascii"),
            tenant.name if tenant is not None else None,
            request.model if request is not None and call.ticket is not None else None,
            call.route.name if call.route is not None else OTHER,
            status,
            outcome,
            duration_ms=round((now - began) * 1e3, 1),
        )
        if lease is not None:
            line.worker = lease.worker.name
            line.queue_ms = round((call.dispatched_s - began) * 1e3, 1)
            if call.first_byte_s:
                line.ttft_ms = round((call.first_byte_s - began) * 1e3, 1)
        if usage is not None:
            line.input_tokens = usage.input_tokens
            line.cached_tokens = usage.cached_tokens
            line.output_tokens = usage.output_tokens
            line.cost = cost
        if fault is not None:
            line.error = fault.code
        self._access_log.write(line)

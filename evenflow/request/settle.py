"""Stage 7: how every request ends, whatever happened to it.

`end` runs exactly once for each call: the slots go back, the tenant is charged what was really computed, the limits
are settled, counts and one log line are written. `refuse` ends a call that has shown nothing yet with an error in
OpenAI's shape. Never waits.
"""

import time
from time import monotonic

from evenflow.observe.access_log import AccessLog, never_ran_line, ran_line
from evenflow.observe.metrics import OTHER, Metrics
from evenflow.observe.why import Recent, why_line
from evenflow.policy.cost import CostModel
from evenflow.request import Call
from evenflow.request.place import Scheduler
from evenflow.wire.answer import last_event
from evenflow.wire.faults import Fault, error_body, retry_after_value
from evenflow.wire.merge import Group
from evenflow.wire.openai import Usage
from evenflow.wire.ratelimit import rate_limit_lines

CLIENT_GONE = 499
NOTHING = Usage(0, 0, 0)


class Settler:
    __slots__ = ("_access_log", "_clock_offset", "_cost", "_metrics", "_scheduler", "live", "recent")

    def __init__(self, scheduler: Scheduler, cost: CostModel, metrics: Metrics, access_log: AccessLog) -> None:
        self._scheduler = scheduler
        self._cost = cost
        self._metrics = metrics
        self._access_log = access_log
        # Wall-clock time of monotonic zero; taken anew now and then by the gateway.
        self._clock_offset = time.time() - monotonic()
        # Calls begun and not ended, and those that ended last.
        self.live = 0
        self.recent = Recent()

    def each_second(self) -> None:
        self._clock_offset = time.time() - monotonic()

    def refuse(self, call: Call, fault: Fault) -> None:
        """Tells the caller why there is no answer, and ends the call."""
        if call.part is not None and call.fanout is not None:
            self.end(call, fault.status, b"failed", fault)
            call.fanout.fail(fault)
            return
        client = call.client
        self.end(call, fault.status, b"refused" if fault.status < 500 or call.lease is None else b"failed", fault)
        if client is not None and call.opened:
            client.break_off(call, last_event(fault, http11=call.head.http11))
        elif client is not None:
            extra = b""
            if fault.retry_after_s is not None:
                extra = b"retry-after: %s\r\n" % retry_after_value(fault.retry_after_s)
            elif fault.allow is not None:
                extra = b"allow: %b\r\n" % fault.allow.encode("ascii")
            elif fault.status == 401:
                extra = b"www-authenticate: Bearer\r\n"
            tenant = call.tenant
            if tenant is not None and tenant.limits is not None:
                extra += rate_limit_lines(tenant.limits, monotonic())
            if call.head.why:
                extra += why_line(call.waited, call.rivals, None)
            client.answer(call, fault.status, b"application/json", error_body(fault), extra)

    def unrecorded(self, call: Call) -> None:
        """Ends a call that the gateway answers itself: a probe every second is no news, and held nothing."""
        call.ended = True
        self.live -= 1

    def left(self, call: Call) -> None:
        """The client has gone; what was produced until now is charged."""
        call.client = None
        self.end(call, CLIENT_GONE, b"cancelled", None)

    def end(self, call: Call, status: int, outcome: bytes, fault: Fault | None) -> None:
        """Gives back all that the call holds and writes it down. `outcome`: ok, error, refused, failed, cancelled."""
        if call.ended:
            return
        call.ended = True
        fanout = call.fanout
        if fanout is not None:
            if call.part is not None:
                self._end_part(call, call.part, outcome)
                return
            fanout.stop()
        self.live -= 1
        now = monotonic()
        tenant, request, route, ticket = call.tenant, call.request, call.route, call.ticket
        usage, cost = self._charge(call, status, outcome)
        if fanout is not None:
            usage, cost = fanout.usage(), fanout.cost
        if call.reserved is not None:
            self._settle_rate(call, now, usage)
        # A model becomes a label only when somebody serves it, which a ticket proves.
        series = self._metrics.series(
            tenant.name if tenant is not None else None,
            request.model if request is not None and (ticket is not None or fanout is not None) else None,
            route.name if route is not None else OTHER,
        )
        statuses = series.statuses
        statuses[status] = statuses.get(status, 0) + 1
        lease = call.lease
        began = call.accepted_s
        error = None if fault is None else fault.code
        if lease is None:
            line = never_ran_line(
                now + self._clock_offset, call.request_id, series.log_names, status, outcome, now - began, error
            )
        else:
            series.input_tokens += usage.input_tokens
            series.cached_tokens += usage.cached_tokens
            series.output_tokens += usage.output_tokens
            times = series.times
            times.request.observe(now - began)
            times.queue_wait.observe(call.dispatched_s - began)
            first = call.first_byte_s - began if call.first_byte_s else -1.0
            if first >= 0.0:
                times.first_token.observe(first)
                if lease.worker.learns_by_first_token and request is not None and request.stream:
                    lease.worker.first_token(call.first_byte_s - call.dispatched_s)
                if self._scheduler.answered is not None:
                    self._scheduler.answered(lease.worker, call.first_byte_s - call.dispatched_s)
            line = ran_line(
                now + self._clock_offset,
                call.request_id,
                series.log_names,
                status,
                outcome,
                lease.worker.log_name,
                call.dispatched_s - began,
                first,
                now - began,
                usage.input_tokens,
                usage.cached_tokens,
                usage.output_tokens,
                cost,
                error,
            )
        self._access_log.write(line)
        self.recent.add(line, call.waited, call.rivals)
        call.ticket = None
        call.connection = None

    def _end_part(self, call: Call, part: Group, outcome: bytes) -> None:
        """A part of a call gives back what it holds, and is charged what it had computed. Its call has the line."""
        ticket, lease, request, model = call.ticket, call.lease, call.request, self._cost
        call.ticket = call.connection = None
        if ticket is None or request is None or call.fanout is None:
            return
        if lease is None:
            self._scheduler.cancel(ticket)
            return
        usage = part.usage()
        if usage is None:
            tokens = 0
            if part.output_tokens:
                tokens = int(model.input_tokens(ticket.tenant.name, request.model, request.prompt_bytes))
            usage = Usage(tokens, 0, part.output_tokens)
        cost = model.actual(usage.input_tokens, usage.cached_tokens, usage.output_tokens, request.n)
        if usage.output_tokens and outcome == b"ok":
            model.learn(ticket.tenant.name, request.model, usage.output_tokens / request.n)
        call.fanout.cost += cost
        self._scheduler.finish(ticket, lease, cost)

    def _charge(self, call: Call, status: int, outcome: bytes) -> tuple[Usage, float]:
        """Settles ticket and lease; returns what was used and its cost.

        1. Never dispatched: out of the queue, nothing charged.
        2. The engine told its usage: that.
        3. Answered with an error, or failed before anything came: nothing was computed that one could bill.
        4. Else what was relayed, and the prompt by its size.
        """
        ticket, lease, request, route = call.ticket, call.lease, call.request, call.route
        if ticket is None or request is None or route is None:
            return NOTHING, 0.0
        if lease is None:  # (1)
            self._scheduler.cancel(ticket)
            return NOTHING, 0.0
        usage, model = call.usage, self._cost
        if usage is None:
            if status >= 400 and outcome != b"cancelled" and not call.output_tokens:  # (3)
                self._scheduler.finish(ticket, lease, 0.0)
                return NOTHING, 0.0
            input_tokens = int(model.input_tokens(ticket.tenant.name, request.model, request.prompt_bytes))
            usage = Usage(input_tokens, 0, call.output_tokens)  # (4)
        elif usage.input_tokens:
            model.learn_ratio(ticket.tenant.name, request.model, request.prompt_bytes, usage.input_tokens)
        sequences = request.sequences if route.generates else request.prompts
        output_tokens = usage.output_tokens
        if sequences > 1 and call.output_tokens > output_tokens:
            # Some engines tell the usage of one choice where several ran; what was counted is nearer the truth.
            output_tokens = call.output_tokens
            usage = Usage(usage.input_tokens, usage.cached_tokens, output_tokens)
        cost = model.actual(usage.input_tokens, usage.cached_tokens, output_tokens, sequences)
        if output_tokens and outcome == b"ok":
            model.learn(ticket.tenant.name, request.model, output_tokens / sequences)
        self._scheduler.finish(ticket, lease, cost)
        return usage, cost

    def _settle_rate(self, call: Call, now: float, usage: Usage) -> None:
        """Corrects what was reserved of the tenant's rate: all of it back for a call that was refused."""
        reserved, limits = call.reserved, call.reserved_from
        assert limits is not None and reserved is not None
        if call.lease is None:
            limits.refund(now, reserved)
        else:
            limits.settle(now, reserved, usage.input_tokens + usage.output_tokens)

"""Stage 6: the call's bytes go to its worker, and the worker's answer comes back.

Answers are relayed, not rebuilt: a read of the worker becomes one write to the client. Connections to workers are
kept and used again, the youngest first. One of three things ends a relay, and each ends in settle: the answer is
whole, the worker failed, or the client left. A failure before anything was shown may send the call to another worker;
after that it becomes one error event, or the end of the connection.

Danger lies in the order of things. A worker's connection can die at any moment, also between two calls; a client can
leave while a connection is still being opened for it. So a connection knows its call and a call its connection only
while bytes may flow between them, and an attempt is recognised by its lease: one that a call no longer holds is over.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import cast

import httptools
import msgspec

from evenflow.config import TimeoutSettings
from evenflow.fleet.registry import Registry, Worker
from evenflow.observe.metrics import Metrics
from evenflow.observe.why import why_line
from evenflow.policy.cost import CostModel
from evenflow.policy.retry import RetryBudget
from evenflow.request import Call, Lease
from evenflow.request.fanout import PartAnswer
from evenflow.request.place import Scheduler
from evenflow.request.settle import Settler
from evenflow.timers import Wheel
from evenflow.wire.answer import FewerChoicesError, Head, LateAnswer, PlainAnswer, StreamAnswer, verdict
from evenflow.wire.faults import Fault, WorkerError
from evenflow.wire.http import AnswerHead, HeadMemo, memo_of
from evenflow.wire.openai import SAMPLED, splice, usage_of
from evenflow.wire.ratelimit import rate_limit_lines

log = logging.getLogger("evenflow.relay")

Answer = PlainAnswer | StreamAnswer | LateAnswer | PartAnswer

# Idle connections kept for each worker, beyond those its slots can use.
IDLE_CONNECTIONS_MAX = 64
# An idle connection older than this is not trusted: engines on uvicorn close theirs after 5 s.
IDLE_S = 4.0
ANSWER_HEAD_BYTES_MAX = 256 * 1024
EVENT_STREAM = b"text/event-stream"
# Output tokens between two charges of a running stream.
CHARGE_STEP = 16


class Relay:
    """All connections to workers, and the paths of success and failure between them and the other stages."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        wheel: Wheel,
        registry: Registry,
        scheduler: Scheduler,
        settler: Settler,
        cost: CostModel,
        metrics: Metrics,
        timeouts: TimeoutSettings,
    ) -> None:
        self._loop = loop
        self.wheel = wheel
        self.registry = registry
        self._scheduler = scheduler
        self.settler = settler
        self._cost = cost
        self._metrics = metrics
        self.timeouts = timeouts
        self._budget = RetryBudget()
        self._tls: ssl.SSLContext | None = None
        self._opening: set[asyncio.Task[None]] = set()
        # Set by the gateway: what becomes of a call whose worker made fewer choices than it was asked for.
        self.split: Callable[[Call], None]
        # The gateway is stopping: answers tell their callers to go elsewhere, connections are not kept.
        self.draining = False

    # -- a lease comes in ----------------------------------------------------------------------------------------

    def start(self, call: Call, lease: Lease) -> None:
        """Sends the call to the lease's worker, over a kept connection if one is left."""
        call.dispatched_s = now = monotonic()
        if not call.attempts:
            self._budget.deposit()
        call.attempts += 1
        if call.client is not None:
            call.client.wait_for_worker(call)
        idle = lease.worker.idle
        while idle:
            connection = idle.pop()
            if connection.usable(now):
                connection.send(call, now)
                return
        self.open(call, lease)

    def request_bytes(self, call: Call, worker: Worker) -> bytes:
        """Head and body for the worker, in one piece."""
        body, head = call.body, call.head
        request, route = call.request, call.route
        assert request is not None and route is not None
        name = worker.aliases.get(request.model) if worker.aliases else None
        if name is not None:
            body = splice(body, {"model": msgspec.json.encode(name)})
        return b"".join(
            (
                b"POST ",
                worker.base,
                route.path,
                head.query,
                worker.head,
                head.forward,
                b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (call.request_id, len(body)),
                body,
            )
        )

    def open(self, call: Call, lease: Lease) -> None:
        """Opens a new connection for the lease, in a task of its own: the one thing that a call waits for."""
        task = self._loop.create_task(self._connect(call, lease))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, call: Call, lease: Lease) -> None:
        worker = lease.worker
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: WorkerConnection(self, worker),
                    worker.host,
                    worker.port,
                    ssl=self._tls_context() if worker.tls else None,
                )
        except (OSError, TimeoutError) as error:
            self.registry.unreachable(worker, self._why_no_connection(error))
            if call.lease is lease and not call.ended:
                self.fail(
                    call,
                    WorkerError(
                        f"The worker {worker.name} cannot be reached. Try again; the gateway is looking after it.",
                        code="upstream_error",
                        retry_safe=True,
                    ),
                )
            return
        if call.lease is lease and not call.ended:
            connection.send(call, monotonic())
        else:
            connection.rest(monotonic())

    def _why_no_connection(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLError):
            return f"TLS failed: {error.reason or 'no handshake'}; check the worker's certificate"
        if isinstance(error, TimeoutError):
            return f"no connection within {self.timeouts.connect_s:g} s"
        return "connection refused" if isinstance(error, ConnectionRefusedError) else "no connection"

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    # -- an attempt ends -----------------------------------------------------------------------------------------

    def finished(self, call: Call, status: int, outcome: bytes = b"ok") -> None:
        """The answer is whole and written."""
        client = call.client
        self.settler.end(call, status, outcome, None)
        if client is not None:
            client.done(call)

    def fail(self, call: Call, fault: Fault) -> None:
        """The worker failed the call.

        0. It made fewer choices than it was asked for, without a word: the call is split, uncharged until then.
        1. Nothing was shown, a retry is safe and earned, and another try makes sense: back to the queue's head.
        2. Nothing was shown, and nobody else has the model: no worker is there.
        3. Nothing was shown: an error answer.
        4. An answer had begun: it is broken off so that the client can tell.
        """
        lease, connection, ticket = call.lease, call.connection, call.ticket
        assert lease is not None and ticket is not None
        answer = None
        if connection is not None:
            answer = connection.answer
            connection.drop()
        if isinstance(fault, FewerChoicesError):  # (0)
            call.lease = None
            self._scheduler.finish(ticket, lease, 0.0)
            self.registry.makes_one_choice(lease.worker)
            self.split(call)
            return
        if not call.shown:
            safe = isinstance(fault, WorkerError) and fault.retry_safe
            live = ticket.lane.live
            if safe and live and self._budget.withdraw(call.attempts):  # (1)
                self._metrics.retries += 1
                if call.client is not None:
                    call.client.wait_in_queue(None)
                self._scheduler.give_back(call, lease.worker)
            elif safe and not live:  # (2)
                self._scheduler.no_worker(call)
            else:  # (3)
                self.settler.refuse(call, fault)
            return
        client = call.client  # (4)
        self.settler.end(call, fault.status, b"failed", fault)
        if client is not None and answer is not None:
            client.break_off(call, answer.broken_off(fault))

    def cancel(self, call: Call) -> None:
        """The client left: the worker hears of it at once, since its connection closes."""
        connection = call.connection
        if connection is not None:
            connection.drop()
        self.settler.left(call)

    def new_answer(self, call: Call, worker: Worker, head: AnswerHead) -> Answer:
        """The answer object for a head that has come, with the lines that the gateway adds."""
        if call.part is not None:
            return PartAnswer(call, head)
        request, route, client = call.request, call.route, call.client
        assert request is not None and route is not None and client is not None
        origin, name = call.head.origin, worker.aliases.get(request.model)
        extra = b"" if origin is None else client.cors(origin)
        limits = call.tenant.limits if call.tenant is not None else None
        if limits is not None:
            extra += rate_limit_lines(limits, monotonic())
        if call.head.why:
            extra += why_line(call.waited, call.rivals, worker.name)
        answer_head = Head(
            b"%bx-request-id: %b\r\n%bx-evenflow-queue-ms: %d\r\n%b"
            % (
                head.start,
                call.request_id,
                worker.name_line,
                (call.dispatched_s - call.accepted_s) * 1e3,
                extra,
            ),
            http11=call.head.http11,
            keep_alive=call.keep_alive and not self.draining,
            rename=None if name is None else (name.encode("utf-8"), request.model.encode("utf-8")),
        )
        if head.content_type.startswith(EVENT_STREAM):
            return StreamAnswer(
                answer_head,
                hide_usage=not request.include_usage,
                ends_with_done=route.usage_option,
                opened=call.opened,
            )
        if call.opened:
            return LateAnswer(head.status)
        choices = request.sequences if not worker.makes_n and route.kind in SAMPLED else 0
        return PlainAnswer(answer_head, head.length, ok=head.status < 400, choices=choices)

    def charge(self, call: Call) -> None:
        """A running stream has produced more than was charged: charges what is there now."""
        call.charge_at = call.output_tokens + CHARGE_STEP
        ticket, request = call.ticket, call.request
        if ticket is not None and request is not None:
            input_tokens = int(self._cost.input_tokens(ticket.tenant.name, request.model, request.prompt_bytes))
            cost = self._cost.actual(input_tokens, 0, call.output_tokens, request.sequences)
            self._scheduler.progress(ticket, cost)

    def rescue(self, worker: Worker) -> None:
        """The worker has fallen silent, and may hang: what it has not begun to answer goes to another, if there is one.

        Streams that have begun stay. They may go on when it wakes, and cannot be told elsewhere.
        """
        for connection in list(worker.busy):
            call = connection.call
            if call is not None and not call.shown and call.ticket is not None and call.ticket.lane.live:
                self.fail(call, _lost(worker, "does not answer any more"))

    @staticmethod
    def forget(worker: Worker) -> None:
        """The worker is gone: no kept connection is left. One that is busy closes by itself when it has rested."""
        idle, worker.idle = worker.idle, []
        for connection in idle:
            connection.drop()

    async def close(self) -> None:
        self.draining = True
        for task in list(self._opening):
            task.cancel()
        for worker in self.registry.workers.values():
            for connection in (*worker.idle, *worker.busy):
                connection.drop()
            worker.idle.clear()


class WorkerConnection(asyncio.Protocol):
    """One connection to one worker, carrying one call at a time."""

    __slots__ = (
        "_complete",  # the parser saw the end of the answer
        "_first_read",  # all that has come of the answer, while its head is parsed
        "_head",  # of the current answer, once it is whole
        "_head_bytes",  # read of the current answer before its head was whole
        "_headers",
        "_memo",  # knows the last answer's head again
        "_memo_head",
        "_paused",  # not read, since the client does not keep up
        "_overrun",  # more came than was asked for
        "_parser",
        "_pieces",  # body bytes of this read
        "_relay",
        "_transport",
        "answer",  # the current one, once its head is whole
        "call",
        "deadline",
        "reused",
        "total_deadline",
        "wheel_at",
        "worker",
    )

    def __init__(self, relay: Relay, worker: Worker) -> None:
        self._relay = relay
        self.worker = worker
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._memo: HeadMemo | None = None
        self._memo_head: AnswerHead
        self.call: Call | None = None
        self.reused = False
        self.deadline = inf
        self.wheel_at = inf
        self.total_deadline = inf
        self.answer: Answer | None = None
        self._head: AnswerHead | None = None
        self._complete = False
        self._overrun = False
        self._paused = False
        self._head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._first_read = b""

    # -- for the relay -------------------------------------------------------------------------------------------

    def usable(self, now: float) -> bool:
        """False for a kept connection that the worker has closed or may be closing this moment."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if now > self.deadline:
            self.drop()
            return False
        return True

    def send(self, call: Call, now: float) -> None:
        assert self._transport is not None
        self.call = call
        call.connection = self
        self.worker.busy.add(self)
        timeouts = self._relay.timeouts
        self.total_deadline = now + timeouts.total_s
        first = now + timeouts.first_byte_s
        self.deadline = first if first < self.total_deadline else self.total_deadline
        if self.wheel_at > self.deadline:
            self._relay.wheel.arm(self)
        self._transport.write(self._relay.request_bytes(call, self.worker))

    def rest(self, now: float) -> None:
        """Goes among the idle ones, or closes when there are enough."""
        worker = self.worker
        idle = worker.idle
        if self._relay.draining or len(idle) >= IDLE_CONNECTIONS_MAX + worker.slots:
            self.drop()
            return
        if self._paused:  # by the last piece of an answer: the next call must hear what its worker says
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()
        self.deadline = now + IDLE_S
        if self.wheel_at > self.deadline:
            self._relay.wheel.arm(self)
        idle.append(self)

    def drop(self) -> None:
        """Closes at once and forgets the call."""
        self._detach()
        self.deadline = inf
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """The client does not keep up: reads nothing more until it does."""
        if self._transport is not None and not self._transport.is_closing():
            if not self._paused:
                self._paused = True
                self._transport.pause_reading()
            # The worker is not to blame for this silence; the client's own limit runs instead.
            self.deadline = self.total_deadline

    def resume(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
            if self._head is not None:
                self._expect_more()

    def _detach(self) -> None:
        call, self.call = self.call, None
        answer, self.answer = self.answer, None
        if call is not None:
            if answer is not None:
                call.usage = answer.usage
                call.output_tokens = answer.output_tokens
            if call.connection is self:
                call.connection = None
            self.worker.busy.discard(self)

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports fit asyncio.Transport without deriving from it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """1. The same head as before and its whole body: no parser.  2. All else goes through the parser."""
        call = self.call
        if call is None:  # an idle connection must not speak
            self.drop()
            return
        if self._head is None:
            memo = self._memo
            if memo is not None and not self._head_bytes:  # (1)
                body_at = memo.match(data)
                if body_at:
                    self._whole(call, self._memo_head, data[body_at:])
                    return
            self._head_bytes += len(data)
            self._first_read = data if self._head_bytes == len(data) else b""
        assert self._parser is not None
        try:  # (2)
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._complete:
                self._broken(f"sent what is not HTTP ({error})")
                return
            self._overrun = True
        head = self._head
        if head is None:
            if self._head_bytes > ANSWER_HEAD_BYTES_MAX:
                self._broken("sent an endless answer head")
            return
        if self.answer is None and not self._begin(call, head):
            return
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._go_on(call, body)

    def _whole(self, call: Call, head: AnswerHead, body: bytes) -> None:
        """A plain 200 that came in one read: the general way gives the same bytes, at twice the price."""
        worker, client, relay = self.worker, call.client, self._relay
        assert client is not None
        asked, request = call.head, call.request
        assert request is not None
        if (
            not body
            or worker.aliases
            or asked.origin is not None
            or not (asked.http11 and call.keep_alive)
            or call.opened
            or asked.why
            or (not worker.makes_n and request.sequences > 1)
            or call.part is not None
            or relay.draining
        ):
            self._head = head
            self._complete = True
            if self._begin(call, head):
                self._go_on(call, body)
            return
        relay.registry.answered(worker)
        call.usage = usage_of(body)
        call.first_byte_s = now = monotonic()
        tenant = call.tenant
        limits = tenant.limits if tenant is not None else None
        client.write(
            b"%bx-request-id: %b\r\n%bx-evenflow-queue-ms: %d\r\n%bcontent-length: %d\r\n\r\n%b"
            % (
                head.start,
                call.request_id,
                worker.name_line,
                (call.dispatched_s - call.accepted_s) * 1e3,
                b"" if limits is None else rate_limit_lines(limits, now),
                len(body),
                body,
            )
        )
        self.call = None
        worker.busy.discard(self)
        self.reused = True
        self.rest(relay.wheel.now)
        relay.finished(call, 200)

    def _begin(self, call: Call, head: AnswerHead) -> bool:
        """Looks at a whole answer head; False when the call has failed on it."""
        status, relay = head.status, self._relay
        if status >= 500:
            relay.registry.failed(self.worker, f"answered {status}")
        else:
            relay.registry.answered(self.worker)
        if status >= 300:
            fault = verdict(status, head.content_type.startswith(b"application/json"))
            if fault is not None:
                relay.fail(call, fault)
                return False
        self.answer = relay.new_answer(call, self.worker, head)
        if self._memo is None:
            head.start = b""  # nobody will look at it again
        return True

    def _go_on(self, call: Call, body: bytes) -> None:
        """Hands what this read brought to the answer, in one piece, and what comes of it to the client."""
        answer = self.answer
        assert answer is not None
        complete = self._complete
        try:
            out = answer.take(body, complete)
        except Fault as fault:
            if fault.status >= 500:
                self._relay.registry.failed(self.worker, "did not answer as it should")
            self._relay.fail(call, fault)
            return
        client = call.client
        if out and client is not None:
            if not call.shown:
                call.shown = True
                call.first_byte_s = monotonic()
                if call.lease is not None:
                    call.lease.prompt_done()
                call.body = b""  # no retry from here on
                if not call.head.http11 and isinstance(answer, PlainAnswer | StreamAnswer):
                    call.keep_alive = answer.head.keep_alive
            client.write(out)
        if answer.broken is not None:
            self._relay.registry.failed(self.worker, "broke its answer off")
            self._relay.fail(call, answer.broken)
        elif complete:
            self._finish(call, answer)
        elif call.shown:  # until then the limit on the first byte runs on, whatever comments may come
            self._expect_more()
            call.output_tokens = answer.output_tokens
            if client is not None and client.stalled:
                client.pause_writing()  # it was behind before this answer began, and will not say so again
            if answer.output_tokens >= call.charge_at:
                self._relay.charge(call)

    def _expect_more(self) -> None:
        deadline = self._relay.wheel.now + self._relay.timeouts.idle_s
        self.deadline = deadline if deadline < self.total_deadline else self.total_deadline
        if self.wheel_at > self.deadline:
            self._relay.wheel.arm(self)

    def _finish(self, call: Call, answer: Answer) -> None:
        head = self._head
        assert head is not None
        self._detach()
        worker, request = self.worker, call.request
        if not worker.makes_n and request is not None and request.n > 1 and head.status < 300:
            self._relay.registry.makes_choices(worker)
        if head.keep_alive and not self._overrun:
            self.reused = True
            self._head = None
            self._head_bytes = 0
            self._complete = False
            self.rest(self._relay.wheel.now)
        else:
            self.drop()
        self._relay.finished(call, head.status, answer.outcome)

    def connection_lost(self, exc: Exception | None) -> None:
        call = self.call
        if call is None:
            self.deadline = inf
            if self in self.worker.idle:
                self.worker.idle.remove(self)
        elif self._head is not None and self._head.until_end and self.answer is not None and exc is None:
            self._complete = True
            self._go_on(call, b"")
        elif self._head is None and self.reused:
            # A kept connection that its worker closed just as we used it. That says nothing of the worker, and is no
            # attempt: the same lease goes on over a new connection, which is not reused, so this happens once.
            self._detach()
            assert call.lease is not None
            self._relay.open(call, call.lease)
        elif self._head is None:
            self._relay.registry.failed(self.worker, "closed the connection before an answer")
            self._relay.fail(call, _lost(self.worker, "closed the connection before an answer"))
        else:
            self._broken("closed the connection in the middle of an answer")
        self._transport = None
        self._parser = None  # it refers back to us, and nothing should wait for the garbage collector

    def on_deadline(self, now: float) -> None:
        call = self.call
        if call is None:
            self.drop()
            if self in self.worker.idle:
                self.worker.idle.remove(self)
            return
        name, timeouts = self.worker.name, self._relay.timeouts
        if now >= self.total_deadline:
            what = f"did not end its answer within {timeouts.total_s:g} s"
        elif self._head is None:
            what = f"did not begin to answer within {timeouts.first_byte_s:g} s"
        else:
            what = f"sent nothing for {timeouts.idle_s:g} s"
        self._relay.registry.failed(self.worker, what)
        self._relay.fail(
            call,
            WorkerError(f"The worker {name} {what}. Try again, or ask for less.", status=504, code="upstream_timeout"),
        )

    def _broken(self, what: str) -> None:
        call = self.call
        if call is not None:
            self._relay.registry.failed(self.worker, what)
            self._relay.fail(
                call, WorkerError(f"The worker {self.worker.name} {what}. Try again.", retry_safe=not call.shown)
            )

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        headers, self._headers = self._headers, []
        if status < 200:  # an interim answer; the real one follows
            self._first_read = b""
            return
        self._head = head = AnswerHead(status, headers, keep_alive=parser.should_keep_alive())
        data, self._first_read = self._first_read, b""
        self._memo = None
        if head.keep_alive and head.length > 0 and status == 200 and not head.content_type.startswith(EVENT_STREAM):
            end = data.find(b"\r\n\r\n") + 4
            if end > 4:
                self._memo, self._memo_head = memo_of(data, end), head

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._pieces.append(body)

    def on_message_begin(self) -> None:
        if self._complete:  # an answer that nobody asked for: what else may follow is not to be trusted
            self._overrun = True

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._complete = True


def _lost(worker: Worker, what: str) -> WorkerError:
    return WorkerError(f"The worker {worker.name} {what}. Try again.", retry_safe=True)


"""Stage 1: bytes of a client become a Call, and the bytes of its answer go back.

One `ClientConnection` for each socket. It holds a caller to the limits on heads, bodies and slowness, hands
whole requests on one at a time in the order in which they came, and tells the relay when its client leaves or
stops reading. A request that is wrong is answered in OpenAI's error shape; what is not HTTP at all is answered
once and the connection closed. The end of a client's stream counts as its leaving: nobody who half-closes can
be told from somebody who has gone.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from enum import IntEnum
from math import inf
from time import monotonic
from typing import cast

import httptools

from evenflow.config import LimitSettings, ListenSettings, TimeoutSettings
from evenflow.request import Call
from evenflow.request.authenticate import Authenticator
from evenflow.request.decode import Decoder
from evenflow.request.enqueue import Enqueuer
from evenflow.request.older import AnsweredError
from evenflow.request.relay import Relay
from evenflow.request.settle import Settler
from evenflow.tenancy.directory import Member
from evenflow.timers import Wheel
from evenflow.wire.faults import CallerError, Fault, OverloadError
from evenflow.wire.http import (
    CONTINUE,
    PREFLIGHT,
    HeadMemo,
    RequestHead,
    cors_headers,
    memo_of,
    status_line,
)
from evenflow.wire.openai import ROUTES, Route

log = logging.getLogger("evenflow.accept")

# Pipelined requests that wait behind the running one before the connection is read no further.
PIPELINED_MAX = 32
PIPELINED_BYTES_MAX = 1024 * 1024
# A body must come at least this fast once its first seconds are over, in bytes per second.
BODY_RATE_MIN = 16 * 1024
# How long a connection that is to be closed is still read, so that its client can read our last answer.
LINGER_S = 2.0
# A line of a stream that says nothing: clients skip it, proxies see that somebody lives.
COMMENT = b": waiting\n\n"
# Bytes of answers that may wait for a client before its worker is read no further.
WRITE_BUFFER_BYTES = 64 * 1024


NO_HEADERS: list[tuple[bytes, bytes]] = []


class Phase(IntEnum):
    """What the connection's deadline stands for."""

    IDLE = 0  # no request under way
    HEAD = 1
    BODY = 2
    QUEUED = 3
    RUNNING = 4
    STALLED = 5  # the client does not read
    LINGER = 6  # answered for good; only read, to be closed


class LocalAnswer:
    """What a route of the gateway itself answers."""

    __slots__ = ("body", "content_type", "status")

    def __init__(self, body: bytes, content_type: bytes = b"application/json", status: int = 200) -> None:
        self.status = status
        self.content_type = content_type
        self.body = body


class LocalRoute:
    """A route that the gateway answers itself, at once."""

    __slots__ = ("answer", "for_operators", "methods")

    def __init__(
        self,
        methods: tuple[bytes, ...],
        answer: Callable[[Call], LocalAnswer],
        *,
        for_operators: bool = False,
    ) -> None:
        self.methods = methods
        self.answer = answer
        # No web page of another site may read what operators see.
        self.for_operators = for_operators


class Front:
    """What all client connections share: the stages behind them, the limits, and the list of themselves."""

    def __init__(
        self,
        wheel: Wheel,
        authenticator: Authenticator,
        decoder: Decoder,
        enqueuer: Enqueuer,
        relay: Relay,
        settler: Settler,
        *,
        listen: ListenSettings,
        limits: LimitSettings,
        timeouts: TimeoutSettings,
    ) -> None:
        self.wheel = wheel
        self.authenticator = authenticator
        self._decoder = decoder
        self.enqueuer = enqueuer
        self.relay = relay
        self.settler = settler
        self.configure(listen, limits, timeouts)
        # Exact paths, and prefixes that end in "/", of what the gateway answers itself.
        self.local: dict[bytes, LocalRoute] = {}
        self.local_under: dict[bytes, LocalRoute] = {}
        self.connections: set[ClientConnection] = set()
        # Bytes of bodies that have come in part.
        self.uploading_bytes = 0
        self._id_prefix = os.urandom(6).hex().encode("ascii")
        self._ids = itertools.count()

    def configure(self, listen: ListenSettings, limits: LimitSettings, timeouts: TimeoutSettings) -> None:
        """Takes what is configured, at the start or when it has changed."""
        self.header_bytes_max = listen.header_bytes
        self.body_bytes_max = limits.body_bytes
        self.connections_max = limits.connections
        self.uploading_bytes_max = limits.queued_bytes
        self.timeouts = timeouts
        self.origins = frozenset(origin.encode("ascii") for origin in listen.cors_origins)

    def forget_heads(self) -> None:
        """Keys may mean something else from now on: the next request on each connection is read in full."""
        for connection in self.connections:
            connection.forget_head()

    @property
    def draining(self) -> bool:
        """True from the moment the gateway is told to stop."""
        return self.relay.draining

    def next_id(self) -> bytes:
        return b"req-%b-%x" % (self._id_prefix, next(self._ids))

    def begin(self, call: Call) -> None:
        """Takes a whole request through the stages up to the queue; every way out is answered.

        1. Wrong already by its head.  2. A route of the gateway itself.  3. The gateway is stopping.
        4. Who asks, for what (decode settles both), and into the queue.
        """
        self.settler.live += 1
        try:
            if call.fault is not None:  # (1)
                raise call.fault
            if call.route is None:  # (2)
                self._answer_locally(call)
                return
            if self.draining:  # (3)
                raise stopping()
            self._decoder.decode(call)  # (4)
            self.enqueuer.enqueue(call)
        except Fault as fault:
            self.settler.refuse(call, fault)
        except AnsweredError as answered:
            self.settler.unrecorded(call)
            if call.client is not None:
                call.client.answer(call, 200, b"application/json", answered.body)
        except Exception:
            log.exception("a request failed in the gateway")
            self.settler.refuse(call, Fault("The gateway failed. This is a bug; the log of the gateway has more."))

    def check_head(self, head: RequestHead) -> tuple[Route | None, Member | None]:
        """What the head alone tells: the route and the tenant. Raises Fault for a wrong path, method or key."""
        path, method = head.path, head.method
        route = ROUTES.get(path)
        if route is not None:
            if method != b"POST":
                raise wrong_method(method, (b"POST",))
            if head.content_length > self.body_bytes_max:
                raise self.body_too_large()
            return route, self.authenticator.by_head(head)
        local = self._local(path)
        if local is None:
            raise CallerError(
                f"There is no {shown(method)} {shown(path)} here. The OpenAI routes begin with /v1/.",
                code="not_found",
                status=404,
            )
        if method not in local.methods:
            raise wrong_method(method, local.methods)
        return None, None

    def body_too_large(self) -> CallerError:
        return CallerError(
            f"The body is larger than the {self.body_bytes_max} bytes that this gateway takes. Send less, or ask its "
            "operator to raise limits.body_bytes.",
            status=413,
        )

    def _local(self, path: bytes) -> LocalRoute | None:
        local = self.local.get(path)
        if local is None:
            for prefix, candidate in self.local_under.items():
                if path.startswith(prefix):
                    return candidate
        return local

    def _answer_locally(self, call: Call) -> None:
        client = call.client
        assert client is not None
        head = call.head
        if head.method == b"OPTIONS":
            self.settler.unrecorded(call)
            client.answer(call, 204, b"", b"", PREFLIGHT if head.origin is not None else b"allow: GET, POST\r\n")
            return
        local = self._local(head.path)
        assert local is not None
        answer = local.answer(call)
        self.settler.unrecorded(call)
        client.answer(call, answer.status, answer.content_type, answer.body, cors=not local.for_operators)


class ClientConnection(asyncio.Protocol):
    """One client's socket."""

    __slots__ = (
        "_body_began_s",
        "_body_bytes",
        "_call",  # being parsed
        "_front",
        "_head_bytes",
        "_first_read",  # all that has come of the request, while it is parsed
        "_headers",
        "_memo",  # knows the last head again
        "_memo_head",
        "_memo_route",
        "_memo_tenant",
        "_next",  # whole requests that wait for the running one
        "_queue_until",  # when the running call has waited long enough for its turn
        "_parser",  # None while it has nothing to remember
        "_parsing",  # a request has begun in the parser, and not ended
        "_paused",  # too much is pipelined to read on
        "_phase",
        "_pieces",
        "_transport",
        "_unparsable",  # what came behind the last good request was no HTTP
        "_url",
        "call",  # the running one
        "deadline",
        "stalled",  # more waits to be written than the client reads
        "wheel_at",
    )

    def __init__(self, front: Front) -> None:
        self._front = front
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._parsing = False
        self._call: Call | None = None
        self.call: Call | None = None
        self._next: list[Call] = []
        self._memo: HeadMemo | None = None
        self._memo_head: RequestHead
        self._memo_route: Route | None = None
        self._memo_tenant: Member | None = None
        self._first_read = b""
        self._url = b""
        self._headers = NO_HEADERS
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_began_s = 0.0
        self._unparsable: CallerError | None = None
        self._paused = False
        self.stalled = False
        self._phase = Phase.IDLE
        self._queue_until = inf
        self.deadline = inf
        self.wheel_at = inf

    # -- for the other stages ------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def cors(self, origin: bytes) -> bytes:
        return cors_headers(origin, self._front.origins)

    def wait_in_queue(self, limit_s: float | None) -> None:
        """The call waits for its turn; None for one that had its turn before and is waiting for another worker."""
        now, call = monotonic(), self.call
        if limit_s is None:
            limit_s = self._front.enqueuer.queue_timeout_s
            if call is not None and call.head.deadline_s is not None:
                limit_s = min(limit_s, max(0.0, call.accepted_s + call.head.deadline_s - now))
        self._queue_until = until = now + limit_s
        comment_s = self._comment_s(call)
        if comment_s is not None and comment_s < limit_s:
            until = now + comment_s
        self._await(Phase.QUEUED, until)

    def wait_for_worker(self, call: Call) -> None:
        """The call's turn has come: its worker's time limits hold now, and a stream is kept alive until it speaks."""
        self._phase = Phase.RUNNING
        comment_s = self._comment_s(call)
        if comment_s is not None:
            self._await(Phase.RUNNING, self._front.wheel.now + comment_s)
        else:
            self.deadline = inf

    def _comment_s(self, call: Call | None) -> float | None:
        """Seconds of silence that the call's client may be left in; None for one that is not kept alive."""
        if call is None or call.request is None or not call.request.stream or call.form is not None:
            return None
        tenant = call.tenant
        return self._front.timeouts.comment_s if tenant is None or tenant.comments else None

    def _comment(self, call: Call) -> None:
        """Keeps a waiting stream alive. It has begun from here on: what may go wrong is told by an event."""
        data = COMMENT if not call.head.http11 else b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT)
        if not call.opened:
            call.opened = True
            call.keep_alive = call.keep_alive and call.head.http11
            lines = [
                status_line(200),
                b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n",
                b"x-request-id: %b\r\n" % call.request_id,
            ]
            if call.head.origin is not None:
                lines.append(self.cors(call.head.origin))
            if call.head.http11:
                lines.append(b"transfer-encoding: chunked\r\n")
            if not call.keep_alive:
                lines.append(b"connection: close\r\n")
            data = b"".join((*lines, b"\r\n", data))
        self.write(data)

    def answer(
        self,
        call: Call,
        status: int,
        content_type: bytes,
        body: bytes,
        extra: bytes = b"",
        *,
        cors: bool = True,
    ) -> None:
        """Writes a whole answer of the gateway's own and goes on to the next request."""
        lines = [status_line(status), b"x-request-id: %b\r\n" % call.request_id, extra]
        if content_type:
            lines.append(b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body)))
        head = call.head
        if head.origin is not None and cors:
            lines.append(self.cors(head.origin))
        if not call.keep_alive or self._front.draining:
            lines.append(b"connection: close\r\n")
        elif not head.http11:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        if head.method != b"HEAD":
            lines.append(body)
        self.write(b"".join(lines))
        self.done(call)

    def done(self, call: Call) -> None:
        """The call's answer is written; what comes next on this connection?"""
        if self.call is call:
            self.call = None
        call.client = None
        transport = self._transport
        if transport is None:
            return
        if not call.keep_alive or self._front.draining:
            self._close()
            return
        if self._parsing:
            # More came behind the request, so what comes next is no beginning: only the parser may read it.
            self._await_rest()
        else:
            self._await(Phase.IDLE, self._front.wheel.now + self._front.timeouts.keep_alive_s)
        if self._paused:
            self._paused = False
            transport.resume_reading()
        if self._next:
            # From the loop, so that a pile of refused requests does not become a pile of stack frames.
            self._front.wheel.loop.call_soon(self._start_next)
        elif self._unparsable is not None:
            self._refuse_bytes()

    def break_off(self, call: Call, last: bytes | None) -> None:
        """Ends an answer that had begun: with these bytes, or by the end of the connection."""
        if last is None:
            call.client = None
            if self._transport is not None:
                self._transport.abort()
            return
        self.write(last)
        self.done(call)

    def drain(self) -> None:
        """Closes at once if nothing is under way; a running call closes when it is done."""
        if self.call is None and not self._next and self._call is None:
            self._close()

    def stop(self) -> None:
        """The time to drain is over: what still waits is refused, what runs is broken off."""
        call = self.call
        if call is None:
            self._close()
        elif call.fanout is not None:
            call.fanout.fail(stopping())
        elif call.lease is None:
            self._front.settler.refuse(call, stopping())
        else:
            self._front.relay.fail(call, stopping())

    def forget_head(self) -> None:
        self._memo = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def peer_host(self) -> str:
        """The caller's address, empty when unknown."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if peer else ""

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports fit asyncio.Transport without deriving from it.
        self._transport = stream = cast(asyncio.Transport, transport)
        stream.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._front.connections.add(self)
        if len(self._front.connections) > self._front.connections_max:
            stream.abort()
            return
        self._await(Phase.IDLE, monotonic() + self._front.timeouts.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.connections.discard(self)
        self._transport = None
        self.deadline = inf
        call, self.call = self.call, None
        if call is not None:
            self._front.relay.cancel(call)
        for waiting in self._next:
            waiting.client = None
        self._next.clear()
        self._call = None
        self._drop_body()
        self._parser = None  # it refers back to us, and nothing should wait for the garbage collector

    def eof_received(self) -> bool:
        return False  # closes the transport: half a connection is a client that leaves

    def pause_writing(self) -> None:
        """The client does not read as fast as its worker writes."""
        self.stalled = True
        call = self.call
        if call is not None:
            if call.fanout is not None and call.shown:
                call.fanout.pause()
            elif call.connection is None:
                return  # what it does not read is of an earlier answer; this call waits, under the limits of that
            else:
                call.connection.pause()
        elif self._phase is not Phase.IDLE:
            return  # a next request is half read, or the end is near: their limits hold
        self._await(Phase.STALLED, monotonic() + self._front.timeouts.idle_s)

    def resume_writing(self) -> None:
        self.stalled = False
        call = self.call
        if call is not None and call.fanout is not None:
            call.fanout.resume()
        elif call is not None and call.connection is not None:
            call.connection.resume()
        if self._phase is not Phase.STALLED:
            return
        if call is not None:
            self._phase = Phase.RUNNING
            self.deadline = inf
        else:
            self._await(Phase.IDLE, monotonic() + self._front.timeouts.keep_alive_s)

    def data_received(self, data: bytes) -> None:
        """1. The same head as before and its whole body: taken as it is.  2. All else goes through the parser."""
        memo = self._memo
        front = self._front
        if memo is not None and self._phase is Phase.IDLE:  # (1)
            body_at = memo.match(data)
            if body_at and len(data) - body_at <= front.body_bytes_max:
                head = self._memo_head
                call = Call(self, head, self._memo_route, self._memo_tenant, head.request_id or front.next_id())
                call.body = data[body_at:]
                call.accepted_s = monotonic()
                self.call = call
                self._phase = Phase.RUNNING
                self.deadline = inf
                front.begin(call)
                return
        self._parse(data)  # (2)

    def _parse(self, data: bytes) -> None:
        front = self._front
        if self._phase is Phase.LINGER or self._unparsable is not None:
            return
        if self._phase is Phase.IDLE:
            self._await(Phase.HEAD, monotonic() + front.timeouts.header_s)
            self._first_read = data
        else:
            self._first_read = b""
        if self._phase is Phase.HEAD and len(data) > front.header_bytes_max:
            end = data.find(b"\r\n\r\n")
            if not 0 <= end <= front.header_bytes_max:
                self._head_too_large()
                self._refuse_bytes()
                return
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self.call is None or self.call.keep_alive:  # behind the last request of a connection all is noise
                self._unparsable = CallerError(f"The bytes received are not a request in HTTP/1.1: {error}.")
        self._first_read = b""
        if not self._parsing:
            # Nothing is under way in the parser: a stream may now run for minutes, and a kilobyte is a kilobyte.
            self._parser = None
            self._headers = NO_HEADERS
        if self._phase is Phase.HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > front.header_bytes_max:
                self._head_too_large()
        if self.call is None:
            if self._next:
                self._start_next()
            elif self._unparsable is not None:
                self._refuse_bytes()
            elif self._call is not None and self._call.fault is not None:
                self._refuse_unparsed(self._call.fault)  # no use in waiting for the rest of its body
        elif not self._paused and self._transport is not None and self._is_far_ahead():
            self._paused = True
            self._transport.pause_reading()

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._parsing = True
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """A head is whole: reads it into a call. What is wrong with it is kept until its turn to be answered."""
        front = self._front
        self._body_bytes = 0
        self._head_bytes = 0
        if self.call is None:
            now = monotonic()
            self._phase = Phase.BODY
            self._body_began_s = now
            self.deadline = now + front.timeouts.body_s
        parser = self._parser
        assert parser is not None
        version = parser.get_http_version()
        url = self._url if self._url.startswith(b"/") else origin_form(self._url)
        path, mark, query = url.partition(b"?")
        head = RequestHead(
            parser.get_method(),
            path,
            mark + query,
            http11=version == "1.1",
            keep_alive=parser.should_keep_alive(),
        )
        route: Route | None = None
        tenant: Member | None = None
        fault: Fault | None = None
        try:
            head.read_headers(self._headers)
            if version not in ("1.0", "1.1"):
                raise CallerError("This gateway speaks HTTP/1.0 and HTTP/1.1.", status=505)
            if head.method != b"OPTIONS":
                route, tenant = front.check_head(head)
        except Fault as wrong:
            fault = wrong
        self._call = call = Call(self, head, route, tenant, head.request_id or front.next_id())
        call.fault = fault
        if fault is None and head.expects_continue and head.http11:
            self.write(CONTINUE)
        self._memo = None
        if route is not None and fault is None and head.keep_alive and head.http11 and not head.expects_continue:
            self._remember(head, route, tenant)

    def _remember(self, head: RequestHead, route: Route, tenant: Member | None) -> None:
        """Keeps a head that came in one read and is framed by its length, to know it again."""
        data = self._first_read
        end = data.find(b"\r\n\r\n") + 4
        if end > 4 and head.content_length >= 0:
            self._memo = memo_of(data, end)
            self._memo_head, self._memo_route, self._memo_tenant = head, route, tenant

    def on_body(self, body: bytes) -> None:
        call = self._call
        if call is None or call.fault is not None:
            return
        front = self._front
        self._body_bytes += len(body)
        if self._body_bytes > front.body_bytes_max:
            self._drop_body()
            call.fault = front.body_too_large()
            return
        self._pieces.append(body)
        front.uploading_bytes += len(body)
        if front.uploading_bytes > front.uploading_bytes_max:
            self._drop_body()
            call.fault = too_much_at_once()

    def on_message_complete(self) -> None:
        self._parsing = False
        call, self._call = self._call, None
        if call is None:
            return
        pieces = self._pieces
        if len(pieces) == 1:
            call.body = pieces[0]
        elif pieces:
            call.body = b"".join(pieces)
        self._drop_body()
        call.accepted_s = monotonic()
        self._next.append(call)

    # -- own helpers ---------------------------------------------------------------------------------------------

    def _drop_body(self) -> None:
        """What has come of a body is no longer on its way in: it is whole, or of no use."""
        for piece in self._pieces:
            self._front.uploading_bytes -= len(piece)
        self._pieces.clear()

    def _is_far_ahead(self) -> bool:
        """So much is pipelined behind the running call that the connection should be read no further."""
        waiting = self._next
        return len(waiting) > PIPELINED_MAX or (
            len(waiting) > 0 and sum([len(call.body) for call in waiting]) > PIPELINED_BYTES_MAX
        )

    def _start_next(self) -> None:
        if self.call is None and self._next and self._transport is not None:
            self.call = call = self._next.pop(0)
            self._phase = Phase.RUNNING
            self.deadline = inf
            self._front.begin(call)

    def _await(self, phase: Phase, deadline: float) -> None:
        self._phase = phase
        self.deadline = deadline
        if self.wheel_at > deadline:
            self._front.wheel.arm(self)

    def _await_rest(self) -> None:
        """A request is half read: its own limits hold from now on, since until now another one was running."""
        timeouts, now = self._front.timeouts, monotonic()
        if self._call is None:
            self._await(Phase.HEAD, now + timeouts.header_s)
        else:
            self._body_began_s = now
            self._await(Phase.BODY, now + timeouts.body_s)

    def _head_too_large(self) -> None:
        self._unparsable = CallerError(
            f"The head of the request is larger than {self._front.header_bytes_max} bytes. Send fewer or shorter "
            "headers.",
            status=431,
        )

    def _refuse_bytes(self) -> None:
        """Answers once what cannot be parsed, and closes."""
        fault, self._unparsable = self._unparsable, None
        assert fault is not None
        self._refuse_unparsed(fault)

    def _refuse_unparsed(self, fault: Fault) -> None:
        call = self._call
        if call is None:
            head = RequestHead(b"", b"", b"", http11=True, keep_alive=False)
            call = Call(self, head, None, None, self._front.next_id())
        self._call = None
        call.accepted_s = monotonic()
        call.fault = fault
        call.keep_alive = False
        self.call = call
        self._front.begin(call)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """A client offered to speak another protocol, which we decline by going on in this one."""
        if not self._next:
            return
        parser = self._parser = httptools.HttpRequestParser(self)
        if not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self._headers):
            if rest:
                parser.feed_data(rest)
            return
        call = self._next.pop()
        # The body is still to come: parse the head again, without the offer.
        lines = [b"%b %b HTTP/1.1\r\n" % (call.head.method, self._url)]
        for name, value in self._headers:
            if name.lower() not in (b"upgrade", b"connection", b"http2-settings"):
                lines.append(b"%b: %b\r\n" % (name, value))
        parser.feed_data(b"".join((*lines, b"\r\n", rest)))

    def _close(self) -> None:
        """Closes so that the client can still read what was written."""
        transport = self._transport
        if transport is None:
            return
        if transport.can_write_eof():
            transport.write_eof()
            self._await(Phase.LINGER, monotonic() + LINGER_S)
        else:
            transport.close()

    def on_deadline(self, now: float) -> None:
        phase, front = self._phase, self._front
        call = self.call
        if phase is Phase.QUEUED and call is not None:
            if now >= self._queue_until:
                front.settler.refuse(call, front.enqueuer.timed_out(call, now))
            else:
                self._comment(call)
                comment_s = front.timeouts.comment_s or inf
                self._await(Phase.QUEUED, min(self._queue_until, now + comment_s))
        elif phase is Phase.RUNNING and call is not None:
            if not call.shown:
                self._comment(call)
                self._await(Phase.RUNNING, now + (front.timeouts.comment_s or inf))
        elif phase is Phase.BODY:
            allowed = self._body_began_s + front.timeouts.body_s + self._body_bytes / BODY_RATE_MIN
            if now < allowed:
                self._await(Phase.BODY, allowed)
            else:
                self._refuse_unparsed(
                    CallerError("The body did not come in time. Send it faster, or in a smaller piece.", status=408)
                )
        elif phase is Phase.HEAD and self._head_bytes:
            self._refuse_unparsed(CallerError("The head of the request did not come in time.", status=408))
        else:
            self.abort()


def origin_form(url: bytes) -> bytes:
    """The path and query of an absolute URL, as a request to a proxy has it."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return url
    path = parsed.path or b"/"
    return path + b"?" + parsed.query if parsed.query else path


def stopping() -> OverloadError:
    return OverloadError(
        "This gateway is stopping. Try again; another one will answer.",
        status=503,
        code="overloaded",
        retry_after_s=1.0,
    )


def too_much_at_once() -> OverloadError:
    return OverloadError(
        "The gateway is receiving as many bytes as it can hold. Try again shortly, or with a smaller body.",
        status=503,
        code="overloaded",
        retry_after_s=1.0,
    )


def wrong_method(method: bytes, allowed: tuple[bytes, ...]) -> CallerError:
    names = ", ".join(name.decode("ascii") for name in allowed)
    fault = CallerError(
        f"This path does not take {shown(method)}. Use {names}.", code="method_not_allowed", status=405
    )
    fault.allow = names  # for the Allow header
    return fault


def shown(raw: bytes) -> str:
    """Bytes of a caller in words that are safe to show: short, printable, no query."""
    return raw[:80].decode("ascii", "replace").encode("unicode_escape").decode("ascii")

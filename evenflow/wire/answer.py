"""A worker's answer on its way to the caller: bytes in, bytes to write out, and what was learned on the way.

`PlainAnswer` relays a body of any kind, `StreamAnswer` one of server-sent events. Both send head and first bytes as
one piece, choose the framing anew, read the usage, and raise a Fault when the answer turns out to be none. Bytes are
passed on as they came; what is changed is named here and nowhere else:

- the usage event that accounting asked for is hidden from a caller who did not ask for it, and given its `choices`
  when the engine left them out
- an alias stays in `model`, where the worker wrote its own name
- an error event before any content becomes an HTTP error; after content, everything behind it is cut off

Never touches a socket, never reads a clock.
"""

from typing import Final

from evenflow.wire.faults import CallerError, Fault, OverloadError, WorkerError, error_body
from evenflow.wire.http import LAST_CHUNK
from evenflow.wire.openai import (
    Usage,
    choices_of,
    error_in_event,
    error_message,
    has_content,
    is_usage_only,
    rename_model,
    splice,
    usage_in_event,
    usage_of,
)
from evenflow.wire.sse import EventReader, EventTooLarge, count_events, payload, split_events

# Of a plain answer that comes in many reads, so much is kept to find its usage.
TAIL_BYTES: Final = 64 * 1024
# A plain answer in which a name must be changed is held whole; one longer than this is refused.
HELD_BYTES_MAX: Final = 64 * 1024 * 1024
# Pieces of an error's body that are kept for its message.
LATE_PIECES_MAX: Final = 16


class Head:
    """What both kinds of answer need to know of the exchange."""

    __slots__ = ("http11", "keep_alive", "rename", "start")

    def __init__(
        self, start: bytes, *, http11: bool, keep_alive: bool, rename: tuple[bytes, bytes] | None
    ) -> None:
        # First line and header lines, without framing, which is added by the answer.
        self.start = start
        self.http11 = http11
        self.keep_alive = keep_alive
        # (the worker's name of the model, the name the caller used), None when they are the same.
        self.rename = rename

    def write(self, framing: bytes) -> bytes:
        if not self.keep_alive:
            return self.start + framing + b"connection: close\r\n\r\n"
        if self.http11:
            return self.start + framing + b"\r\n"
        return self.start + framing + b"connection: keep-alive\r\n\r\n"


class FewerChoicesError(WorkerError):
    """The answer has fewer choices than were asked for: an engine that leaves `n` unread."""


class PlainAnswer:
    """A body that is not a stream of events."""

    __slots__ = ("_choices", "_chunked", "_held", "_held_bytes", "_length", "_ok", "_sent", "head", "broken",
        "outcome", "output_tokens", "usage")

    def __init__(self, head: Head, length: int, *, ok: bool, choices: int = 0) -> None:
        self.head = head
        # How many the answer must have; 0: as it comes.
        self._choices = choices if ok else 0
        # Of the whole body, below 0 when it is not known.
        self._length = length
        self._ok = ok
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._sent = False
        self._chunked = False
        self.broken: WorkerError | None = None
        self.outcome = b"ok" if ok else b"error"
        self.output_tokens = 0
        self.usage: Usage | None = None

    def take(self, body: bytes, complete: bool) -> bytes:
        """The bytes to write now. Raises WorkerError for an answer that cannot be passed on.

        1. The whole answer came in one read: one write, whatever its framing was.
        2. A name must be changed, or choices counted: held until it is whole.
        3. Else passed on as it comes.
        """
        rename = self.head.rename
        if complete and not self._sent:  # (1)
            if self._held:
                body = b"".join((*self._held, body))
            if not body and self._ok:
                raise WorkerError("The worker answered with nothing. Try again.", retry_safe=True)
            if self._ok:
                self.usage = usage_of(body)
                if self._choices > 1 and choices_of(body) < self._choices:
                    raise FewerChoicesError("The worker made fewer choices than it was asked for. Try again.")
                if rename is not None:
                    body = rename_model(body, *rename)
            return self.head.write(b"content-length: %d\r\n" % len(body)) + body
        if (rename is not None or self._choices > 1) and self._ok:  # (2)
            self._keep(body)
            if self._held_bytes > HELD_BYTES_MAX:
                raise WorkerError(f"The worker's answer is longer than {HELD_BYTES_MAX} bytes. Ask for less.")
            return b""
        return self._pass_on(body, complete)  # (3)

    def _pass_on(self, body: bytes, complete: bool) -> bytes:
        self._keep(body)
        if self._held_bytes > 2 * TAIL_BYTES:
            tail = b"".join(self._held)[-TAIL_BYTES:]
            self._held, self._held_bytes = [tail], len(tail)
        head = b""
        if not self._sent:
            if not body:
                return b""  # wait for the first bytes, to send them along with the head
            self._sent = True
            head = self._first_head()
        if complete and self._ok:
            self.usage = usage_of(b"".join(self._held))
        if not self._chunked:
            return head + body
        parts = [head]
        if body:
            parts += (b"%x\r\n" % len(body), body, b"\r\n")
        if complete:
            parts.append(LAST_CHUNK)
        return b"".join(parts)

    def _first_head(self) -> bytes:
        if self._length >= 0:
            return self.head.write(b"content-length: %d\r\n" % self._length)
        if self.head.http11:
            self._chunked = True
            return self.head.write(b"transfer-encoding: chunked\r\n")
        self.head.keep_alive = False
        return self.head.write(b"")

    def _keep(self, body: bytes) -> None:
        self._held.append(body)
        self._held_bytes += len(body)

    def broken_off(self, fault: Fault) -> bytes | None:
        """None: nothing but the end of the connection can say that the rest is missing."""
        return None


class StreamAnswer:
    """A stream of server-sent events.

    Nothing is sent before the first event that has content, so that an error until then can still be an HTTP error.
    """

    __slots__ = (
        "_begun",
        "_done",
        "_ends_with_done",
        "_held",
        "_hide_usage",
        "_last",
        "_reader",
        "_sent",
        "head",
        "broken",
        "outcome",
        "output_tokens",
        "usage",
    )

    def __init__(self, head: Head, *, hide_usage: bool, ends_with_done: bool, opened: bool = False) -> None:
        self.head = head
        self._hide_usage = hide_usage
        # True for the routes whose streams end with `[DONE]`.
        self._ends_with_done = ends_with_done
        self._reader = EventReader()
        # An event with content has come.
        self._begun = False
        self._held = b""
        # The gateway has already begun the stream, to keep it alive.
        self._sent = opened
        self._done = False
        self._last = b""
        # Set when the stream turned out to have been cut; what `take` returned is still to be written.
        self.broken: WorkerError | None = None
        self.outcome = b"ok"
        self.output_tokens = 0
        self.usage: Usage | None = None

    def take(self, body: bytes, complete: bool) -> bytes:
        """The bytes to write now. Raises a Fault for a stream that failed, or ended before its end."""
        try:
            block = self._reader.feed(body)
        except EventTooLarge as error:
            raise WorkerError(f"The worker sent an event that is too large: {error}.") from None
        if complete:
            block += self._reader.take_rest()
        if block:
            if (
                not self._begun
                or b'"usage"' in block
                or b"[DONE]" in block
                or b'"error"' in block
                or self.head.rename is not None
                or self.outcome != b"ok"
            ):
                block = self._look(block)
            else:
                self.output_tokens += block.count(b"\n\n") or count_events(block)
                self._last = block
        if complete:
            self.broken = self._end_fault()
            if self.broken is not None:
                complete = False
                if not self._begun:
                    raise self.broken
        return self._frame(block, complete)

    def _frame(self, block: bytes, complete: bool) -> bytes:
        if not self._sent:
            if not self._begun and not complete:
                self._held += block
                return b""
            self._sent = True
            block = self._held + block
            self._held = b""
            if self.head.http11:
                head = self.head.write(b"transfer-encoding: chunked\r\n")
            else:
                self.head.keep_alive = False
                head = self.head.write(b"")
            self.head.start = b""  # a stream may run for minutes
        else:
            head = b""
        if not self.head.http11:
            return head + block
        if not block:
            return head + LAST_CHUNK if complete else head
        return b"%b%x\r\n%b\r\n%b" % (head, len(block), block, LAST_CHUNK if complete else b"")

    def _look(self, block: bytes) -> bytes:
        """Reads every event of the block; returns what of it may be seen."""
        kept = []
        for event in split_events(block):
            if self.outcome != b"ok":
                break  # nothing follows an error
            data = payload(event)
            if data is None or data == b"[DONE]":
                self._done = self._done or data is not None
            else:
                event = self._event(event, data)
            kept.append(event)
        return b"".join(kept)

    def _event(self, event: bytes, data: bytes) -> bytes:
        """One event with data; returns it as it may be shown, b"" to hide it."""
        error = error_in_event(data) if b'"error"' in data else None
        if error is not None:
            if not self._begun:
                raise fault_of_event(*error)
            self.outcome = b"failed"
            return event
        if b'"usage"' in data:
            usage = usage_in_event(data)
            if usage is not None:
                self.usage = usage.joined(self.usage)
                if is_usage_only(data):
                    return b"" if self._hide_usage else self._named(with_choices(event, data))
        self.output_tokens += 1
        self._last = event
        if not self._begun and has_content(data):
            self._begun = True
        return self._named(event)

    def _named(self, event: bytes) -> bytes:
        rename = self.head.rename
        return event if rename is None else rename_model(event, *rename)

    def _end_fault(self) -> WorkerError | None:
        """Not None when the stream was closed without having come to its end."""
        if self.outcome != b"ok" or self._done:
            return None
        if not self.output_tokens:
            return WorkerError("The worker ended its answer before it began. Try again.", retry_safe=True)
        if self._ends_with_done and not finished(self._last):
            return WorkerError("The worker broke its answer off. Try again.")
        return None

    def broken_off(self, fault: Fault) -> bytes:
        """What tells the caller, behind what was already sent."""
        if self.outcome != b"ok":  # the worker's own error event was shown
            return LAST_CHUNK if self.head.http11 else b""
        return last_event(fault, http11=self.head.http11)


class LateAnswer:
    """A plain body for a stream that was begun to keep it alive: an error, told by an event since no status can."""

    __slots__ = ("_pieces", "_status", "broken", "outcome", "output_tokens", "usage")

    def __init__(self, status: int) -> None:
        self._status = status
        self._pieces: list[bytes] = []
        self.broken: WorkerError | None = None
        self.outcome = b"error"
        self.output_tokens = 0
        self.usage: Usage | None = None

    def take(self, body: bytes, complete: bool) -> bytes:
        """Holds the body (of which only the message is of use) until it is whole, then raises what it says."""
        if len(self._pieces) < LATE_PIECES_MAX:
            self._pieces.append(body)
        if not complete:
            return b""
        error = error_in_event(b"".join(self._pieces))
        if error is None:
            raise WorkerError("The worker answered a stream with something else. Try again.")
        raise fault_of_event(self._status, error[1])

    def broken_off(self, fault: Fault) -> bytes | None:
        return None


Answer = PlainAnswer | StreamAnswer | LateAnswer


def last_event(fault: Fault, *, http11: bool) -> bytes:
    """One error event and the end of the body, without `[DONE]`."""
    event = b"data: %b\n\n" % error_body(fault)
    return b"%x\r\n%b\r\n%b" % (len(event), event, LAST_CHUNK) if http11 else event


def finished(block: bytes) -> bool:
    """True when the block holds a finish reason that is not null."""
    _, found, rest = block.rpartition(b'"finish_reason"')
    return bool(found) and rest.lstrip(b" \t:").startswith(b'"')


def with_choices(event: bytes, data: bytes) -> bytes:
    """A usage event that surely has its `choices`."""
    if b'"choices"' in data:
        return event
    return b"data: %b\n\n" % splice(data, {"choices": b"[]"})


def fault_of_event(code: int | None, raw: bytes) -> Fault:
    """The HTTP error that an error event stands for, by the code it carries."""
    message = error_message(raw) or "The worker reported an error in place of an answer. Try again."
    if code == 429:
        return OverloadError(message, status=429, code="rate_limit_exceeded", retry_after_s=1.0)
    if code is not None and 400 <= code < 500:
        return CallerError(message, status=code)
    status = 503 if code == 503 else 502
    return WorkerError(message, status=status, retry_safe=True)


def verdict(status: int, json_body: bool) -> Fault | None:
    """The Fault to show in place of an answer that must not be passed on, None for all others."""
    if status in (401, 403, 407):
        return WorkerError(
            "The worker refused the gateway's own credential. Ask the operator to check the worker's api_key."
        )
    if 300 <= status < 400:
        return WorkerError("The worker answered with a redirect. Ask the operator to check the worker's url.")
    if status >= 500 and not json_body:
        return WorkerError(f"The worker failed with status {status}. Try again.", retry_safe=True)
    return None

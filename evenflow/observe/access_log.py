"""One JSON line for each request, in a buffer that is written every 100 ms.

A line has ids, names, counts and times; it never has a key, a prompt or an answer. When what lies behind the file
descriptor does not take the lines (a full pipe, a full disk), lines are dropped and counted, never waited for.
"""

import asyncio
import logging
import os
import sys
from typing import Protocol

import msgspec

log = logging.getLogger("evenflow.log")

FLUSH_S = 0.1
# Lines waiting to be written; more are dropped and counted.
LINES_MAX = 100_000


# A line of a call that ran on a worker, and of one that never came so far. They are formatted in one step, which costs
# half of what an encoder takes for the same fields; what is put in is safe in JSON as it is: numbers, names that
# `json_name` made, words of our own, and request ids of a restricted alphabet.
_RAN = (
    b'{"time":%.3f,"request_id":"%b",%b,"status":%d,"outcome":"%b","worker":%b,"queue_ms":%.1f,"ttft_ms":%b,'
    b'"duration_ms":%.1f,"input_tokens":%d,"cached_tokens":%d,"output_tokens":%d,"cost":%.1f%b}'
)
_NEVER_RAN = b'{"time":%.3f,"request_id":"%b",%b,"status":%d,"outcome":"%b","duration_ms":%.1f%b}'


def json_name(name: str | None) -> bytes:
    return msgspec.json.encode(name)


def log_names(tenant: str | None, model: str | None, route: str) -> bytes:
    """The names that stay the same over many lines."""
    return b'"tenant":%b,"model":%b,"route":%b' % (json_name(tenant), json_name(model), json_name(route))


def ran_line(
    time: float,
    request_id: bytes,
    names: bytes,
    status: int,
    outcome: bytes,
    worker: bytes,
    queue_s: float,
    first_byte_s: float,
    duration_s: float,
    input_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    cost: float,
    error: str | None,
) -> bytes:
    """Times in seconds, written in milliseconds; `first_byte_s` below 0 when nothing was sent."""
    return _RAN % (
        time,
        request_id,
        names,
        status,
        outcome,
        worker,
        queue_s * 1e3,
        b"%.1f" % (first_byte_s * 1e3) if first_byte_s >= 0.0 else b"null",
        duration_s * 1e3,
        input_tokens,
        cached_tokens,
        output_tokens,
        cost,
        b"" if error is None else b',"error":' + json_name(error),
    )


def never_ran_line(
    time: float,
    request_id: bytes,
    names: bytes,
    status: int,
    outcome: bytes,
    duration_s: float,
    error: str | None,
) -> bytes:
    return _NEVER_RAN % (
        time,
        request_id,
        names,
        status,
        outcome,
        duration_s * 1e3,
        b"" if error is None else b',"error":' + json_name(error),
    )


class AccessLog(Protocol):
    def write(self, line: bytes) -> None: ...
    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def close(self) -> None: ...


class NoLog:
    """The log that is off."""

    def write(self, line: bytes) -> None:
        return None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        return None

    def close(self) -> None:
        return None


class JsonLog:
    """Writes to a file descriptor it owns."""

    __slots__ = ("_descriptor", "_handle", "_lines", "_loop", "_rest", "dropped")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._rest = b""
        self._handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dropped = 0

    def write(self, line: bytes) -> None:
        if len(self._lines) < LINES_MAX:
            self._lines.append(line)
        else:
            self.dropped += 1

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle = loop.call_later(FLUSH_S, self._tick)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._flush()
        os.close(self._descriptor)

    def _tick(self) -> None:
        assert self._loop is not None
        self._handle = self._loop.call_later(FLUSH_S, self._tick)
        if self._lines or self._rest:
            self._flush()

    def _flush(self) -> None:
        if not self._rest and self._lines:
            self._lines.append(b"")
            self._rest = b"\n".join(self._lines)
            self._lines.clear()
        try:
            written = os.write(self._descriptor, self._rest)
        except BlockingIOError:
            return
        except OSError as error:
            log.error("the access log cannot be written (%s); lines are dropped until it can", error.strerror)
            self.dropped += self._rest.count(b"\n")
            self._rest = b""
            return
        self._rest = self._rest[written:]


def open_access_log(target: str) -> AccessLog:
    """`off`, `-` for standard output, or a path to append to. Raises OSError for a path that cannot be opened."""
    if target == "off":
        return NoLog()
    if target == "-":
        return JsonLog(os.dup(sys.stdout.fileno()))
    return JsonLog(os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640))

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


class Line(msgspec.Struct, omit_defaults=True):
    """The fields of a line, in the order in which they are written."""

    time: float
    request_id: str
    tenant: str | None
    model: str | None
    route: str
    status: int
    outcome: str
    worker: str | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None
    error: str | None = None


class AccessLog(Protocol):
    def write(self, line: Line) -> None: ...
    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def close(self) -> None: ...


class NoLog:
    """The log that is off."""

    def write(self, line: Line) -> None:
        return None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        return None

    def close(self) -> None:
        return None


class JsonLog:
    """Writes to a file descriptor it owns."""

    __slots__ = ("_descriptor", "_encode", "_handle", "_lines", "_loop", "_rest", "dropped")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._rest = b""
        self._handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dropped = 0

    def write(self, line: Line) -> None:
        if len(self._lines) < LINES_MAX:
            self._lines.append(self._encode(line))
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

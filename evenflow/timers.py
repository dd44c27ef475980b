"""One coarse timer for every time limit of the gateway.

A connection's limits move with each request; a timer object for each would cost more than the request. Here an
entry only writes its new `deadline`; it sits in a bucket of the wheel and is looked at when that bucket comes due.
A deadline that has moved on is put back, one that has passed fires. Accurate to one tick, never early.
"""

import asyncio
import logging
import time
from math import inf
from typing import Protocol

log = logging.getLogger("evenflow.timers")

TICK_S = 0.1


class Entry(Protocol):
    # When to call `on_deadline`, in seconds of time.monotonic(); inf for never. Written by the entry itself.
    deadline: float
    # The bucket the entry sits in, inf when in none. Written by the wheel alone.
    wheel_at: float

    def on_deadline(self, now: float) -> None: ...


class Wheel:
    """Buckets of entries, one for each tick. `now` is the time of the last tick, for readers that need no better."""

    __slots__ = ("_buckets", "_handle", "_last", "loop", "now")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._buckets: dict[int, list[Entry]] = {}
        self._handle: asyncio.TimerHandle | None = None
        self.now = time.monotonic()
        self._last = int(self.now / TICK_S)

    def start(self) -> None:
        self._handle = self.loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def arm(self, entry: Entry) -> None:
        """Sees to it that the entry is looked at by its deadline. Cheap when it already sits early enough."""
        deadline = entry.deadline
        if entry.wheel_at > deadline:
            index = max(int(deadline / TICK_S), self._last) + 1
            entry.wheel_at = index * TICK_S
            self._buckets.setdefault(index, []).append(entry)

    def _tick(self) -> None:
        self._handle = self.loop.call_later(TICK_S, self._tick)
        self.now = now = time.monotonic()
        until = int(now / TICK_S)
        first, self._last = self._last + 1, until
        for index in range(first, until + 1):
            for entry in self._buckets.pop(index, ()):
                if entry.wheel_at == index * TICK_S:  # else it moved to an earlier bucket meanwhile
                    entry.wheel_at = inf
                    if entry.deadline > now:
                        if entry.deadline != inf:
                            self.arm(entry)
                    else:
                        entry.deadline = inf
                        try:
                            entry.on_deadline(now)
                        except Exception:  # a bug in one entry must not cost all others their time limits
                            log.exception("a time limit failed in the gateway")

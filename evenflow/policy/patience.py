"""How long a tenant's requests may wait for their turn: less when its queue does not drain.

A queue that is always full makes every request wait as long as it may, and then refuses those for which nobody waits
any more. After CoDel (Nichols and Jacobson, "Controlling Queue Delay", 2012): the first request that waited in vain
starts an interval; while the queue does not run empty, each interval in which another waits in vain shortens what new
requests may wait, by the square root of their number. A queue that has run empty is forgiven at once. Nobody whose
requests have their turn in time is ever touched.

Never waits, never reads a clock: `now` is an argument, in seconds of any clock that does not go backwards.
"""

from math import sqrt

# The limit is never shortened below this part of what is configured.
SHORTEST = 0.125


class Patience:
    """One tenant's limit on waiting. Kept only from its first request that waited in vain until its queue is empty."""

    __slots__ = ("_intervals", "_until_s")

    def __init__(self) -> None:
        # Intervals in which a request waited in vain, and when the present one ends.
        self._intervals = 0
        self._until_s = 0.0

    def waited_in_vain(self, now: float, limit_s: float) -> None:
        """A request reached its limit in the queue; `limit_s` is the configured one, which is also the interval."""
        if now >= self._until_s:
            self._intervals += 1
            self._until_s = now + limit_s

    def limit_s(self, limit_s: float) -> float:
        """What a new request may wait, at most `limit_s`."""
        return max(limit_s / sqrt(1 + self._intervals), limit_s * SHORTEST)

"""How many sequences a worker should run at once, learned from what the engine tells or shows.

A request is scheduled fairly only while it waits in the gateway: one too many in the engine waits in the engine's own
queue, in no order of ours, and one too few leaves the engine idle. So the limit follows the engine's waiting queue:

    a report with waiting > 1, and no more in flight than the limit     limit -= (waiting - 1) / 2
    else, if the limit was reached since the last report                limit += 1
    within [SLOTS_MIN, the engine's maximum]

An engine that keeps one or two waiting is never idle, and what waits there is too little to disturb the schedule. While
more is in flight than the limit the last cut has not taken effect yet, and another would be for the same queue: cutting
on at each report made the limit of one simulated engine swing between 4 and 38 instead of 17 and 39. A worker whose
reports have stopped keeps its limit. One that never reported is led by its time to first token instead, after TCP Vegas
(Brakmo and Peterson, 1995): while the median of a window stays near the best that was seen the limit may grow, and when
it has doubled the engine is taken to queue. The best is measured at first and anew now and then, with a quarter of the
limit, since prompts get longer and engines slower (as BBR does: Cardwell et al., 2016).

Never waits, never reads a clock: `now` is an argument, in seconds of any clock that does not go backwards.
"""

from statistics import median

SLOTS_START = 32
SLOTS_MIN = 4
# Where the engine does not tell how many sequences it batches at most.
SLOTS_MAX = 1024
# A report older than this says nothing about now.
REPORT_STALE_S = 2.0
# First tokens in a window, and how much slower than the best window one is that shows queueing.
WINDOW = 16
GREW = 2.0
# Below this a difference between times to first token is noise of the network and not a queue.
NOISE_S = 0.05
# How far the limit falls when first tokens show queueing.
BACK_OFF = 0.9
# Windows after which the best is measured anew; and the part of the limit that holds meanwhile, for one window to
# settle and one to measure: so little that nothing queues, so seldom that it costs some 2 % of the requests.
MEASURE_EVERY = 200
MEASURE_AT = 0.25
# How much of the KV cache running requests may be expected to fill. Slightly more than all of it: they do not all
# reach their full length at once, and what does not fit waits in the engine, where it is seen. Measured by replaying
# a chat log of 27 tenants: 1.0 loses 3 % of the engine's tokens per second and 1.1 makes light tenants wait longer.
KV_SHARE = 1.05


class LearnedSlots:
    """One worker's limit. Whoever writes the limit to the worker does so when a method returns True."""

    __slots__ = (
        "_before",
        "_best_s",
        "_first_tokens",
        "_limit",
        "_maximum",
        "_windows",
        "reached",
        "reported_s",
    )

    def __init__(self, start: int = SLOTS_START, maximum: int = SLOTS_MAX) -> None:
        self._maximum = maximum
        self._limit = float(min(start, maximum))
        # Set by the scheduler when a ticket found no room because of this limit; cleared by each decision.
        self.reached = False
        # When the last report came; None for a worker that never reported.
        self.reported_s: float | None = None
        # First tokens of the present window; windows since the best was measured, and that; the limit before.
        self._first_tokens: list[float] = []
        self._windows = MEASURE_EVERY
        self._best_s: float | None = None
        self._before = 0.0

    @property
    def limit(self) -> int:
        return int(self._limit)

    @property
    def maximum(self) -> int:
        return self._maximum

    def learn_maximum(self, maximum: int) -> bool:
        """The engine told how many sequences it batches at most."""
        self._maximum = max(1, maximum)
        return self._set(self._limit)

    def report(self, now: float, waiting: float, in_flight: int) -> bool:
        """The engine told how many requests wait in its own queue, while the gateway had so many sequences with it.

        True when the limit has changed.
        """
        self.reported_s = now
        reached, self.reached = self.reached, False
        if waiting > 1.0:
            return in_flight <= self.limit and self._set(self._limit - (waiting - 1.0) / 2.0)
        return self._set(self._limit + 1.0) if reached else False

    def first_token(self, took_s: float) -> bool:
        """A request had its first token so long after it was sent. True when the limit has changed.

        Does nothing for a worker that reports, also while its reports are stale.
        """
        if self.reported_s is not None:
            return False
        window = self._first_tokens
        window.append(took_s)
        if len(window) < WINDOW:
            return False
        middle = median(window)
        window.clear()
        self._windows += 1
        reached, self.reached = self.reached, False
        if self._windows > MEASURE_EVERY:
            return self._measure(middle)
        best = self._best_s
        if best is None or middle < best:
            self._best_s = best = middle
        if middle > GREW * best + NOISE_S:
            return self._set(self._limit * BACK_OFF)
        return self._set(self._limit + 1.0) if reached else False

    def _measure(self, middle: float) -> bool:
        """The windows in which the best is measured anew: 1. lower the limit, 2. let it settle, 3. take the best."""
        step = self._windows - MEASURE_EVERY
        if step == 1:
            self._before = self._limit
            return self._set(self._limit * MEASURE_AT)
        if step == 2:
            return False
        self._windows = 0
        self._best_s = middle
        return self._set(self._before)

    def _set(self, limit: float) -> bool:
        before = int(self._limit)
        self._limit = min(max(limit, float(min(SLOTS_MIN, self._maximum))), float(self._maximum))
        return int(self._limit) != before

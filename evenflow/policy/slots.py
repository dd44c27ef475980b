"""How many sequences a worker should run at once, learned from what the engine tells or shows.

A request is scheduled fairly only while it waits in the gateway: one too many in the engine waits in the engine's own
queue, in no order of ours, and one too few leaves the engine idle. So the limit follows the engine's waiting queue:

    a report with waiting > 1, and no more in flight than the limit     limit -= (waiting - 1) / 2
    else, if the limit was reached since the last report                limit += 1
    within [SLOTS_MIN, the engine's maximum]

An engine that keeps one or two waiting is never idle, and what waits there is too little to disturb the schedule. While
more is in flight than the limit the last cut has not taken effect yet, and another would be for the same queue:
cutting on at each report made the limit of one simulated engine swing between 4 and 38 instead of 17 and 39. Where the
limit was raised many times in a row and still nothing queues it is far too low, and grows by a part of itself instead
of by one: to 1,000 sequences it takes a minute and not eight. A worker whose reports have stopped keeps its limit.

One that never reported is led by its time to first token instead, after TCP Vegas (Brakmo and Peterson, 1995): while
the median of a window stays near the best that was seen the limit may grow, and when it has doubled the engine is taken
to queue. After a cut, what was sent before it is passed over: it waited in a queue that was cut already. The best is
measured at the least limit at first, and anew now and then with a quarter of the limit, since prompts get longer and
engines slower (as BBR does: Cardwell et al., 2016). What is seen at the least limit is always the best there is, and
so a limit that fell that far comes back.

Never waits, never reads a clock: `now` is an argument, in seconds of any clock that does not go backwards.
"""

from statistics import median

SLOTS_START = 32
SLOTS_MIN = 4
# Where the engine does not tell how many sequences it batches at most.
SLOTS_MAX = 1024
# The limit was raised so often in a row before it grows by a part of itself, and the part; at most one up to 63.
RAISES_SMALL = 32
RAISE_PART = 1 / 32
# First tokens in a window, and how much slower than the best window one is that shows queueing.
WINDOW = 16
GREW = 2.0
# Below this a difference between times to first token is noise of the network and not a queue.
NOISE_S = 0.05
# How far the limit falls when first tokens show queueing; and when they are so many times later than what shows it.
BACK_OFF = 0.9
MUCH = 4.0
BACK_OFF_MUCH = 0.5
# Windows after which the best is measured anew, or requests for each slot if that is later; and the part of the limit
# that holds meanwhile: so little that nothing queues, so seldom that a busy engine loses 2 to 3 % of its time.
MEASURE_EVERY = 400
MEASURE_GENERATIONS = 100
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
        "_passed_over",
        "_raises",
        "_seen_s",
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
        # How often the limit was raised since something queued.
        self._raises = 0
        # First tokens of the present window, and how many are still passed over before it begins.
        self._first_tokens: list[float] = []
        self._passed_over = 0
        # The best median, and windows since it was measured. While it is being measured: the limit and the median
        # before; else 0.
        self._best_s: float | None = None
        self._windows = 0
        self._before = 0.0
        self._seen_s = 0.0

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
        before = self.limit
        if self._before:
            # First tokens lead no longer, and what was lowered to measure them goes back.
            self._limit, self._before = self._before, 0.0
        self.reported_s = now
        reached, self.reached = self.reached, False
        if waiting > 1.0:
            self._raises = 0
            if in_flight <= self.limit:
                self._set(self._limit - (waiting - 1.0) / 2.0)
        elif reached:
            self._raise()
        return self.limit != before

    def first_token(self, took_s: float) -> bool:
        """A request had its first token so long after it was sent. True when the limit has changed.

        Does nothing for a worker that reports, also while its reports are stale.

        1. What was sent before the last cut: passed over.
        2. The window is not full: wait.
        3. The best is being measured: take it, and go back to the limit before; unless that is the first one and
           turns out to have been too much.
        4. The best was never measured, or long ago: measure it, with a low limit.
        5. The limit is the least: what is seen is the best.
        6. The window shows queueing: cut.
        7. It does not, and the limit was reached: raise.
        """
        if self.reported_s is not None:
            return False
        if self._passed_over:  # (1)
            self._passed_over -= 1
            return False
        window = self._first_tokens
        window.append(took_s)
        if len(window) < WINDOW:  # (2)
            return False
        middle = median(window)
        window.clear()
        self._windows += 1
        reached, self.reached = self.reached, False
        best = self._best_s
        if self._before:  # (3)
            before, self._before = self._before, 0.0
            if best is None and self._seen_s > GREW * middle + NOISE_S:
                before = self._limit
            self._best_s, self._windows = middle, 0
            return self._set(before)
        if best is None or self._windows > max(MEASURE_EVERY, MEASURE_GENERATIONS * self.limit // WINDOW):  # (4)
            self._before, self._seen_s = self._limit, middle
            return self._cut(0.0) if best is None else self._cut(self._limit * MEASURE_AT, WINDOW)
        self._best_s = best = middle if self._limit <= SLOTS_MIN else min(best, middle)  # (5)
        queues = GREW * best + NOISE_S
        if middle > queues:  # (6)
            self._raises = 0
            return self._cut(self._limit * (BACK_OFF_MUCH if middle > MUCH * queues else BACK_OFF))
        return self._raise() if reached else False  # (7)

    def _raise(self) -> bool:
        self._raises += 1
        part = self._limit * RAISE_PART if self._raises > RAISES_SMALL else 0.0
        return self._set(self._limit + max(1.0, part))

    def _cut(self, limit: float, passed_over: int | None = None) -> bool:
        """Lowers the limit because of first tokens, of which so many more are from before: at most all in flight."""
        self._passed_over = self.limit if passed_over is None else passed_over
        return self._set(limit)

    def _set(self, limit: float) -> bool:
        before = int(self._limit)
        self._limit = min(max(limit, float(min(SLOTS_MIN, self._maximum))), float(self._maximum))
        return int(self._limit) != before

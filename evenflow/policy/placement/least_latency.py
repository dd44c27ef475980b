"""Least observed latency: the worker that has lately answered soonest, counted for all that it runs already.

    score = moving average of its latency · (running sequences + 1)

Without the second factor all would rush to the fastest until it is the slowest. One that was never observed is tried
with a request, then taken for a middling one until its answer has begun; and a few requests go anywhere at random, so
that one which was slow once is not slow for ever.
"""

import random
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from .candidate import has_room

if TYPE_CHECKING:
    from .candidate import Ask, Candidate

# The weight of the newest observation.
LATENCY_STEP = 0.2
# The part of all requests that go anywhere.
PROBE_SHARE = 1.0 / 64.0
# Smaller latencies are no different from each other.
LATENCY_MIN_S = 1e-6


class LeastLatency:
    """Ties go to one at random."""

    __slots__ = ("_latency_s", "_random")

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random
        # Moving averages in seconds; who is not in it was never observed.
        self._latency_s: dict[Candidate, float] = {}

    def choose(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask | None" = None) -> int:
        """See `Placement.choose`.

        1. One that was never observed and runs nothing: at once.
        2. Of the others the least score; who was never observed has the average latency of all who were.
        """
        if self._random() < PROBE_SHARE:
            return self._anywhere(workers, sequences)
        known = self._latency_s
        usual_s = 0.0
        best, best_score, ties = -1, inf, 1
        for index, worker in enumerate(workers):
            slots = worker.slots
            in_flight = worker.in_flight
            need = sequences if sequences < slots else slots
            if worker.live and in_flight + need <= slots:
                latency_s = known.get(worker, 0.0)
                if latency_s == 0.0 and in_flight:
                    usual_s = latency_s = usual_s or self._usual_s()
                score = latency_s * (in_flight + 1)  # (1), (2)
                if score < best_score:
                    best, best_score, ties = index, score, 1
                elif score == best_score:
                    ties += 1
                    if self._random() * ties < 1.0:  # each of the tied ends up chosen with equal chance
                        best = index
        return best

    def answered(self, worker: "Candidate", took_s: float) -> None:
        if took_s < LATENCY_MIN_S:
            took_s = LATENCY_MIN_S
        old = self._latency_s.get(worker, 0.0)
        self._latency_s[worker] = old + LATENCY_STEP * (took_s - old) if old else took_s

    def forget(self, worker: "Candidate") -> None:
        self._latency_s.pop(worker, None)

    def score(self, worker: "Candidate", ask: "Ask | None") -> float:
        """In seconds."""
        latency_s = self._latency_s.get(worker, 0.0)
        if latency_s == 0.0 and worker.in_flight:
            latency_s = self._usual_s()
        return latency_s * (worker.in_flight + 1)

    def _usual_s(self) -> float:
        known = self._latency_s
        return sum(known.values()) / len(known) if known else 1.0

    def _anywhere(self, workers: "Sequence[Candidate]", sequences: int) -> int:
        open_ = [index for index, worker in enumerate(workers) if has_room(worker, sequences)]
        return open_[int(self._random() * len(open_))] if open_ else -1

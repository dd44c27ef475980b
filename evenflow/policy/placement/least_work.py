"""Least estimated finish: the worker whose running work, divided by its speed, is smallest."""

import random
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Candidate


class LeastWork:
    """Ties, as among idle workers, go to one at random."""

    __slots__ = ("_random",)

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def choose(self, workers: "Sequence[Candidate]", sequences: int) -> int:
        best, best_score, ties = -1, inf, 1
        for index, worker in enumerate(workers):
            slots = worker.slots
            need = sequences if sequences < slots else slots
            if worker.live and worker.in_flight + need <= slots:
                score = worker.work / worker.speed
                if score < best_score:
                    best, best_score, ties = index, score, 1
                elif score == best_score:
                    ties += 1
                    if self._random() * ties < 1.0:  # each of the tied ends up chosen with equal chance
                        best = index
        return best

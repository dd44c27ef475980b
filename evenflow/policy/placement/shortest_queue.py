"""Shortest queue: the worker that runs the fewest sequences, whatever they cost and however fast it is."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .candidate import Ask, Candidate


class ShortestQueue:
    """Ties go to one at random."""

    __slots__ = ("_random",)

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def choose(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask | None" = None) -> int:
        best, fewest, ties = -1, 0, 1
        for index, worker in enumerate(workers):
            slots = worker.slots
            in_flight = worker.in_flight
            need = sequences if sequences < slots else slots
            if worker.live and in_flight + need <= slots:
                if best < 0 or in_flight < fewest:
                    best, fewest, ties = index, in_flight, 1
                elif in_flight == fewest:
                    ties += 1
                    if self._random() * ties < 1.0:  # each of the tied ends up chosen with equal chance
                        best = index
        return best

    def score(self, worker: "Candidate", ask: "Ask | None") -> float:
        return float(worker.in_flight)

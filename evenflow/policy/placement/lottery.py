"""Lottery: one at random, each with a chance in proportion to its speed."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .candidate import Ask, Candidate


class Lottery:
    """Draws among those with room alone, so a full worker's chance goes to the others."""

    __slots__ = ("_random",)

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def choose(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask | None" = None) -> int:
        drawn, total = -1, 0.0
        for index, worker in enumerate(workers):
            slots = worker.slots
            need = sequences if sequences < slots else slots
            if worker.live and worker.in_flight + need <= slots:
                # Takes the place of the one drawn before with its share of all until now.
                total += worker.speed
                if drawn < 0 or self._random() * total < worker.speed:
                    drawn = index
        return drawn

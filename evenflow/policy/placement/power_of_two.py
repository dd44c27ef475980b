"""Power of two choices: of two workers at random the one with less work for its speed.

Nearly as even as looking at all, at a cost that does not grow with the fleet, and many gateways that know little of
each other do not all rush to the same idle worker.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from .candidate import has_room

if TYPE_CHECKING:
    from .candidate import Ask, Candidate

# Draws for each of the two before all with room are listed, as when few have any.
DRAWS_MAX = 4


class PowerOfTwo:
    """The two are different ones wherever two have room."""

    __slots__ = ("_random",)

    by_work: Final = True

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def choose(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask | None" = None) -> int:
        first = self._draw(workers, sequences, -1)
        if first < 0:
            return -1
        second = self._draw(workers, sequences, first)
        if second < 0:
            return first
        one, other = workers[first], workers[second]
        return first if one.work / one.speed <= other.work / other.speed else second

    def score(self, worker: "Candidate", ask: "Ask | None") -> float:
        return worker.work / worker.speed

    def _draw(self, workers: "Sequence[Candidate]", sequences: int, beside: int) -> int:
        """One with room at random that is not `beside`, or -1."""
        count = len(workers)
        for _ in range(DRAWS_MAX):
            index = int(self._random() * count)
            if index != beside and index < count and has_room(workers[index], sequences):
                return index
        open_ = [
            index for index, worker in enumerate(workers) if index != beside and has_room(worker, sequences)
        ]
        return open_[int(self._random() * len(open_))] if open_ else -1

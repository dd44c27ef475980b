"""The least loaded of very many workers, without looking at all of them for every request.

A look at all makes a list of the few that have least to do. The next requests are served from that list until it is
used up: until its best has more to do than the first that is not on it had, or until as many were served as are on it.
So of N idle workers each still gets one of N requests, and the price is that of a short list. What became idle since
the last look is seen at the next.
"""

import random
from collections.abc import Sequence
from heapq import nsmallest
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .candidate import Candidate

# Workers on the list, and requests served from it before the next look at all.
LISTED_MAX = 16


class Shortlist:
    """For one group of workers at a time; a request for another one costs a look at all of it."""

    __slots__ = ("_left", "_limit", "_listed", "_positions", "_random", "_workers")

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random
        # The group it was made of, held so that no other can be taken for it.
        self._workers: Sequence[Candidate] = ()
        self._positions: dict[Candidate, int] = {}
        # Indexes into the group; the load of the next that is not listed; requests that may still be served.
        self._listed: list[int] = []
        self._limit = 0.0
        self._left = 0

    def least(self, workers: "Sequence[Candidate]", sequences: int) -> int:
        """The index of the one with least work for its speed among those with room; -1 when none has any.

        1. The list holds for these workers, and its best is still as good as all that are not on it.
        2. Else all are looked at.
        """
        if workers is self._workers and self._left > 0:
            best, best_score = -1, inf
            for index in self._listed:
                worker = workers[index]
                slots = worker.slots
                need = sequences if sequences < slots else slots
                if worker.live and worker.in_flight + need <= slots:
                    score = worker.work / worker.speed
                    if score < best_score:
                        best, best_score = index, score
            if best >= 0 and best_score <= self._limit:  # (1)
                self._left -= 1
                return best
        return self._look(workers, sequences)  # (2)

    def position(self, workers: "Sequence[Candidate]", worker: "Candidate") -> int:
        """The index of a worker of the group, -1 for any other."""
        if workers is not self._workers:
            self._take(workers)
        return self._positions.get(worker, -1)

    def _look(self, workers: "Sequence[Candidate]", sequences: int) -> int:
        if workers is not self._workers:
            self._take(workers)
        count = len(workers)
        turn = int(self._random() * count)  # among equals no place in the list is better than another
        found = []
        for index, worker in enumerate(workers):
            slots = worker.slots
            need = sequences if sequences < slots else slots
            if worker.live and worker.in_flight + need <= slots:
                found.append((worker.work / worker.speed, (index - turn) % count, index))
        if not found:
            self._left = 0
            return -1
        least = nsmallest(LISTED_MAX + 1, found)
        self._limit = least[LISTED_MAX][0] if len(least) > LISTED_MAX else inf
        self._listed = [index for _, _, index in least[:LISTED_MAX]]
        self._left = len(self._listed) - 1
        return self._listed[0]

    def _take(self, workers: "Sequence[Candidate]") -> None:
        self._workers = workers
        self._positions = {worker: index for index, worker in enumerate(workers)}
        self._left = 0

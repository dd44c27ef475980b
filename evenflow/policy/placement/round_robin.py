"""Round robin: the workers in turn, passing over those that are down or full."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .candidate import Ask, Candidate


class RoundRobin:
    """One turn for the whole gateway; starts at a random worker so that many gateways do not march in step."""

    __slots__ = ("_turn",)

    def __init__(self, rng: random.Random) -> None:
        self._turn = rng.randrange(1 << 16)

    def choose(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask | None" = None) -> int:
        count = len(workers)
        turn = self._turn
        for step in range(count):
            index = (turn + step) % count
            worker = workers[index]
            slots = worker.slots
            need = sequences if sequences < slots else slots
            if worker.live and worker.in_flight + need <= slots:
                self._turn = index + 1
                return index
        return -1

"""Sticky: the requests of a session go to one worker, and to another only when that one cannot take them well.

Rendezvous hashing: each worker draws a number from the session's key and its own name, and the lowest wins. Nothing
else counts, so every gateway and every start agree; a worker that goes moves its own sessions and no others, and one
that comes takes its part of each. Faster workers draw lower, so that each wins in proportion to its speed.
"""

import random
from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING, Final

from .candidate import session_of
from .least_work import LeastWork

if TYPE_CHECKING:
    from .candidate import Ask, Candidate

# A worker is passed over that runs more than this part of its slots, and so many times more than its part of all that
# runs. Below half nobody is crowded, and a session is not moved for the sake of evenness.
CROWDED_FROM = 0.5
CROWDED_TIMES = 1.5
# Worker names whose numbers are kept, a backstop, as names come and go with the fleet; and sessions whose winner is.
NAMES_MAX = 10_000
SESSIONS_MAX = 20_000

# Numbers of 31 bits, since the product of two is still a small one. The multipliers are odd and without a pattern.
_MASK = (1 << 31) - 1
_MIX_1 = 0x45D9F3B5
_MIX_2 = 0x2C1B3C6D
_UNIT = 1.0 / (1 << 31)


class Sticky:
    """A request without a session goes where there is least work."""

    __slots__ = ("_names", "_rest", "_winners")

    wants_blocks: Final = True
    wants_session: Final = True
    by_work: Final = True

    def __init__(self, rng: random.Random) -> None:
        self._rest = LeastWork(rng)
        # What a worker's name hashes to.
        self._names: dict[str, int] = {}
        # Session → the workers among which it was drawn, and who won; saves the draws, and decides nothing.
        self._winners: dict[int, tuple[Sequence[Candidate], int]] = {}

    def choose(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask | None" = None) -> int:
        """See `Placement.choose`.

        1. No session: the least work.
        2. The winner of all has room, and is not crowded.
        3. Of those with room that are not crowded, the one that draws lowest.
        4. All with room are crowded: the one of them that draws lowest.
        """
        if ask is None or not ask.session:  # (1)
            return self._rest.choose(workers, sequences, ask)
        if not workers:
            return -1
        winner = self._winner(workers, ask.session)
        worker = workers[winner]
        slots = worker.slots
        need = sequences if sequences < slots else slots
        fits = worker.live and worker.in_flight + need <= slots
        if fits and worker.in_flight <= CROWDED_FROM * slots:  # (2)
            return winner
        allowed = max(CROWDED_FROM, CROWDED_TIMES * _use(workers))
        if fits and worker.in_flight <= allowed * slots:
            return winner
        best, best_draw, spare, spare_draw = -1, 0.0, -1, 0.0
        for index, worker in enumerate(workers):
            slots = worker.slots
            need = sequences if sequences < slots else slots
            if worker.live and worker.in_flight + need <= slots:
                draw = self._draw(worker, ask.session)
                if worker.in_flight <= allowed * slots:  # (3)
                    if best < 0 or draw < best_draw:
                        best, best_draw = index, draw
                elif spare < 0 or draw < spare_draw:
                    spare, spare_draw = index, draw
        return best if best >= 0 else spare  # (4)

    def saved(self, worker: "Candidate", ask: "Ask") -> float:
        return self._rest.saved(worker, ask)

    def placed(self, worker: "Candidate", ask: "Ask") -> None:
        self._rest.placed(worker, ask)

    def reported(self, worker: "Candidate", kv_use: float) -> None:
        self._rest.reported(worker, kv_use)

    def forget(self, worker: "Candidate") -> None:
        self._rest.forget(worker)
        self._names.pop(worker.name, None)
        self._winners.clear()

    def score(self, worker: "Candidate", ask: "Ask | None") -> float:
        """What it draws for the session; without one see `LeastWork.score`."""
        if ask is None or not ask.session:
            return self._rest.score(worker, ask)
        return self._draw(worker, ask.session)

    def _winner(self, workers: "Sequence[Candidate]", session: int) -> int:
        """The one that draws lowest of all, with room or without."""
        known = self._winners.get(session)
        if known is not None and known[0] is workers:
            return known[1]
        best, best_draw = 0, self._draw(workers[0], session)
        for index, worker in enumerate(workers):
            draw = self._draw(worker, session)
            if draw < best_draw:
                best, best_draw = index, draw
        if len(self._winners) >= SESSIONS_MAX:
            self._winners.clear()
        self._winners[session] = (workers, best)
        return best

    def _draw(self, worker: "Candidate", session: int) -> float:
        name = self._names.get(worker.name)
        if name is None:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            name = self._names[worker.name] = session_of(worker.name) & _MASK
        # The upper half of the session meets what the lower half has made of the name.
        mixed = (name ^ (session & _MASK)) * _MIX_1 & _MASK
        mixed = (mixed ^ mixed >> 15 ^ session >> 31 & _MASK) * _MIX_2 & _MASK
        mixed = (mixed ^ mixed >> 14) * _MIX_1 & _MASK
        mixed ^= mixed >> 16
        # A number in (0, 1); the logarithm makes the chances proportional to the speeds.
        return -log((mixed + 0.5) * _UNIT) / worker.speed


def _use(workers: "Sequence[Candidate]") -> float:
    """The part of all live slots that is in use."""
    in_flight = slots = 0
    for worker in workers:
        if worker.live:
            in_flight += worker.in_flight
            slots += worker.slots
    return in_flight / slots if slots else 0.0

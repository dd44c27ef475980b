"""Least estimated finish: the worker that is thought to be done with its work and this request's prompt soonest.

    score = (work it runs + what of the prompt it must compute) / speed + prompt · k / (1 - k)

where k is how full its KV cache is: a full one must preempt or evict to take the prompt, an empty one need not. What a
worker need not compute is told by the prefix index. A cached prefix thus counts for as much as it saves and no more:
a hot one spills over to others as soon as its worker is that much behind. For a short prompt, which no cache helps,
the rule is the least work for its speed.
"""

import random
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from .prefix import PrefixIndex
from .shortlist import Shortlist

if TYPE_CHECKING:
    from .candidate import Ask, Candidate

# Among more workers than this not all are looked at: the best prefix match, some at random and one of the least loaded.
SCANNED_MAX = 64
RANDOM_PICKS = 2
# What a full cache counts against the prompt (the factor λ), and where it counts no more.
KV_WEIGHT = 1.0
KV_USE_MAX = 0.99


class LeastWork:
    """Ties, as among idle workers, go to one at random."""

    __slots__ = ("_asked", "_depths", "_index", "_kv_others", "_random", "_shortlist")

    wants_blocks: Final = True
    by_work: Final = True

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random
        self._index = PrefixIndex()
        self._shortlist = Shortlist(rng)
        # Tokens in a worker's cache beyond those that it runs for us by our count, by its last report. Less than none
        # where prompts share their blocks.
        self._kv_others: dict[Candidate, float] = {}
        # The ask that was looked at last, and how many of its blocks each worker has.
        self._asked: Ask | None = None
        self._depths: dict[Candidate, int] = {}

    def choose(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask | None" = None) -> int:
        """See `Placement.choose`.

        1. There is a prompt that a cache may help: the least estimated finish.
        2. Very many workers: one of the least loaded, or one of two at random if that has less to do by now.
        3. Else the least work of all.
        """
        if ask is not None and ask.blocks:  # (1)
            return self._least_finish(workers, sequences, ask)
        if len(workers) > SCANNED_MAX:  # (2)
            return self._among_many(workers, sequences)
        best, best_score, ties = -1, inf, 1  # (3)
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

    def placed(self, worker: "Candidate", ask: "Ask") -> None:
        """Its cache will have the prompt."""
        if ask.blocks:
            self._index.learn(worker, ask.blocks)

    def reported(self, worker: "Candidate", kv_use: float) -> None:
        """What is sent to it and what ends there from now on changes this by its own tokens."""
        if worker.tokens_max < inf:
            self._kv_others[worker] = kv_use * worker.tokens_max - worker.tokens

    def forget(self, worker: "Candidate") -> None:
        self._index.forget(worker)
        self._kv_others.pop(worker, None)
        self._asked, self._depths = None, {}

    def saved(self, worker: "Candidate", ask: "Ask") -> float:
        """Of the ask that was looked at last."""
        return ask.saved(self._depths.get(worker, 0)) if ask is self._asked else 0.0

    def score(self, worker: "Candidate", ask: "Ask | None") -> float:
        """The work until it has finished this request too, for its speed; of the ask that was looked at last."""
        if ask is None or not ask.blocks:
            return worker.work / worker.speed
        depth = self._depths.get(worker, 0) if ask is self._asked else 0
        return self._finish(worker, ask, depth)

    def _least_finish(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask") -> int:
        """The best as if no cache had anything of the prompt, unless one that has is better."""
        if len(workers) > SCANNED_MAX:
            best = self._among_many(workers, sequences, ask)
        else:
            best = self._least_cold(workers, sequences, ask)
        if best < 0:
            return -1
        depths = self._index.match(ask.blocks)
        self._asked, self._depths = ask, depths
        if not depths:
            return best
        best_score = self._score(workers[best], sequences, ask, depths.get(workers[best], 0))
        ties = 1
        for worker, depth in depths.items():
            score = self._score(worker, sequences, ask, depth)
            if score > best_score or worker is workers[best]:
                continue
            index = self._position(workers, worker)
            if index >= 0:
                ties = 1 if score < best_score else ties + 1
                if self._random() * ties < 1.0:
                    best, best_score = index, score
        return best

    def _least_cold(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask") -> int:
        """As `_score` without any block, written out."""
        prompt = ask.prompt_work
        kv_others = self._kv_others
        best, best_score, ties = -1, inf, 1
        for index, worker in enumerate(workers):
            slots = worker.slots
            need = sequences if sequences < slots else slots
            if worker.live and worker.in_flight + need <= slots:
                score = (worker.work + prompt) / worker.speed
                tokens_max = worker.tokens_max
                if tokens_max < inf:
                    use = (kv_others.get(worker, 0.0) + worker.tokens) / tokens_max
                    score += prompt * _pressure(use)
                if score < best_score:
                    best, best_score, ties = index, score, 1
                elif score == best_score:
                    ties += 1
                    if self._random() * ties < 1.0:
                        best = index
        return best

    def _among_many(self, workers: "Sequence[Candidate]", sequences: int, ask: "Ask | None" = None) -> int:
        """One of the least loaded, unless one of a few at random is better."""
        best = self._shortlist.least(workers, sequences)
        if best < 0:
            return -1
        best_score = self._score(workers[best], sequences, ask, 0)
        for _ in range(RANDOM_PICKS):
            index = int(self._random() * len(workers))
            score = self._score(workers[index], sequences, ask, 0)
            if score < best_score:
                best, best_score = index, score
        return best

    def _score(self, worker: "Candidate", sequences: int, ask: "Ask | None", depth: int) -> float:
        """Infinite for one that is down or full."""
        slots = worker.slots
        need = sequences if sequences < slots else slots
        if not worker.live or worker.in_flight + need > slots:
            return inf
        if ask is None:
            return worker.work / worker.speed
        return self._finish(worker, ask, depth)

    def _finish(self, worker: "Candidate", ask: "Ask", depth: int) -> float:
        prompt = ask.prompt_work
        score = (worker.work + prompt - ask.saved(depth)) / worker.speed
        if worker.tokens_max < inf:
            use = (self._kv_others.get(worker, 0.0) + worker.tokens) / worker.tokens_max
            score += prompt * _pressure(use)
        return score

    def _position(self, workers: "Sequence[Candidate]", worker: "Candidate") -> int:
        """-1 for one of another lane."""
        if len(workers) > SCANNED_MAX:
            return self._shortlist.position(workers, worker)
        for index, other in enumerate(workers):
            if other is worker:
                return index
        return -1


def _pressure(use: float) -> float:
    """λ·k/(1-k)."""
    if use <= 0.0:
        return 0.0
    if use > KV_USE_MAX:
        use = KV_USE_MAX
    return KV_WEIGHT * use / (1.0 - use)

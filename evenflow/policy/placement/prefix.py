"""Which workers have the beginning of a prompt in their caches, as far as one can tell from what they were sent.

A prompt is cut into blocks of 512 bytes, and the hash of a block covers all before it: equal hashes mean equal
prompts up to there. The index keeps for each hash the few workers that were sent it last.

What was not sent for long is forgotten by generations: all that is sent goes into the young one; when that is full it
becomes the old one, and what was old is gone. A prompt enters a generation as a whole, so the blocks before a known one
are known too, and a prompt that goes on costs no more than the blocks that are new in it.

The index is a guess: caches evict as they please, and a wrong one costs some prefill on a worker with little to do.
Hashes are Python's own, keyed anew in each process (nobody can make two prompts collide, and processes that share an
index must share PYTHONHASHSEED); they take a quarter of the time of blake2b. Only the first blocks are hashed, so a
prompt of megabytes takes no longer than one of 64 KiB. Never keeps a byte of a prompt.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .candidate import Candidate

BLOCK_BYTES = 512
# Blocks of a prompt that are looked at; beyond 64 KiB all count as new.
BLOCKS_HASHED_MAX = 128
PROMPT_BYTES_HASHED_MAX = BLOCKS_HASHED_MAX * BLOCK_BYTES
# Blocks that the index remembers: 64 MiB of text, some 16 million tokens, in 25 MB of memory at most.
BLOCKS_KEPT_MAX = 131_072
# Workers that are remembered for each block, the newest first, and that are looked for. What all have, such as a common
# system prompt, is short: forgetting some of them costs little.
HOLDERS_MAX = 8


def block_hashes(prompt: bytes, model: str = "") -> tuple[int, ...]:
    """The chained hashes of the whole blocks of a prompt; caches of different models have nothing in common."""
    end = min(len(prompt), PROMPT_BYTES_HASHED_MAX)
    chain = hash(model)
    found = []
    for start in range(0, end - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain = hash((chain, prompt[start : start + BLOCK_BYTES]))
        found.append(chain)
    return tuple(found)


class Holder:
    """A worker in the index. Its entries are not searched for when it is gone: it lets go of the worker."""

    __slots__ = ("worker",)

    def __init__(self, worker: "Candidate") -> None:
        self.worker: Candidate | None = worker


class PrefixIndex:
    """Block hash → the workers that were sent it."""

    __slots__ = ("_blocks_max", "_holders", "_holders_max", "_old", "_young")

    def __init__(self, blocks_max: int = BLOCKS_KEPT_MAX, holders_max: int = HOLDERS_MAX) -> None:
        # Of each generation.
        self._blocks_max = blocks_max // 2
        self._holders_max = holders_max
        # Blocks of one prompt share one tuple wherever they can.
        self._young: dict[int, tuple[Holder, ...]] = {}
        self._old: dict[int, tuple[Holder, ...]] = {}
        self._holders: dict[Candidate, Holder] = {}

    def __len__(self) -> int:
        """Entries, a block in both generations counted twice."""
        return len(self._young) + len(self._old)

    def learn(self, worker: "Candidate", blocks: tuple[int, ...]) -> None:
        """The worker is sent a prompt with these blocks.

        From the end to the beginning: once a block has the worker in front, those before it have it too, as a rule.
        """
        holder = self._holders.get(worker)
        if holder is None:
            holder = self._holders[worker] = Holder(worker)
        if len(self._young) + len(blocks) > self._blocks_max:
            self._old, self._young = self._young, {}
        young, old = self._young, self._old
        after: tuple[Holder, ...] = (holder,)
        alone, before = after, after
        for block in reversed(blocks[: self._blocks_max]):
            known = young.get(block)
            if known is not None and known[0] is holder:
                break
            if known is None:
                known = old.get(block, alone)
            if known is not before:
                before = known
                after = known if known[0] is holder else self._with(holder, known)
            young[block] = after

    def _with(self, holder: Holder, holders: tuple[Holder, ...]) -> tuple[Holder, ...]:
        others = [other for other in holders if other is not holder and other.worker is not None]
        return (holder, *others[: self._holders_max - 1])

    def match(self, blocks: tuple[int, ...]) -> "dict[Candidate, int]":
        """How many of the blocks each worker has that has any, counted from the first; who has most comes first.

        1. The last known block is found by halving, since all before a known one are known.
        2. From there to the front, by halving again to where other workers come in.
        """
        found: dict[Candidate, int] = {}
        young, old = self._young, self._old
        first = self._of(blocks[0]) if blocks else None
        if first is None:
            return found
        low, high = 0, len(blocks)
        while high - low > 1:  # (1)
            middle = (low + high) // 2
            if blocks[middle] in young or blocks[middle] in old:
                low = middle
            else:
                high = middle
        for _ in range(self._holders_max):  # (2)
            holders = self._of(blocks[low])
            if holders is None:
                break
            for holder in holders:
                worker = holder.worker
                if worker is not None and worker not in found:
                    found[worker] = low + 1
            if holders is first:
                break
            high, low = low, 0
            while high - low > 1:
                middle = (low + high) // 2
                if self._of(blocks[middle]) is holders:
                    high = middle
                else:
                    low = middle
        return found

    def _of(self, block: int) -> "tuple[Holder, ...] | None":
        holders = self._young.get(block)
        return holders if holders is not None else self._old.get(block)

    def forget(self, worker: "Candidate") -> None:
        """The worker is gone, and its cache with it."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            holder.worker = None
            if not self._holders:
                self._young, self._old = {}, {}

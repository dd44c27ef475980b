"""What passes between the scheduler and a placement policy: the workers as it may see them, and what a request asks.

Plain shapes and one test that all policies share. Never waits, never sees a prompt: only the hashes of its blocks.
"""

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

# Bytes of a session's key that tell it from others. 63 bits, so that it fits in a machine's whole number.
_SESSION_BYTES = 8
_SESSION_MASK = (1 << 63) - 1


class Candidate(Protocol):
    """What a policy may know of a worker; the registry's workers fit, and so does any small fake."""

    name: str
    live: bool
    # Running sequences it takes at most, and runs now.
    slots: int
    in_flight: int
    # Estimated cost of what it runs now.
    work: float
    # How fast it is against the others; 1.0 is usual.
    speed: float
    # Tokens that what it runs is thought to keep in its memory, and how many that holds; infinite until it has told.
    tokens: float
    tokens_max: float


class Ask:
    """What a request asks of its worker, made once for each request that has something to say here."""

    __slots__ = ("block_work", "blocks", "prompt_work", "session", "tail_work")

    def __init__(
        self,
        blocks: tuple[int, ...] = (),
        prompt_work: float = 0.0,
        block_work: float = 0.0,
        tail_work: float = 0.0,
        session: int = 0,
    ) -> None:
        # Chained hashes of the blocks of its prompt, see `prefix.block_hashes`; empty for a short one.
        self.blocks = blocks
        # In the unit of `Candidate.work`: what its prompt costs, what each block saves that the worker has, and what is
        # saved behind the last of them: a prompt that is too long to look at all of it is taken to go on as it began.
        self.prompt_work = prompt_work
        self.block_work = block_work
        self.tail_work = tail_work
        # See `session_of`; 0 without one.
        self.session = session

    def saved(self, depth: int) -> float:
        """Work that a worker need not do that has so many of the blocks."""
        saved = depth * self.block_work
        return saved + self.tail_work if self.tail_work and depth == len(self.blocks) else saved


class Placement(Protocol):
    """How a worker is chosen. Only `choose` is needed; for what else a policy may have see `Hooks`."""

    def choose(self, workers: Sequence[Candidate], sequences: int, ask: Ask | None = None) -> int:
        """The index of the worker to use, or -1 when none has room for so many sequences at once.

        A request with more sequences than a worker has slots takes all of that worker.
        """
        ...


class Hooks(NamedTuple):
    """What a policy wants beside `choose`. None: it has no such method, and nobody needs to call it."""

    # Whether it makes use of an ask's blocks and of its session; who asks for neither needs no ask at all.
    blocks: bool
    session: bool
    # Whether it compares the work for the speed where there is no ask, so that nobody has to call `score` for that.
    by_work: bool
    # By what it has just compared this worker for this ask, for who wants to know why: the least is best.
    score: Callable[[Candidate, Ask | None], float] | None
    # Work that this worker is thought not to need for the ask that was just compared.
    saved: Callable[[Candidate, Ask], float] | None
    # A request was given to the worker.
    placed: Callable[[Candidate, Ask], None] | None
    # The worker's answer began so many seconds after the request was sent.
    answered: Callable[[Candidate, float], None] | None
    # The worker told how full its KV cache is, 0 to 1.
    reported: Callable[[Candidate, float], None] | None
    # The worker is gone, or was lost and comes back without what it held.
    forget: Callable[[Candidate], None] | None


def hooks_of(placement: Placement) -> Hooks:
    """Looked up once, so that a policy without them costs nothing."""
    return Hooks(
        bool(getattr(placement, "wants_blocks", False)),
        bool(getattr(placement, "wants_session", False)),
        bool(getattr(placement, "by_work", False)),
        getattr(placement, "score", None),
        getattr(placement, "saved", None),
        getattr(placement, "placed", None),
        getattr(placement, "answered", None),
        getattr(placement, "reported", None),
        getattr(placement, "forget", None),
    )


# Makes a policy from a source of chance.
Maker = Callable[[random.Random], Placement]


def session_of(key: str) -> int:
    """A number for a session's key: the same in every process and after every start, and never 0."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_SESSION_BYTES).digest()
    return int.from_bytes(digest, "little") & _SESSION_MASK or 1


def has_room(worker: Candidate, sequences: int) -> bool:
    """Whether it may be chosen. Loops over all workers have this written out, since a call costs more than the test."""
    slots = worker.slots
    need = sequences if sequences < slots else slots
    return worker.live and worker.in_flight + need <= slots

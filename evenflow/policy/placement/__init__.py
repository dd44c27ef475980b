"""Which worker takes a request: one file for each policy, one line here for its name.

A policy chooses among the workers of a lane that are live and have room for the request's sequences. It never waits,
never reads a clock, and changes no worker; ties are broken by the random source it was given.
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from .least_work import LeastWork
from .round_robin import RoundRobin


class Candidate(Protocol):
    """What a policy may know of a worker; the registry's workers fit, and so does any small fake."""

    live: bool
    # Running sequences it takes at most, and runs now.
    slots: int
    in_flight: int
    # Estimated cost of what it runs now.
    work: float
    # How fast it is against the others; 1.0 is usual.
    speed: float


class Placement(Protocol):
    def choose(self, workers: Sequence[Candidate], sequences: int) -> int:
        """The index of the worker to use, or -1 when none has room for so many sequences at once.

        A request with more sequences than a worker has slots takes all of that worker.
        """
        ...


PLACEMENTS: dict[str, Callable[[random.Random], Placement]] = {
    "least_work": LeastWork,
    "round_robin": RoundRobin,
}

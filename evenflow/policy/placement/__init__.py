"""Which worker takes a request: one file for each policy, one line here for its name.

A policy chooses among the workers of a lane that are live and have room for the request's sequences. It never waits,
never reads a clock, and changes no worker; ties are broken by the random source it was given. What it may know of a
request is an `Ask`, and what it may learn comes through its `Hooks`.
"""

from .candidate import Ask, Candidate, Hooks, Maker, Placement, hooks_of, session_of
from .least_latency import LeastLatency
from .least_work import LeastWork
from .lottery import Lottery
from .own import PlacementError, own_placement
from .power_of_two import PowerOfTwo
from .prefix import block_hashes
from .round_robin import RoundRobin
from .shortest_queue import ShortestQueue
from .sticky import Sticky

__all__ = [
    "PLACEMENTS",
    "Ask",
    "Candidate",
    "Hooks",
    "Placement",
    "PlacementError",
    "block_hashes",
    "hooks_of",
    "placement_named",
    "session_of",
]

PLACEMENTS: dict[str, Maker] = {
    "least_work": LeastWork,
    "shortest_queue": ShortestQueue,
    "round_robin": RoundRobin,
    "lottery": Lottery,
    "least_latency": LeastLatency,
    "power_of_two": PowerOfTwo,
    "sticky": Sticky,
}


def placement_named(name: str) -> Maker:
    """What makes the policy of that name: one of `PLACEMENTS`, or a `package.module:Class` of the user's own.

    Raises PlacementError.
    """
    known = PLACEMENTS.get(name)
    if known is not None:
        return known
    if ":" not in name:
        raise PlacementError(f"must be one of {', '.join(PLACEMENTS)}, or package.module:Class of your own")
    return own_placement(name)

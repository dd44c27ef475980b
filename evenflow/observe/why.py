"""Why a request waited, and why it went to the worker it went to.

While a request runs only what would be lost is kept: what stood before it when it came, and what each worker had to
do when one was chosen. Words are made of it when somebody asks, by a header or through the admin API. The last
requests are remembered by their log lines, which have the rest.
"""

from collections import deque
from collections.abc import Callable
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenflow.fleet.registry import Worker
    from evenflow.policy.placement import Ask

# Requests that are remembered after their end.
RECENT_MAX = 10_000
# Workers that are remembered of each choice: the best by score.
RIVALS_MAX = 8


class Waited:
    """What a request found when it could not run at once."""

    __slots__ = ("above", "ahead", "ahead_all", "estimate_s", "held_at", "share")

    def __init__(
        self, ahead: int, ahead_all: int, above: int, held_at: int | None, share: float, estimate_s: float
    ) -> None:
        # Requests that waited in its tenant's queue and before its pool of workers, itself not counted.
        self.ahead = ahead
        self.ahead_all = ahead_all
        # Those of them that waited in higher tiers; and its tenant's concurrency, if that was reached.
        self.above = above
        self.held_at = held_at
        # The part of the pool that its tenant had by weight.
        self.share = share
        # Seconds that it was thought to wait.
        self.estimate_s = estimate_s


class Rival:
    """A worker as it stood when one was chosen."""

    __slots__ = ("in_flight", "live", "score", "slots", "worker")

    def __init__(self, worker: "Worker", score: float) -> None:
        self.worker = worker
        # By what placement compared it: the least is best.
        self.score = score
        self.in_flight = worker.in_flight
        self.slots = worker.slots
        self.live = worker.live


def rivals_of(
    workers: "Sequence[Worker]",
    chosen: "Worker",
    score: "Callable[[Worker, Ask | None], float] | None" = None,
    ask: "Ask | None" = None,
) -> tuple[Rival, ...]:
    """The workers that a request can go to, before it goes to the chosen one.

    Without a `score` by estimated cost of what each runs, divided by its speed.
    """
    if len(workers) > RIVALS_MAX:
        best = nsmallest(RIVALS_MAX, workers, key=lambda worker: worker.work / worker.speed)
        workers = best if chosen in best else [chosen, *best[:-1]]
    if score is None:
        return tuple([Rival(worker, worker.work / worker.speed) for worker in workers])
    return tuple([Rival(worker, score(worker, ask)) for worker in workers])


class Recent:
    """The requests that ended last."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        self._ended: deque[tuple[bytes, Waited | None, tuple[Rival, ...] | None]] = deque(maxlen=RECENT_MAX)

    def add(self, line: bytes, waited: Waited | None, rivals: tuple[Rival, ...] | None) -> None:
        """`line` is the request's line of the access log."""
        self._ended.append((line, waited, rivals))

    def find(self, request_id: str, tenant: str | None = None) -> dict[str, Any] | None:
        """The newest request with this id, of a tenant or of any: its log line, and what it waited for.

        Looks at all that are remembered.
        """
        mark = b'"request_id":%b,' % msgspec.json.encode(request_id)
        for line, waited, rivals in reversed(self._ended):
            if mark in line:
                found: dict[str, Any] = msgspec.json.decode(line)
                if tenant is not None and found["tenant"] != tenant:
                    continue
                found["why"] = explain(waited, rivals, found.get("worker"))
                return found
        return None


def explain(
    waited: Waited | None, rivals: "tuple[Rival, ...] | None", worker: str | None
) -> dict[str, Any]:
    """As plain data, for the admin API. `worker` is the name of the one it went to, if it has."""
    waited_for = None
    if waited is not None:
        waited_for = {
            "ahead_in_own_queue": waited.ahead,
            "ahead_in_all_queues": waited.ahead_all,
            "ahead_in_higher_tiers": waited.above,
            "held_at_concurrency": waited.held_at,
            "share_by_weight": round(waited.share, 6),
            "wait_estimate_ms": round(waited.estimate_s * 1e3, 1),
        }
    others = [
        {
            "name": rival.worker.name,
            "chosen": rival.worker.name == worker,
            "score": round(rival.score, 3),
            "in_flight": rival.in_flight,
            "slots": rival.slots,
            "live": rival.live,
        }
        for rival in sorted(rivals or (), key=lambda rival: rival.score)
    ]
    return {"queued": waited_for, "worker": worker, "workers": others, "told": _in_words(waited, rivals, worker)}


def why_line(waited: Waited | None, rivals: "tuple[Rival, ...] | None", worker: str | None) -> bytes:
    """The header x-evenflow-why, with its line end."""
    return b"x-evenflow-why: %b\r\n" % _in_words(waited, rivals, worker).encode("ascii", "replace")


def _in_words(waited: Waited | None, rivals: "tuple[Rival, ...] | None", worker: str | None) -> str:
    words = "its turn came at once"
    if waited is not None:
        words = (
            f"waited behind {waited.ahead} of its own and {waited.ahead_all} in all, "
            f"with {waited.share:.1%} of the pool by weight"
        )
        if waited.above:
            words += f", after {waited.above} of higher tiers"
        if waited.held_at is not None:
            words += f", held back by its own limit: concurrency {waited.held_at}"
    if worker is None:
        return words
    if not rivals:
        return f"{words}; {worker} was the only worker"
    scores = ", ".join(
        f"{rival.worker.name} {_standing(rival)}" for rival in sorted(rivals, key=lambda rival: rival.score)
    )
    return f"{words}; {worker} was chosen among {scores}"


def _standing(rival: Rival) -> str:
    if not rival.live:
        return "down"
    full = " full" if rival.in_flight >= rival.slots else ""
    return f"{rival.score:.0f}{full}"

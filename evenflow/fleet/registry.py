"""The workers of this gateway and what they serve: the single owner of worker state.

The prober reports what it saw, the relay reports what it met, and only this module turns either into a state.
A model is served by a *lane*: the set of workers that have it. Models with the same workers share a lane object,
and a lane object lives as long as its set of workers stays the same. Never opens a socket.
"""

import logging
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from math import inf
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from evenflow.config import WorkerSettings
from evenflow.fleet.engines.abilities import ABILITIES, UNKNOWN, Abilities
from evenflow.observe.access_log import json_name
from evenflow.policy.slots import KV_SHARE, SLOTS_START, LearnedSlots

if TYPE_CHECKING:
    from evenflow.fleet.engines.load import LoadReport
    from evenflow.request.place import Pool
    from evenflow.request.relay import WorkerConnection

log = logging.getLogger("evenflow.fleet")

# Failures in a row of requests that had reached a worker, after which it is not chosen until a probe succeeds.
FAILURES_MAX = 3
# What a worker makes of one request that has no other cap.
CHOICES_MAX = 2**31
# A worker that registered itself and was silent for so long beyond its time is forgotten.
FORGOTTEN_S = 3600.0
# Names that a message shows.
WORDS_MAX = 5
# Probes that must fail in a row before a worker that answers requests is called suspect.
PROBE_FAILURES_MAX = 2


class State(StrEnum):
    STARTING = "starting"  # not heard of yet
    READY = "ready"
    SUSPECT = "suspect"  # failed; not chosen until a probe succeeds
    DRAINING = "draining"  # finishes what it runs, takes nothing new
    GONE = "gone"  # no more in the fleet; what it runs may end


class Source(StrEnum):
    """Who brought a worker into the fleet, and so who takes it out."""

    CONFIGURED = "configured"  # the configuration
    ADDED = "added"  # an operator
    JOINED = "joined"  # itself
    LAUNCHED = "launched"  # the gateway, for a group of the configuration


class Worker:
    """One engine instance."""

    __slots__ = (
        "abilities",
        "aliases",
        "answered",
        "authorization",
        "base",
        "busy",
        "errors",
        "expires_s",
        "failures",
        "group",
        "head",
        "host",
        "idle",
        "in_flight",
        "kind",
        "kv_use",
        "last_seen_s",
        "learned",
        "learns_by_first_token",
        "live",
        "log_name",
        "makes_n",
        "models",
        "models_given",
        "models_told",
        "n_max",
        "n_max_given",
        "name",
        "name_line",
        "port",
        "probe_failures",
        "reason",
        "removes_when_idle",
        "settings",
        "slots",
        "source",
        "speed",
        "state",
        "tls",
        "tokens",
        "tokens_max",
        "url",
        "version",
        "wake_probe",
        "work",
    )

    def __init__(
        self,
        settings: WorkerSettings,
        source: Source = Source.CONFIGURED,
        *,
        models_told: Iterable[str] = (),
        group: str = "",
        version: str = "",
    ) -> None:
        self.settings = settings
        self.source = source
        # The group of the configuration that it was launched for, and which version of the group's template it runs.
        self.group = group
        self.version = version
        self.name = settings.name
        self.url = settings.url
        split = urlsplit(settings.url)
        self.tls = split.scheme == "https"
        self.host = split.hostname or ""
        self.port = split.port or (443 if self.tls else 80)
        self.base = split.path.rstrip("/").removesuffix("/v1").encode("ascii")
        # The constant part of every request head: the end of its first line, the host, our credential.
        host = split.netloc.rpartition("@")[2].encode("idna" if not split.netloc.isascii() else "ascii")
        self.head = b" HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\n" % host
        self.authorization = ""
        if settings.api_key is not None:
            self.authorization = f"Bearer {settings.api_key.reveal()}"
            self.head += b"authorization: %s\r\n" % self.authorization.encode("utf-8")
        self.name_line = b"x-evenflow-worker: %s\r\n" % self.name.encode("ascii", "replace")
        self.log_name = json_name(self.name)
        # Which engine it runs, once it has told: a key of `fleet.engines.load.ENGINES`; and what that does itself.
        self.kind = ""
        self.abilities: Abilities = UNKNOWN
        # Most choices that it makes of one request, and whether it is known to make more than one at all.
        self.n_max_given = settings.n_max
        self.n_max: int = settings.n_max or CHOICES_MAX
        self.makes_n = settings.n_max is not None
        self.models_given = settings.models is not None
        # What it registered itself with; what its model list says goes above that.
        self.models_told = frozenset(models_told)
        self.models: frozenset[str] = frozenset(settings.models or models_told)
        # Name that callers use → name that the worker knows.
        self.aliases: dict[str, str] = dict(settings.aliases)
        # Sequences it runs at most. Learned unless it was given: from its reports, and if that was asked for, from its
        # time to first token while it makes none.
        fixed = settings.slots
        self.slots = SLOTS_START
        self.learned: LearnedSlots | None = None
        if isinstance(fixed, int):
            self.slots = fixed
        else:
            self.learned = LearnedSlots()
        self.learns_by_first_token = fixed == "auto"
        self.speed = settings.speed
        self.state = State.STARTING
        # True when placement may choose it; follows `state`, kept apart since the hot path reads it.
        self.live = False
        # Why it is not ready, in words for `workers list`.
        self.reason = "waiting for the first probe"
        # Running sequences, their estimated cost and tokens; written by leases alone.
        self.in_flight = 0
        self.work = 0.0
        self.tokens = 0.0
        # Tokens that its memory holds; infinite until it has told.
        self.tokens_max = inf
        # Of its KV cache, 0 to 1; None until it has told.
        self.kv_use: float | None = None
        # Wall clock; 0 until it was heard of.
        self.last_seen_s = 0.0
        # Monotonic time after which it is not chosen unless it beats before; infinite for one that need not.
        self.expires_s = inf
        # It drains to leave the fleet, and not to come back.
        self.removes_when_idle = False
        self.failures = 0
        self.probe_failures = 0
        # Connections, the newest last; written by the relay.
        self.idle: list[WorkerConnection] = []
        self.busy: set[WorkerConnection] = set()
        # Requests answered and failed since start, for metrics.
        self.answered = 0
        self.errors = 0
        # Set by the prober: asks for a probe at once.
        self.wake_probe: Callable[[], None] | None = None

    def first_token(self, took_s: float) -> None:
        """A stream had its first token so long after it was sent."""
        learned = self.learned
        if learned is not None and learned.first_token(took_s):
            self.slots = learned.limit

    def serves(self) -> Iterable[str]:
        """Every name a caller may use for something this worker has."""
        yield from self.models
        for alias, model in self.aliases.items():
            if not self.models or model in self.models:
                yield alias


class Lane:
    """The workers that can run a call, and the pool it queues in."""

    __slots__ = (
        "beats",
        "bounded",
        "has_choice",
        "heals_completions",
        "joined",
        "learners",
        "live",
        "makes_n",
        "n_max",
        "pool",
        "slot_caches",
        "workers",
    )

    def __init__(self, workers: tuple[Worker, ...]) -> None:
        self.workers = workers
        self.has_choice = len(workers) > 1
        # Whether some of them must beat to be chosen.
        self.beats = any(worker.source is Source.JOINED for worker in workers)
        # How many of the workers are live; kept by the registry, read for every request.
        self.live = sum(worker.live for worker in workers)
        # Its workers whose limits are learned, and whether any worker has told how many tokens it holds.
        self.learners = [worker for worker in workers if worker.learned is not None]
        self.bounded = any(worker.tokens_max < inf for worker in workers)
        # What every one of its workers can do, and what must be done for any: see `Worker` and `Abilities`.
        self.n_max = min([worker.n_max for worker in workers], default=CHOICES_MAX)
        self.makes_n = all(worker.makes_n for worker in workers)
        self.joined = any(worker.abilities.joined for worker in workers)
        self.slot_caches = any(worker.abilities.slot_caches for worker in workers)
        self.heals_completions = any(worker.abilities.heals_completions for worker in workers)
        # Set by the scheduler, which groups lanes that share workers.
        self.pool: Pool

    @property
    def slots_max(self) -> int:
        """Of the live worker that has most."""
        return max([worker.slots for worker in self.workers if worker.live], default=1)


class Registry:
    """All workers by name, and the lane of every model."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        # Model or alias → its lane. Read on the hot path; replaced whole.
        self.lanes: dict[str, Lane] = {}
        # A lane for each worker alone, for parts of calls that must go to it; empty until the first such call, since
        # more lanes make every decision dearer.
        self.pinned: dict[Worker, Lane] = {}
        self._pins = False
        # Called after `lanes` changed, after a worker became live or takes more than before, and after a live one has
        # fallen silent.
        self.on_lanes_changed: Callable[[], None] = _nothing
        self.on_room: Callable[[Worker], None] = _nothing_of
        self.on_silent: Callable[[Worker], None] = _nothing_of
        # Called after a worker has come or gone.
        self.on_workers_changed: list[Callable[[], object]] = []
        # What a worker that is gone still held is dropped.
        self.on_gone: Callable[[Worker], None] = _nothing_of
        # What placement wants to be told: how full a KV cache is, and who may come back without what it held.
        self.on_kv_use: Callable[[Worker, float], None] | None = None
        self.on_lost: Callable[[Worker], None] | None = None

    def add(self, worker: Worker) -> None:
        """Takes a worker in; one that had its name is gone at once, and nothing of it is left in any lane."""
        old = self.workers.get(worker.name)
        self.workers[worker.name] = worker
        log.info("worker %s: %s at %s", worker.name, worker.source, worker.url)
        if old is not None:
            self._retire(old, "another of its name took its place")
        self._rebuild()
        self._workers_changed()

    def remove(self, worker: Worker, reason: str) -> None:
        """The worker is gone at once. Calls that it runs go on until they end or fail."""
        if self.workers.get(worker.name) is worker:
            del self.workers[worker.name]
            self._retire(worker, reason)
            self._rebuild()
            self._workers_changed()

    def _retire(self, worker: Worker, reason: str) -> None:
        self._move(worker, State.GONE, reason)
        self.on_gone(worker)

    def _workers_changed(self) -> None:
        for tell in self.on_workers_changed:
            tell()

    def set_models(self, worker: Worker, listed: frozenset[str]) -> None:
        """Takes what the worker's model list says. Of what it registered itself with only that counts which it lists.

        Raises ValueError when it has nothing of that.
        """
        told = worker.models_told
        models = listed & told if told else listed
        if told and not models:
            raise ValueError(f"registered with {words(told)}, but its /v1/models lists {words(listed)}")
        if models != worker.models:
            worker.models = models
            self._rebuild()

    def told_models(self, worker: Worker, told: frozenset[str]) -> None:
        """It registered itself again, maybe with other models; its list is read soon."""
        if told != worker.models_told:
            worker.models_told = told
            if told:
                worker.models = told
                self._rebuild()
            if worker.wake_probe is not None:
                worker.wake_probe()

    def knows_all(self) -> bool:
        """False while a worker has not yet told its models, so that a model nobody lists may still turn up."""
        return all(worker.models for worker in self.workers.values())

    def any_live(self) -> bool:
        return any(worker.live for worker in self.workers.values())

    def model_names(self) -> list[str]:
        """Sorted and unique; a model stays listed while its worker is down."""
        return sorted(self.lanes)

    # -- what was seen of a worker ------------------------------------------------------------------------------

    def probe_succeeded(self, worker: Worker) -> None:
        worker.last_seen_s = time.time()
        worker.probe_failures = 0
        if worker.state in (State.STARTING, State.SUSPECT) and worker.expires_s > monotonic():
            worker.failures = 0
            self._move(worker, State.READY, "")

    def probe_failed(self, worker: Worker, reason: str) -> None:
        worker.probe_failures += 1
        if worker.state is State.STARTING or worker.probe_failures >= PROBE_FAILURES_MAX:
            was_live = worker.live
            self._suspect(worker, reason, probe=False)
            if was_live:
                self.on_silent(worker)

    def answered(self, worker: Worker) -> None:
        """A request was answered, be it with a 4xx: the caller's mistakes say nothing of a worker."""
        worker.answered += 1
        worker.failures = 0

    def unreachable(self, worker: Worker, reason: str) -> None:
        """A connection was refused or broke before an answer."""
        worker.errors += 1
        self._suspect(worker, reason)

    def failed(self, worker: Worker, reason: str) -> None:
        """A request that had reached the worker failed there: a 5xx, a time-out, an answer cut short.

        The last live worker of a lane stays in use whatever requests say: without it there would be no answer at
        all, and a probe tells soon enough whether it is gone.
        """
        worker.errors += 1
        worker.failures += 1
        if worker.failures >= FAILURES_MAX:
            if all(lane.live > 1 for lane in self._lanes_of(worker)):
                self._suspect(worker, reason)
            elif worker.wake_probe is not None:
                worker.wake_probe()

    def load_reported(self, worker: Worker, load: "LoadReport", now: float) -> None:
        """The worker told of its own queue and memory. Changes its slots if they are learned."""
        if load.kind != worker.kind:
            self.set_kind(worker, load.kind)
        if load.sequences_max is not None and worker.abilities.n_within_slots:
            self._set_choices(worker, worker.n_max_given or load.sequences_max, makes_n=True)
        worker.kv_use = load.kv_use
        if load.kv_tokens is not None:
            worker.tokens_max = load.kv_tokens * KV_SHARE
            for lane in self._lanes_of(worker):
                lane.bounded = True
        if load.kv_use is not None and self.on_kv_use is not None:
            self.on_kv_use(worker, load.kv_use)
        learned = worker.learned
        if learned is None:
            return
        if load.sequences_max is not None and load.sequences_max != learned.maximum:
            learned.learn_maximum(load.sequences_max)
        if load.waiting is not None:
            learned.report(now, load.waiting, worker.in_flight)
        grown = learned.limit > worker.slots
        worker.slots = learned.limit
        if grown:
            self.on_room(worker)

    def set_kind(self, worker: Worker, kind: str) -> None:
        """The worker told which engine it is, and so what of sampling must be done for it."""
        worker.kind = kind
        worker.abilities = able = ABILITIES.get(kind, UNKNOWN)
        if worker.n_max_given is None:
            # An engine that has a limit of its own will tell it.
            worker.n_max = 1 if able.makes_n is False or able.n_within_slots else CHOICES_MAX
            worker.makes_n = able.makes_n is not None
        self._rebuild(changed=worker)

    def pin(self) -> None:
        """From now on there is a lane for each worker alone."""
        if not self._pins:
            self._pins = True
            self._rebuild()

    def makes_one_choice(self, worker: Worker) -> None:
        """It was asked for several, and made one."""
        self._set_choices(worker, 1, makes_n=True)

    def makes_choices(self, worker: Worker) -> None:
        """It was asked for several, and made them."""
        self._set_choices(worker, worker.n_max, makes_n=True)

    def _set_choices(self, worker: Worker, n_max: int, *, makes_n: bool) -> None:
        if (n_max, makes_n) != (worker.n_max, worker.makes_n):
            worker.n_max, worker.makes_n = n_max, makes_n
            self._rebuild(changed=worker)

    # -- what is asked of a worker ------------------------------------------------------------------------------

    def drain(self, worker: Worker, reason: str, *, then_remove: bool = False) -> None:
        """It gets nothing new and finishes what it runs; then it leaves the fleet, if that is asked."""
        worker.removes_when_idle |= then_remove
        if worker.state is not State.DRAINING:
            self._move(worker, State.DRAINING, reason)
        if worker.removes_when_idle and not worker.in_flight:
            self.remove(worker, reason)

    def resume(self, worker: Worker) -> None:
        """A drained one comes back, as soon as a probe has found it well."""
        if worker.state is State.DRAINING:
            worker.removes_when_idle = False
            self._move(worker, State.STARTING, "waiting for a probe")
            if worker.wake_probe is not None:
                worker.wake_probe()

    def beat(self, worker: Worker, expires_s: float) -> None:
        """It sent a heartbeat, or registered, and is due again at that monotonic time."""
        worker.last_seen_s = time.time()
        silent = worker.expires_s <= monotonic()
        worker.expires_s = expires_s
        if silent and worker.wake_probe is not None:
            worker.wake_probe()

    def expired(self, worker: Worker) -> None:
        """It was silent for too long; checked when it would be chosen, and once a second."""
        if worker.live:
            self._move(worker, State.SUSPECT, "sends no heartbeats any more")

    def each_second(self, now: float) -> None:
        """Leaves the silent alone, and lets those go that have drained."""
        for worker in list(self.workers.values()):
            if worker.expires_s <= now:
                self.expired(worker)
                if worker.expires_s + FORGOTTEN_S <= now:
                    self.remove(worker, "sent no heartbeats for too long")
            elif worker.removes_when_idle and not worker.in_flight:
                self.remove(worker, "drained")

    def _suspect(self, worker: Worker, reason: str, *, probe: bool = True) -> None:
        if worker.state in (State.STARTING, State.READY):
            self._move(worker, State.SUSPECT, reason)
        elif worker.state is State.SUSPECT:
            worker.reason = reason
        if probe and worker.wake_probe is not None:
            worker.wake_probe()

    def _move(self, worker: Worker, state: State, reason: str) -> None:
        was_live, worker.live = worker.live, state is State.READY
        log.info("worker %s: %s -> %s%s", worker.name, worker.state, state, f" ({reason})" if reason else "")
        worker.state, worker.reason = state, reason
        for lane in self._lanes_of(worker):
            lane.live += worker.live - was_live
        if worker.live and not was_live:
            self.on_room(worker)
        elif self.on_lost is not None and state in (State.SUSPECT, State.GONE):
            self.on_lost(worker)

    def _lanes_of(self, worker: Worker) -> list[Lane]:
        return [lane for lane in self.all_lanes() if worker in lane.workers]

    def all_lanes(self) -> list[Lane]:
        """Those of models, and those of single workers."""
        return list(dict.fromkeys([*self.lanes.values(), *self.pinned.values()]))

    def _rebuild(self, changed: Worker | None = None) -> None:
        """Forms the lanes anew. What a lane knows of its workers is known at its making, so those of a `changed` one
        are not kept."""
        by_model: dict[str, list[Worker]] = {}
        for worker in self.workers.values():
            for model in worker.serves():
                by_model.setdefault(model, []).append(worker)
        kept = {lane.workers: lane for lane in self.all_lanes() if changed not in lane.workers}
        lanes: dict[str, Lane] = {}
        for model, workers in by_model.items():
            key = tuple(workers)
            lane = kept.get(key)
            if lane is None:
                lane = kept[key] = Lane(key)
            lanes[model] = lane
        self.lanes = lanes
        self.pinned = {}
        if self._pins:
            for worker in dict.fromkeys(worker for lane in lanes.values() for worker in lane.workers):
                self.pinned[worker] = kept.get((worker,)) or Lane((worker,))
        self.on_lanes_changed()


def words(names: Iterable[str]) -> str:
    """Names in a message: sorted, and no more than fit in a line."""
    shown = sorted(names)
    more = f" and {len(shown) - WORDS_MAX} more" if len(shown) > WORDS_MAX else ""
    return (", ".join(name[:100] for name in shown[:WORDS_MAX]) or "nothing") + more


def _nothing() -> None:
    return None


def _nothing_of(worker: Worker) -> None:
    return None

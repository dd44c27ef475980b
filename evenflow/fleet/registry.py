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
from evenflow.policy.health import TIMES, Event, Health, State
from evenflow.policy.slots import KV_SHARE, SLOTS_START, LearnedSlots

if TYPE_CHECKING:
    from evenflow.fleet.engines.load import LoadReport
    from evenflow.request.place import Pool
    from evenflow.request.relay import WorkerConnection

log = logging.getLogger("evenflow.fleet")

# What a worker makes of one request that has no other cap.
CHOICES_MAX = 2**31
# A worker that registered itself and was silent for so long beyond its time is forgotten.
FORGOTTEN_S = 3600.0
# Names that a message shows.
WORDS_MAX = 5


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
        "group",
        "head",
        "health",
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
        "reason",
        "removes_when_idle",
        "settings",
        "slots",
        "source",
        "speed",
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
        self.health = Health()
        # True when placement may choose it; follows `health`, kept apart since the hot path reads it.
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
            self.take_slots()

    @property
    def state(self) -> State:
        return self.health.state

    def take_slots(self) -> bool:
        """Its limit, or what its health allows, has changed; True when it may be given more than before."""
        before, most = self.slots, self.health.slots_max
        slots = self.slots_given()
        self.slots = slots if slots <= most else int(most)
        return self.slots > before

    def slots_given(self) -> int:
        """By its configuration, or learned; whatever its health."""
        learned, fixed = self.learned, self.settings.slots
        return learned.limit if learned is not None else fixed if isinstance(fixed, int) else SLOTS_START

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
        self._happened(worker, Event.REMOVE, reason)
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
            _wake(worker)

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
        health = worker.health
        if worker.expires_s <= monotonic():
            return  # it must beat first
        if health.until_s > -inf and any(not lane.live for lane in self._lanes_of(worker)):
            health.until_s = -inf  # nobody else is left: better this one than none
        new = health.state is State.STARTING and worker.source is not Source.CONFIGURED
        if self._happened(worker, Event.PROBE_SUCCEEDED, ""):
            if new and any(lane.live > 1 for lane in self._lanes_of(worker)):
                health.begin_slowly()
                worker.take_slots()
        elif health.state is State.SUSPECT and health.until_s > monotonic():
            left_s = health.until_s - monotonic()
            worker.reason = f"{worker.reason.partition('; tried')[0]}; tried again in {left_s:.0f} s"

    def probe_failed(self, worker: Worker, reason: str) -> None:
        was_live = worker.live
        if self._happened(worker, Event.PROBE_FAILED, reason) and was_live:
            self.on_silent(worker)

    def answered(self, worker: Worker) -> None:
        """A request was answered, be it with a 4xx: the caller's mistakes say nothing of a worker."""
        worker.answered += 1
        health = worker.health
        if health.failures or health.on_trial:
            was_on_trial = health.on_trial
            health.answered()
            if was_on_trial:
                worker.reason = ""
                if worker.take_slots():
                    self.on_room(worker)

    def unreachable(self, worker: Worker, reason: str) -> None:
        """A connection was refused or broke before an answer."""
        worker.errors += 1
        self._happened(worker, Event.UNREACHABLE, reason)
        _wake(worker)

    def failed(self, worker: Worker, reason: str) -> None:
        """A request that had reached the worker failed there: a 5xx, a time-out, an answer cut short.

        The last live worker of a lane stays in use whatever requests say: without it there would be no answer at
        all, and a probe tells soon enough whether it is gone.
        """
        worker.errors += 1
        if all(lane.live > 1 for lane in self._lanes_of(worker)):
            if self._happened(worker, Event.FAILED, reason):
                _wake(worker)
        else:
            worker.health.failures += 1
            if worker.health.failures >= TIMES[Event.FAILED]:
                _wake(worker)

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
        if worker.take_slots():
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
        self._happened(worker, Event.DRAIN, reason)
        if worker.removes_when_idle and not worker.in_flight:
            self.remove(worker, reason)

    def resume(self, worker: Worker) -> None:
        """A drained one comes back, as soon as a probe has found it well."""
        if worker.state is State.DRAINING:
            worker.removes_when_idle = False
            self._happened(worker, Event.RESUME, "waiting for a probe")
            _wake(worker)

    def beat(self, worker: Worker, expires_s: float) -> None:
        """It sent a heartbeat, or registered, and is due again at that monotonic time."""
        worker.last_seen_s = time.time()
        silent = worker.expires_s <= monotonic()
        worker.expires_s = expires_s
        if silent:
            _wake(worker)

    def expired(self, worker: Worker) -> None:
        """It was silent for too long; checked when it would be chosen, and once a second."""
        self._happened(worker, Event.SILENT, "sends no heartbeats any more")

    def each_second(self, now: float) -> None:
        """Leaves the silent alone, and lets those go that have drained."""
        for worker in list(self.workers.values()):
            if worker.expires_s <= now:
                self.expired(worker)
                if worker.expires_s + FORGOTTEN_S <= now:
                    self.remove(worker, "sent no heartbeats for too long")
            elif worker.removes_when_idle and not worker.in_flight:
                self.remove(worker, "drained")
            elif worker.health.slots_max < inf and worker.health.ramp(worker.slots_given()) and worker.take_slots():
                self.on_room(worker)

    def _happened(self, worker: Worker, event: Event, reason: str) -> bool:
        """Takes an event in; True when the worker's state has changed with it."""
        health, was_live, before = worker.health, worker.live, worker.health.state
        if not health.on(event, monotonic()):
            if health.state is State.SUSPECT and reason:
                worker.reason = reason
            return False
        state = health.state
        worker.live = state is State.READY
        if worker.live and health.on_trial:
            reason = "on trial: one request at a time until it answers one"
        log.info("worker %s: %s -> %s%s", worker.name, before, state, f" ({reason})" if reason else "")
        worker.reason = reason
        worker.take_slots()
        for lane in self._lanes_of(worker):
            lane.live += worker.live - was_live
        if worker.live and not was_live:
            self.on_room(worker)
        elif self.on_lost is not None and state in (State.SUSPECT, State.GONE):
            self.on_lost(worker)
        return True

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


def _wake(worker: Worker) -> None:
    """Asks for a probe at once."""
    if worker.wake_probe is not None:
        worker.wake_probe()


def _nothing() -> None:
    return None


def _nothing_of(worker: Worker) -> None:
    return None

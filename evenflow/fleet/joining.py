"""Who joins the fleet while it runs and who leaves it: self-registered workers, and those an operator adds.

What comes in is already decoded and allowed; here it is judged, and the registry told. A worker takes no traffic before
a probe of its advertised address has succeeded, whatever it says of itself. Opens no socket.
"""

import logging
from collections.abc import Sequence
from ipaddress import ip_address
from math import inf, isfinite
from pathlib import Path
from time import monotonic, time

from pydantic import ValidationError

from evenflow.config import WorkerSettings
from evenflow.config.settings import FleetSettings, worker_url
from evenflow.fleet.registry import Registry, Source, Worker
from evenflow.fleet.wanted import KeptGroup, KeptWorker, Wanted, WantedFile, kept
from evenflow.policy.health import State
from evenflow.wire.faults import CallerError

log = logging.getLogger("evenflow.fleet")

# Workers that may be in the fleet; more are refused, so that a script that registers for ever fills no memory.
WORKERS_MAX = 4096
# Models and characters that one registration may bring.
MODELS_MAX = 1024
NAME_CHARACTERS_MAX = 256
# Refused registrations that are remembered, to be shown beside the workers.
REFUSED_MAX = 64


class Registration:
    """What a worker says of itself, or an operator of it. Checked by `Joining.join`."""

    __slots__ = ("aliases", "api_key", "beats", "models", "name", "slots", "speed", "url")

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        models: Sequence[str] = (),
        speed: float = 1.0,
        slots: int | str | None = None,
        aliases: dict[str, str] | None = None,
        api_key: str | None = None,
        beats: bool = False,
    ) -> None:
        self.url = url
        self.name = name
        self.models = models
        self.speed = speed
        self.slots = slots
        self.aliases = aliases or {}
        self.api_key = api_key
        self.beats = beats


class Refused:
    """A registration that was not taken."""

    __slots__ = ("at_s", "name", "reason", "url")

    def __init__(self, name: str, url: str, reason: str) -> None:
        self.name = name
        self.url = url
        self.reason = reason
        self.at_s = time()


class Joining:
    def __init__(self, registry: Registry, settings: FleetSettings) -> None:
        self._registry = registry
        self._settings = settings
        self._file = WantedFile(Path(settings.state) if settings.state else None)
        # What operators asked of groups; written by the reconciler, kept with the workers.
        self.groups: dict[str, KeptGroup] = {}
        # By what they would have been called.
        self.refused: dict[str, Refused] = {}

    # -- in ------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Takes in who was there when the gateway ended. They are probed first, as all are."""
        wanted = self._file.read()
        self.groups = {group.name: group for group in wanted.groups}
        expires_s = monotonic() + self._settings.heartbeat_expiry_s
        for one in wanted.workers:
            try:
                worker = self._restored(one)
            except (ValidationError, ValueError):
                log.error("the worker %r of %s is not one that can be taken in again", one.name, self._file.path)
                continue
            if worker.name not in self._registry.workers and self.by_url(worker.url) is None:
                if one.beats:
                    worker.expires_s = expires_s
                self._registry.add(worker)

    @staticmethod
    def _restored(one: KeptWorker) -> Worker:
        return Worker(one.settings(), Source(one.source), models_told=one.models)

    def join(self, registration: Registration, source: Source, *, from_here: bool) -> Worker:
        """A worker registers, or is added. `from_here`: whoever says so is on this machine.

        1. Its address is one of the configuration: that stays as it is configured.
        2. It is known as it says: it lives. Other models are taken over at once.
        3. It is new, or something else of it has changed: it takes the place of what had its name or its address.

        Raises CallerError, naming the parameter.
        """
        try:
            return self._join(registration, source, from_here=from_here)
        except CallerError as error:
            name = (registration.name or registration.url)[:NAME_CHARACTERS_MAX]
            while len(self.refused) >= REFUSED_MAX:
                del self.refused[next(iter(self.refused))]
            self.refused[name] = Refused(name, registration.url[:NAME_CHARACTERS_MAX], error.message)
            log.warning("the worker %r was refused: %s", name, error.message)
            raise

    def _join(self, registration: Registration, source: Source, *, from_here: bool) -> Worker:
        settings = checked(registration)
        if source is Source.JOINED and not from_here and is_local(settings.parts.hostname or ""):
            raise CallerError(
                f"The worker advertises {settings.url}, which is this gateway's own machine and not the worker's. "
                "Advertise the address under which the gateway reaches it (evenflow join --advertise URL; "
                "--worker-address of FastChat).",
                param="url",
            )
        same_url = self.by_url(settings.url)
        if same_url is not None and same_url.source is Source.CONFIGURED:  # (1)
            return same_url
        same_name = self._registry.workers.get(settings.name)
        if same_name is not None and same_name.source in (Source.CONFIGURED, Source.LAUNCHED):
            raise CallerError(
                f"There is a worker {settings.name!r} already, at {same_name.url}. Choose another name.", param="name"
            )
        worker = Worker(settings, source, models_told=registration.models)
        expires_s = monotonic() + self._settings.heartbeat_expiry_s if registration.beats else inf
        if same_url is not None and same_url is same_name and is_same(same_url, worker):  # (2)
            self._registry.told_models(same_url, worker.models_told)
            self._registry.beat(same_url, expires_s)
            return same_url
        if same_name is None and same_url is None and len(self._registry.workers) >= WORKERS_MAX:
            raise CallerError(f"The fleet has {WORKERS_MAX} workers, and takes no more. Remove some first.", status=403)
        worker.expires_s = expires_s  # (3)
        if same_url is not None and same_url is not same_name:
            self._registry.remove(same_url, "it registered under another name")
        self._registry.add(worker)
        self.refused.pop(settings.name, None)
        if source is Source.JOINED and not registration.beats and self._file.path is None:
            log.warning(
                "worker %s joined without heartbeats: a restart of the gateway forgets it; set fleet.state to a file "
                "to keep it",
                worker.name,
            )
        return worker

    def beat(self, who: str) -> bool:
        """A heartbeat of the worker with that name or address; False when there is none, and it should register."""
        worker = self.find(who)
        if worker is None:
            return False
        self._registry.beat(worker, inf if worker.expires_s == inf else monotonic() + self._settings.heartbeat_expiry_s)
        return True

    # -- out -----------------------------------------------------------------------------------------------------

    def leave(self, worker: Worker, reason: str, *, now: bool = False) -> None:
        """It finishes what it runs and goes, or goes at once."""
        if now:
            self._registry.remove(worker, reason)
        else:
            self._registry.drain(worker, reason, then_remove=True)

    def each_second(self) -> None:
        """Writes the wanted fleet down if it has changed. Small, and seldom: not worth a thread."""
        if self._file.path is not None:
            groups = sorted(self.groups.values(), key=lambda group: group.name)
            self._file.write(Wanted(workers=kept(self._registry.workers.values()), groups=groups))

    # -- who is it -----------------------------------------------------------------------------------------------

    def find(self, who: str) -> Worker | None:
        """By its name, or by its address in any spelling."""
        worker = self._registry.workers.get(who)
        if worker is not None:
            return worker
        try:
            return self.by_url(worker_url(who))
        except ValueError:
            return None

    def by_url(self, url: str) -> Worker | None:
        for worker in self._registry.workers.values():
            if worker.url == url and worker.state is not State.GONE:
                return worker
        return None


def checked(registration: Registration) -> WorkerSettings:
    """As a worker of the configuration would be. Raises CallerError with the first thing that is wrong."""
    models = registration.models
    if len(models) > MODELS_MAX or any(not 0 < len(model) <= NAME_CHARACTERS_MAX for model in models):
        raise CallerError(
            f"A worker may serve {MODELS_MAX} models at most, each with a name of 1 to {NAME_CHARACTERS_MAX} "
            "characters.",
            param="models",
        )
    if not isfinite(registration.speed) or registration.speed <= 0:
        raise CallerError(f"speed must be a number above 0, is {registration.speed}.", param="speed")
    typed: dict[str, object] = {
        "url": registration.url,
        "speed": registration.speed,
        "aliases": registration.aliases,
    }
    for name in ("name", "slots", "api_key"):
        value = getattr(registration, name)
        if value:
            typed[name] = value
    try:
        return WorkerSettings.model_validate(typed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else "url"
        text = str(first["msg"]).removeprefix("Value error, ")
        raise CallerError(f"{param}: {text}.", param=param) from None


def is_same(old: Worker, new: Worker) -> bool:
    """Whether what is registered is what is known, but for its models. One that leaves comes back as a new one."""
    return old.state is not State.DRAINING and old.source is new.source and old.settings == new.settings


def is_local(host: str) -> bool:
    """An address that means another machine to everybody who reads it."""
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified



"""The wanted fleet on disk: which workers joined or were added, so that a restarted gateway finds them again.

One small JSON file, written whole beside its place and then moved there, so that a crash leaves the old one or the new
one. What is kept is what was wished for; nothing of what runs, waits or was measured. A file that cannot be read is put
aside under another name and told of, never overwritten. May hold credentials of workers, so only its owner may read it.
"""

import contextlib
import logging
import os
from collections.abc import Iterable
from math import inf
from pathlib import Path

import msgspec

from evenflow.config import WorkerSettings
from evenflow.fleet.registry import Source, Worker

log = logging.getLogger("evenflow.fleet")

FORMAT = 1
KEPT_SOURCES = (Source.ADDED, Source.JOINED)


class KeptWorker(msgspec.Struct, omit_defaults=True):
    """A worker as it was registered."""

    name: str
    url: str
    source: str
    models: list[str] = []
    speed: float = 1.0
    slots: int | str | None = None
    aliases: dict[str, str] = {}
    api_key: str | None = None
    # Whether it must send heartbeats.
    beats: bool = False

    def settings(self) -> WorkerSettings:
        """Raises pydantic.ValidationError for what no version of ours has written."""
        typed = {"name": self.name, "url": self.url, "speed": self.speed, "aliases": self.aliases}
        if self.slots is not None:
            typed["slots"] = self.slots
        if self.api_key is not None:
            typed["api_key"] = self.api_key
        return WorkerSettings.model_validate(typed)


class KeptGroup(msgspec.Struct, omit_defaults=True):
    """What an operator asked of a group beyond its configuration."""

    name: str
    # Instances held there; None while the group scales by itself.
    wanted: int | None = None
    # The version it was rolled to, and that one's command; None for the configuration's.
    version: str | None = None
    command: list[str] | None = None


class Wanted(msgspec.Struct):
    """The whole file."""

    format: int = FORMAT
    workers: list[KeptWorker] = []
    groups: list[KeptGroup] = []


class WantedFile:
    """Reads once at the start, and writes when something has changed. Without a path it keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._written = b""

    def read(self) -> Wanted:
        """What was wanted when the gateway ended; nothing when there is no file, or none that can be read."""
        if self.path is None:
            return Wanted()
        try:
            self._written = self.path.read_bytes()
            wanted = msgspec.json.decode(self._written, type=Wanted)
            if wanted.format > FORMAT:
                raise ValueError(f"it was written by a newer version (format {wanted.format})")
            return wanted
        except FileNotFoundError:
            return Wanted()
        except (OSError, ValueError) as error:
            self._put_aside(error)
            return Wanted()

    def write(self, wanted: Wanted) -> None:
        """Replaces the file if that says something else. Errors are logged: the gateway goes on without."""
        page = msgspec.json.format(msgspec.json.encode(wanted))
        if self.path is None or page == self._written:
            return
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        except OSError as error:
            log.error(
                "the fleet cannot be kept in %s (%s): a restart of the gateway will know joined workers again only "
                "when they beat; make the folder writable, or change fleet.state",
                self.path,
                error.strerror,
            )
            with contextlib.suppress(OSError):
                beside.unlink()
        self._written = page

    def _put_aside(self, error: Exception) -> None:
        assert self.path is not None
        aside = self.path.with_name(f"{self.path.name}.unreadable")
        log.error("the fleet in %s cannot be read (%s); it is put aside as %s", self.path, error, aside.name)
        self._written = b""
        with contextlib.suppress(OSError):
            self.path.replace(aside)


def kept(workers: Iterable[Worker]) -> list[KeptWorker]:
    """Those of the workers that come back after a restart, sorted by name."""
    return [
        KeptWorker(
            name=worker.name,
            url=worker.url,
            source=worker.source.value,
            models=sorted(worker.models_told),
            speed=worker.speed,
            slots=worker.settings.slots,
            aliases=dict(worker.aliases),
            api_key=None if worker.settings.api_key is None else worker.settings.api_key.reveal(),
            beats=worker.expires_s < inf,
        )
        for worker in sorted(workers, key=lambda worker: worker.name)
        if worker.source in KEPT_SOURCES and not worker.removes_when_idle
    ]

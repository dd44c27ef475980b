"""What the benchmark must know of a gateway to run it."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where one gateway runs: everything its command and configuration may need."""

    # Configuration, logs and temporary files go here; made anew for each run.
    directory: pathlib.Path
    # The gateway listens here, on 127.0.0.1.
    port: int
    # Free as well, for those who want a port of their own for metrics.
    spare_port: int
    # The mock engine's, each playing one worker that serves the model "mock".
    worker_ports: tuple[int, ...]
    # The only key that callers use.
    key: str

    @property
    def worker_urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.worker_ports)


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """How to start it."""

    command: tuple[str, ...]
    version: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One row of the table."""

    name: str
    about: str
    # Installs what is missing, writes the configuration, says how to start; raises NotMeasured if it cannot.
    prepare: Callable[[Site], Start]
    # Part of a run that names no gateways.
    by_default: bool = True
    # How long it may take until the first answer.
    startup_s: float = 20.0
    # Fewer for those that cannot carry the usual number; the table says so.
    paced_streams: int = 200
    open_streams: int = 2000
    # The time over which the open streams begin: as fast as all but the slowest can take them.
    opening_s: float = 2.0

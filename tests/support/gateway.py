"""A running gateway for tests: in this process in a thread of its own, or as a process of its own.

Both start from a dictionary that is written as YAML and read like a user's file. The process is for what
a thread can not show: signals, descriptors, memory and logs.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import uvloop
import yaml

from support.http import Answer, ClosedEarlyError, fetch, post
from support.mock_engine import MockEngine

ROOT = Path(__file__).resolve().parents[2]
# Counters that must be zero whenever nothing is going on; idle kept connections are allowed to stay.
AT_REST = ("in_flight", "queued", "leases", "client_connections", "worker_connections_busy", "calls")


def settings_for(*engines: MockEngine, slots: int = 32, models: Any = ("m",), **sections: Any) -> dict[str, Any]:
    """Settings with one worker per engine; a section given replaces or extends the default one."""
    settings: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "workers": [{"url": engine.url, "slots": slots, "models": list(models or ())} for engine in engines],
        "fleet": {"probe_interval_s": 0.2},
        "log": {"access": "off"},
    }
    if models is None:
        for worker in settings["workers"]:
            del worker["models"]
    for name, section in sections.items():
        both_maps = isinstance(section, dict) and isinstance(settings.get(name), dict)
        settings[name] = {**settings[name], **section} if both_maps else section
    return settings


def write_settings(path: Path, settings: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    return path


def wait_until(condition: Callable[[], Any], seconds: float = 5.0, what: str = "") -> Any:
    """Polls until the condition holds; its value. Fails after the time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.002)
    return value


class Running(Protocol):
    """What tests need of a gateway, whichever way it runs."""

    port: int

    def stop(self, drain_s: float = 0.0) -> None: ...


class GatewayThread:
    """A gateway in this process, on a uvloop in its own thread."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        from evenflow.config import load
        from evenflow.gateway import Gateway

        loaded = load(str(write_settings(path, settings)), environ={}, overrides={})
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()

        async def build() -> Gateway:
            gateway = Gateway(loaded)
            await gateway.start()
            return gateway

        self.gateway = self.call(build())
        self.port: int = self.gateway.port
        self.stopped = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, Any], seconds: float = 20.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def counters(self) -> dict[str, int]:
        async def read() -> dict[str, int]:
            return dict(self.gateway.counters())

        counters: dict[str, int] = self.call(read())
        return counters

    def counter(self, name: str) -> int:
        return self.counters()[name]

    def wait_for(self, seconds: float = 5.0, **expected: int) -> None:
        """Until the named counters have these values."""
        wait_until(
            lambda: all(self.counters()[name] == value for name, value in expected.items()),
            seconds,
            f"{expected} in {self.counters()}",
        )

    def wait_at_rest(self, seconds: float = 5.0) -> None:
        """Until all that counts work in progress is zero."""
        deadline = time.monotonic() + seconds
        while busy := {name: n for name, n in self.counters().items() if name in AT_REST and n}:
            assert time.monotonic() < deadline, f"not at rest after {seconds} s: {busy}"
            time.sleep(0.002)

    def stop(self, drain_s: float = 0.0) -> None:
        if self.stopped:
            return
        self.stopped = True
        try:
            self.call(self.gateway.stop(drain_s=drain_s), drain_s + 20)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)


class GatewayProcess:
    """`evenflow serve` as a process; its output is kept in files beside its settings."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any] | None,
        *,
        ready: bool = True,
        arguments: tuple[str, ...] = (),
    ) -> None:
        if settings is not None:
            arguments = ("--config", str(write_settings(path, settings)), *arguments)
        self.path = path
        self.stdout_path = path.with_suffix(".out")
        self.stderr_path = path.with_suffix(".err")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("EVENFLOW_", "FASTCHAT_"))}
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "evenflow", "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=environ,
            )
        self.port = 0
        if ready:
            self.port = wait_until(self._listening, 15, f"listening: {self.stderr_path}")

    def _listening(self) -> int:
        assert self.process.poll() is None, self.stderr
        for line in self.stderr.splitlines():
            if "listening on http://127.0.0.1:" in line:
                return int(line.rsplit(":", 1)[1].strip(" /"))
        return 0

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def signal(self, number: int = signal.SIGTERM) -> float:
        self.process.send_signal(number)
        return time.monotonic()

    def wait(self, seconds: float = 10.0) -> int:
        return self.process.wait(seconds)

    def stop(self, drain_s: float = 0.0) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(drain_s + 3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)


def wait_ready(gateway: Running, seconds: float = 5.0) -> None:
    wait_until(lambda: status_of(gateway, "/readiness") == 200, seconds, "readiness")


def status_of(gateway: Running, path: str) -> int:
    try:
        return fetch(gateway.port, "GET", path).status
    except (ClosedEarlyError, OSError):
        return 0


def served_at_once(gateway: Running, *, key: str | None = None, within_s: float = 1.0) -> Answer:
    """A good request is answered well, soon: what must hold after any misuse."""
    started = time.monotonic()
    answer = post(gateway.port, {"model": "m", "messages": [{"role": "user", "content": "good"}]}, key=key)
    assert answer.status == 200, answer
    assert time.monotonic() - started < within_s
    return answer


def metric(gateway: Running, name: str, *, key: str | None = None, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    total = 0.0
    for line in fetch(gateway.port, "GET", "/metrics", key=key).body.decode().splitlines():
        series, _, value = line.rpartition(" ")
        if series.split("{")[0] == name and all(f'{label}="{v}"' in series for label, v in labels.items()):
            total += float(value)
    return total


def log_lines(path: Path) -> list[dict[str, Any]]:
    """The access log without what the fixtures asked themselves."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["route"] != "other" or line["status"] not in (200, 503)]


EngineMaker = Callable[..., MockEngine]
GatewayMaker = Callable[..., GatewayThread]
ProcessMaker = Callable[..., GatewayProcess]

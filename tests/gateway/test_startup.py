"""Starting: wrong configurations are told with their place, right ones serve (report 45)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gateway import (
    ROOT,
    GatewayProcess,
    ProcessMaker,
    served_at_once,
    settings_for,
    wait_ready,
    wait_until,
    write_settings,
)
from support.http import fetch
from support.mock_engine import MockEngine


def serve(*arguments: str, seconds: float = 10, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evenflow", *arguments], capture_output=True, text=True, timeout=seconds,
        cwd=ROOT, env={**os.environ, **environ}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("limits:\n  queud: 5\n", ("evenflow.yaml:2", "limits.queud", "'queued'")),
        ("lisen: {port: 0}\n", ("evenflow.yaml:1", "lisen", "'listen'")),
        ("scheduling: {placement: fastest}\n", ("evenflow.yaml:1", "scheduling.placement", "least_work")),
        ("workers:\n  - url: 'http://127.0.0.1:9'\n    slots: many\n", ("evenflow.yaml:3", "slots")),
        ("tenants:\n  - {name: a, keys: [k], weight: 0}\n", ("evenflow.yaml:2", "weight")),
        ("tenants:\n  - {name: a, keys: [k], group: gold}\n", ("evenflow.yaml:2", "group", "gold")),
        ("tenants:\n  - {name: a, keys: [k]}\n  - {name: a, keys: [j]}\n", ("evenflow.yaml:3", "name")),
        ("listen:\n\tport: 1\n", ("evenflow.yaml:2",)),
    ],
    ids=["option", "section", "choice", "type", "weight", "group", "duplicate", "tab"],
)
def test_a_wrong_configuration_stops_the_start(tmp_path: Path, text: str, told: tuple[str, ...]) -> None:
    """Report 45, S3, S65: nothing is ignored until the first request."""
    path = tmp_path / "evenflow.yaml"
    path.write_text(text)
    for command in (("serve", "--config", str(path)), ("config", "check", str(path))):
        done = serve(*command)
        assert done.returncode != 0
        output = done.stdout + done.stderr
        assert "Traceback" not in output
        for part in told:
            assert part in output, output


def test_a_port_in_use_is_told(engine: MockEngine, tmp_path: Path) -> None:
    path = write_settings(tmp_path / "c.yaml", settings_for(engine, listen={"port": engine.port}))
    done = serve("serve", "--config", str(path))
    assert done.returncode != 0
    assert str(engine.port) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_on_the_command_line_needs_no_file(engine: MockEngine, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "none.yaml", None, arguments=("--port", "0", "--worker", engine.url))
    try:
        wait_ready(gateway)
        served_at_once(gateway)
    finally:
        gateway.stop()
    assert gateway.process.returncode == 0


def test_a_gateway_starts_before_its_workers(engine: MockEngine, processes: ProcessMaker) -> None:
    engine.stop()
    gateway = processes(engine, wait=False, models=None)
    assert fetch(gateway.port, "GET", "/health").status == 200
    assert fetch(gateway.port, "GET", "/readiness").status == 503
    engine.start()
    wait_until(lambda: fetch(gateway.port, "GET", "/readiness").status == 200, 5)
    served_at_once(gateway)

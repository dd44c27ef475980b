"""FastChat's own worker code joins the fleet, beats, and finds a restarted gateway again.

Needs a virtual environment with FastChat, which `make test-all` makes; without it this is skipped.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.gateway import ROOT, EngineMaker, GatewayMaker, wait_until
from support.http import chat, fetch, post

PYTHON = ROOT / ".venv-fastchat" / "bin" / "python"
BEAT_S = 1
ADMIN = (("authorization", "Bearer sk-admin"),)
WORKER = """
import sys, time
from fastchat.conversation import get_conv_template
from fastchat.serve.base_model_worker import BaseModelWorker

class Worker(BaseModelWorker):
    def make_conv_template(self, conv_template=None, model_path=None):
        return get_conv_template("vicuna_v1.1")

controller, address = sys.argv[1:]
worker = Worker(controller, address, "w1", "models/vicuna-7b", ["vicuna-7b"], 5)
worker.init_heart_beat()
time.sleep(3600)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="FastChat is not installed; make test-all does that"),
]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Starts FastChat's worker code for an engine: `join(gateway address, engine address)`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(controller: str, address: str) -> None:
        process = subprocess.Popen(
            [str(PYTHON), "-c", WORKER, controller, address],
            env={"FASTCHAT_WORKER_HEART_BEAT_INTERVAL": str(BEAT_S), "LOGDIR": str(tmp_path)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it logs there
        )
        started.append(process)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.timeout(60)
def test_their_worker_joins_and_finds_a_restarted_gateway(
    engines: EngineMaker, gateways: GatewayMaker, join: Callable[[str, str], None]
) -> None:
    engine = engines(models=("vicuna-7b",))
    settings = {"auth": {"admin_keys": ["sk-admin"], "worker_token": "join-me"}}
    first = gateways(**settings)
    join(f"http://worker:join-me@127.0.0.1:{first.port}", engine.url)
    wait_until(lambda: post(first.port, chat(model="vicuna-7b")).status == 200, 10)
    port = first.port
    first.stop()
    second = gateways(**settings, listen={"port": port})
    began = time.monotonic()
    wait_until(lambda: post(second.port, chat(model="vicuna-7b")).status == 200, 10)
    took_s = time.monotonic() - began
    print(f"back after {took_s:.2f} s, with a heartbeat each {BEAT_S} s")
    assert took_s < BEAT_S + 5  # their client waits 5 s when it meets a gateway that is not there
    (worker,) = fetch(port, "GET", "/admin/v1/workers", headers=ADMIN).json["workers"]
    assert worker["source"] == "joined"
    assert worker["heartbeat_due_s"] > 80

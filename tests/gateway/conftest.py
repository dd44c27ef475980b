"""Fixtures of the socket-level tests: engines and gateways that are stopped whatever happens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gateway import (
    EngineMaker,
    GatewayMaker,
    GatewayProcess,
    GatewayThread,
    ProcessMaker,
    settings_for,
    wait_ready,
)
from support.http import Client
from support.mock_engine import Behaviour, MockEngine

HERE = Path(__file__).parent
TEST_TIME_S = 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIME_S))


@pytest.fixture(autouse=True)
def _no_client_stays_open() -> Iterator[None]:
    yield
    for client in list(Client.left_open):
        client.close()


@pytest.fixture
def engines() -> Iterator[EngineMaker]:
    """Starts engines: `engines(Behaviour(...), models=("a",), any_attribute=value)`."""
    made: list[MockEngine] = []

    def make(behaviour: Behaviour | None = None, *, models: tuple[str, ...] = ("m",), **attributes: Any) -> MockEngine:
        engine = MockEngine(models, name=f"mock{len(made)}")
        engine.behaviour = behaviour or Behaviour()
        for name, value in attributes.items():
            setattr(engine, name, value)
        made.append(engine)
        return engine.start()

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture
def engine(engines: EngineMaker) -> MockEngine:
    return engines()


@pytest.fixture
def gateways(tmp_path: Path, engines: EngineMaker) -> Iterator[GatewayMaker]:
    """Starts gateways in this process: `gateways(engine, slots=4, limits={...})`; all must end at rest."""
    made: list[GatewayThread] = []

    def make(*workers: MockEngine, wait: bool = True, **settings: Any) -> GatewayThread:
        path = tmp_path / f"gateway{len(made)}.yaml"
        gateway = GatewayThread(path, settings_for(*workers, **settings))
        made.append(gateway)
        if wait and workers:
            wait_ready(gateway)
        return gateway

    yield make
    for gateway in made:
        gateway.stop()
        left = {name: n for name, n in gateway.gateway.counters().items() if n}
        assert not left, f"after the stop: {left}"


@pytest.fixture
def processes(tmp_path: Path, engines: EngineMaker) -> Iterator[ProcessMaker]:
    """Starts gateways as processes of their own."""
    made: list[GatewayProcess] = []

    def make(*workers: MockEngine, wait: bool = True, **settings: Any) -> GatewayProcess:
        path = tmp_path / f"process{len(made)}.yaml"
        gateway = GatewayProcess(path, settings_for(*workers, **settings))
        made.append(gateway)
        if wait and workers:
            wait_ready(gateway)
        return gateway

    yield make
    for gateway in made:
        gateway.stop()

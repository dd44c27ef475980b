"""S34: the in-flight limit of a worker follows the engine's own waiting queue, and its memory is not overbooked."""

import time

import pytest
from support.gateway import EngineMaker, GatewayMaker, GatewayThread, wait_until
from support.http import CHAT, Client, chat, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

START = 32


def page(waiting: float, running: float = 0.0, more: str = "") -> bytes:
    return (
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{model_name="m"}} {running}\n'
        f'vllm:num_requests_waiting{{model_name="m"}} {waiting}\n{more}'
    ).encode()


def automatic(engine: MockEngine, slots: str | None = None) -> list[dict[str, object]]:
    worker: dict[str, object] = {"url": engine.url, "models": ["m"]}
    return [worker if slots is None else {**worker, "slots": slots}]


def slots(gateway: GatewayThread) -> int:
    (worker,) = fetch(gateway.port, "GET", "/list_workers").json["workers"]
    return int(worker["slots"])


@pytest.mark.parametrize("configured", [None, "auto"])
def test_a_queue_in_the_engine_lowers_the_limit(
    engine: MockEngine, gateways: GatewayMaker, configured: str | None
) -> None:
    waiting = [11.0]
    engine.metrics = lambda: page(waiting[0])
    gateway = gateways(engine, workers=automatic(engine, configured))
    wait_until(lambda: slots(gateway) <= START - 5, 3)  # (11 - 1) / 2 at each report
    waiting[0] = 101.0
    wait_until(lambda: slots(gateway) == 4, 3)
    # Nothing waits there, but the limit was not reached either: it stays.
    waiting[0] = 0.0
    time.sleep(1.2)
    assert slots(gateway) == 4
    # It is reached, and nothing waits in the engine: one more at each report.
    engine.behaviour = Behaviour(gated=True)
    clients = [Client(gateway.port) for _ in range(9)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat()))
    wait_until(lambda: engine.running == 9, 5)
    assert slots(gateway) in (9, 10)
    engine.open_gate()
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()


def test_a_fixed_number_stays(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.metrics = lambda: page(100.0)
    gateway = gateways(engine, slots=7)
    time.sleep(1.2)
    assert slots(gateway) == 7


def test_without_reports_it_stays_where_it_is(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, workers=automatic(engine))
    time.sleep(0.8)
    assert slots(gateway) == START
    assert post(gateway.port, chat()).status == 200


def test_stale_reports_freeze_it(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.metrics = lambda: page(11.0)
    gateway = gateways(engine, workers=automatic(engine, "auto"))
    wait_until(lambda: slots(gateway) < START, 3)
    engine.metrics = None
    time.sleep(0.7)
    frozen = slots(gateway)
    for _ in range(40):
        assert post(gateway.port, chat(stream=True)).status == 200
    time.sleep(0.7)
    assert slots(gateway) == frozen


def test_a_page_that_hangs_holds_up_no_request(engines: EngineMaker, gateways: GatewayMaker) -> None:
    engine = engines()

    def hang() -> bytes:
        time.sleep(0.3)  # blocks the mock's loop: every answer of it is late, but not the gateway
        return page(0.0)

    other = engines()
    engine.metrics = hang
    workers = [*automatic(engine), *automatic(other)]
    workers[1]["models"] = ["other"]
    gateway = gateways(engine, other, workers=workers)
    for _ in range(50):
        began = time.monotonic()
        assert post(gateway.port, {**chat(), "model": "other"}).status == 200
        assert time.monotonic() - began < 0.2


def test_the_memory_of_an_engine_is_a_limit_too(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Where the engine tells the size of its KV cache, what runs is thought to fit in it."""
    blocks = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="90"} 1.0\n'
    engine.metrics = lambda: page(0.0, more=blocks)
    gateway = gateways(engine, workers=automatic(engine))
    (worker,) = gateway.gateway._registry.workers.values()
    wait_until(lambda: worker.tokens_max < 1700, 3)
    engine.behaviour = Behaviour(gated=True)
    clients = [Client(gateway.port, timeout_s=20) for _ in range(10)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat("x" * 1200, max_tokens=100)))  # some 430 tokens each
    wait_until(lambda: engine.running == 3, 3)
    time.sleep(0.3)
    assert engine.running == 3
    assert gateway.counter("queued") == 7
    # One that is larger than the whole memory runs alone: the engine is to say what it thinks of it.
    engine.open_gate()
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    assert post(gateway.port, chat("y" * 40_000)).status == 200
    gateway.wait_at_rest()


def test_slower_first_tokens_lower_it_where_nothing_is_reported(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, workers=automatic(engine, "auto"))

    def ask(times: int) -> None:
        clients = [Client(gateway.port) for _ in range(times)]
        for client in clients:
            client.send(request_bytes("POST", CHAT, chat(stream=True)))
        for client in clients:
            assert client.read_answer().status == 200
            client.close()

    for _ in range(4):
        ask(16)
    assert slots(gateway) == START  # never reached, never slow
    engine.behaviour = Behaviour(first_delay_s=0.5)
    ask(24)
    gateway.wait_at_rest()
    assert slots(gateway) < START

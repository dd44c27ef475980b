"""What is taken is given back: slots, places and limits after every way in which a request can end."""

import asyncio
from collections import Counter

import pytest
from support.gateway import EngineMaker, GatewayMaker, served_at_once, wait_until
from support.http import CHAT, Client, chat, exchange, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

ENDINGS = {
    "bad request": Behaviour(status=400),
    "server error": Behaviour(status=500),
    "bad gateway": Behaviour(status=502),
    "closes": Behaviour(close_at_once=True),
    "resets": Behaviour(close_at_once=True, reset=True),
    "never answers": Behaviour(silent=True),
    "stalls": Behaviour(tokens=9, stall_after=2),
    "cut": Behaviour(tokens=9, close_after=2),
    "cut before content": Behaviour(close_after=0),
    "garbage": Behaviour(raw=b"garbage\r\n\r\n"),
    "error event": Behaviour(error_after=0),
    "late error event": Behaviour(tokens=9, error_after=3),
    "short": Behaviour(content_length=1000),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_concurrency_limit_is_released_on_every_ending(
    engine: MockEngine, gateways: GatewayMaker, ending: str, stream: bool
) -> None:
    """Report 6: ten bad ones at a limit of ten, then a good one at once."""
    engine.named["bad"] = ENDINGS[ending]
    tenant = {"name": "a", "keys": ["sk-a"], "limits": {"concurrency": 10}}
    timeouts = {"first_byte_s": 0.3, "idle_s": 0.3}
    gateway = gateways(engine, slots=10, tenants=[tenant], timeouts=timeouts)
    data = request_bytes("POST", CHAT, chat("<<bad>>", stream=stream), key="sk-a", close=True)

    async def run() -> None:
        await asyncio.gather(*(exchange(gateway.port, data) for _ in range(10)))

    asyncio.run(run())
    gateway.wait_at_rest()
    wait_until(lambda: post(gateway.port, chat(), key="sk-a").status == 200, 3, "served again")
    # All ten places are free.
    engine.behaviour = Behaviour(gated=True)
    clients = [Client(gateway.port) for _ in range(10)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
    wait_until(lambda: engine.running >= 10, 3, "ten at once")
    for client in clients:
        client.close()
    gateway.wait_at_rest()


def test_refused_requests_take_nothing(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 33: what is refused for its key, its body, its model or a full queue costs nothing."""
    engine.named["hold"] = Behaviour(gated=True)
    tenant = {"name": "a", "keys": ["sk-a"], "limits": {"concurrency": 1, "queued": 1}}
    gateway = gateways(engine, tenants=[tenant])
    for _ in range(20):
        assert post(gateway.port, chat(), key="sk-wrong").status == 401
        assert post(gateway.port, chat(n=0), key="sk-a").status == 400
        assert post(gateway.port, b"{", key="sk-a").status == 400
        assert post(gateway.port, {**chat(), "model": "x"}, key="sk-a").status == 404
        served_at_once(gateway, key="sk-a")
    with Client(gateway.port) as holder, Client(gateway.port) as waiter:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-a"))
        wait_until(lambda: engine.running == 1)
        waiter.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
        gateway.wait_for(queued=1)
        for _ in range(20):
            assert post(gateway.port, chat(), key="sk-a").status == 429
        engine.open_gate()
        assert (holder.read_answer().status, waiter.read_answer().status) == (200, 200)
    gateway.wait_at_rest()
    served_at_once(gateway, key="sk-a")


def test_concurrency_spans_models_and_workers(engine: MockEngine, engines: EngineMaker, gateways: GatewayMaker) -> None:
    """A tenant's limit is one, also when its requests go to workers that share nothing."""
    other = engines(models=("other",))
    for mock in (engine, other):
        mock.behaviour = Behaviour(head_delay_s=0.02)
    tenant = {"name": "a", "keys": ["sk-a"], "limits": {"concurrency": 2}}
    workers = [{"url": engine.url, "models": ["m"]}, {"url": other.url, "models": ["other"]}]
    gateway = gateways(engine, other, tenants=[tenant], workers=workers)
    most = 0

    async def run() -> None:
        nonlocal most
        calls = [
            asyncio.create_task(
                exchange(
                    gateway.port,
                    request_bytes("POST", CHAT, {**chat(), "model": model}, key="sk-a", close=True),
                )
            )
            for model in ("m", "other") * 10
        ]
        while not all(call.done() for call in calls):
            # Of the gateway: two engines in two threads would be read at two moments.
            most = max(most, gateway.counter("in_flight"))
            await asyncio.sleep(0.001)
        assert Counter(call.result().status for call in calls) == {200: 20}

    asyncio.run(run())
    assert most <= 2
    gateway.wait_at_rest()


def test_a_free_place_is_given_at_once_to_another_model(
    engine: MockEngine, engines: EngineMaker, gateways: GatewayMaker
) -> None:
    """What ends on one worker lets go on what waits for another; nothing else would wake it."""
    other = engines(models=("other",))
    engine.behaviour = Behaviour(gated=True)
    tenant = {"name": "a", "keys": ["sk-a"], "limits": {"concurrency": 1}}
    workers = [{"url": engine.url, "models": ["m"]}, {"url": other.url, "models": ["other"]}]
    gateway = gateways(engine, other, tenants=[tenant], workers=workers)
    with Client(gateway.port) as first, Client(gateway.port) as second:
        first.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
        wait_until(lambda: engine.running == 1)
        second.send(request_bytes("POST", CHAT, {**chat(), "model": "other"}, key="sk-a"))
        gateway.wait_for(queued=1)
        assert not other.received
        engine.open_gate()
        second.sock.settimeout(0.5)
        assert second.read_answer().status == 200
        assert first.read_answer().status == 200
    gateway.wait_at_rest()


def test_leaving_callers_release_the_limit(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Reports 1, 6, 55: at the limit, the caller of the running and of the waiting one leave in turn."""
    engine.behaviour = Behaviour(silent=True)
    tenant = {"name": "a", "keys": ["sk-a"], "limits": {"concurrency": 1}}
    gateway = gateways(engine, tenants=[tenant])
    for _ in range(10):
        clients = [Client(gateway.port) for _ in range(4)]
        for client in clients:
            client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
        gateway.wait_for(queued=3)
        for client in clients[::2] + clients[1::2]:
            client.close()
        gateway.wait_at_rest()
    engine.behaviour = Behaviour()
    served_at_once(gateway, key="sk-a")

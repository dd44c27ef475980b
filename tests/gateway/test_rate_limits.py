"""Requests and tokens per minute: true headers, reserved and settled, refunded, the same on every route."""

import re

import pytest
from support.gateway import GatewayMaker, GatewayThread, wait_until
from support.http import CHAT, Answer, Client, chat, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

UNITS = ("requests", "tokens")


def tenant(**limits: int) -> dict[str, object]:
    return {"name": "a", "keys": ["sk-a"], "limits": limits}


def shown(answer: Answer, unit: str) -> tuple[int, int, float]:
    """limit, remaining, reset in seconds."""
    limit, remaining = (answer.header(f"x-ratelimit-{name}-{unit}") for name in ("limit", "remaining"))
    reset = answer.header(f"x-ratelimit-reset-{unit}")
    assert limit and remaining and reset, answer
    match = re.fullmatch(r"(?:(\d+)m)?([\d.]+)(ms|s)", reset)
    assert match, reset
    seconds = int(match[1] or 0) * 60 + float(match[2]) / (1000 if match[3] == "ms" else 1)
    return int(limit), int(remaining), seconds


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_headers_tell_the_truth(engine: MockEngine, gateways: GatewayMaker, stream: bool) -> None:
    """Report 14: they move as requests and tokens are spent, also on kept connections."""
    engine.behaviour = Behaviour(input_tokens=10, tokens=20)
    gateway = gateways(engine, tenants=[tenant(requests_per_minute=60, tokens_per_minute=6000)])
    with Client(gateway.port) as client:
        for spent in range(1, 5):
            client.send(request_bytes("POST", CHAT, chat(max_tokens=20, stream=stream), key="sk-a"))
            answer = client.read_answer()
            limit, remaining, reset_s = shown(answer, "requests")
            assert limit == 60
            assert 60 - spent <= remaining <= 60 - spent + 1
            assert spent - 1.5 <= reset_s <= spent
            limit, remaining, reset_s = shown(answer, "tokens")
            assert limit == 6000
            # Before it stand spent - 1 true ones of 30 tokens; its own is still the reservation.
            assert 6000 - 30 * (spent - 1) - 80 <= remaining < 6000 - 30 * (spent - 1) + 110


def test_a_tenant_without_limits_sees_none(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(headers=(("x-ratelimit-remaining-tokens", "5"),))
    gateway = gateways(engine, tenants=[{"name": "b", "keys": ["sk-b"]}])
    answer = post(gateway.port, chat(), key="sk-b")
    assert answer.status == 200
    assert not [name for name, _ in answer.headers if name.lower().startswith("x-ratelimit")]


def test_only_the_limit_that_is_set_is_shown(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, tenants=[tenant(requests_per_minute=5)])
    answer = post(gateway.port, chat(), key="sk-a")
    assert answer.header("x-ratelimit-limit-requests") == "5"
    assert answer.header("x-ratelimit-limit-tokens") is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens_are_limited_for_streams_too(engine: MockEngine, gateways: GatewayMaker, stream: bool) -> None:
    """Report 21: a hundred tokens a minute, sixty each: the third is refused, streamed or not."""
    engine.behaviour = Behaviour(input_tokens=10, tokens=50)
    gateway = gateways(engine, tenants=[tenant(tokens_per_minute=100)])
    ask = chat("hi", max_tokens=50, stream=stream)
    statuses = []
    for _ in range(3):
        answer = post(gateway.port, ask, key="sk-a")
        statuses.append(answer.status)
        gateway.wait_for(calls=0)
    assert statuses[0] == 200
    assert statuses[2] == 429
    assert answer.error["code"] == "rate_limit_exceeded"
    assert int(answer.header("retry-after") or 0) >= 1
    assert shown(answer, "tokens")[1] < 60
    # The wait that is told is true: what is missing comes at a hundred a minute.
    assert int(answer.header("retry-after") or 0) <= 60


def test_what_is_refused_later_is_refunded(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 33: a request that left the queue without running has used nothing of its rate."""
    engine.named["hold"] = Behaviour(gated=True)
    gateway = gateways(
        engine, slots=1, tenants=[tenant(requests_per_minute=100, tokens_per_minute=100_000), HOLDER]
    )
    before = shown(post(gateway.port, chat(), key="sk-a"), "requests")[1]
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-hold"))
        wait_until(lambda: engine.running == 1)
        for _ in range(20):  # they leave while they wait
            with Client(gateway.port) as client:
                client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
                gateway.wait_for(queued=1)
            gateway.wait_for(queued=0)
        for _ in range(3):  # their deadline passes
            late = post(gateway.port, chat(), headers=[("x-evenflow-deadline-ms", "1")], key="sk-a")
            assert late.status == 503
        engine.open_gate()
        holder.read_answer()
    after = shown(post(gateway.port, chat(), key="sk-a"), "requests")[1]
    assert after >= before - 1


HOLDER = {"name": "hold", "keys": ["sk-hold"]}
ROUTES = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": "m", "prompt": "x"},
    "/completions": {"model": "m", "prompt": "x"},
    "/v1/completions_qos": {"model": "m", "prompt": "x"},
    "/v1/chat/completions_qos": {**chat(), "user_id": "u"},
    "/v1/embeddings": {"model": "m", "input": "x"},
    "/v1/responses": {"model": "m", "input": "x"},
    "/v1/messages": {**chat(), "max_tokens": 5},
    "/v1/rerank": {"model": "m", "query": "x", "documents": ["y"]},
    "/v1/score": {"model": "m", "text_1": "x", "text_2": "y"},
    "/tokenize": {"model": "m", "prompt": "x"},
    "/detokenize": {"model": "m", "tokens": [1]},
}


def test_one_policy_on_every_route(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 57: no other route is a way around a limit."""
    gateway = gateways(engine, tenants=[tenant(requests_per_minute=1)])
    assert post(gateway.port, chat(), key="sk-a").status == 200
    for path, body in ROUTES.items():
        answer = post(gateway.port, body, path=path, key="sk-a")
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded"), path
    assert fetch(gateway.port, "GET", "/v1/models", key="sk-a").status == 200  # costs nothing, and is not counted


def most_at_once(engine: MockEngine, gateway: GatewayThread, asks: int) -> int:
    clients = [Client(gateway.port, timeout_s=20) for _ in range(asks)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    return engine.running_max


def test_concurrency_is_never_overshot(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 16: a hundred at once under a limit of five; the engine never saw a sixth."""
    engine.behaviour = Behaviour(head_delay_s=0.01)
    gateway = gateways(engine, slots=100, tenants=[tenant(concurrency=5)])
    assert most_at_once(engine, gateway, 100) == 5


@pytest.mark.parametrize("path", ["/completions", "/v1/completions_qos", "/v1/chat/completions_qos"])
def test_older_routes_reach_the_engine_by_their_new_names(
    engine: MockEngine, gateways: GatewayMaker, path: str
) -> None:
    """S72: the routes of older services are the normal ones under other names."""
    gateway = gateways(engine)
    answer = post(gateway.port, ROUTES[path], path=path)
    assert answer.status == 200
    asked = [received.path for received in engine.received if received.method == "POST"]
    assert asked == ["/v1/chat/completions" if "chat" in path else "/v1/completions"]

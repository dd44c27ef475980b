"""Tiers and deadlines that a request asks for itself: they can lower it, and nothing in it can raise it."""

import time

import pytest
from support.gateway import GatewayMaker, GatewayThread, wait_until
from support.http import CHAT, Answer, Client, chat, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

TIERS = [
    {"name": "gold", "groups": [{"name": "paying", "weight": 10}]},
    {"name": "standard", "groups": [{"name": "keys", "weight": 10}, {"name": "anonymous", "weight": 1}]},
    {"name": "batch", "groups": [{"name": "background", "weight": 1}]},
]
TENANTS = [
    {"name": "hold", "keys": ["sk-hold"], "group": "paying"},
    {"name": "gold", "keys": ["sk-gold"], "group": "paying"},
    {"name": "a", "keys": ["sk-a"], "group": "keys"},
    {"name": "b", "keys": ["sk-b"], "group": "keys"},
]


def order(
    engine: MockEngine, gateway: GatewayThread, *asks: tuple[str, str, dict[str, str], dict[str, object]]
) -> list[str]:
    """Queues (label, key, headers, fields) behind a held slot, in this order; the labels in order of service."""
    engine.named["hold"] = Behaviour(gated=True)
    clients = []
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-hold"))
        wait_until(lambda: engine.running == 1)
        for number, (label, key, headers, fields) in enumerate(asks, 1):
            client = Client(gateway.port, timeout_s=20)
            body = chat(f"[{label}]", **fields)
            client.send(request_bytes("POST", CHAT, body, list(headers.items()), key=key))
            clients.append(client)
            gateway.wait_for(queued=number)
        engine.open_gate()
        holder.read_answer()
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()
    labels = [received.body.partition(b"[")[2].partition(b"[")[2].partition(b"]")[0] for received in engine.received]
    return [label.decode() for label in labels if label]


def lower(tier: str) -> dict[str, str]:
    return {"x-evenflow-tier": tier}


def test_a_header_lowers_and_never_raises(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S6, S16: gold may go down to batch; a key of the standard tier stays where it is, whatever it asks for."""
    gateway = gateways(engine, slots=1, scheduling={"tiers": TIERS}, tenants=TENANTS)
    served = order(
        engine,
        gateway,
        ("lowered", "sk-gold", lower("batch"), {}),
        ("wants up", "sk-a", lower("gold"), {}),
        ("plain", "sk-b", {}, {}),
        ("gold", "sk-gold", {}, {}),
        ("same", "sk-gold", lower("gold"), {}),
    )
    assert served == ["gold", "same", "wants up", "plain", "lowered"]


@pytest.mark.parametrize(
    ("service_tier", "last"),
    [("flex", True), ("batch", True), ("auto", False), ("default", False), ("priority", False), ("gold", False)],
)
def test_the_service_tier_of_openai(
    engine: MockEngine, gateways: GatewayMaker, service_tier: str, last: bool
) -> None:
    gateway = gateways(engine, slots=1, scheduling={"tiers": TIERS}, tenants=TENANTS)
    served = order(
        engine,
        gateway,
        ("asks", "sk-a", {}, {"service_tier": service_tier}),
        ("plain", "sk-b", {}, {}),
    )
    assert served == (["plain", "asks"] if last else ["asks", "plain"])
    sent = engine.find("asks")[0].json
    assert sent["service_tier"] == service_tier  # it travels on: the engine may have an opinion too


def test_a_tier_that_does_not_exist(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, scheduling={"tiers": TIERS}, tenants=TENANTS)
    answer = post(gateway.port, chat(), headers=[("x-evenflow-tier", "platinum")], key="sk-a")
    assert answer.status == 400
    assert answer.error["param"] == "x-evenflow-tier"
    assert "gold, standard, batch" in answer.error["message"]
    assert post(gateway.port, chat(service_tier=5), key="sk-a").error["param"] == "service_tier"
    assert not engine.received or all(received.path != CHAT for received in engine.received)


def test_lowered_tenants_share_as_in_their_own_tier(engine: MockEngine, gateways: GatewayMaker) -> None:
    """In a tier that does not list them, groups count among themselves as in their own: keys 10, anonymous 1."""
    gateway = gateways(
        engine, slots=1, scheduling={"tiers": TIERS}, tenants=TENANTS, auth={"anonymous": True}
    )
    callers = (("n", None), ("a", "sk-a"))
    asks = [(f"{who}{i}", key, lower("batch"), {"max_tokens": 4}) for i in range(11) for who, key in callers]
    served = order(engine, gateway, *asks)  # type: ignore[arg-type]
    assert [label[0] for label in served[:11]].count("a") >= 9


def test_a_deadline_passes_in_the_queue(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, slots=1)
    engine.named["hold"] = Behaviour(gated=True)
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>")))
        wait_until(lambda: engine.running == 1)
        began = time.monotonic()
        answer = post(gateway.port, chat("late"), headers=[("x-evenflow-deadline-ms", "400")])
        took_s = time.monotonic() - began
        assert answer.status == 503
        assert answer.error["code"] == "overloaded"
        assert "deadline" in answer.error["message"]
        assert int(answer.header("retry-after") or 0) >= 1
        assert 0.4 <= took_s < 0.9
        assert gateway.counter("queued") == 0
        engine.open_gate()
        assert holder.read_answer().status == 200
    assert not engine.find("late")
    gateway.wait_at_rest()


def test_a_deadline_that_cannot_be_met_is_refused_at_once(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Where the pool's rate is known and the own queue is long, nobody waits for nothing."""
    gateway = gateways(engine, slots=1, tenants=TENANTS[2:])
    engine.behaviour = Behaviour(head_delay_s=0.05, tokens=50)
    for _ in range(30):  # some rate to go by
        post(gateway.port, chat(), key="sk-a")
    wait_until(lambda: all(pool.rate > 0 for pool in gateway.gateway._scheduler.pools), 3)
    engine.named["hold"] = Behaviour(gated=True)
    clients = [Client(gateway.port) for _ in range(60)]
    clients[0].send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-a"))
    wait_until(lambda: engine.running == 1)
    for client in clients[1:]:
        client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
    gateway.wait_for(queued=59)
    began = time.monotonic()
    answer = post(gateway.port, chat("late"), headers=[("x-evenflow-deadline-ms", "500")], key="sk-a")
    assert time.monotonic() - began < 0.3
    assert (answer.status, answer.error["code"]) == (503, "overloaded")
    assert int(answer.header("retry-after") or 0) >= 1
    # Whoever has no queue of its own in the way may try.
    with Client(gateway.port) as other:
        other.send(request_bytes("POST", CHAT, chat(), [("x-evenflow-deadline-ms", "20000")], key="sk-b"))
        gateway.wait_for(queued=60)
    for client in clients:
        client.close()
    gateway.wait_at_rest()


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "soon", "1e3", "9" * 30, "٣"])
def test_a_deadline_that_is_none(engine: MockEngine, gateways: GatewayMaker, value: str) -> None:
    gateway = gateways(engine)
    data = request_bytes("POST", CHAT, chat(), [("x-evenflow-deadline-ms", "PLACE")])
    with Client(gateway.port) as client:
        client.send(data.replace(b"PLACE", value.encode()))
        answer: Answer = client.read_answer()
    assert answer.status == 400
    assert answer.error["param"] == "x-evenflow-deadline-ms"


def test_a_request_that_waited_long_moves_up(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 36: strict tiers need not starve; after `max_wait_s` a request waits one tier higher."""
    tiers = [
        {"name": "high", "groups": [{"name": "keys", "weight": 10}]},
        {"name": "low", "max_wait_s": 1.0, "groups": [{"name": "anonymous", "weight": 1}]},
    ]
    gateway = gateways(
        engine, slots=1, scheduling={"tiers": tiers}, tenants=TENANTS[2:], auth={"anonymous": True}
    )
    engine.behaviour = Behaviour(head_delay_s=0.02)
    stop = time.monotonic() + 6
    low = Client(gateway.port, timeout_s=10)
    flood = [Client(gateway.port) for _ in range(4)]
    for client in flood:
        client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
    low.send(request_bytes("POST", CHAT, chat("[low]")))
    began = time.monotonic()
    while not engine.find("[low]") and time.monotonic() < stop:
        for client in flood:  # the high tier is never empty
            assert client.read_answer().status == 200
            client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
    assert 0.9 < time.monotonic() - began < 4
    assert low.read_answer().status == 200
    for client in [low, *flood]:
        client.close()
    gateway.wait_at_rest()


def test_an_idle_gateway_does_not_forget_how_fast_it_is(engine: MockEngine, gateways: GatewayMaker) -> None:
    """After a pause a deadline that is easily met is not refused, and Retry-After is no fantasy."""
    gateway = gateways(engine, slots=1, tenants=[{"name": "a", "keys": ["sk-a"], "limits": {"queued": 3}}])
    engine.behaviour = Behaviour(head_delay_s=0.05, tokens=20)
    for _ in range(30):
        post(gateway.port, chat(), key="sk-a")
    (pool,) = gateway.gateway._scheduler.pools
    wait_until(lambda: pool.rate > 0, 3)
    for _ in range(100):  # as many idle seconds
        pool.take_rate()
    clients = [Client(gateway.port) for _ in range(4)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat(), [("x-evenflow-deadline-ms", "10000")], key="sk-a"))
    wait_until(lambda: engine.running == 1)
    full = post(gateway.port, chat(), key="sk-a")
    if full.status == 429:
        assert int(full.header("retry-after") or 0) <= 60
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()


def test_lowered_work_takes_nobodys_floor(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S6: a floor is for those whose tier it is; who lowers itself goes behind them there."""
    tiers = [
        {"name": "high", "groups": [{"name": "keys", "weight": 10}]},
        {"name": "low", "min_share": 0.2, "groups": [{"name": "slow", "weight": 1}]},
    ]
    tenants = [
        {"name": "hold", "keys": ["sk-hold"]},
        {"name": "a", "keys": ["sk-a"]},
        {"name": "c", "keys": ["sk-c"], "group": "slow"},
    ]
    gateway = gateways(engine, slots=1, scheduling={"tiers": tiers}, tenants=tenants)
    asks = [
        (label, key, headers, {"max_tokens": 4})
        for _ in range(12)
        for label, key, headers in (("h", "sk-a", {}), ("l", "sk-a", lower("low")), ("c", "sk-c", {}))
    ]
    served = order(engine, gateway, *asks)  # type: ignore[arg-type]
    # Of the floor the first lowered one gets its turn, as whoever is new does; after that all is of those it is for.
    low = [label for label in served if label != "h"]
    assert low[:6].count("l") <= 1
    assert low[:13].count("l") <= 1

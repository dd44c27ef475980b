"""The schedule through sockets: shares, order, bounds and who pays when there is no room."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from support.gateway import GatewayMaker, GatewayThread, wait_until
from support.http import CHAT, Answer, Client, chat, exchange, parse_answer, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

# Who asks, as (key, text of the prompt, body fields).
Ask = tuple[str | None, str]
KEYS = {"a": "sk-a", "b": "sk-b", "c": "sk-c", "web": "sk-web", "anonymous": None}


def tenants(**weights: float) -> list[dict[str, object]]:
    """Tenants by name with these weights; `web` is in the web group."""
    return [
        {"name": name, "keys": [f"sk-{name}"], "weight": weight, "group": "web" if name == "web" else "keys"}
        for name, weight in weights.items()
    ]


def body_for(who: str, **fields: object) -> dict[str, object]:
    # Same size for all, so that equal costs are equal to the byte.
    return {"model": "m", "prompt": f"from {who:>10}", "max_tokens": 4, **fields}


def who_sent(body: bytes) -> str:
    return body.partition(b'"from')[2].partition(b'"')[0].decode().strip()


@contextmanager
def held(engine: MockEngine, gateway: GatewayThread, slots: int = 1) -> Iterator[None]:
    """All slots are taken while the block queues its requests; at its end they are let go."""
    engine.named["hold"] = Behaviour(gated=True)
    holders = [Client(gateway.port) for _ in range(slots)]
    for holder in holders:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-hold"))
    wait_until(lambda: engine.running == slots)
    try:
        yield
    finally:
        engine.open_gate()
        for holder in holders:
            holder.read_answer()
            holder.close()


def order_of_service(engine: MockEngine, gateway: GatewayThread, asks: Sequence[str], **fields: object) -> list[str]:
    """Queues a request for each name, in this order, behind a held slot; the order of their service."""
    clients = []
    with held(engine, gateway):
        for number, who in enumerate(asks, 1):
            client = Client(gateway.port, timeout_s=20)
            client.send(request_bytes("POST", "/v1/completions", body_for(who, **fields), key=KEYS[who]))
            clients.append(client)
            if number % 10 == 0 or number == len(asks):
                gateway.wait_for(queued=number)
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()
    return [who_sent(received.body) for received in engine.received if who_sent(received.body)]


HOLDER = {"name": "hold", "keys": ["sk-hold"], "group": "keys"}


def interleaved(*names: str, each: int) -> list[str]:
    return [name for _ in range(each) for name in names]


def test_weights_30_and_10(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S10: 3 : 1, within one item, over every window of four while both wait."""
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=30, b=10), HOLDER])
    order = order_of_service(engine, gateway, ["a"] * 45 + ["b"] * 45)
    both = order[: len(order) - 1 - order[::-1].index("a")]  # while a still waits
    assert Counter(both[:56])["a"] == pytest.approx(42, abs=1)
    for start in range(len(both) - 4):
        assert 2 <= both[start : start + 4].count("a") <= 4
    # Then b has it all.
    assert order[len(both) + 1 :] == ["b"] * (len(order) - len(both) - 1)


def test_equal_weights_take_turns(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=10, b=10), HOLDER])
    order = order_of_service(engine, gateway, ["a"] * 20 + ["b"] * 20)
    for start in range(0, 40, 2):
        assert sorted(order[start : start + 2]) == ["a", "b"]


def test_a_weight_left_out_is_10(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S3."""
    plain = {"name": "b", "keys": ["sk-b"]}
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=10), plain, HOLDER])
    order = order_of_service(engine, gateway, ["a"] * 20 + ["b"] * 20)
    assert order[:20].count("a") == 10


def test_keys_and_anonymous_10_to_1(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S11: whatever the number of keys."""
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=10, b=30, c=1), HOLDER], auth={"anonymous": True})
    order = order_of_service(engine, gateway, interleaved("a", "b", "c", "anonymous", each=30))
    assert order[:66].count("anonymous") == pytest.approx(6, abs=1)


def test_a_tenant_more_does_not_change_other_groups(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S12, S18: the anonymous share is the same beside one key and beside three."""
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=10, b=10, c=10), HOLDER], auth={"anonymous": True})
    order = order_of_service(engine, gateway, interleaved("a", "anonymous", each=44))
    assert order[:44].count("anonymous") == pytest.approx(4, abs=1)


def test_the_web_group_starts_within_one_service_time(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=30, b=10, web=10), HOLDER], auth={"anonymous": True})
    order = order_of_service(engine, gateway, [*interleaved("a", "b", "anonymous", each=15), "web"])
    assert order.index("web") <= 1


def test_fifo_within_a_tenant(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S14: also when sizes differ."""
    gateway = gateways(engine, slots=1)
    clients = []
    with held(engine, gateway):
        for number in range(30):
            client = Client(gateway.port)
            prompt = f"number {number} " + "x" * (number * 37 % 11 * 100)
            client.send(request_bytes("POST", CHAT, chat(prompt, max_tokens=30 - number)))
            clients.append(client)
            gateway.wait_for(queued=number + 1)
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    for number, received in enumerate(engine.received[1:]):
        assert f"number {number} " in received.json["messages"][0]["content"]


def test_shares_hold_in_tokens_not_in_requests(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S22: a's requests make four times as many tokens, so b gets four times as many requests."""
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=10, b=10), HOLDER])
    clients = []
    with held(engine, gateway):
        for who, tokens, count in (("a", 400, 20), ("b", 100, 60)):
            for _ in range(count):
                client = Client(gateway.port, timeout_s=20)
                body = body_for(who, max_tokens=tokens)
                client.send(request_bytes("POST", "/v1/completions", body, key=KEYS[who]))
                clients.append(client)
        gateway.wait_for(queued=80)
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    order = [who_sent(received.body) for received in engine.received[1:]]
    first = order[10:60]
    assert first.count("b") / first.count("a") == pytest.approx(4, rel=0.2)


def test_parallel_choices_count(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S22: a asks for four choices each time, b for one."""
    gateway = gateways(engine, slots=4, tenants=[*tenants(a=10, b=10), HOLDER])
    engine.behaviour = Behaviour(head_delay_s=0.004)
    clients = []
    with held(engine, gateway, slots=4):
        for who, n, count in (("a", 4, 15), ("b", 1, 60)):
            for _ in range(count):
                client = Client(gateway.port, timeout_s=20)
                body = body_for(who, n=n, max_tokens=100)
                client.send(request_bytes("POST", "/v1/completions", body, key=KEYS[who]))
                clients.append(client)
        gateway.wait_for(queued=75)
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    order = [who_sent(received.body) for received in engine.received[4:]]
    first = order[:50]
    assert first.count("b") / max(1, first.count("a")) == pytest.approx(4, rel=0.3)


def test_a_lone_tenant_gets_everything_at_once(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S13: whatever its weight."""
    engine.behaviour = Behaviour(gated=True)
    gateway = gateways(engine, slots=16, tenants=tenants(a=0.01, b=1000), auth={"anonymous": True})
    clients = [Client(gateway.port) for _ in range(16)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
    wait_until(lambda: engine.running == 16, 2)
    engine.open_gate()
    for client in clients:
        assert client.read_answer().status == 200
        client.close()


def test_no_credit_is_banked(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S21: b comes back after a was served much alone, and starts level with it."""
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=10, b=10), HOLDER])
    for _ in range(60):
        assert post(gateway.port, body_for("a"), path="/v1/completions", key="sk-a").status == 200
    engine.received.clear()
    order = order_of_service(engine, gateway, ["a"] * 20 + ["b"] * 20)
    assert 8 <= order[:20].count("a") <= 12


def test_strict_tiers(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S16, report 32: the next free slot goes to the highest tier; what runs is not preempted."""
    tiers = [
        {"name": "high", "groups": [{"name": "web", "weight": 1}]},
        {"name": "low", "groups": [{"name": "keys", "weight": 1}]},
    ]
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=100, web=1), HOLDER], scheduling={"tiers": tiers})
    order = order_of_service(engine, gateway, ["a"] * 30 + ["web"] * 5)
    assert order == ["web"] * 5 + ["a"] * 30


def test_a_lone_item_behind_saturated_others_is_served_in_its_bound(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S15: within (sum of the others' weights / its weight + number of groups) items."""
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=30, b=30, c=6), HOLDER])
    order = order_of_service(engine, gateway, [*interleaved("a", "b", each=20), "c"])
    assert order.index("c") <= 60 / 6 + 1


def test_concurrency_of_a_tenant_is_never_overshot_and_waits(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 16 and the interface: at its concurrency a tenant waits; others go on."""
    engine.behaviour = Behaviour(head_delay_s=0.02)
    capped = {"name": "a", "keys": ["sk-a"], "limits": {"concurrency": 5}}
    gateway = gateways(engine, slots=50, tenants=[capped, *tenants(b=10)])

    async def run() -> None:
        data = request_bytes("POST", CHAT, chat(), key="sk-a", close=True)
        calls = [asyncio.create_task(exchange(gateway.port, data)) for _ in range(60)]
        await asyncio.sleep(0.03)
        started = time.monotonic()
        other = await exchange(gateway.port, request_bytes("POST", CHAT, chat("other"), key="sk-b", close=True))
        assert other.status == 200
        assert time.monotonic() - started < 0.2
        assert {answer.status for answer in await asyncio.gather(*calls)} == {200}

    asyncio.run(run())
    assert engine.running_max <= 6
    gateway.wait_at_rest()


# ---- bounds (S31, report 14) ----


def retry_after(answer: Answer) -> int:
    value = answer.header("retry-after")
    assert value is not None
    assert value.isdigit(), value
    return int(value)


def test_a_tenants_full_queue_is_429_with_a_time(engine: MockEngine, gateways: GatewayMaker) -> None:
    bounded = {"name": "a", "keys": ["sk-a"], "limits": {"queued": 3}}
    gateway = gateways(engine, slots=1, tenants=[bounded, *tenants(b=10), HOLDER])
    clients = [Client(gateway.port) for _ in range(3)]
    with held(engine, gateway):
        for client in clients:
            client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
        gateway.wait_for(queued=3)
        for stream in (False, True):
            answer = post(gateway.port, chat(stream=stream), key="sk-a")
            assert answer.status == 429
            assert answer.error["code"] == "queue_full"
            assert retry_after(answer) >= 1
        gateway.wait_for(queued=3)
        # Another tenant is not concerned.
        with Client(gateway.port) as other:
            other.send(request_bytes("POST", CHAT, chat("other"), key="sk-b"))
            gateway.wait_for(queued=4)
            engine.open_gate()
            assert other.read_answer().status == 200
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()
    assert post(gateway.port, chat(), key="sk-a").status == 200


def test_retry_after_grows_with_the_queue_of_its_tenant(engine: MockEngine, gateways: GatewayMaker) -> None:
    deep = {"name": "a", "keys": ["sk-a"], "limits": {"queued": 60}}
    shallow = {"name": "b", "keys": ["sk-b"], "limits": {"queued": 1}}
    gateway = gateways(engine, slots=1, tenants=[deep, shallow, HOLDER])
    clients = []
    with held(engine, gateway):
        for key, count in (("sk-a", 60), ("sk-b", 1)):
            for _ in range(count):
                client = Client(gateway.port)
                client.send(request_bytes("POST", CHAT, chat(max_tokens=4000), key=key))
                clients.append(client)
        gateway.wait_for(queued=61)
        of_deep, of_shallow = (post(gateway.port, chat(), key=key) for key in ("sk-a", "sk-b"))
        assert (of_deep.status, of_shallow.status) == (429, 429)
        assert retry_after(of_deep) > retry_after(of_shallow)
        for client in clients:
            client.close()
    gateway.wait_at_rest()


def test_at_the_global_bound_the_flood_pays(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S31: a fills the gateway's queue; b's first request still gets its place, a's newest is refused."""
    gateway = gateways(engine, slots=1, tenants=[*tenants(a=10, b=10), HOLDER], limits={"queued": 10})
    flood = [Client(gateway.port) for _ in range(10)]
    other = Client(gateway.port)
    with held(engine, gateway):
        for number, client in enumerate(flood, 1):
            client.send(request_bytes("POST", CHAT, chat(f"flood {number}"), key="sk-a"))
            gateway.wait_for(queued=number)
        other.send(request_bytes("POST", CHAT, chat("other"), key="sk-b"))
        answer = flood[-1].read_answer()
        assert answer.status == 503
        assert answer.error["code"] == "overloaded"
        assert retry_after(answer) >= 1
        gateway.wait_for(queued=10)
        # One more of the flood is itself the newest of the longest queue.
        assert post(gateway.port, chat("flood 11"), key="sk-a").status == 503
        gateway.wait_for(queued=10)
    assert other.read_answer().status == 200
    for client in flood[:-1]:
        assert client.read_answer().status == 200
    for client in (*flood, other):
        client.close()
    gateway.wait_at_rest()
    assert not engine.find("flood 10")
    assert not engine.find("flood 11")


def test_at_the_global_bound_the_lowest_tier_pays_first(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 32: a full queue evicts the lowest tier, not the newest."""
    tiers = [
        {"name": "high", "groups": [{"name": "web", "weight": 1}]},
        {"name": "low", "groups": [{"name": "keys", "weight": 1}]},
    ]
    gateway = gateways(
        engine,
        slots=1,
        tenants=[*tenants(a=10, web=10), HOLDER],
        limits={"queued": 5},
        scheduling={"tiers": tiers},
    )
    low = Client(gateway.port)
    high = [Client(gateway.port) for _ in range(5)]
    with held(engine, gateway):
        low.send(request_bytes("POST", CHAT, chat("low"), key="sk-a"))
        gateway.wait_for(queued=1)
        for number, client in enumerate(high, 1):
            client.send(request_bytes("POST", CHAT, chat("high"), key="sk-web"))
            gateway.wait_for(queued=min(5, number + 1))
        assert low.read_answer().status == 503
        # A low one finds no room while the high ones wait.
        assert post(gateway.port, chat("low again"), key="sk-a").status in (429, 503)
    for client in (*high, low):
        if client is not low:
            assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()


def test_a_flood_is_bounded_and_told(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, slots=1, limits={"queued": 50})
    data = request_bytes("POST", CHAT, chat(), close=True)

    async def run() -> Counter[int]:
        calls = [asyncio.create_task(exchange(gateway.port, data)) for _ in range(300)]
        deadline = time.monotonic() + 10
        while sum(call.done() for call in calls) < 250:
            assert time.monotonic() < deadline
            assert gateway.counters()["queued"] <= 50
            await asyncio.sleep(0.01)
        engine.open_gate()
        return Counter(answer.status for answer in await asyncio.gather(*calls))

    with Client(gateway.port) as holder:
        engine.named["hold"] = Behaviour(gated=True)
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>")))
        wait_until(lambda: engine.running == 1)
        statuses = asyncio.run(run())
        assert holder.read_answer().status == 200
    assert statuses == {200: 50, 503: 250}
    gateway.wait_at_rest()


def test_what_waits_can_be_pipelined(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Order on one connection and order of the schedule do not block each other."""
    gateway = gateways(engine, slots=1)
    with Client(gateway.port) as client:
        with held(engine, gateway):
            client.send(request_bytes("POST", CHAT, chat("1")) + request_bytes("POST", CHAT, chat("2"), close=True))
            gateway.wait_for(queued=1)
        data = client.read_to_end()
    first = parse_answer(data)
    assert first.status == 200
    assert data.count(b"HTTP/1.1 200") == 2
    gateway.wait_at_rest()

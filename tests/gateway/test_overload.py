"""When there is too much: bounds in requests and bytes, who pays, and patience that shortens."""

import time

from support.gateway import GatewayMaker, GatewayThread, wait_until
from support.http import CHAT, Client, chat, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

TENANTS = [
    {"name": "flood", "keys": ["sk-flood"]},
    {"name": "trickle", "keys": ["sk-trickle"]},
    {"name": "hold", "keys": ["sk-hold"]},
]


def hold(engine: MockEngine, gateway: GatewayThread) -> Client:
    engine.named["hold"] = Behaviour(gated=True)
    holder = Client(gateway.port, timeout_s=30)
    holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-hold"))
    wait_until(lambda: engine.running == 1)
    return holder


def test_the_bytes_that_wait_are_bounded_and_the_flood_pays(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S31: a tenant with few but huge bodies is the longest queue too."""
    gateway = gateways(engine, slots=1, tenants=TENANTS, limits={"queued": 100, "queued_bytes": 1_000_000})
    holder = hold(engine, gateway)
    small = [Client(gateway.port) for _ in range(5)]
    for client in small:
        client.send(request_bytes("POST", CHAT, chat("small"), key="sk-trickle"))
    gateway.wait_for(queued=5)
    large = [Client(gateway.port) for _ in range(6)]
    for client in large:  # 300 kB each: three fit
        client.send(request_bytes("POST", CHAT, chat("x" * 300_000), key="sk-flood"))
    statuses = []
    for client in large[3:]:
        answer = client.read_answer()
        statuses.append((answer.status, answer.error["code"]))
        assert int(answer.header("retry-after") or 0) >= 1
    assert statuses == [(503, "overloaded")] * 3
    assert gateway.counter("queued") == 8
    engine.open_gate()
    for client in [holder, *small, *large[:3]]:
        assert client.read_answer().status == 200
    for client in [holder, *small, *large]:
        client.close()
    gateway.wait_at_rest()


def test_the_bytes_on_their_way_in_are_bounded(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, limits={"queued": 100, "queued_bytes": 1_000_000})
    head = request_bytes("POST", CHAT, b"x" * 800_000).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    clients = [Client(gateway.port) for _ in range(3)]
    for client in clients:
        client.send(head + b'{"messages":' + b" " * 400_000)
    refused = [client for client in clients if not client.closed_within(0.0) and readable(client)]
    assert len(refused) == 1
    answer = refused[0].read_answer()
    assert (answer.status, answer.error["code"]) == (503, "overloaded")
    assert answer.header("retry-after") == "1"
    # A whole body that comes in one piece is none of these.
    assert post(gateway.port, chat()).status == 200
    for client in clients:
        client.close()
    wait_until(lambda: gateway.gateway._front.uploading_bytes == 0)
    assert post(gateway.port, chat("y" * 700_000)).status == 200
    gateway.wait_at_rest()
    assert gateway.gateway._front.uploading_bytes == 0


def readable(client: Client) -> bool:
    import select

    return bool(select.select([client.sock], [], [], 0.5)[0])


def test_a_queue_that_never_drains_is_told_sooner(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Whose requests wait in vain again and again hears of it sooner; others wait as long as before."""
    gateway = gateways(engine, slots=1, tenants=TENANTS, limits={"queue_timeout_s": 0.8})
    holder = hold(engine, gateway)
    waits = []
    backlog = [Client(gateway.port, timeout_s=10) for _ in range(2)]
    for client in backlog:
        client.send(request_bytes("POST", CHAT, chat(), key="sk-flood"))
        time.sleep(0.4)
    for number in range(8):  # its queue is never empty: the next comes before the last has given up
        client = backlog[number % 2]
        answer = client.read_answer()
        assert answer.status == 503
        began = time.monotonic()
        client.send(request_bytes("POST", CHAT, chat(), key="sk-flood"))
        waits.append(began)
    shortened = gateway.gateway._directory.tenant_of(b"sk-flood").patience  # type: ignore[union-attr]
    assert shortened is not None
    assert shortened.limit_s(0.8) < 0.6
    began = time.monotonic()
    assert post(gateway.port, chat(), key="sk-trickle").status == 503
    assert time.monotonic() - began > 0.75
    for client in backlog:
        client.close()
    gateway.wait_for(queued=0)
    engine.open_gate()
    assert holder.read_answer().status == 200
    # Its queue has run empty: all is forgiven.
    began = time.monotonic()
    holder.close()
    engine.close_gate()
    holder = hold(engine, gateway)
    began = time.monotonic()
    assert post(gateway.port, chat(), key="sk-flood").status == 503
    assert time.monotonic() - began > 0.75
    engine.open_gate()
    holder.read_answer()
    holder.close()
    gateway.wait_at_rest()


def test_a_flood_in_a_lower_tier_pays_first(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 32: a full queue evicts from the lowest tier, not the newest."""
    tiers = [
        {"name": "high", "groups": [{"name": "keys", "weight": 1}]},
        {"name": "low", "groups": [{"name": "anonymous", "weight": 1}]},
    ]
    gateway = gateways(
        engine,
        slots=1,
        tenants=TENANTS,
        auth={"anonymous": True},
        scheduling={"tiers": tiers},
        limits={"queued": 4},
    )
    holder = hold(engine, gateway)
    low = [Client(gateway.port) for _ in range(4)]
    for number, client in enumerate(low, 1):
        client.send(request_bytes("POST", CHAT, chat()))
        gateway.wait_for(queued=number)
    with Client(gateway.port) as high:
        high.send(request_bytes("POST", CHAT, chat("high"), key="sk-trickle"))
        assert low[3].read_answer().status == 503
        engine.open_gate()
        assert high.read_answer().status == 200
    for client in [holder, *low[:3]]:
        assert client.read_answer().status == 200
    for client in [holder, *low]:
        client.close()
    gateway.wait_at_rest()


def test_streams_of_a_tenant_that_cannot_bear_comments(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 12: comments keep a waiting stream alive, but for clients that need silence."""
    tenants = [{"name": "quiet", "keys": ["sk-quiet"], "comments": False}, {"name": "any", "keys": ["sk-any"]}]
    engine.behaviour = Behaviour(head_delay_s=0.8)
    gateway = gateways(engine, tenants=tenants, timeouts={"comment_s": 0.2})
    assert b": waiting" in post(gateway.port, chat(stream=True), key="sk-any").body
    assert b": waiting" not in post(gateway.port, chat(stream=True), key="sk-quiet").body

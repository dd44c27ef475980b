"""Report 37, S22, S23: shares hold in tokens, so that a few heavy requests do not take what many light ones need."""

import time
from collections import Counter

import pytest
from support.gateway import GatewayMaker, GatewayThread, wait_until
from support.http import Client, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

PATH = "/v1/completions"
# Cost 800 + 2 · 100 = 1000 and 20 + 2 · 15 = 50.
KINDS = {"heavy": Behaviour(input_tokens=800, tokens=100), "light": Behaviour(input_tokens=20, tokens=15)}
COST = {"heavy": 1000, "light": 50}


def tenants(heavy: float, light: float) -> list[dict[str, object]]:
    weights = {"heavy": heavy, "light": light, "hold": 10}
    return [{"name": name, "keys": [f"sk-{name}"], "weight": weight} for name, weight in weights.items()]


def ask(kind: str) -> bytes:
    return request_bytes("POST", PATH, {"model": "m", "prompt": f"<<{kind}>>"}, key=f"sk-{kind}")


def served_cost(engine: MockEngine, gateway: GatewayThread, counts: dict[str, int], until: int) -> Counter[str]:
    """Queues so many of each behind a held slot, serves `until` of them; the cost that each tenant got."""
    for kind, behaviour in KINDS.items():
        engine.named[kind] = behaviour
    for kind in KINDS:  # so that averages and ratios are known
        for _ in range(30):
            answer = post(gateway.port, {"model": "m", "prompt": f"<<{kind}>>"}, path=PATH, key=f"sk-{kind}")
            assert answer.status == 200
    gateway.wait_at_rest()
    before = len(engine.received)
    engine.named["hold"] = Behaviour(gated=True)
    clients = []
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", PATH, {"model": "m", "prompt": "<<hold>>"}, key="sk-hold"))
        wait_until(lambda: engine.running == 1)
        for kind, count in counts.items():
            for _ in range(count):
                client = Client(gateway.port, timeout_s=20)
                client.send(ask(kind))
                clients.append(client)
        gateway.wait_for(queued=sum(counts.values()))
        engine.open_gate()
        holder.read_answer()
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()
    order = [
        kind
        for received in engine.received[before:]
        for kind in KINDS
        if f"<<{kind}>>".encode() in received.body
    ]
    return Counter({kind: order[:until].count(kind) * cost for kind, cost in COST.items()})


@pytest.mark.parametrize(("weights", "ratio"), [((10, 10), 1.0), ((10, 30), 1 / 3), ((30, 10), 3.0)])
def test_heavy_and_light_share_by_tokens(
    engine: MockEngine, gateways: GatewayMaker, weights: tuple[float, float], ratio: float
) -> None:
    gateway = gateways(engine, slots=1, tenants=tenants(*weights))
    # Both wait over the whole window: six heavy ones stand against the light ones that their cost buys.
    light = round(6 * COST["heavy"] / COST["light"] / ratio)
    got = served_cost(engine, gateway, {"heavy": 9, "light": light + 60}, 6 + light)
    assert got["heavy"] / got["light"] == pytest.approx(ratio, rel=0.25)


def test_whoever_returns_has_saved_nothing_and_owes_nothing(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S21: after one has idled while the other was served, both share from then on, as if both were new."""
    gateway = gateways(engine, slots=1, tenants=tenants(10, 10))
    for kind, behaviour in KINDS.items():
        engine.named[kind] = behaviour
    for _ in range(100):  # light works, heavy idles
        post(gateway.port, {"model": "m", "prompt": "<<light>>"}, path=PATH, key="sk-light")
    time.sleep(0.05)
    got = served_cost(engine, gateway, {"heavy": 7, "light": 140}, 4 + 80)
    assert got["heavy"] / got["light"] == pytest.approx(1.0, rel=0.35)

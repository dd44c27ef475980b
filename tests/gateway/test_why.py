"""S67: why did my request wait, and why this worker? Told by a header, and by the admin API."""

import pytest
from support.gateway import EngineMaker, GatewayMaker, GatewayThread, wait_until
from support.http import CHAT, Answer, Client, chat, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

WHY = [("x-evenflow-why", "1")]
TENANTS = [
    {"name": "a", "keys": ["sk-a"], "weight": 30},
    {"name": "b", "keys": ["sk-b"], "weight": 10},
    {"name": "hold", "keys": ["sk-hold"], "weight": 10},
]
ADMIN = {"admin_keys": ["sk-admin"]}


def ask_admin(gateway: GatewayThread, path: str, key: str | None = "sk-admin") -> Answer:
    return fetch(gateway.port, "GET", path, key=key)


def test_a_request_that_waited_can_say_what_for(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.named["hold"] = Behaviour(gated=True)
    gateway = gateways(engine, slots=1, tenants=TENANTS, auth=ADMIN)
    clients = [Client(gateway.port, timeout_s=20) for _ in range(4)]
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-hold"))
        wait_until(lambda: engine.running == 1)
        for number, (client, key) in enumerate(zip(clients, ("sk-a", "sk-b", "sk-b", "sk-b"), strict=True), 1):
            headers = [("x-request-id", f"ask-{number}"), *WHY]
            client.send(request_bytes("POST", CHAT, chat(), headers, key=key))
            gateway.wait_for(queued=number)
        # While it waits.
        waiting = ask_admin(gateway, "/admin/v1/requests/ask-4").json
        assert (waiting["state"], waiting["tenant"], waiting["worker"]) == ("waiting", "b", None)
        assert waiting["tier"] == "standard"
        queued = waiting["why"]["queued"]
        assert (queued["ahead_in_own_queue"], queued["ahead_in_all_queues"]) == (2, 3)
        # Of two groups that could wait only keys does, and in it a : b = 30 : 10.
        assert queued["share_by_weight"] == pytest.approx(0.25)
        assert queued["wait_estimate_ms"] > 0
        running = list(ask_admin(gateway, "/admin/v1/queues").json["pools"][0]["workers"])
        assert [worker["in_flight"] for worker in running] == [1]
        engine.open_gate()
        holder.read_answer()
    answers = [client.read_answer() for client in clients]
    words = answers[3].header("x-evenflow-why")
    assert words is not None
    assert "waited behind 2 of its own and 3 in all, with 25.0% of the pool by weight" in words
    assert "was the only worker" in words
    for client in clients:
        client.close()
    gateway.wait_at_rest()
    # And after it has ended.
    ended = ask_admin(gateway, "/admin/v1/requests/ask-4").json
    assert ended["why"]["queued"]["ahead_in_own_queue"] == 2
    assert ended["outcome"] == "ok"
    assert ended["queue_ms"] > 0
    assert ended["worker"] == ended["why"]["worker"]


def test_the_workers_it_could_have_gone_to(engines: EngineMaker, gateways: GatewayMaker) -> None:
    first, second = engines(), engines()
    first.behaviour = second.behaviour = Behaviour(gated=True)
    gateway = gateways(first, second, auth=ADMIN)
    with Client(gateway.port) as one, Client(gateway.port) as other:
        one.send(request_bytes("POST", CHAT, chat("x" * 4000), [("x-request-id", "one")]))
        wait_until(lambda: first.running + second.running == 1)
        other.send(request_bytes("POST", CHAT, chat(), [("x-request-id", "other"), *WHY]))
        wait_until(lambda: first.running + second.running == 2)
        running = ask_admin(gateway, "/admin/v1/requests/other").json
        assert running["state"] == "running"
        chosen, rest = running["why"]["workers"]
        assert (chosen["chosen"], rest["chosen"]) == (True, False)
        assert chosen["score"] == 0 < rest["score"]
        assert (chosen["in_flight"], rest["in_flight"]) == (0, 1)
        for engine in (first, second):
            engine.open_gate()
        one.read_answer()
        words = other.read_answer().header("x-evenflow-why")
    assert words is not None
    assert words.startswith("its turn came at once; ")
    assert f"{chosen['name']} was chosen among {chosen['name']} 0, {rest['name']} " in words


def test_nobody_asks_and_nobody_is_told(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    assert post(gateway.port, chat()).header("x-evenflow-why") is None
    assert post(gateway.port, chat(), headers=[("x-evenflow-why", "0")]).header("x-evenflow-why") is None


def test_who_may_ask(engine: MockEngine, gateways: GatewayMaker) -> None:
    """An operator about all, a tenant about its own, nobody else about anything."""
    gateway = gateways(engine, tenants=TENANTS, auth={**ADMIN, "anonymous": True})
    post(gateway.port, chat(), headers=[("x-request-id", "of-a")], key="sk-a")
    gateway.wait_at_rest()
    path = "/admin/v1/requests/of-a"
    assert ask_admin(gateway, path).json["tenant"] == "a"
    assert ask_admin(gateway, path, "sk-a").json["tenant"] == "a"
    assert ask_admin(gateway, path, "sk-b").status == 404
    assert ask_admin(gateway, path, "sk-wrong").status == 401
    assert ask_admin(gateway, path, None).status == 401
    assert ask_admin(gateway, "/admin/v1/queues", "sk-a").status == 401
    assert ask_admin(gateway, "/admin/v1/queues", None).status == 401
    assert fetch(gateway.port, "POST", "/admin/v1/queues", {}, key="sk-admin").status == 405
    for unknown in ("of-nobody", "", "%00", "a%22b", "x" * 200, "%F0%9F%92%A9"):
        answer = ask_admin(gateway, f"/admin/v1/requests/{unknown}")
        assert (answer.status, answer.error["code"]) == (404, "not_found")


def test_the_queues_tell_who_waits_and_why(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.named["hold"] = Behaviour(gated=True)
    gateway = gateways(engine, slots=1, tenants=TENANTS, auth={**ADMIN, "anonymous": True})
    asks = ["sk-a"] * 3 + ["sk-b"] * 2 + [None]
    clients = [Client(gateway.port, timeout_s=20) for _ in asks]
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-hold"))
        wait_until(lambda: engine.running == 1)
        for client, key in zip(clients, asks, strict=True):
            client.send(request_bytes("POST", CHAT, chat(), key=key))
        gateway.wait_for(queued=6)
        (pool,) = ask_admin(gateway, "/admin/v1/queues").json["pools"]
        assert pool["models"] == ["m"]
        assert pool["waiting"] == 6
        assert 0 <= pool["bound_ratio"] <= 1
        (tier,) = pool["tiers"]
        groups = {group["name"]: group for group in tier["groups"]}
        assert {name: group["waiting"] for name, group in groups.items()} == {"web": 0, "keys": 5, "anonymous": 1}
        tenants = {tenant["name"]: tenant for group in tier["groups"] for tenant in group["tenants"]}
        assert tenants["a"]["waiting"] == 3
        assert tenants["hold"]["in_flight"] == 1
        # keys : anonymous = 10 : 1, and a : b = 30 : 10 among the keys that wait
        assert tenants["a"]["share_by_weight"] == pytest.approx(10 / 11 * 0.75, abs=1e-5)
        assert tenants["anonymous"]["share_by_weight"] == pytest.approx(1 / 11, abs=1e-5)
        assert tenants["a"]["wait_estimate_ms"] > 0
        engine.open_gate()
        holder.read_answer()
        for client in clients:
            assert client.read_answer().status == 200
            client.close()
    gateway.wait_at_rest()
    served = ask_admin(gateway, "/admin/v1/queues").json
    assert served["shares_served_over_s"] > 0
    shares = {
        tenant["name"]: tenant["share_served"]
        for group in served["pools"][0]["tiers"][0]["groups"]
        for tenant in group["tenants"]
    }
    assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
    assert shares["a"] > shares["anonymous"] > 0


def test_no_key_and_no_prompt_in_what_is_told(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, tenants=TENANTS, auth=ADMIN)
    post(gateway.port, chat("a secret prompt"), headers=[("x-request-id", "one"), *WHY], key="sk-a")
    gateway.wait_at_rest()
    for path in ("/admin/v1/requests/one", "/admin/v1/queues"):
        body = ask_admin(gateway, path).body
        assert b"secret" not in body
        assert b"sk-" not in body

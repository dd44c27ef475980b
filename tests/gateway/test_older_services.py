"""S4, S17-S20, S72: the files of older services, loaded as they are, and their routes as their users call them."""

import json
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.gateway import GatewayProcess, wait_ready, wait_until
from support.http import Client, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

QOS = {
    "enable_user_qos": 1,
    "user_groups": ["Platinum", "Gold", "Bronze"],
    "user_group_map": {
        "Platinum": [{"id": "vip", "quota_pct": 100}, {"id": "default", "quota_pct": 0}],
        "Gold": [{"id": "gold1", "quota_pct": 50}, {"id": "gold2", "quota_pct": 50}],
        "Bronze": [
            {"id": "b1", "quota_pct": 30},
            {"id": "b2", "quota_pct": 30},
            {"id": "b3", "quota_pct": 40},
            {"id": "default", "quota_pct": 0},
        ],
    },
}
ALPA = {"allowed_api_keys": ["key-30", "key-10", "key-plain"], "api_key_weights": {"key-30": 30, "key-10": 10}}
CHAT_QOS, COMPLETIONS_QOS = "/v1/chat/completions_qos", "/v1/completions_qos"


def serve(tmp_path: Path, engine: MockEngine, content: object, name: str) -> GatewayProcess:
    """`evenflow serve --config FILE --worker URL --port 0`, with the older service's file untouched."""
    path = tmp_path / name
    path.write_text(json.dumps(content, indent=2))
    gateway = GatewayProcess(
        path, None, arguments=("--config", str(path), "--worker", engine.url, "--port", "0")
    )
    wait_ready(gateway)
    return gateway


def ask(user: str | None, **fields: object) -> dict[str, object]:
    named = {} if user is None else {"user_id": user}
    return {"model": "m", "prompt": f"from {user}", "max_tokens": 4, **named, **fields}


def order(engine: MockEngine, gateway: GatewayProcess, asks: list[tuple[str | None, str | None]]) -> list[str]:
    """Queues (user_id, key) behind as many held slots as there are; who was served, in order."""
    engine.named["hold"] = Behaviour(gated=True)
    clients = [Client(gateway.port, timeout_s=20) for _ in range(32)]
    for client in clients:  # all slots of a worker without reports
        client.send(request_bytes("POST", "/v1/completions", ask(None, prompt="<<hold>>"), key=asks[0][1]))
    wait_until(lambda: engine.running == 32, 5)
    engine.named["hold"] = Behaviour()
    waiting = []
    for user, key in asks:
        client = Client(gateway.port, timeout_s=20)
        client.send(request_bytes("POST", "/v1/completions", ask(user, prompt=f"[{user or key}]"), key=key))
        waiting.append(client)
    time.sleep(0.5)
    engine.open_gate()
    for client in [*clients, *waiting]:
        assert client.read_answer().status == 200
        client.close()
    return [one.body.partition(b'"[')[2].partition(b"]")[0].decode() for one in engine.received if b'"[' in one.body]


def test_a_qos_file_is_served_as_it_is(tmp_path: Path, engine: MockEngine) -> None:
    """Groups go strictly in their order; whoever is unknown waits in the default bucket, and nobody crashes."""
    gateway = serve(tmp_path, engine, QOS, "qos.json")
    try:
        assert "can claim any user_id" in gateway.stderr
        asks = [(user, None) for user in ("stranger", "b1", "gold1", "vip", None, "gold2", "vip")]
        served = order(engine, gateway, asks)  # type: ignore[arg-type]
        assert served[:2] == ["vip", "vip"]
        assert set(served[2:4]) == {"gold1", "gold2"}
        assert served[4] == "b1"  # those of quota 0 come when nobody else of their group waits
        assert set(served[5:]) == {"stranger", "None"}
        for path in (CHAT_QOS, COMPLETIONS_QOS):
            body = ask("vip") | {"messages": [{"role": "user", "content": "hi"}]}
            assert post(gateway.port, body, path=path).status == 200
        # Clients of OpenAI's SDK send some key whatever the service; here none means anything.
        assert post(gateway.port, ask("vip"), path=COMPLETIONS_QOS, key="EMPTY").status == 200
        assert post(gateway.port, ask(None) | {"user_id": 7}, path=COMPLETIONS_QOS).status == 200
    finally:
        gateway.signal(signal.SIGTERM)
        gateway.stop()


def test_quotas_share_their_group(tmp_path: Path, engine: MockEngine) -> None:
    """S17: 30/30/40, all backlogged, serves 30/30/40 of every 100."""
    users = {"Bronze": [{"id": name, "quota_pct": quota} for name, quota in (("b1", 30), ("b2", 30), ("b3", 40))]}
    gateway = serve(tmp_path, engine, {**QOS, "user_groups": ["Bronze"], "user_group_map": users}, "qos.json")
    try:
        served = order(engine, gateway, [(user, None) for _ in range(60) for user in ("b1", "b2", "b3")])
        counts = Counter(served[32:132])
        assert counts["b3"] == pytest.approx(40, abs=8)
        assert counts["b1"] == pytest.approx(30, abs=7)
    finally:
        gateway.stop()


def test_a_keys_file_is_served_as_it_is(tmp_path: Path, engine: MockEngine) -> None:
    gateway = serve(tmp_path, engine, ALPA, "keys_file.json")
    try:
        for key in ALPA["allowed_api_keys"]:
            assert post(gateway.port, {**ask(None), "api_key": key}, path="/completions").status == 200
        assert post(gateway.port, {**ask(None), "api_key": "key-wrong"}, path="/completions").status == 401
        assert post(gateway.port, ask(None), path="/completions").status == 200  # no key is the anonymous group
        served = order(engine, gateway, [(None, key) for _ in range(40) for key in ("key-30", "key-10")])
        assert Counter(served[8:48])["key-30"] == pytest.approx(30, abs=5)
        assert "key-30" not in gateway.stderr + gateway.stdout
    finally:
        gateway.stop()


def test_a_user_id_is_a_label_unless_it_is_trusted(tmp_path: Path, engine: MockEngine) -> None:
    """S6: in a configuration of our own nobody becomes somebody by saying so."""
    config = {
        "auth": {"anonymous": True},
        "tenants": [{"name": "vip", "keys": ["sk-vip"], "limits": {"requests_per_minute": 1}}],
    }
    gateway = serve(tmp_path, engine, config, "evenflow.yaml")
    try:
        for _ in range(3):
            answer = post(gateway.port, ask("vip"), path="/v1/completions")
            assert answer.status == 200
            assert answer.header("x-ratelimit-limit-requests") is None
    finally:
        gateway.stop()

"""Who a caller is: keys in all forms, what they can never do, and where they must never show."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gateway import ROOT, EngineMaker, GatewayMaker, ProcessMaker, served_at_once, wait_until
from support.http import CHAT, Client, chat, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

TENANTS = [
    {"name": "alice", "weight": 30, "keys": ["sk-alice-1111", "sk-alice-2222"]},
    {"name": "bob", "keys": ["sk-bob-3333"]},
]
# One body for each route that answers callers, by path.
ROUTES = {
    CHAT: chat(),
    "/v1/completions": {"model": "m", "prompt": "x"},
    "/v1/embeddings": {"model": "m", "input": "x"},
    "/v1/responses": {"model": "m", "input": "x"},
    "/v1/messages": {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "/v1/rerank": {"model": "m", "query": "x", "documents": ["y"]},
    "/v1/score": {"model": "m", "text_1": "x", "text_2": "y"},
    "/tokenize": {"model": "m", "prompt": "x"},
    "/detokenize": {"model": "m", "tokens": [1]},
}
KEY_FORMS: dict[str, Callable[[str], tuple[dict[str, str], dict[str, str]]]] = {
    "bearer": lambda key: ({"authorization": f"Bearer {key}"}, {}),
    "lower case bearer": lambda key: ({"Authorization": f"bearer {key}"}, {}),
    "x-api-key": lambda key: ({"X-API-Key": key}, {}),
    "body": lambda key: ({}, {"api_key": key}),
}


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_asks_for_a_key(engine: MockEngine, gateways: GatewayMaker, path: str) -> None:
    """S1, report 57: one policy on all routes."""
    gateway = gateways(engine, tenants=TENANTS)
    for headers in ((), [("authorization", "Bearer sk-wrong")], [("x-api-key", "sk-wrong")]):
        answer = post(gateway.port, ROUTES[path], path=path, headers=headers)
        assert answer.status == 401
        assert answer.error["code"] == "invalid_api_key"
    answer = post(gateway.port, {**ROUTES[path], "api_key": "sk-wrong"}, path=path)
    assert answer.status == 401
    assert not engine.received
    assert post(gateway.port, ROUTES[path], path=path, key="sk-bob-3333").status == 200
    assert engine.received[0].path == path


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_respects_the_tenants_queue(engine: MockEngine, gateways: GatewayMaker, path: str) -> None:
    """Report 57, S8: all routes share the tenant's one queue."""
    engine.named["hold"] = Behaviour(gated=True)
    gateway = gateways(engine, slots=1, tenants=[{"name": "a", "keys": ["sk-a"], "limits": {"queued": 1}}])
    with Client(gateway.port) as holder, Client(gateway.port) as waiter:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-a"))
        wait_until(lambda: engine.running == 1)
        waiter.send(request_bytes("POST", "/v1/completions", ROUTES["/v1/completions"], key="sk-a"))
        gateway.wait_for(queued=1)
        answer = post(gateway.port, ROUTES[path], path=path, key="sk-a")
        assert answer.status == 429
        assert answer.error["code"] == "queue_full"
        engine.open_gate()
        assert (holder.read_answer().status, waiter.read_answer().status) == (200, 200)
    gateway.wait_at_rest()


def test_endpoints_of_a_tenant_are_served_in_order_of_arrival(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S8, S14."""
    engine.named["hold"] = Behaviour(gated=True)
    gateway = gateways(engine, slots=1)
    clients = [Client(gateway.port) for _ in range(len(ROUTES) + 1)]
    clients[0].send(request_bytes("POST", CHAT, chat("<<hold>>")))
    wait_until(lambda: engine.running == 1)
    for number, (path, asked) in enumerate(ROUTES.items(), 1):
        clients[number].send(request_bytes("POST", path, asked))
        gateway.wait_for(queued=number)
    engine.open_gate()
    assert all(client.read_answer().status == 200 for client in clients)
    assert [received.path for received in engine.received] == [CHAT, *ROUTES]
    for client in clients:
        client.close()


@pytest.mark.parametrize("form", KEY_FORMS)
@pytest.mark.parametrize("own", [None, "wk-secret"], ids=["no credential", "own credential"])
def test_a_key_in_any_form_is_taken_and_never_passed_on(
    engine: MockEngine, gateways: GatewayMaker, form: str, own: str | None
) -> None:
    """S2, report 15."""
    worker = {"url": engine.url, "models": ["m"], **({"api_key": own} if own else {})}
    gateway = gateways(engine, tenants=TENANTS, workers=[worker])
    headers, fields = KEY_FORMS[form]("sk-alice-2222")
    answer = post(gateway.port, {**chat(), **fields, "after": 1}, headers=headers.items())
    assert answer.status == 200
    [received] = engine.received
    assert b"sk-alice" not in received.head + received.body
    assert received.header("x-api-key") is None
    assert received.header("authorization") == (f"Bearer {own}" if own else None)
    assert received.json == {**chat(), "after": 1}


def test_a_key_in_the_body_written_with_escapes_is_found_and_removed(
    engine: MockEngine, gateways: GatewayMaker
) -> None:
    gateway = gateways(engine, tenants=TENANTS)
    body = b'{"model":"m","messages":[{"role":"user"}],"api\\u005fkey":"sk-bob-3333"}'
    assert post(gateway.port, body).status == 200
    assert b"sk-bob" not in engine.received[0].body
    # A nested member of the same name is content and stays.
    body = b'{"model":"m","messages":[{"role":"user"}],"metadata":{"api_key":"mine"}}'
    assert post(gateway.port, body, key="sk-bob-3333").status == 200
    assert engine.received[1].body == body


def test_credentials_of_any_kind_stop_at_the_gateway(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 15: cookies and proxy credentials too; headers for the hop are made new."""
    gateway = gateways(engine, tenants=TENANTS)
    secrets = [
        ("cookie", "session=secret-1"),
        ("proxy-authorization", "Basic secret-2"),
        ("x-hop", "secret-3"),
        ("connection", "keep-alive, x-hop"),
        ("te", "trailers"),
        ("keep-alive", "timeout=5"),
        ("x-request-id", "from-the-caller"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ]
    assert post(gateway.port, chat(), headers=secrets, key="sk-bob-3333").status == 200
    [received] = engine.received
    assert b"secret-" not in received.head
    for name in ("te", "keep-alive", "cookie"):
        assert received.header(name) is None
    assert len([1 for name, _ in received.headers if name in ("host", "content-length")]) == 2
    assert received.header("host") == engine.url.removeprefix("http://")
    assert received.header("x-request-id") == "from-the-caller"


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ([("authorization", "Bearer sk-alice-1111"), ("x-api-key", "sk-bob-3333")], {}),
        ([("authorization", "Bearer sk-alice-1111")], {"api_key": "sk-bob-3333"}),
        ([("x-api-key", "sk-alice-1111")], {"api_key": "sk-alice-2222"}),
        ([("authorization", "Bearer sk-alice-1111"), ("authorization", "Bearer sk-bob-3333")], {}),
    ],
    ids=["headers", "header and body", "two of one tenant", "twice"],
)
def test_two_keys_that_differ_are_an_error(
    engine: MockEngine, gateways: GatewayMaker, headers: list[tuple[str, str]], fields: dict[str, str]
) -> None:
    """S2."""
    gateway = gateways(engine, tenants=TENANTS)
    answer = post(gateway.port, {**chat(), **fields}, headers=headers)
    assert answer.status in (400, 401)
    assert answer.error
    assert not engine.received


def test_the_same_key_twice_is_fine(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, tenants=TENANTS)
    headers = [("authorization", "Bearer sk-bob-3333"), ("x-api-key", "sk-bob-3333")]
    assert post(gateway.port, {**chat(), "api_key": "sk-bob-3333"}, headers=headers).status == 200


@pytest.mark.parametrize(
    "value",
    ["Bearer sk-é", "Bearer \xff\xfe", "Bearer ", "Bearer", "Basic sk-bob-3333", "sk-bob-3333 x",
     "Bearer sk-bob-333", "Bearer sk-bob-33333", "Bearer " + "k" * 10000, "Bearer sk-bob-3333 sk-bob-3333"],
)  # fmt: skip
def test_odd_keys_are_401(engine: MockEngine, gateways: GatewayMaker, value: str) -> None:
    """Report 66: no key crashes the comparison."""
    gateway = gateways(engine, tenants=TENANTS)
    answer = post(gateway.port, chat(), headers=[("authorization", value)])
    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"


@pytest.mark.parametrize("value", [7, None, ["sk-bob-3333"], {"a": 1}, "", "é", "\ud800"], ids=repr)
def test_odd_keys_in_the_body(engine: MockEngine, gateways: GatewayMaker, value: object) -> None:
    gateway = gateways(engine, tenants=TENANTS)
    assert post(gateway.port, {**chat(), "api_key": value}).status in (400, 401)
    assert not engine.received


def test_hashed_keys(engine: MockEngine, gateways: GatewayMaker) -> None:
    import hashlib

    digest = hashlib.sha256(b"sk-hashed").hexdigest()
    gateway = gateways(engine, tenants=[{"name": "a", "keys": [f"sha256:{digest}"]}])
    assert post(gateway.port, chat(), key="sk-hashed").status == 200
    assert post(gateway.port, chat(), key=digest).status == 401
    assert post(gateway.port, chat(), key=f"sha256:{digest}").status == 401


def test_keys_are_compared_as_digests() -> None:
    """Report 66, by reading the code: digests decide, no plain key is compared."""
    text = (ROOT / "evenflow/tenancy/directory.py").read_text()
    assert "sha256" in text
    assert not re.search(r"key\s*==\s*", text)


def test_anonymous_is_allowed_only_where_the_configuration_says(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S1."""
    assert post(gateways(engine).port, chat()).status == 200
    assert post(gateways(engine, tenants=TENANTS).port, chat()).status == 401
    mixed = gateways(engine, tenants=TENANTS, auth={"anonymous": True})
    assert post(mixed.port, chat()).status == 200
    # A wrong key is refused, never downgraded.
    assert post(mixed.port, chat(), key="sk-wrong").status == 401
    assert post(gateways(engine, auth={"anonymous": False}).port, chat()).status == 401


def test_a_401_comes_before_the_body_and_does_not_wait_for_it(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, tenants=TENANTS)
    with Client(gateway.port) as client:
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer sk-wrong\r\n"
            b"content-length: 30000000\r\nexpect: 100-continue\r\n\r\n"
        )
        answer = client.read_answer()
    assert answer.status == 401
    assert answer.informational == []


def test_a_captcha_field_proves_nothing(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S5."""
    gateway = gateways(engine, tenants=TENANTS)
    for field in ("g-recaptcha-response", "h-captcha-response", "captcha"):
        assert post(gateway.port, {**chat(), field: "03AGdBq2"}).status == 401
        assert post(gateway.port, chat(), headers=[(field, "03AGdBq2")]).status == 401


def test_nothing_raises_a_caller_above_its_key(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S6: the low tier stays below whatever its callers write."""
    tiers = [
        {"name": "high", "groups": [{"name": "gold", "weight": 1}]},
        {"name": "low", "groups": [{"name": "keys", "weight": 1}, {"name": "anonymous", "weight": 1}]},
    ]
    tenants = [
        {"name": "gold", "group": "gold", "keys": ["sk-gold"]},
        {"name": "plain", "group": "keys", "keys": ["sk-plain"]},
    ]
    engine.named["hold"] = Behaviour(gated=True)
    gateway = gateways(engine, slots=1, scheduling={"tiers": tiers}, tenants=tenants)
    raising_headers = [
        ("x-evenflow-tier", "high"), ("x-evenflow-group", "gold"), ("x-user", "gold"), ("priority", "u=0"),
    ]  # fmt: skip
    raising_fields = {"user": "gold", "user_id": "gold", "priority": -100, "tier": "high", "group": "gold"}
    clients = [Client(gateway.port) for _ in range(7)]
    clients[0].send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-plain"))
    wait_until(lambda: engine.running == 1)
    for number in (1, 2, 3):
        body = chat("low", **raising_fields)
        clients[number].send(request_bytes("POST", CHAT, body, raising_headers, key="sk-plain"))
    gateway.wait_for(queued=3)
    for number in (4, 5, 6):
        clients[number].send(request_bytes("POST", CHAT, chat("high"), key="sk-gold"))
    gateway.wait_for(queued=6)
    engine.open_gate()
    assert all(client.read_answer().status == 200 for client in clients)
    order = ["low" if b'"low"' in received.body else "high" for received in engine.received[1:]]
    assert order == ["high"] * 3 + ["low"] * 3
    for client in clients:
        client.close()


# ---- where keys and prompts must not show (S7, reports 29, 61) ----

SECRET_KEY, SECRET_PROMPT, WORKER_KEY = "sk-alice-1111", "prompt-that-is-private", "wk-of-the-worker"


@pytest.mark.timeout(60)
def test_no_key_and_no_prompt_shows_anywhere(engines: EngineMaker, processes: ProcessMaker, tmp_path: Path) -> None:
    engine = engines()
    for status in (400, 401, 404, 429, 500):
        engine.named[f"s{status}"] = Behaviour(status=status)
    engine.named["cut"] = Behaviour(close_after=2)
    engine.named["gone"] = Behaviour(close_at_once=True)
    engine.named["bad"] = Behaviour(raw=b"HTTP/1.1 abc\r\n\r\n")
    log = tmp_path / "access.log"
    gateway = processes(
        engine,
        tenants=TENANTS,
        auth={"admin_keys": ["sk-admin-4444"]},
        workers=[{"url": engine.url, "models": ["m"], "api_key": WORKER_KEY}],
        log={"access": str(log), "level": "debug"},
    )
    told = b""
    for marker in ("ok", "s400", "s401", "s404", "s429", "s500", "cut", "gone", "bad"):
        for stream in (False, True):
            body = chat(f"<<{marker}>> {SECRET_PROMPT}", stream=stream)
            answer = post(gateway.port, body, key=SECRET_KEY)
            told += answer.body + repr(answer.headers).encode()
    for broken in (b'{"model":"m","x":"' + SECRET_PROMPT.encode() + b'"', b"\xff" + SECRET_PROMPT.encode()):
        told += post(gateway.port, broken, key=SECRET_KEY).body
    told += post(gateway.port, chat(SECRET_PROMPT, n=0, api_key=SECRET_KEY)).body
    told += post(gateway.port, chat(SECRET_PROMPT), key=SECRET_KEY + "x").body
    told += post(gateway.port, chat(SECRET_PROMPT, model=SECRET_KEY), key=SECRET_KEY).body.replace(
        f"'{SECRET_KEY}'".encode(), b""
    )
    told += fetch(gateway.port, "GET", f"/v1/x?key={SECRET_KEY}", key=SECRET_KEY).body
    engine.stop()
    told += post(gateway.port, chat(SECRET_PROMPT), key=SECRET_KEY).body
    for path in ("/health", "/readiness", "/v1/models", "/list_workers", "/metrics"):
        told += fetch(gateway.port, "GET", path, key="sk-admin-4444").body
    gateway.stop()
    told += (gateway.stdout + gateway.stderr + log.read_text()).encode()
    assert "alice" in log.read_text()
    for secret in (SECRET_KEY, SECRET_PROMPT, WORKER_KEY, "sk-admin-4444", "sk-bob-3333"):
        assert secret.encode() not in told, secret


def test_metrics_and_admin_pages_need_the_admin_key(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 61."""
    gateway = gateways(engine, tenants=TENANTS, auth={"admin_keys": ["sk-admin"]})
    assert fetch(gateway.port, "GET", "/metrics").status == 401
    assert fetch(gateway.port, "GET", "/metrics", key="sk-bob-3333").status in (401, 403)
    assert fetch(gateway.port, "GET", "/metrics", None, [("x-forwarded-for", "127.0.0.1")]).status == 401
    answer = fetch(gateway.port, "GET", "/metrics", key="sk-admin")
    assert answer.status == 200
    assert (answer.header("content-type") or "").startswith("text/plain")
    for path in ("/health", "/readiness"):
        answer = fetch(gateway.port, "GET", path)
        assert answer.status == 200
        assert b"alice" not in answer.body
        assert engine.url.encode() not in answer.body


def test_without_an_admin_key_metrics_answer_on_loopback(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    assert fetch(gateway.port, "GET", "/metrics").status == 200


def test_an_admin_key_is_no_tenants_key(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, tenants=TENANTS, auth={"admin_keys": ["sk-admin"]})
    assert post(gateway.port, chat(), key="sk-admin").status in (401, 403)
    served_at_once(gateway, key="sk-bob-3333")


def test_a_worker_that_rejects_our_credential_is_not_the_callers_fault(
    engines: EngineMaker, gateways: GatewayMaker
) -> None:
    """A 401 would make the caller doubt a key that is right."""
    engine = engines(
        Behaviour(status=401, body=b'{"error":{"message":"bad key wk-1234","type":"x","param":null,"code":1}}')
    )
    gateway = gateways(engine, workers=[{"url": engine.url, "models": ["m"], "api_key": "wk-1234"}])
    answer = post(gateway.port, chat())
    assert answer.status in (401, 502)
    assert json.loads(answer.body)["error"]

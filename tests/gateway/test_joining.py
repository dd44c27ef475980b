"""Workers that come and go while the gateway runs: FastChat's and LMDeploy's protocols, operators, tokens, restarts."""

import json
import time
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.gateway import EngineMaker, GatewayMaker, Running, served_at_once, wait_until
from support.http import CHAT, Answer, Client, chat, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

ADMIN = (("authorization", "Bearer sk-admin"),)
TOKEN = (("authorization", "Bearer join-me"),)
ALIEN = (("x-forwarded-for", "10.1.2.3"),)


def register(gateway: Running, url: str, *models: str, beats: bool = True, headers: Any = (), **extra: Any) -> Answer:
    """As a FastChat worker does."""
    status = {"model_names": list(models), "speed": 1, "queue_length": 0}
    body = {"worker_name": url, "check_heart_beat": beats, "worker_status": status, "multimodal": False, **extra}
    return fetch(gateway.port, "POST", "/register_worker", body, headers)


def beat(gateway: Running, url: str, headers: Any = ()) -> bool:
    body = {"worker_name": url, "queue_length": 3}
    answer = fetch(gateway.port, "POST", "/receive_heart_beat", body, headers)
    assert answer.status == 200
    exist = answer.json["exist"]
    assert isinstance(exist, bool)
    return exist


def workers(gateway: Running, headers: Any = ()) -> dict[str, dict[str, Any]]:
    rows = fetch(gateway.port, "GET", "/list_workers", headers=headers).json["workers"]
    return {row["url"]: row for row in rows}


def state_of(gateway: Running, engine: MockEngine | str, headers: Any = ()) -> str:
    url = engine if isinstance(engine, str) else engine.url
    row = workers(gateway, headers).get(url)
    return "gone" if row is None else str(row["state"])


def wait_state(gateway: Running, engine: MockEngine | str, state: str, headers: Any = ()) -> None:
    wait_until(lambda: state_of(gateway, engine, headers) == state, 10, f"{state}, is {workers(gateway, headers)}")


# ---- FastChat (S45, S56, S57) ----


def test_a_worker_registers_and_serves(engines: EngineMaker, gateways: GatewayMaker) -> None:
    gateway = gateways()
    engine = engines(models=("vicuna",))
    assert not beat(gateway, engine.url)  # beats without having registered: it is told to register
    answer = register(gateway, engine.url, "vicuna")
    assert (answer.status, answer.json) == (200, None)
    assert fetch(gateway.port, "POST", "/list_models").json == {"models": ["vicuna"]}
    wait_state(gateway, engine, "ready")
    assert beat(gateway, engine.url)
    assert post(gateway.port, chat(model="vicuna")).status == 200
    address = fetch(gateway.port, "POST", "/get_worker_address", {"model": "vicuna"}).json
    assert address == {"address": engine.url}
    assert fetch(gateway.port, "POST", "/get_worker_address", {"model": "other"}).json == {"address": ""}
    status = fetch(gateway.port, "POST", "/worker_get_status").json
    assert status == {"model_names": ["vicuna"], "speed": 1.0, "queue_length": 0}
    assert fetch(gateway.port, "POST", "/refresh_all_workers").status == 200
    assert state_of(gateway, engine) == "ready"  # looked at anew, and not forgotten meanwhile (S49)


def test_without_models_they_are_read_from_its_list(engines: EngineMaker, gateways: GatewayMaker) -> None:
    gateway = gateways()
    engine = engines(models=("a", "b"))
    assert fetch(
        gateway.port, "POST", "/register_worker",
        {"worker_name": engine.url, "check_heart_beat": False, "worker_status": None},
    ).status == 200  # fmt: skip
    wait_state(gateway, engine, "ready")
    assert fetch(gateway.port, "GET", "/list_models").json == {"models": ["a", "b"]}


def test_registering_again_replaces_everywhere_at_once(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Report 39: the same address again, with the same and with another model; no entry is left, no share doubled."""
    gateway = gateways()
    first, second = engines(models=("m0", "m1")), engines(models=("m0",))
    for url in (first.url, second.url, first.url, first.url):
        assert register(gateway, url, "m0").status == 200
    for engine in (first, second):
        wait_state(gateway, engine, "ready")
    assert len(workers(gateway)) == 2
    for _ in range(40):
        assert post(gateway.port, chat(model="m0")).status == 200
    share = Counter({engine.name: len(engine.received) for engine in (first, second)})
    assert min(share.values()) >= 8, share
    assert register(gateway, first.url, "m1").status == 200
    assert fetch(gateway.port, "GET", "/list_models").json == {"models": ["m0", "m1"]}
    before = len(first.received)
    for _ in range(10):
        assert post(gateway.port, chat(model="m0")).status == 200
    assert len(first.received) == before
    assert post(gateway.port, chat(model="m1")).status == 200
    assert len(first.received) == before + 1


def test_a_worker_comes_back_on_another_port_under_its_name(engines: EngineMaker, gateways: GatewayMaker) -> None:
    gateway = gateways()
    old, new = engines(), engines()
    register(gateway, old.url, "m", name="gpu-7")
    wait_state(gateway, old, "ready")
    old.stop()
    register(gateway, new.url, "m", name="gpu-7")
    assert state_of(gateway, old) == "gone"
    wait_state(gateway, new, "ready")
    assert post(gateway.port, chat()).header("x-evenflow-worker") == "gpu-7"
    # And under another name at the same address: one worker, not two.
    register(gateway, new.url, "m", name="gpu-8")
    assert [row["name"] for row in workers(gateway).values()] == ["gpu-8"]


def test_the_silent_are_not_chosen(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """S46; it answers probes well, and is taken back as soon as it beats."""
    gateway = gateways(fleet={"heartbeat_expiry_s": 0.6, "heartbeat_interval_s": 0.2})
    silent, steady = engines(), engines()
    register(gateway, silent.url, "m")
    register(gateway, steady.url, "m", beats=False)
    wait_state(gateway, steady, "ready")
    wait_state(gateway, silent, "suspect")
    assert "heartbeat" in workers(gateway)[silent.url]["reason"]
    before = len(silent.received)
    for _ in range(20):
        assert post(gateway.port, chat()).status == 200
    assert len(silent.received) == before
    assert beat(gateway, silent.url)
    wait_state(gateway, silent, "ready")


@pytest.mark.parametrize(
    ("listed", "state", "says"),
    [
        (("other",), "suspect", "registered with ghost, m, but its /v1/models lists other"),
        (("m", "x"), "ready", ""),
    ],
)
def test_what_it_lists_goes_above_what_it_says(
    engines: EngineMaker, gateways: GatewayMaker, listed: tuple[str, ...], state: str, says: str
) -> None:
    gateway = gateways()
    engine = engines(models=listed)
    register(gateway, engine.url, "m", "ghost")
    wait_state(gateway, engine, state)
    assert says in workers(gateway)[engine.url]["reason"]
    if state == "ready":
        assert fetch(gateway.port, "GET", "/list_models").json == {"models": ["m"]}


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (Behaviour(body=b"<html>welcome</html>", content_type="text/html"), "did not answer with a list of models"),
        (Behaviour(close_at_once=True), "probe failed"),
        (Behaviour(silent=True), "no answer in time"),
        (Behaviour(status=404), "404"),
    ],
    ids=["html", "closes", "hangs", "missing"],
)
def test_what_is_no_engine_gets_a_state_and_no_traffic(
    engines: EngineMaker, gateways: GatewayMaker, page: Behaviour, says: str
) -> None:
    good = engines()
    gateway = gateways(good)
    bad = engines(probed_as=page)
    register(gateway, bad.url, "m")
    wait_state(gateway, bad, "suspect")
    assert says in workers(gateway)[bad.url]["reason"]
    for _ in range(10):
        assert served_at_once(gateway).status == 200
    assert not [one for one in bad.received if one.path == CHAT]


# ---- LMDeploy ----


def test_a_node_joins_and_leaves_when_it_has_drained(engines: EngineMaker, gateways: GatewayMaker) -> None:
    gateway = gateways()
    engine = engines(models=("internlm",))
    body = {"url": engine.url, "status": {"models": ["internlm"], "role": "Hybrid", "latency": [], "speed": None}}
    assert fetch(gateway.port, "POST", "/nodes/add", body).json == {"message": "Added successfully"}
    wait_state(gateway, engine, "ready")
    status = fetch(gateway.port, "GET", "/nodes/status").json
    assert status[engine.url]["models"] == ["internlm"]
    engine.behaviour = Behaviour(tokens=6, chunk_delay_s=0.1)
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat(model="internlm", stream=True)))
        answer = client.read_head()
        events = client.events(answer)
        next(events)
        assert fetch(gateway.port, "POST", f"/nodes/remove?node_url={engine.url}").status == 200
        assert state_of(gateway, engine) == "draining"
        assert post(gateway.port, chat(model="internlm")).status == 503
        assert list(events)[-1] == b"[DONE]"
    wait_state(gateway, engine, "gone")
    again = fetch(gateway.port, "POST", "/nodes/remove", {"url": engine.url})
    assert (again.status, again.error["code"]) == (404, "worker_not_found")
    # What it served is unknown again, once nobody has it.
    assert post(gateway.port, chat(model="internlm")).status in (404, 503)


def test_a_part_of_an_engine_is_refused(gateways: GatewayMaker) -> None:
    gateway = gateways()
    answer = fetch(
        gateway.port, "POST", "/nodes/add", {"url": "http://127.0.0.1:1", "status": {"role": "Prefill"}}
    )
    assert (answer.status, answer.error["param"]) == (400, "status.role")


# ---- who may join (S56) ----

TENANT = {"tenants": [{"name": "a", "keys": ["sk-a"]}], "auth": {"admin_keys": ["sk-admin"], "worker_token": "join-me"}}


def basic(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", "Basic " + b64encode(f"worker:{token}".encode()).decode()),)


def test_joining_needs_the_token(engines: EngineMaker, gateways: GatewayMaker) -> None:
    gateway = gateways(**TENANT)
    engine = engines()
    for headers in ((), (("authorization", "Bearer sk-a"),), basic("wrong"), (("authorization", "Basic ?"),)):
        answer = register(gateway, engine.url, "m", headers=headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert fetch(gateway.port, "POST", "/nodes/add", {"url": engine.url}, headers).status == 401
        assert fetch(gateway.port, "POST", "/receive_heart_beat", {"worker_name": "x"}, headers).status == 401
        assert fetch(gateway.port, "POST", "/nodes/remove", {"url": engine.url}, headers).status == 401
    assert workers(gateway, ADMIN) == {}
    for headers in (TOKEN, basic("join-me"), ADMIN):
        assert register(gateway, engine.url, "m", headers=headers).status == 200
    wait_state(gateway, engine, "ready", ADMIN)


def test_keys_without_a_worker_token_let_nobody_join(gateways: GatewayMaker) -> None:
    gateway = gateways(tenants=TENANT["tenants"])
    answer = register(gateway, "http://127.0.0.1:1", "m", headers=TOKEN)
    assert answer.status == 401
    assert "auth.worker_token" in answer.error["message"]


def test_localhost_from_elsewhere_is_refused_and_shown(gateways: GatewayMaker) -> None:
    gateway = gateways()
    for url in ("http://localhost:9", "http://127.0.0.1:9", "http://[::1]:9", "http://0.0.0.0:9"):
        answer = register(gateway, url, "m", headers=ALIEN)
        assert (answer.status, answer.error["param"]) == (400, "url")
        assert "--advertise" in answer.error["message"]
    assert workers(gateway) == {}
    refused = fetch(gateway.port, "GET", "/admin/v1/workers").json["refused"]
    assert len(refused) == 4
    assert all("own machine" in one["reason"] for one in refused)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"worker_name": 3}, "worker_name"),
        ({}, None),
        ({"worker_name": "ftp://x"}, "url"),
        ({"worker_name": "http://x/y/z"}, "url"),
        ({"worker_name": "http://a:b@x"}, "url"),
        ({"worker_name": "http://x", "worker_status": {"model_names": "m"}}, "worker_status.model_names"),
        ({"worker_name": "http://x", "worker_status": {"model_names": ["m" * 1000]}}, "models"),
        ({"worker_name": "http://x", "worker_status": {"model_names": [""]}}, "models"),
        ({"worker_name": "http://x", "worker_status": {"model_names": [], "speed": 0}}, "speed"),
        ({"worker_name": "http://x", "worker_status": {"model_names": [], "speed": -1}}, "speed"),
        ({"worker_name": "http://x", "name": "a b"}, "name"),
        ({"worker_name": "http://x", "slots": "many"}, "slots"),
        ("[]", None),
        ("{", None),
    ],
)
def test_bad_registrations(gateways: GatewayMaker, body: Any, param: str | None) -> None:
    gateway = gateways()
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    answer = fetch(gateway.port, "POST", "/register_worker", data)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert workers(gateway) == {}


# ---- operators ----


def admin(gateway: Running, method: str, path: str, body: Any = None, headers: Any = ()) -> Answer:
    return fetch(gateway.port, method, "/admin/v1/workers" + path, body, headers)


def test_an_operator_adds_drains_and_removes(engines: EngineMaker, gateways: GatewayMaker) -> None:
    first, second = engines(), engines()
    gateway = gateways(first)
    added = admin(gateway, "POST", "", {"url": second.url, "name": "second", "models": ["m"], "slots": 3})
    assert added.status == 201
    assert {**added.json, "last_seen_s": 0} == {
        "name": "second", "url": second.url, "state": "starting", "reason": "waiting for the first probe",
        "source": "added", "group": None, "version": None, "kind": "", "models": ["m"], "in_flight": 0, "queued": 0,
        "slots": 3, "speed": 1.0, "kv_use": None, "answered": 0, "errors": 0, "last_seen_s": 0, "heartbeat_due_s": None,
    }  # fmt: skip
    wait_state(gateway, second, "ready")
    assert admin(gateway, "POST", "/second/drain").json["state"] == "draining"
    before = len(second.received)
    for _ in range(10):
        assert served_at_once(gateway).status == 200
    assert len(second.received) == before
    assert state_of(gateway, second) == "draining"  # it stays until it is removed or comes back
    assert admin(gateway, "POST", "/second/resume").json["state"] == "starting"
    wait_state(gateway, second, "ready")
    assert admin(gateway, "DELETE", "/second?now=1").json["state"] == "gone"
    assert state_of(gateway, second) == "gone"
    missing = admin(gateway, "GET", "/secnd")
    assert (missing.status, missing.error["code"]) == (404, "worker_not_found")
    assert admin(gateway, "POST", f"/{first.url.removeprefix('http://')}/fly").status == 404


def test_a_removed_worker_finishes_what_it_runs(engines: EngineMaker, gateways: GatewayMaker) -> None:
    stays, leaves = engines(), engines(Behaviour(tokens=5, chunk_delay_s=0.1))
    gateway = gateways(leaves)
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat(stream=True)))
        events = client.events(client.read_head())
        next(events)
        admin(gateway, "POST", "", {"url": stays.url, "models": ["m"]})
        wait_state(gateway, stays, "ready")
        name = leaves.url.removeprefix("http://")
        assert admin(gateway, "DELETE", f"/{name}").json == {"name": name, "state": "draining", "in_flight": 1}
        assert post(gateway.port, chat()).header("x-evenflow-worker") == stays.url.removeprefix("http://")
        assert list(events)[-1] == b"[DONE]"
    wait_state(gateway, leaves, "gone")
    gateway.wait_at_rest()


def test_admin_routes_are_for_operators(engines: EngineMaker, gateways: GatewayMaker) -> None:
    engine = engines()
    gateway = gateways(**TENANT)
    for headers in ((), TOKEN, (("authorization", "Bearer sk-a"),)):
        assert admin(gateway, "GET", "", headers=headers).status == 401
        assert admin(gateway, "POST", "", {"url": engine.url}, headers).status == 401
        assert admin(gateway, "DELETE", "/x", headers=headers).status == 401
    assert admin(gateway, "POST", "", {"url": engine.url}, (*ADMIN, ("origin", "https://evil"))).status == 403
    assert admin(gateway, "POST", "", {"url": engine.url, "colour": 1}, ADMIN).status == 400
    assert admin(gateway, "POST", "", {"url": engine.url, "api_key": "sk-engine"}, ADMIN).status == 201
    wait_state(gateway, engine, "ready", ADMIN)
    assert b"sk-engine" not in admin(gateway, "GET", "", headers=ADMIN).body
    assert post(gateway.port, chat(), headers=(("authorization", "Bearer sk-a"),)).status == 200
    assert engine.received[-1].header("authorization") == "Bearer sk-engine"


# ---- restarts (S45, S59; report 52) ----


def test_a_restarted_gateway_knows_its_fleet_again_by_their_beats(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Twenty workers that beat every half second, as FastChat's do: told to register, they do."""
    urls = [engines().url for _ in range(20)]
    first = gateways()
    for url in urls:
        register(first, url, "m")
    wait_until(lambda: [row["state"] for row in workers(first).values()] == ["ready"] * 20, 10)
    first.stop()
    second = gateways()
    assert workers(second) == {}
    began = time.monotonic()
    for url in urls:  # one heartbeat of each
        if not beat(second, url):
            register(second, url, "m")
    wait_until(lambda: [row["state"] for row in workers(second).values()] == ["ready"] * 20, 10)
    print(f"all back {time.monotonic() - began:.2f} s after their first beats")
    assert post(second.port, chat()).status == 200


def test_the_wanted_fleet_outlives_the_gateway(
    engines: EngineMaker, gateways: GatewayMaker, tmp_path: Path
) -> None:
    state = tmp_path / "fleet.json"
    node, added, left = engines(), engines(), engines()
    first = gateways(fleet={"state": str(state)})
    fetch(first.port, "POST", "/nodes/add", {"url": node.url, "status": {"models": ["m"]}})
    fetch(first.port, "POST", "/nodes/add", {"url": left.url, "status": {"models": ["m"]}})
    admin(first, "POST", "", {"url": added.url, "name": "added", "slots": 2, "api_key": "sk-e", "aliases": {"x": "m"}})
    for engine in (node, added, left):
        wait_state(first, engine, "ready")
    fetch(first.port, "POST", "/nodes/remove", {"url": left.url})
    wait_until(lambda: state.exists() and left.url not in state.read_text() and added.url in state.read_text(), 5)
    assert state.stat().st_mode & 0o077 == 0  # it holds a credential
    assert "in_flight" not in state.read_text()
    first.stop()
    second = gateways(fleet={"state": str(state)})
    for engine in (node, added):
        wait_state(second, engine, "ready")
    assert state_of(second, left) == "gone"
    row = workers(second)[added.url]
    assert (row["name"], row["slots"], row["models"]) == ("added", 2, ["m", "x"])
    assert post(second.port, chat(model="x")).status == 200
    assert added.received[-1].header("authorization") == "Bearer sk-e"


@pytest.mark.parametrize("page", [b"", b"{", b"[]", b'{"format": 99}', b'{"workers": [{"name": 1}]}', b"\xff\x00"])
def test_a_broken_file_is_put_aside(gateways: GatewayMaker, tmp_path: Path, page: bytes) -> None:
    state = tmp_path / "fleet.json"
    state.write_bytes(page)
    gateway = gateways(fleet={"state": str(state)})
    assert workers(gateway) == {}
    assert (tmp_path / "fleet.json.unreadable").read_bytes() == page


def test_a_worker_of_the_file_that_is_none_is_left_out(gateways: GatewayMaker, tmp_path: Path) -> None:
    state = tmp_path / "fleet.json"
    good = {"name": "good", "url": "http://127.0.0.1:9", "source": "added"}
    rows = [{**good, "name": "bad", "url": "nowhere"}, {**good, "name": "odd", "source": "magic"}, good]
    state.write_text(json.dumps({"format": 1, "workers": rows}))
    gateway = gateways(fleet={"state": str(state)})
    assert [row["name"] for row in workers(gateway).values()] == ["good"]

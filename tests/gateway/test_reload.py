"""SIGHUP reads the configuration again: in force at once and whole, or not at all; nothing under way is touched."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayProcess, ProcessMaker, settings_for, wait_until, write_settings
from support.http import CHAT, Client, chat, post, request_bytes
from support.mock_engine import Behaviour, MockEngine


def tenant(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "keys": [f"sk-{name}"], **more}


class Reloading:
    """A gateway process whose file is rewritten."""

    def __init__(self, processes: ProcessMaker, engine: MockEngine, **sections: Any) -> None:
        self.engine = engine
        self.process: GatewayProcess = processes(engine, **sections)
        self.port = self.process.port
        self.path: Path = self.process.path

    def reload(self, *, accepted: bool = True, text: str | None = None, **sections: Any) -> None:
        told = "in force" if accepted else "reload refused"
        before = self.process.stderr.count(told)
        if text is not None:
            self.path.write_text(text)
        else:
            write_settings(self.path, settings_for(self.engine, **sections))
        self.process.signal(signal.SIGHUP)
        wait_until(lambda: self.process.stderr.count(told) > before, 5, f"{told!r} in {self.process.stderr}")


@pytest.fixture
def reloading(processes: ProcessMaker, engine: MockEngine) -> Any:
    return lambda **sections: Reloading(processes, engine, **sections)


def test_keys_come_and_go(reloading: Any) -> None:
    """A revoked key is refused at once, also on the connection that has just used it."""
    gateway = reloading(tenants=[tenant("a"), tenant("b")])
    with Client(gateway.port) as kept:
        data = request_bytes("POST", CHAT, chat(), key="sk-a")
        for _ in range(3):
            kept.send(data)
            assert kept.read_answer().status == 200
        assert post(gateway.port, chat(), key="sk-c").status == 401
        gateway.reload(tenants=[tenant("b"), tenant("c")])
        kept.send(data)
        assert kept.read_answer().status == 401
    assert post(gateway.port, chat(), key="sk-b").status == 200
    assert post(gateway.port, chat(), key="sk-c").status == 200


def test_a_bad_file_keeps_the_running_configuration(reloading: Any) -> None:
    """S4, report 58: refused with file and line; what is right later is taken."""
    gateway = reloading(tenants=[tenant("a")])
    weights = ["0", "-1", ".inf", '"10"', "1e-300"]
    for wrong in weights:
        text = gateway.path.read_text().replace("name: a", f"name: a\n  weight: {wrong}")
        good = gateway.path.read_text()
        gateway.reload(accepted=False, text=text)
        assert post(gateway.port, chat(), key="sk-a").status == 200
        gateway.path.write_text(good)
    line = gateway.process.stderr.splitlines()[-1]
    assert "tenants[0].weight" in line
    assert f"{gateway.path}:" in line
    for broken in ("tenants: [", "\t", "tenantz: []", "scheduling: {tiers: []}"):
        gateway.reload(accepted=False, text=broken)
        assert post(gateway.port, chat(), key="sk-a").status == 200
    gateway.reload(tenants=[tenant("b")])
    assert post(gateway.port, chat(), key="sk-b").status == 200
    assert post(gateway.port, chat(), key="sk-a").status == 401


def test_what_runs_and_waits_goes_on_under_the_new_schedule(reloading: Any, engine: MockEngine) -> None:
    """S66: twenty streams and a queue through a change of tiers and weights; none is lost, the new order holds."""
    gateway = reloading(slots=20, tenants=[tenant("a"), tenant("b"), tenant("hold")])
    engine.named["hold"] = Behaviour(gated_after=1, tokens=5)
    running = [Client(gateway.port, timeout_s=20) for _ in range(20)]
    for client in running:
        client.send(request_bytes("POST", CHAT, chat("<<hold>>", stream=True), key="sk-hold"))
    wait_until(lambda: engine.running == 20)
    waiting = {}
    for name in ("a", "b"):
        for number in range(3):
            client = waiting[name, number] = Client(gateway.port, timeout_s=20)
            client.send(request_bytes("POST", CHAT, chat(f"[{name}{number}]"), key=f"sk-{name}"))
            time.sleep(0.05)
    tiers = [
        {"name": "high", "groups": [{"name": "b", "weight": 1}]},
        {"name": "low", "groups": [{"name": "keys", "weight": 1}]},
    ]
    gateway.reload(
        slots=20,
        scheduling={"tiers": tiers},
        tenants=[tenant("a"), tenant("b", group="b"), tenant("hold")],
    )
    assert engine.running == 20
    engine.open_gate()
    for client in running:
        answer = client.read_answer()
        assert answer.payloads[-1] == b"[DONE]"
        client.close()
    for client in waiting.values():
        assert client.read_answer().status == 200
        client.close()
    served = [one.body.partition(b'"[')[2][:2].decode() for one in engine.received if b'"[' in one.body]
    assert served == ["b0", "b1", "b2", "a0", "a1", "a2"]


def test_limits_change_and_what_was_used_stays_used(reloading: Any) -> None:
    gateway = reloading(tenants=[tenant("a", limits={"requests_per_minute": 10})])
    for _ in range(8):
        assert post(gateway.port, chat(), key="sk-a").status == 200
    gateway.reload(tenants=[tenant("a", limits={"requests_per_minute": 5})])
    answers = [post(gateway.port, chat(), key="sk-a") for _ in range(3)]
    assert answers[0].header("x-ratelimit-limit-requests") == "5"
    assert [answer.status for answer in answers] == [200, 429, 429]
    gateway.reload(tenants=[tenant("a")])
    assert post(gateway.port, chat(), key="sk-a").header("x-ratelimit-limit-requests") is None


def test_a_concurrency_that_is_raised_lets_what_waits_run(reloading: Any, engine: MockEngine) -> None:
    gateway = reloading(tenants=[tenant("a", limits={"concurrency": 1})])
    engine.behaviour = Behaviour(gated=True)
    clients = [Client(gateway.port) for _ in range(3)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat(), key="sk-a"))
    wait_until(lambda: engine.running == 1)
    gateway.reload(tenants=[tenant("a", limits={"concurrency": 3})])
    wait_until(lambda: engine.running == 3)
    engine.open_gate()
    for client in clients:
        assert client.read_answer().status == 200
        client.close()


def test_what_needs_a_restart_is_said(reloading: Any, engine: MockEngine) -> None:
    gateway = reloading(tenants=[tenant("a")])
    gateway.reload(slots=7, tenants=[tenant("a")])
    assert "workers: a change here needs a restart" in gateway.process.stderr


def test_limits_that_are_taken_away_leave_open_requests_whole(reloading: Any, engine: MockEngine) -> None:
    """What runs and waits was reserved from limits that are no more; nobody else loses a time limit over it."""
    short = {"queue_timeout_s": 1.0}
    limited = tenant("a", limits={"requests_per_minute": 100})
    gateway = reloading(slots=1, limits=short, tenants=[limited, tenant("b")])
    engine.behaviour = Behaviour(gated=True)
    clients = [Client(gateway.port, timeout_s=6) for _ in range(4)]
    for client, name in zip(clients, "abab", strict=True):
        client.send(request_bytes("POST", CHAT, chat(), key=f"sk-{name}"))
        time.sleep(0.05)
    gateway.reload(slots=1, limits=short, tenants=[tenant("a"), tenant("b")])
    for client in clients[1:]:
        assert client.read_answer().status == 503
    engine.open_gate()
    assert clients[0].read_answer().status == 200
    clients[0].send(request_bytes("POST", CHAT, chat(), key="sk-a"))
    assert clients[0].read_answer().status == 200
    for client in clients:
        client.close()


def test_fewer_tiers_and_tenants_lose_nothing_that_waits(reloading: Any, engine: MockEngine) -> None:
    tiers = [
        {"name": "high", "groups": [{"name": "keys", "weight": 1}]},
        {"name": "low", "groups": [{"name": "slow", "weight": 1}]},
    ]
    names = [tenant("a", group="slow"), tenant("b"), tenant("c", group="slow")]
    gateway = reloading(slots=1, scheduling={"tiers": tiers}, tenants=names, auth={"admin_keys": ["sk-admin"]})
    engine.behaviour = Behaviour(gated=True)
    clients = {}
    for number, name in enumerate("cabac"):
        client = clients[number, name] = Client(gateway.port, timeout_s=10)
        client.send(request_bytes("POST", CHAT, chat(), [("x-request-id", f"id-{number}")], key=f"sk-{name}"))
        time.sleep(0.05)
    one = [{"name": "only", "groups": [{"name": "keys", "weight": 1}]}]
    gateway.reload(
        slots=1, scheduling={"tiers": one}, tenants=[tenant("b"), tenant("c")], auth={"admin_keys": ["sk-admin"]}
    )
    from support.http import fetch

    told = fetch(gateway.port, "GET", "/admin/v1/requests/id-1", key="sk-admin").json
    assert (told["state"], told["tier"]) == ("waiting", "only")
    running = fetch(gateway.port, "GET", "/admin/v1/requests/id-0", key="sk-admin").json
    assert (running["state"], running["tier"]) == ("running", "low")  # as it was when it was dispatched
    assert post(gateway.port, chat(), key="sk-a").status == 401
    engine.open_gate()
    for client in clients.values():
        assert client.read_answer().status == 200
        client.close()


def test_what_is_read_last_is_in_force_last(reloading: Any) -> None:
    """A large file and, right behind it, a small one: the small one wins, though it is read faster."""
    gateway = reloading(tenants=[tenant("a")])
    many = [tenant("a"), *(tenant(f"t{number}") for number in range(3000))]
    write_settings(gateway.path, settings_for(gateway.engine, tenants=many))
    gateway.process.signal(signal.SIGHUP)
    time.sleep(0.05)
    gateway.reload(tenants=[tenant("b")])
    wait_until(lambda: gateway.process.stderr.count("in force") >= 2, 10)
    assert post(gateway.port, chat(), key="sk-b").status == 200
    assert post(gateway.port, chat(), key="sk-a").status == 401


def test_another_address_is_said_to_need_a_restart(reloading: Any) -> None:
    gateway = reloading(tenants=[tenant("a")])
    gateway.reload(tenants=[tenant("a")], listen={"port": 1})
    assert "listen: another address needs a restart" in gateway.process.stderr

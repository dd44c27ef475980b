"""Workers that look well and fail, that go up and down, and that come back: who is chosen, and how much they get."""

import time
from typing import Any

from support.gateway import EngineMaker, GatewayMaker, Running, wait_until
from support.http import chat, fetch, post
from support.mock_engine import Behaviour, MockEngine


def row_of(gateway: Running, engine: MockEngine) -> dict[str, Any]:
    rows: list[dict[str, Any]] = fetch(gateway.port, "GET", "/admin/v1/workers").json["workers"]
    (row,) = [row for row in rows if row["url"] == engine.url]
    return row


def served_for(gateway: Running, seconds: float) -> int:
    """All are served whatever the fleet does; how many there were."""
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        assert post(gateway.port, chat()).status == 200
        count += 1
    return count


HTML: dict[str, Any] = {"status": 502, "body": b"<html>bad gateway</html>", "content_type": "text/html"}


def test_one_that_answers_health_but_fails_all_work_gets_little(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Its probes bring it back only on trial, and after longer and longer pauses; no caller sees any of it."""
    bad, good = engines(Behaviour(**HTML)), engines()
    gateway = gateways(bad, good, scheduling={"placement": "round_robin"})
    count = served_for(gateway, 3.0)
    assert count > 100
    # Three until it was noticed, then one after 1 s and one after 2 s more.
    assert 3 <= len(bad.received) <= 6
    row = row_of(gateway, bad)
    assert row["state"] == "suspect"
    assert "tried again in" in row["reason"]
    assert row["errors"] >= 3
    bad.behaviour = Behaviour()
    wait_until(lambda: row_of(gateway, bad)["state"] == "ready", 10)
    wait_until(lambda: served_for(gateway, 0.2) and row_of(gateway, bad)["reason"] == "", 5)
    # On trial it gets one at a time; once that has been answered, more each second.
    assert row_of(gateway, bad)["slots"] < 32
    wait_until(lambda: row_of(gateway, bad)["slots"] == 32, 10)


def test_the_only_worker_is_not_left_alone_for_what_requests_say(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    engine.behaviour = Behaviour(status=500, body=b'{"error":"broken"}')
    for _ in range(10):
        assert post(gateway.port, chat()).status >= 500
    assert row_of(gateway, engine)["state"] == "ready"
    engine.behaviour = Behaviour()
    assert post(gateway.port, chat()).status == 200


def test_a_backoff_ends_when_nobody_else_is_left(engines: EngineMaker, gateways: GatewayMaker) -> None:
    bad, good = engines(Behaviour(**HTML)), engines()
    gateway = gateways(bad, good, scheduling={"placement": "round_robin"})
    served_for(gateway, 1.5)  # it has failed a trial by now, and would be left alone for 2 s
    bad.behaviour = Behaviour()
    good.stop()
    began = time.monotonic()
    wait_until(lambda: post(gateway.port, chat()).status == 200, 5)
    assert time.monotonic() - began < 1.5


def test_who_goes_down_again_and_again_is_tried_less_and_less(engines: EngineMaker, gateways: GatewayMaker) -> None:
    flapping, steady = engines(), engines()
    gateway = gateways(flapping, steady)
    downs = []
    for _ in range(3):
        wait_until(lambda: row_of(gateway, flapping)["state"] == "ready", 10)
        flapping.stop()
        wait_until(lambda: served_for(gateway, 0.05) and row_of(gateway, flapping)["state"] == "suspect", 10)
        flapping.start()
        began = time.monotonic()
        wait_until(lambda: row_of(gateway, flapping)["state"] == "ready", 10)
        downs.append(time.monotonic() - began)
    assert downs[0] < 0.9
    assert 0.9 < downs[1] < downs[2] < 4.0


def test_one_that_joins_a_running_fleet_is_not_flooded(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """S52: it has a part of its slots at first, and all of them some seconds later."""
    old, new = engines(), engines()
    gateway = gateways(old)
    added = {"url": new.url, "models": ["m"], "slots": 16}
    assert fetch(gateway.port, "POST", "/admin/v1/workers", added).status == 201
    wait_until(lambda: row_of(gateway, new)["state"] == "ready", 5)
    assert row_of(gateway, new)["slots"] < 16
    wait_until(lambda: row_of(gateway, new)["slots"] == 16, 8)

"""Seen from outside: metrics with bounded labels, one log line for each request, true token counts."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayMaker, log_lines, metric, wait_until
from support.http import CHAT, Client, chat, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

METRICS = [
    "evenflow_requests_total", "evenflow_request_seconds", "evenflow_time_to_first_token_seconds",
    "evenflow_queue_wait_seconds", "evenflow_queued", "evenflow_in_flight", "evenflow_tokens_total",
    "evenflow_worker_up", "evenflow_worker_in_flight", "evenflow_worker_slots", "evenflow_dispatch_seconds",
    "evenflow_retries_total", "evenflow_fairness_bound_ratio",
]  # fmt: skip


def scrape(gateway: Any) -> list[str]:
    text: str = fetch(gateway.port, "GET", "/metrics").body.decode()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def series(gateway: Any) -> set[str]:
    return {line.rpartition(" ")[0] for line in scrape(gateway)}


def test_every_promised_metric_is_there(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    assert post(gateway.port, chat(stream=True)).status == 200
    text = fetch(gateway.port, "GET", "/metrics").body.decode()
    for name in METRICS:
        assert re.search(rf"^# TYPE {name.removesuffix('_total')}(_total)? (counter|gauge|histogram)$", text, re.M), (
            name
        )
        assert re.search(rf"^# HELP {name.removesuffix('_total')}(_total)? \w+", text, re.M), name
        assert re.search(rf"^{name}(_bucket|_count)?[{{ ]", text, re.M), name


def test_series_are_bounded_whatever_callers_send(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 13: random paths, models, users, request ids and methods."""
    gateway = gateways(engine)
    random_text = random.Random(13)

    def word() -> str:
        return f"w{random_text.randrange(10**9)}"

    def some(client: Client) -> None:
        client.request("POST", f"/v1/{word()}", chat())
        client.request("POST", CHAT, {**chat(), "model": word()})
        client.request("POST", CHAT, chat(user=word()), [("x-request-id", word()), ("user-agent", word())])
        client.request(word().upper(), CHAT)
        client.request("GET", f"/v1/models/{word()}")

    with Client(gateway.port) as client:
        for _ in range(3):
            try:
                some(client)
            except Exception:  # noqa: BLE001 - an unknown method may close the connection
                client = Client(gateway.port)
        before = series(gateway)
        for _ in range(200):
            client.request("POST", f"/v1/{word()}", chat())
            client.request("POST", CHAT, {**chat(), "model": word()})
            client.request("POST", CHAT, chat(user=word()), [("x-request-id", word()), ("user-agent", word())])
            client.request("GET", f"/v1/models/{word()}")
    after = series(gateway)
    assert len(after) - len(before) <= 20
    assert not [line for line in after if re.search(r"w\d{5,}", line)]


def test_no_series_has_a_key_or_an_address_of_a_caller(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 61."""
    gateway = gateways(engine, tenants=[{"name": "alice", "keys": ["sk-alice"]}], auth={"admin_keys": ["sk-admin"]})
    post(gateway.port, chat(user="alice@example.org"), key="sk-alice")
    text = fetch(gateway.port, "GET", "/metrics", key="sk-admin").body.decode()
    assert "sk-" not in text
    assert "@" not in text


def test_counts_are_true(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.named["bad"] = Behaviour(status=400)
    engine.named["cached"] = Behaviour(input_tokens=100, cached_tokens=80, tokens=7)
    gateway = gateways(engine)
    for stream in (False, True):
        post(gateway.port, chat("<<cached>>", stream=stream))
    post(gateway.port, chat("<<bad>>"))
    post(gateway.port, {"model": "m", "input": "one two three"}, path="/v1/embeddings")
    # In the style of the other two APIs.
    post(gateway.port, {"model": "m", "input": "one two", "max_tokens": 5}, path="/v1/responses")
    post(gateway.port, {**chat("one two three four"), "max_tokens": 6}, path="/v1/messages")
    assert metric(gateway, "evenflow_tokens_total", kind="output") == 7 + 7 + 5 + 6
    whole_input = metric(gateway, "evenflow_tokens_total", kind="input")
    cached = metric(gateway, "evenflow_tokens_total", kind="cached")
    assert cached == 160
    # `input` either includes the cached ones or leaves them out.
    assert whole_input in (200 + 3 + 2 + 4, 40 + 3 + 2 + 4)
    assert metric(gateway, "evenflow_requests_total", model="m") == 6
    assert metric(gateway, "evenflow_request_seconds_count") >= 5
    assert metric(gateway, "evenflow_in_flight") == 0
    assert metric(gateway, "evenflow_queued") == 0
    assert metric(gateway, "evenflow_worker_up") == 1
    assert metric(gateway, "evenflow_worker_slots") == 32


def test_gauges_follow(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(gated=True)
    gateway = gateways(engine, slots=2)
    clients = [Client(gateway.port) for _ in range(5)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat()))
    gateway.wait_for(queued=3)
    assert metric(gateway, "evenflow_queued") == 3
    assert metric(gateway, "evenflow_in_flight") == 2
    assert metric(gateway, "evenflow_worker_in_flight") == 2
    assert 0 <= metric(gateway, "evenflow_fairness_bound_ratio") <= 1
    engine.open_gate()
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()
    assert metric(gateway, "evenflow_queued") == 0
    engine.stop()
    wait_until(lambda: metric(gateway, "evenflow_worker_up") == 0, 5)


# ---- the access log ----


def lines_after(path: Path, count: int) -> list[dict[str, Any]]:
    wait_until(lambda: len(log_lines(path)) >= count, 3, f"{count} log lines")
    return log_lines(path)


def test_one_line_for_each_request(engine: MockEngine, gateways: GatewayMaker, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    tenant = {"name": "alice", "keys": ["sk-alice"]}
    worker = {"url": engine.url, "models": ["m"], "name": "first"}
    gateway = gateways(engine, tenants=[tenant], workers=[worker], log={"access": str(path)})
    engine.behaviour = Behaviour(head_delay_s=0.05, input_tokens=9, cached_tokens=4, tokens=3)
    for stream in (False, True):
        id_header = [("x-request-id", f"id-{stream}")]
        assert post(gateway.port, chat(stream=stream), key="sk-alice", headers=id_header).status == 200
    post(gateway.port, chat(), key="sk-wrong")
    post(gateway.port, chat(n=0), key="sk-alice")
    lines = lines_after(path, 4)
    assert len(lines) == 4
    for stream, line in zip((False, True), lines, strict=False):
        assert line["request_id"] == f"id-{stream}"
        assert (line["tenant"], line["model"], line["worker"]) == ("alice", "m", "first")
        assert (line["input_tokens"], line["cached_tokens"], line["output_tokens"]) == (9, 4, 3)
        assert line["status"] == 200
        assert 45 <= line["ttft_ms"] <= line["duration_ms"] < 2000
        assert 0 <= line["queue_ms"] < 50
        assert line["cost"] == pytest.approx(5 + 0.4 + 6)
        assert abs(line["time"] - time.time()) < 60
    assert [line["status"] for line in lines[2:]] == [401, 400]
    assert all("\n" not in json.dumps(line) for line in lines)


def test_a_log_line_can_not_be_forged(engine: MockEngine, gateways: GatewayMaker, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    gateway = gateways(engine, log={"access": str(path)})
    for value in ('a"b', "a\\b", "a\tb", "é" * 10, "x" * 5000):
        answer = post(gateway.port, chat(), headers=[("x-request-id", value)])
        assert answer.status in (200, 400, 431)
    post(gateway.port, {**chat(), "model": 'm"\n{"tenant":"forged"}'})
    lines = lines_after(path, 6)
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
    assert len(lines) == 6
    assert all(len(line["request_id"]) <= 256 for line in lines)
    assert not [line for line in lines if line["tenant"] == "forged"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_usage_of_a_caller_that_left_is_kept(
    engine: MockEngine, gateways: GatewayMaker, tmp_path: Path, stream: bool
) -> None:
    """Report 8: what was produced is recorded, and marked as partial by its outcome."""
    path = tmp_path / "access.log"
    engine.behaviour = Behaviour(tokens=1000, chunk_delay_s=0.01) if stream else Behaviour(silent=True)
    gateway = gateways(engine, log={"access": str(path)})
    client = Client(gateway.port)
    client.send(request_bytes("POST", CHAT, chat("x " * 400, stream=stream)))
    if stream:
        events = client.events(client.read_head())
        for _ in range(6):
            next(events)
    else:
        wait_until(lambda: engine.running == 1)
    client.close()
    [line] = lines_after(path, 1)
    assert line["status"] == 499
    assert line["outcome"] not in ("ok", "failed")
    assert line["input_tokens"] > 100
    if stream:
        assert 4 <= line["output_tokens"] <= 20


def test_a_caller_that_left_the_queue_is_logged_without_tokens(
    engine: MockEngine, gateways: GatewayMaker, tmp_path: Path
) -> None:
    path = tmp_path / "access.log"
    engine.behaviour = Behaviour(gated=True)
    gateway = gateways(engine, slots=1, log={"access": str(path)})
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", CHAT, chat()))
        wait_until(lambda: engine.running == 1)
        client = Client(gateway.port)
        client.send(request_bytes("POST", CHAT, chat()))
        gateway.wait_for(queued=1)
        client.close()
        [line] = lines_after(path, 1)
        assert line["status"] == 499
        assert not line.get("output_tokens")
        assert not line.get("input_tokens")
        assert not line.get("cost")
        engine.open_gate()
        assert holder.read_answer().status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_time_to_first_token_and_queue_wait_are_true(
    engine: MockEngine, gateways: GatewayMaker, tmp_path: Path, stream: bool
) -> None:
    path = tmp_path / "access.log"
    engine.named["hold"] = Behaviour(head_delay_s=0.3)
    engine.behaviour = Behaviour(first_delay_s=0.2, chunk_delay_s=0.02, tokens=5)
    gateway = gateways(engine, slots=1, log={"access": str(path)})
    with Client(gateway.port) as holder, Client(gateway.port) as waiter:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>")))
        wait_until(lambda: engine.running == 1)
        waiter.send(request_bytes("POST", CHAT, chat(stream=stream)))
        answer = waiter.read_answer()
        assert holder.read_answer().status == 200
    waited_ms = float(answer.header("x-evenflow-queue-ms") or 0)
    assert 150 < waited_ms < 600
    line = lines_after(path, 2)[1]
    assert line["queue_ms"] == pytest.approx(waited_ms, abs=5)
    if stream:
        assert line["ttft_ms"] > line["queue_ms"] + 180
        assert line["duration_ms"] > line["ttft_ms"] + 80

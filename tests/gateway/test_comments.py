"""A stream that waits is kept alive by comment lines (report 12), which count as nothing."""

import json
import time

from support.gateway import GatewayMaker, metric
from support.http import CHAT, Client, chat, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

QUICK = {"comment_s": 0.2}


def raw_events(client: Client) -> tuple[list[bytes], bytes]:
    """The comments and the data of a whole stream, in order, and the raw body."""
    answer = client.read_head()
    assert answer.status == 200
    assert (answer.header("content-type") or "").startswith("text/event-stream")
    body = b"".join(client.pieces(answer))
    assert answer.complete
    return [event for event in body.split(b"\n\n") if event], body


def test_comments_while_queued_and_while_the_worker_is_silent(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.named["hold"] = Behaviour(gated=True)
    engine.named["slow"] = Behaviour(head_delay_s=0.5)
    gateway = gateways(engine, slots=1, timeouts=QUICK)
    with Client(gateway.port) as first, Client(gateway.port) as second:
        first.send(request_bytes("POST", CHAT, chat("<<hold>>")))
        gateway.wait_for(leases=1)
        second.send(request_bytes("POST", CHAT, chat("<<slow>>", stream=True)))
        time.sleep(0.7)
        engine.open_gate()
        assert first.read_answer().status == 200  # no stream was asked for: a whole answer and no comment
        events, body = raw_events(second)
        comments = [event for event in events if event.startswith(b":")]
        assert 3 <= len(comments) <= 8
        assert events[: len(comments)] == comments  # none once the worker speaks
        assert events[-1] == b"data: [DONE]"
        assert body.count(b"[DONE]") == 1
        assert second.request("POST", CHAT, chat()).status == 200  # the connection goes on
    # A comment is no token, and the time to first token is the worker's.
    assert metric(gateway, "evenflow_tokens_total", kind="output") == 12
    assert metric(gateway, "evenflow_time_to_first_token_seconds_sum") > 1.0


def test_errors_after_a_comment_are_events(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(head_delay_s=0.4, status=400, body=b'{"error":{"message":"too long","code":400}}')
    gateway = gateways(engine, timeouts=QUICK)
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat(stream=True)))
        events, body = raw_events(client)
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["message"] == "too long"
        assert b"[DONE]" not in body
        assert client.request("POST", CHAT, chat()).status == 400
    gateway.wait_at_rest()


def test_a_queue_time_out_after_a_comment_is_an_event(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(gated=True)
    gateway = gateways(engine, slots=1, timeouts=QUICK, limits={"queue_timeout_s": 0.7})
    with Client(gateway.port) as first, Client(gateway.port) as second:
        first.send(request_bytes("POST", CHAT, chat()))
        gateway.wait_for(leases=1)
        second.send(request_bytes("POST", CHAT, chat(stream=True)))
        events, _ = raw_events(second)
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "overloaded"
        engine.open_gate()
        first.read_answer()


def test_a_comment_is_no_first_byte(engine: MockEngine, engines: object, gateways: GatewayMaker) -> None:
    """The limit on the first byte holds, and another worker may still be tried, after any number of comments."""
    engine.behaviour = Behaviour(silent=True)
    gateway = gateways(engine, timeouts={**QUICK, "first_byte_s": 0.7})
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat(stream=True)))
        events, _ = raw_events(client)
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "upstream_timeout"


def test_silence_for_those_who_need_it(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(head_delay_s=0.5)
    gateway = gateways(engine, timeouts={"comment_s": None})
    answer = post(gateway.port, chat(stream=True))
    assert b"\n:" not in b"\n" + answer.body

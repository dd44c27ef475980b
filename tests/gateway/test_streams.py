"""Streams: relayed event by event and unchanged, with usage asked for and hidden, and every failure shown."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.gateway import EngineMaker, GatewayMaker, log_lines, metric, wait_until
from support.http import CHAT, Client, chat, post, request_bytes
from support.mock_engine import Behaviour, MockEngine, dump, variant

DONE = b"[DONE]"
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def usage_chunks(payloads: list[bytes]) -> list[dict[str, object]]:
    return [json.loads(p) for p in payloads if p != DONE and json.loads(p).get("usage")]


def text_of(payloads: list[bytes], index: int = 0) -> str:
    chunks = [json.loads(payload) for payload in payloads if payload != DONE]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", []) if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


# ---- relaying ----


def test_content_type_and_events_at_once(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 41."""
    engine.behaviour = Behaviour(tokens=4, chunk_delay_s=0.1)
    gateway = gateways(engine)
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat(stream=True)))
        answer = client.read_head()
        assert answer.status == 200
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"
        times = [time.monotonic() for _ in client.events(answer)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    # The role comes with the first word; behind it each event comes at its own time.
    assert all(0.05 < gap < 0.15 for gap in gaps[1:5]), gaps
    assert answer.complete


@pytest.mark.parametrize(
    "cut",
    [
        {"write_bytes": 1},
        {"chunk_bytes": 1},
        {"write_bytes": 7, "chunk_bytes": 3},
        {"chunk_bytes": 1000},
        {"http10": True},
        {"http10": True, "write_bytes": 1},
    ],
    ids=str,
)
def test_any_split_of_bytes_gives_the_same_stream(
    engine: MockEngine, gateways: GatewayMaker, cut: dict[str, int]
) -> None:
    engine.named["cut"] = Behaviour(tokens=5, token="wörd—", **cut)  # type: ignore[arg-type]
    engine.named["whole"] = Behaviour(tokens=5, token="wörd—")
    gateway = gateways(engine)
    whole = post(gateway.port, chat("<<whole>>", stream=True))
    pieces = post(gateway.port, chat("<<cut>>", stream=True))
    assert pieces.complete
    assert pieces.body == whole.body
    assert whole.payloads[-1] == DONE


@pytest.mark.parametrize("write_bytes", [None, 1], ids=["whole", "bytewise"])
@pytest.mark.parametrize(
    "events",
    [
        (b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\r\n\r\n', b"data: [DONE]\r\n\r\n"),
        (b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\r\r', b"data: [DONE]\r\r"),
        (b'data:{"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', b"data:[DONE]\n\n"),
        (b": ping\n\n", WORD, b": ping\n\ndata: [DONE]\n\n"),
        (b"event: delta\nid: 7\nretry: 10\n" + WORD, b"data: [DONE]\n\n"),
        (b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"a"}}]}\n\n', b"data: [DONE]\n\n"),
        (WORD + b'data: {"choices":[]}\n\n' + b"data: [DONE]\n\n",),
    ],
    ids=["crlf", "cr", "no space", "comments", "fields", "two data lines", "one write"],
)  # fmt: skip
def test_framing_passes_unchanged(
    engine: MockEngine, gateways: GatewayMaker, events: tuple[bytes, ...], write_bytes: int | None
) -> None:
    """S55: line ends, comments, other fields: as the engine wrote them."""
    engine.behaviour = Behaviour(events=events, write_bytes=write_bytes)
    gateway = gateways(engine)
    assert post(gateway.port, chat(stream=True)).body == b"".join(events)


def test_an_event_larger_than_any_buffer(engine: MockEngine, gateways: GatewayMaker) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"z" * 900_000 + b'"}}]}\n\n'
    engine.behaviour = Behaviour(events=(event, b"data: [DONE]\n\n"), chunk_bytes=10_000)
    gateway = gateways(engine)
    assert post(gateway.port, chat(stream=True)).body == event + b"data: [DONE]\n\n"


def test_an_event_without_an_end_does_not_grow_for_ever(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(events=(b"data: " + b"z" * 8_000_000, b"z"))
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.status == 502 or b'"error"' in answer.body[-1000:]
    assert DONE not in answer.payloads
    gateway.wait_at_rest()


def test_a_stream_whose_last_event_has_no_empty_line(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Some engines end after `[DONE]` with a single line end or none."""
    events = (b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', b"data: [DONE]")
    engine.behaviour = Behaviour(events=events)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.complete
    assert [payload for payload in answer.payloads if payload == DONE] == [DONE]
    assert b'"error"' not in answer.body


def test_many_choices_keep_their_indexes(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S39 as far as the engine does n itself: nothing is renumbered."""
    engine.behaviour = Behaviour(tokens=3)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True, n=2, stream_options={"include_usage": True}))
    for index in (0, 1):
        assert text_of(answer.payloads, index) == "word0 word1 word2 "
    assert len(usage_chunks(answer.payloads)) == 1
    assert answer.payloads.count(DONE) == 1


@pytest.mark.parametrize(
    "deltas",
    [
        (
            '{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":""}}]}',
            '{"tool_calls":[{"index":1,"id":"b","type":"function","function":{"name":"g","arguments":""}}]}',
            '{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\\\"}}]}',
            '{"tool_calls":[{"index":0,"function":{"arguments":"u00e9\\"}"}}]}',
        ),
        ('{"tool_calls":[{"index":0,"id":"a"}]}', '{"tool_calls":[{"index":0,"id":"b"}]}'),
        ('{"tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}}]}',),
    ],
    ids=["two calls", "same index", "no index"],
)
def test_tool_calls_pass_unchanged(engine: MockEngine, gateways: GatewayMaker, deltas: tuple[str, ...]) -> None:
    """Report 44."""
    engine.behaviour = Behaviour(deltas=deltas)
    gateway = gateways(engine)
    payloads = post(gateway.port, chat(stream=True)).payloads
    chunks = [json.loads(payload) for payload in payloads if payload != DONE]
    sent = [chunk["choices"][0]["delta"] for chunk in chunks if "tool_calls" in chunk["choices"][0]["delta"]]
    assert sent == [json.loads(delta) for delta in deltas]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}, {"n": 3, "seed": 2**63 - 1}],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_sampling_fields_reach_the_engine_as_sent(
    engine: MockEngine, gateways: GatewayMaker, fields: dict[str, Any], stream: bool
) -> None:
    """Reports 48 and 50 as far as the engine serves them: passed on, never dropped."""
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=stream, **fields))
    assert answer.status == 200
    sent = engine.received[0].json
    assert {name: sent[name] for name in fields} == fields
    if not stream:
        assert len(answer.json["choices"]) == fields.get("n", 1)


# ---- usage (report 9) ----


@pytest.mark.parametrize("usage", ["asked", "always", "no_choices"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {}, {"continuous_usage_stats": False}], ids=str)
def test_usage_that_was_not_asked_for_is_counted_but_not_shown(
    engine: MockEngine, gateways: GatewayMaker, usage: str, options: dict[str, bool] | None
) -> None:
    engine.behaviour = Behaviour(tokens=6, input_tokens=11, usage=usage)
    gateway = gateways(engine)
    fields: dict[str, Any] = {} if options is None else {"stream_options": options}
    answer = post(gateway.port, chat(stream=True, **fields))
    assert usage_chunks(answer.payloads) == []
    assert text_of(answer.payloads) == "".join(f"word{i} " for i in range(6))
    assert answer.payloads[-1] == DONE
    assert metric(gateway, "evenflow_tokens_total", kind="output") == 6
    assert metric(gateway, "evenflow_tokens_total", kind="input") == 11


@pytest.mark.parametrize("usage", ["asked", "always", "no_choices"])
def test_usage_that_was_asked_for_comes_once_before_done(
    engine: MockEngine, gateways: GatewayMaker, usage: str
) -> None:
    engine.behaviour = Behaviour(tokens=6, usage=usage)
    gateway = gateways(engine)
    payloads = post(gateway.port, chat(stream=True, stream_options={"include_usage": True})).payloads
    assert payloads[-1] == DONE
    assert len(usage_chunks(payloads)) == 1
    last = json.loads(payloads[-2])
    assert last["usage"]["completion_tokens"] == 6
    if usage != "no_choices":
        assert last["choices"] == []


def test_usage_bytewise_is_hidden_whole(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(tokens=2, chunk_bytes=1, write_bytes=1)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert b"usage" not in answer.body
    assert answer.complete
    assert answer.payloads[-1] == DONE


def test_the_engine_is_asked_for_usage_and_nothing_else_changes(engine: MockEngine, gateways: GatewayMaker) -> None:
    start, big = (
        b'{ "model" : "m",\t"stream":true , "messages":[{"role":"user","content":"x}"}],',
        b'"big":12345678901234567890123',
    )
    body = start + big + b" }"
    gateway = gateways(engine)
    post(gateway.port, body)
    sent = engine.received[0].body
    assert engine.received[0].json["stream_options"]["include_usage"] is True
    for kept in (start, big):
        assert kept in sent
    # An asker's own wish is passed on byte for byte.
    options = b'"stream_options": {"include_usage" : true, "x":1}'
    body = b'{"model":"m", "stream" : true,%b, "messages":[{"role":"user"}]}' % options
    post(gateway.port, body)
    assert engine.received[1].body == body


def test_an_engine_without_usage_is_counted_by_events(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(tokens=7, usage="never")
    gateway = gateways(engine)
    assert post(gateway.port, chat(stream=True)).payloads[-1] == DONE
    assert 7 <= metric(gateway, "evenflow_tokens_total", kind="output") <= 9


# ---- failures in a stream (reports 3, 4) ----


@pytest.mark.parametrize("code", [400, 429, 503, "queue_full", None], ids=str)
@pytest.mark.parametrize("after", [0, 1], ids=["first", "after the role"])
def test_an_error_event_before_any_content_becomes_an_http_error(
    engine: MockEngine, gateways: GatewayMaker, code: object, after: int
) -> None:
    error = dump({"error": {"message": "no room", "type": "x", "param": None, "code": code}})
    engine.behaviour = Behaviour(error_after=after, error_event=error)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.status == (code if isinstance(code, int) else answer.status)
    assert answer.status >= 400
    assert "no room" in answer.error["message"]
    assert answer.header(
        "content-type",
    ).startswith("application/json")  # type: ignore[union-attr]
    gateway.wait_at_rest()


@pytest.mark.parametrize("after_error", ["done", "close", "go_on"])
def test_an_error_event_after_content_is_shown_and_nothing_is_invented(
    engine: MockEngine, gateways: GatewayMaker, after_error: str
) -> None:
    engine.behaviour = Behaviour(tokens=6, error_after=4, after_error=after_error)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.status == 200
    assert text_of(answer.payloads[:4]) == "word0 word1 word2 "
    errors = [payload for payload in answer.payloads if b'"error"' in payload]
    assert len(errors) == 1
    assert b"engine failed" in errors[0]
    assert DONE not in answer.payloads
    assert b'"finish_reason":"stop"' not in answer.body
    gateway.wait_at_rest()


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
def test_a_worker_that_dies_mid_stream_gives_one_error_event_and_no_done(
    engine: MockEngine, gateways: GatewayMaker, reset: bool
) -> None:
    engine.behaviour = Behaviour(tokens=60, close_after=40, reset=reset)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.status == 200
    errors = [payload for payload in answer.payloads if b'"error"' in payload]
    assert len(errors) == 1
    error = json.loads(answer.payloads[-1])["error"]
    assert error["code"] == "upstream_error"
    assert set(error) >= {"message", "type", "param", "code"}
    assert DONE not in answer.payloads
    if not reset:  # a reset may overtake bytes that were still under way
        assert text_of(answer.payloads[:-1]).count("word") == 39
    gateway.wait_at_rest()


def test_a_cut_inside_an_event_shows_no_half_event(engine: MockEngine, gateways: GatewayMaker) -> None:
    good = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    engine.behaviour = Behaviour(events=(good, b'data: {"choices":[{"ind', b""), close_after=2)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.body.startswith(good)
    assert b'{"ind\n' not in answer.body
    assert [json.loads(payload) for payload in answer.payloads][-1]["error"]
    assert DONE not in answer.payloads


def test_a_stream_that_ends_properly_but_without_done_is_passed_on(engine: MockEngine, gateways: GatewayMaker) -> None:
    """The terminating chunk came, so the transfer is whole: what the engine said is what the caller sees."""
    events = (b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n',)
    engine.behaviour = Behaviour(events=events)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.body.startswith(events[0])
    assert DONE not in answer.payloads
    gateway.wait_at_rest()


def test_one_broken_event_does_not_discard_the_rest(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 4's variant: the gateway is no JSON checker."""
    events = (
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
        b'data: {"choices":[{"index":0,"del\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"b"}}]}\n\n',
        b"data: [DONE]\n\n",
    )
    engine.behaviour = Behaviour(events=events)
    gateway = gateways(engine)
    assert post(gateway.port, chat(stream=True)).body == b"".join(events)


def test_an_error_status_to_a_stream_is_a_plain_json_answer(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 20: the framing is made new, so that no stale length cuts the body."""
    engine.behaviour = Behaviour(
        status=400, body=b'{"error":{"message":"too long","type":"x","param":null,"code":400}}'
    )
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.status == 400
    assert answer.complete
    assert answer.error["message"] == "too long"
    assert len([1 for name, _ in answer.headers if name in ("content-length", "transfer-encoding")]) == 1


def test_a_failed_stream_counts_as_failed(engine: MockEngine, gateways: GatewayMaker, tmp_path: Path) -> None:
    engine.behaviour = Behaviour(tokens=9, close_after=5)
    path = tmp_path / "access.log"
    gateway = gateways(engine, log={"access": str(path)})
    post(gateway.port, chat(stream=True))
    [line] = wait_until(lambda: log_lines(path), 2, "a log line")
    assert line["outcome"] not in ("ok", "success", "completed")
    assert line["output_tokens"] >= 4


# ---- waiting before the first token (report 12) ----


def test_comments_are_no_first_byte_and_no_tokens(engine: MockEngine, gateways: GatewayMaker) -> None:
    comments = tuple(b": keep-alive\n\n" for _ in range(20))
    content = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    engine.behaviour = Behaviour(events=(*comments, content, b"data: [DONE]\n\n"), chunk_delay_s=0.01)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert [payload for payload in answer.payloads if payload != DONE] == [content[6:].strip()]
    assert metric(gateway, "evenflow_tokens_total", kind="output") <= 1
    seconds = metric(gateway, "evenflow_time_to_first_token_seconds_sum")
    assert seconds >= 0.15


def test_comments_do_not_hold_off_the_first_byte_limit(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(events=(b": keep-alive\n\n",) * 1000, chunk_delay_s=0.02)
    gateway = gateways(engine, timeouts={"first_byte_s": 0.4, "idle_s": 5})
    started = time.monotonic()
    answer = post(gateway.port, chat(stream=True))
    assert time.monotonic() - started < 3
    assert answer.status == 504 or b"upstream_timeout" in answer.body


def test_an_error_after_comments_only_is_still_an_http_error_or_an_event(
    engines: EngineMaker, gateways: GatewayMaker
) -> None:
    """Comments decide nothing: if the head was not sent yet, the status is the error's."""
    error = b'data: {"error":{"message":"no room","type":"x","param":null,"code":429}}\n\n'
    engine = engines(Behaviour(events=(b": wait\n\n", error, b"data: [DONE]\n\n")))
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=True))
    assert answer.status == 429 or b"no room" in answer.payloads[-1]
    assert DONE not in answer.payloads


# ---- names (report 60) ----


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_alias_is_kept_in_the_answer(engine: MockEngine, gateways: GatewayMaker, stream: bool) -> None:
    worker = {"url": engine.url, "models": ["m"], "aliases": {"gpt-x": "m"}}
    engine.behaviour = variant(Behaviour(), token='"model":"m" ')
    gateway = gateways(engine, workers=[worker])
    answer = post(gateway.port, {**chat(stream=stream), "model": "gpt-x"})
    assert engine.received[0].json["model"] == "m"
    shown = [json.loads(p) for p in answer.payloads if p != DONE] if stream else [answer.json]
    assert {chunk["model"] for chunk in shown} == {"gpt-x"}
    text = text_of(answer.payloads) if stream else shown[0]["choices"][0]["message"]["content"]
    assert text.startswith('"model":"m" 0')
    # The real name goes on working and is shown as asked for.
    answer = post(gateway.port, chat())
    assert answer.json["model"] == "m"

"""Routes of older services that are no OpenAI ones: Alpa's /logprobs, LMDeploy's /v1/chat/interactive_qos (S72)."""

import json
import threading
from typing import Any

import pytest
from support.gateway import EngineMaker, GatewayMaker, Running, wait_until
from support.http import Answer, Client, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

LOGPROBS, INTERACTIVE = "/logprobs", "/v1/chat/interactive_qos"
# What the mock says in two tokens.
TWO = "word0 word1 "
USAGE = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}


def event(choice: dict[str, Any]) -> bytes:
    body = {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [{"index": 0, **choice}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage_event() -> bytes:
    body = {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [], "usage": USAGE}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def engine_says(logprobs: Any) -> Behaviour:
    first = event({"text": "a", "logprobs": logprobs, "finish_reason": "length"})
    return Behaviour(events=(first, usage_event(), b"data: [DONE]\n\n"))


VLLM = {"tokens": ["token_id:5"], "token_logprobs": [-0.5], "text_offset": [0],
        "top_logprobs": [{"token_id:9": -1.5, "token_id:5": -0.5, "token_id:7": -2.5}]}  # fmt: skip
LLAMACPP = {"content": [{"id": 5, "token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [
    {"id": 5, "token": "a", "bytes": [97], "logprob": -0.5},
    {"id": 9, "token": "b", "bytes": [98], "logprob": -1.5},
    {"id": 7, "token": "c", "bytes": [99], "logprob": -2.5},
]}]}  # fmt: skip
TEXTS = {"tokens": ["a"], "token_logprobs": [-0.5], "text_offset": [0],
         "top_logprobs": [{"a": -0.5, "b": -1.5, "c": -2.5}]}  # fmt: skip


@pytest.mark.parametrize(
    ("logprobs", "field", "names"),
    [(VLLM, "indices", [5, 9]), (LLAMACPP, "indices", [5, 9]), (TEXTS, "tokens", ["a", "b"])],
    ids=["vllm", "llamacpp", "texts"],
)
def test_the_likeliest_next_tokens(
    engine: MockEngine, gateways: GatewayMaker, logprobs: Any, field: str, names: list[Any]
) -> None:
    gateway = gateways(engine)
    engine.behaviour = engine_says(logprobs)
    answer = post(gateway.port, {"model": "m", "prompt": [[1, 2, 3], [4, 5, 6]], "top_k": 2}, path=LOGPROBS)
    assert answer.status == 200, answer.body
    assert answer.header("content-type") == "application/json"
    got = answer.json
    assert set(got) == {"cache_id", "logprobs", field}
    assert got["logprobs"] == [[-0.5, -1.5]] * 2
    assert got[field] == [names] * 2
    sent = [one.json for one in engine.received]
    assert sorted(one["prompt"] for one in sent) == [[1, 2, 3], [4, 5, 6]]
    assert all(one["max_tokens"] == 1 and one["logprobs"] == 2 for one in sent)
    assert all(one.path == "/v1/completions" for one in engine.received)


def test_a_follow_up_sends_the_whole_prompt_and_its_name_comes_back(engine: MockEngine, gateways: GatewayMaker) -> None:
    """As Alpa's own client does, which asks at /completions, with a model named default and a key that is null."""
    gateway = gateways(engine)
    engine.behaviour = engine_says(VLLM)
    body = {"model": "default", "prompt": [1, 2, 3], "top_k": 3, "redirect_logprobs": True, "api_key": None}
    first = post(gateway.port, body, path="/completions").json
    assert first["cache_id"]
    again = post(gateway.port, body | {"prompt": [1, 2, 3, 5], "cache_id": first["cache_id"]}, path="/completions").json
    assert again["cache_id"] == first["cache_id"]
    assert again["indices"] == [[5, 9, 7]]
    plain = post(gateway.port, {"model": "m", "prompt": "hi", "max_tokens": 2, "n": 1}, path="/completions")
    assert "choices" in plain.json  # all else there is a completion


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "prompt"),
        ({"model": "m", "prompt": "a", "top_k": 0}, "top_k"),
        ({"model": "m", "prompt": "a", "top_k": -1}, "top_k"),
        ({"model": "m", "prompt": "a", "top_k": 10**6}, "top_k"),
        ({"model": "m", "prompt": "a", "top_k": "x"}, "top_k"),
        ({"model": "m", "prompt": "a", "cache_id": "x" * 200}, "cache_id"),
        ({"model": "m", "prompt": []}, "prompt"),
        ({"model": "m", "prompt": [1, "a"]}, "prompt"),
        ({"model": "m", "prompt": [-1]}, "prompt"),
        ({"model": "m", "prompt": None}, "prompt"),
    ],
)
def test_bad_questions_for_logprobs(engine: MockEngine, gateways: GatewayMaker, body: Any, param: str) -> None:
    gateway = gateways(engine)
    answer = post(gateway.port, body, path=LOGPROBS)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert not engine.received


def test_engines_that_fail_or_give_none(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    engine.behaviour = engine_says(None)
    answer = post(gateway.port, {"model": "m", "prompt": "a"}, path=LOGPROBS)
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    engine.behaviour = Behaviour(status=400, body=b'{"error":{"message":"at most 20 logprobs","type":"x"}}')
    answer = post(gateway.port, {"model": "m", "prompt": "a", "top_k": 50}, path=LOGPROBS)
    assert answer.status == 400
    assert "at most 20" in answer.error["message"]
    assert post(gateway.port, {"model": "x", "prompt": "a"}, path=LOGPROBS).status == 404
    gateway.wait_at_rest()


def test_the_model_must_be_named_among_several(engines: EngineMaker, gateways: GatewayMaker) -> None:
    one, two = engines(models=("a",)), engines(models=("b",))
    gateway = gateways(one, two, models=None)
    for path, body in ((LOGPROBS, {"prompt": "x"}), (INTERACTIVE, {"prompt": "x"})):
        answer = post(gateway.port, body, path=path)
        assert (answer.status, answer.error["param"]) == (400, "model")


# ---- LMDeploy ----


def talk(gateway: Running, prompt: Any, session: int = 5, **fields: Any) -> Answer:
    key = fields.pop("key", None)
    body = {"prompt": prompt, "session_id": session, "interactive_mode": True, "user_id": "u", **fields}
    return post(gateway.port, body, path=INTERACTIVE, key=key)


def sent_messages(engine: MockEngine) -> list[str]:
    return [f"{one['role']}: {one['content']}" for one in engine.received[-1].json["messages"]]


def test_a_session_goes_on(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    engine.behaviour = Behaviour(tokens=2)
    first = talk(gateway, "hi", request_output_len=9, top_k=40, temperature=0.8, repetition_penalty=1.1, stop=["\n"])
    assert first.status == 200, first.body
    got = first.json
    assert (got["text"], got["tokens"], got["finish_reason"], got["history_tokens"]) == (TWO, 2, "stop", 0)
    assert got["input_tokens"] > 0
    asked = engine.received[-1].json
    assert (asked["model"], asked["max_tokens"], asked["stop"], asked["top_k"]) == ("m", 9, ["\n"], 40)
    assert (asked["temperature"], asked["repetition_penalty"]) == (0.8, 1.1)
    second = talk(gateway, [{"role": "user", "content": "more"}]).json
    assert sent_messages(engine) == ["user: hi", f"assistant: {TWO}", "user: more"]
    assert second["history_tokens"] > 0
    # Another session, and the same number of another tenant, know nothing of it; nor does one without a number.
    for number in (6, -1, -1):
        talk(gateway, "who", number)
        assert sent_messages(engine) == ["user: who"]
    talk(gateway, "last", interactive_mode=False)  # with its history, and then it is over
    assert len(sent_messages(engine)) == 5
    talk(gateway, "new")
    assert sent_messages(engine) == ["user: new"]


def test_sessions_are_their_tenants_own(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, tenants=[{"name": name, "keys": [f"sk-{name}"]} for name in ("a", "b")])
    assert talk(gateway, "secret", key="sk-a").status == 200
    assert talk(gateway, "what?", key="sk-b").status == 200
    assert sent_messages(engine) == ["user: what?"]
    assert talk(gateway, "x", key="sk-none").status == 401


def test_a_stream_is_a_line_for_each_piece(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    engine.behaviour = Behaviour(tokens=2)
    answer = talk(gateway, "hi", stream=True)
    assert (answer.status, answer.header("content-type")) == (200, "text/event-stream")
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert [(line["text"], line["tokens"], line["finish_reason"]) for line in lines] == [
        ("word0 ", 1, None), ("word1 ", 2, None), ("", 2, "stop"),
    ]  # fmt: skip
    assert lines[-1]["input_tokens"] > 0
    talk(gateway, "more")
    assert sent_messages(engine) == ["user: hi", f"assistant: {TWO}", "user: more"]


def test_a_broken_stream_ends_in_an_error_line_and_is_not_kept(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    engine.behaviour = Behaviour(tokens=5, close_after=3)
    lines = [json.loads(line) for line in talk(gateway, "hi", stream=True).body.splitlines()]
    assert lines[-1]["error"]["code"] == "upstream_error"
    engine.behaviour = Behaviour()
    talk(gateway, "again")
    assert sent_messages(engine) == ["user: again"]
    gateway.wait_at_rest()


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_session_can_be_stopped(engine: MockEngine, gateways: GatewayMaker, stream: bool) -> None:
    gateway = gateways(engine)
    engine.behaviour = Behaviour(tokens=50, gated_after=3)
    got: list[Answer] = []
    caller = threading.Thread(target=lambda: got.append(talk(gateway, "hi", stream=stream)))
    caller.start()
    wait_until(lambda: engine.running == 1, 5)
    busy = talk(gateway, "me too")
    assert (busy.status, busy.error["param"]) == (400, "session_id")
    other = talk(gateway, "", 7, cancel=True)  # nothing runs there: nothing to stop, and no mistake
    assert other.json == {"text": "", "tokens": 0, "input_tokens": 0, "history_tokens": 0, "finish_reason": "stop"}
    assert talk(gateway, "", cancel=True).status == 200
    caller.join(10)
    assert got[0].status == 200
    assert json.loads(got[0].body.splitlines()[-1])["finish_reason"] == "stop"
    wait_until(lambda: engine.running == 0, 5, "its slot is free")
    engine.behaviour = Behaviour()
    assert talk(gateway, "and now?").status == 200
    gateway.wait_at_rest()


def test_a_caller_that_leaves_ends_its_session_s_request(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    engine.behaviour = Behaviour(silent=True)
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", INTERACTIVE, {"prompt": "x", "session_id": 5}))
        wait_until(lambda: engine.running == 1, 5)
    wait_until(lambda: engine.running == 0, 5)
    engine.behaviour = Behaviour()
    assert talk(gateway, "again").status == 200
    gateway.wait_at_rest()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [3]}, "prompt"),
        ({"prompt": "x", "session_id": -2}, "session_id"),
        ({"prompt": "x", "session_id": "five"}, "session_id"),
        ({"prompt": "x", "interactive_mode": "yes"}, "interactive_mode"),
        ({"prompt": "x", "request_output_len": -1}, "request_output_len"),
        ({"prompt": "x", "stream": 1}, "stream"),
        ({"cancel": True}, "session_id"),
    ],
)
def test_bad_interactive_requests(engine: MockEngine, gateways: GatewayMaker, body: Any, param: str) -> None:
    gateway = gateways(engine)
    answer = post(gateway.port, body, path=INTERACTIVE)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert not engine.received


def test_they_are_post_routes(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    for path in (LOGPROBS, INTERACTIVE):
        assert fetch(gateway.port, "GET", path).status == 405

"""The OpenAI Python SDK, as most callers use it, against the running gateway."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.gateway import GatewayMaker, GatewayThread, wait_until
from support.http import CHAT, Client, chat, request_bytes
from support.mock_engine import Behaviour, MockEngine

HELLO: Any = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def gateway(engine: MockEngine, gateways: GatewayMaker) -> GatewayThread:
    return gateways(engine, slots=2, tenants=[{"name": "alice", "keys": ["sk-alice"], "limits": {"queued": 1}}])


def client_for(gateway: GatewayThread, key: str = "sk-alice", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=key, max_retries=retries, timeout=10)


@pytest.fixture
def sdk(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with client_for(gateway) as client:
        yield client


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="m", messages=HELLO, max_tokens=3)
    assert answer.choices[0].message.content == "word0 word1 word2"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_chat_stream(sdk: openai.OpenAI) -> None:
    with_usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    for options in ({}, with_usage):
        stream = sdk.chat.completions.create(
            model="m",
            messages=HELLO,
            max_tokens=3,
            stream=True,
            **options,
        )
        chunks = list(stream)
        # Every chunk without usage has a choice: `chunk.choices[0]` is what most callers write.
        assert all(chunk.choices or chunk.usage for chunk in chunks)
        assert bool(chunks[-1].usage) == bool(options)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "word0 word1 word2 "


def test_completions_with_many_prompts(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="m", prompt=["a", "b", "c"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    stream = sdk.completions.create(model="m", prompt=["a", "b"], max_tokens=2, stream=True)
    assert {choice.index for chunk in stream for choice in chunk.choices} == {0, 1}


def test_embeddings(sdk: openai.OpenAI) -> None:
    answer = sdk.embeddings.create(model="m", input=["one", "two"], encoding_format="float")
    assert [item.embedding for item in answer.data] == [[0.25, -0.5]] * 2


def test_responses(sdk: openai.OpenAI) -> None:
    assert sdk.responses.create(model="m", input="hello").output_text == "word0 word1 word2 word3"


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["m"]
    assert sdk.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nothing")


def test_raw_headers(sdk: openai.OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model="m",
        messages=HELLO,
        extra_headers={"x-request-id": "mine"},
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-evenflow-worker"]
    assert raw.parse()._request_id == "mine"


def ask(client: openai.OpenAI, text: str = "hello", **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "m", "messages": [{"role": "user", "content": text}], **fields})


def test_errors_are_the_right_exceptions(engine: MockEngine, gateway: GatewayThread, sdk: openai.OpenAI) -> None:
    with client_for(gateway, "sk-wrong") as stranger, pytest.raises(openai.AuthenticationError) as unknown:
        ask(stranger)
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(sdk, model="nothing")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(sdk, n=0)
    assert bad.value.param == "n"
    engine.named["busy"] = Behaviour(status=429, headers=(("retry-after", "1"),))
    with pytest.raises(openai.RateLimitError):
        ask(sdk, "<<busy>>")
    engine.named["gone"] = Behaviour(close_at_once=True)
    with pytest.raises(openai.InternalServerError) as gone:
        ask(sdk, "<<gone>>")
    assert gone.value.status_code == 502


def test_a_full_queue_is_a_rate_limit_and_is_retried(engine: MockEngine, gateway: GatewayThread) -> None:
    engine.named["hold"] = Behaviour(gated=True)
    holders = [Client(gateway.port) for _ in range(3)]
    for holder in holders:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>"), key="sk-alice"))
    gateway.wait_for(queued=1)
    wait_until(lambda: engine.running == 2)
    with client_for(gateway) as once, pytest.raises(openai.RateLimitError) as full:
        ask(once)
    assert full.value.code == "queue_full"
    assert int(full.value.response.headers["retry-after"]) >= 1
    for holder in holders:
        holder.close()
    gateway.wait_at_rest()


@pytest.mark.parametrize("error_after", [0, 4], ids=["before content", "after content"])
def test_an_error_in_a_stream_is_raised(engine: MockEngine, sdk: openai.OpenAI, error_after: int) -> None:
    """Report 3: never an empty success."""
    engine.behaviour = Behaviour(tokens=8, error_after=error_after)
    seen = 0
    with pytest.raises(openai.APIError) as failed:  # noqa: PT012
        for chunk in ask(sdk, stream=True):
            seen += bool(chunk.choices[0].delta.content)
    assert "engine failed" in str(failed.value)
    assert seen == max(0, error_after - 1)


def test_a_cut_stream_is_raised(engine: MockEngine, sdk: openai.OpenAI) -> None:
    """Report 4."""
    engine.behaviour = Behaviour(tokens=8, close_after=5)
    with pytest.raises((openai.APIError, openai.APIConnectionError)):
        list(ask(sdk, stream=True))


def test_leaving_a_stream_early(engine: MockEngine, gateway: GatewayThread, sdk: openai.OpenAI) -> None:
    engine.behaviour = Behaviour(tokens=10_000, chunk_delay_s=0.005)
    stream = ask(sdk, "leaving", stream=True)
    for number, _ in enumerate(stream):
        if number == 5:
            stream.close()
            break
    [received] = engine.find("leaving")
    wait_until(lambda: received.aborted_s, 2)
    gateway.wait_for(in_flight=0, queued=0, leases=0, worker_connections_busy=0)


def test_tool_calls_through_the_sdk(engine: MockEngine, sdk: openai.OpenAI) -> None:
    """Report 44."""
    engine.behaviour = Behaviour(
        deltas=(
            '{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":""}}]}',
            '{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\":"}}]}',
            '{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}',
        )
    )
    calls = [c.choices[0].delta.tool_calls for c in ask(sdk, stream=True)]
    assert "".join(call[0].function.arguments or "" for call in calls if call) == '{"x":1}'

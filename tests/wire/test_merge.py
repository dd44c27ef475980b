"""Many streams as one answer: texts keep their bytes, what engines do differently is made equal."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.wire.faults import WorkerError
from evenflow.wire.merge import DONE, Group, Identity, StreamMerge, WholeMerge, finish_reason, total_usage
from evenflow.wire.openai import Usage


def chunk(choice: dict[str, Any] | None, **fields: Any) -> bytes:
    event = {
        "id": "engine's own",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "engine's name",
        "choices": [] if choice is None else [{"index": 0, **choice}],
        **fields,
    }
    return json.dumps(event, ensure_ascii=False).encode()


def data_of(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    read: dict[str, Any] = json.loads(event[6:])
    return read


def whole(*events: bytes, legacy: bool = False) -> dict[str, Any]:
    merge, part = WholeMerge(Identity("id", "shown"), legacy=legacy), Group(0, 1)
    for event in events:
        merge.take(part, event)
    answer: dict[str, Any] = json.loads(merge.end(part.parts, total_usage([[part]])))
    return answer


def test_an_event_gets_its_index_and_the_answers_identity() -> None:
    merge = StreamMerge(Identity("chatcmpl-1", "alias"), legacy=False, with_usage=False)
    event = data_of(merge.take(Group(3, 1), chunk({"delta": {"content": "hi"}}, system_fingerprint="fp")))
    assert event["choices"] == [{"index": 3, "delta": {"content": "hi"}}]
    assert (event["id"], event["model"], event["created"]) == ("chatcmpl-1", "alias", 5)
    assert event["system_fingerprint"] == "fp"
    # Another part's stream was made at another time by another process: the answer stays one.
    event = data_of(merge.take(Group(4, 1), chunk({"delta": {}}, created=9, system_fingerprint="other")))
    assert (event["created"], event["system_fingerprint"]) == (5, "fp")


@given(st.text(), st.integers(0, 127))
def test_a_text_keeps_its_bytes(text: str, index: int) -> None:
    raw = json.dumps(text).encode()
    merge = StreamMerge(Identity("x", "m"), legacy=False, with_usage=False)
    event = b'{"choices":[{"index": 0 ,"delta":{"content": %b }}],"id":"\\"index\\":0"}' % raw
    out = merge.take(Group(index, 1), event)
    assert b'{"content": %b }' % raw in out
    assert data_of(out)["choices"][0]["index"] == index


def test_usage_is_told_once_and_only_to_who_asked() -> None:
    for with_usage in (False, True):
        merge, part = StreamMerge(Identity("x", "m"), legacy=False, with_usage=with_usage), Group(0, 1)
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        event = merge.take(part, chunk({"delta": {"content": "a"}}, usage=usage))
        assert b"usage" not in event
        assert merge.take(part, chunk(None, usage=usage)) == b""
        end = merge.end(total_usage([[part]]))
        assert end.endswith(DONE)
        assert (b'"usage"' in end) is with_usage
        assert part.usage() == Usage(3, 0, 2)


def told(group: Group, prompt: int, cached: int, output: int) -> None:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    group.note(json.dumps({"usage": usage}).encode(), [])


def test_the_prompt_counts_once_whatever_n() -> None:
    """S37: of the copies of a prompt the one that computed it counts, and all their tokens."""
    groups = [Group(index, 1) for index in range(4)]
    for group, cached in zip(groups, (0, 9, 9, 4), strict=True):
        told(group, 10, cached, 5)
    assert total_usage([groups[:3]]) == Usage(10, 0, 15)
    assert total_usage([groups[:2], groups[2:]]) == Usage(20, 4, 20)
    assert total_usage([[Group(0, 1)]]) == Usage(0, 0, 0)


def test_usage_of_several_choices_is_told_in_several_ways() -> None:
    each, together, first = Group(0, 3), Group(0, 3), Group(0, 3)
    for _ in range(3):
        told(each, 10, 0, 5)
    told(together, 10, 0, 15)
    told(first, 10, 0, 5)
    merge = WholeMerge(Identity("x", "m"), legacy=False)
    for index in (0, 1, 2) * 7:
        merge.take(first, chunk({"index": index, "delta": {"content": "a"}}))
    assert (each.usage(), together.usage(), first.usage()) == (Usage(10, 0, 15),) * 3


@pytest.mark.parametrize(
    ("word", "shown"), [("stop", "stop"), ("eos_token", "stop"), ("limit", "length"), ("odd", "odd")]
)
def test_finish_reasons_are_openais_words(word: str, shown: str) -> None:
    """S38."""
    assert finish_reason(word) == shown
    part = Group(0, 1)
    merge = StreamMerge(Identity("x", "m"), legacy=False, with_usage=False)
    event = data_of(merge.take(part, chunk({"delta": {}, "finish_reason": word})))
    assert event["choices"][0]["finish_reason"] == shown
    assert merge.end_of(part.parts[0]) == b""


def test_a_finish_that_is_missing_is_added() -> None:
    part, merge = Group(2, 1), StreamMerge(Identity("x", "m"), legacy=False, with_usage=False)
    merge.take(part, chunk({"delta": {"content": "a"}, "finish_reason": None}))
    assert data_of(merge.end_of(part.parts[0]))["choices"] == [
        {"index": 2, "finish_reason": "stop", "logprobs": None, "delta": {}}
    ]
    assert merge.end_of(part.parts[0]) == b""
    assert whole(chunk({"delta": {"content": "a"}}))["choices"][0]["finish_reason"] == "stop"


def test_tool_calls_are_put_together() -> None:
    """Report 44: by their index, or by their place when the engine gives none."""
    first = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x'}}
    second = {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    answer = whole(
        chunk({"delta": {"role": "assistant", "content": None}}),
        chunk({"delta": {"tool_calls": [first]}}),
        chunk({"delta": {"tool_calls": [second]}}),
        chunk({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]}}),
        chunk({"delta": {}, "finish_reason": "tool_calls"}),
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [(tool["id"], tool["function"]["arguments"]) for tool in choice["message"]["tool_calls"]] == [
        ("a", '{"x": 1}'),
        ("b", "{}"),
    ]


def test_reasoning_and_refusals_are_texts_too() -> None:
    answer = whole(
        chunk({"delta": {"role": "assistant", "reasoning_content": "hm"}}),
        chunk({"delta": {"reasoning_content": "m"}}),
        chunk({"delta": {"content": "yes"}}),
    )
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hmm"}
    assert (answer["id"], answer["model"], answer["object"]) == ("id", "shown", "chat.completion")


TOKEN = {"token": "ab", "logprob": -0.5, "bytes": [97, 98], "top_logprobs": [{"token": "ab", "logprob": -0.5}]}


def test_log_probabilities_of_chat_are_joined() -> None:
    """Report 50."""
    answer = whole(*[chunk({"delta": {"content": "ab"}, "logprobs": {"content": [TOKEN]}}) for _ in range(2)])
    assert answer["choices"][0]["logprobs"] == {"content": [TOKEN, TOKEN]}


def test_log_probabilities_of_completions_get_their_own_shape() -> None:
    """Report 50: an engine that answers /v1/completions in the shape of chat."""
    events = [chunk({"text": "ab", "logprobs": {"content": [TOKEN]}}) for _ in range(2)]
    shape = {
        "tokens": ["ab", "ab"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5}, {"ab": -0.5}],
        "text_offset": [0, 2],
    }
    assert whole(*events, legacy=True)["choices"][0]["logprobs"] == shape
    merge, part = StreamMerge(Identity("x", "m"), legacy=True, with_usage=False), Group(0, 1)
    shown = [data_of(merge.take(part, event))["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert shown == [[0], [2]]
    # And those that have it already keep it.
    right = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [0]}
    event = data_of(merge.take(Group(1, 1), chunk({"text": "a", "logprobs": right})))
    assert event["choices"][0]["logprobs"] == right


@pytest.mark.parametrize("data", [b"what", b"[]", b"5", b'{"choices":5}', b'{"choices":[5]}'])
def test_what_is_no_event_is_the_workers_fault(data: bytes) -> None:
    with pytest.raises(WorkerError):
        StreamMerge(Identity("x", "m"), legacy=False, with_usage=False).take(Group(0, 1), data)
    with pytest.raises(WorkerError):
        WholeMerge(Identity("x", "m"), legacy=False).take(Group(0, 1), data)

"""Many streams as one answer: texts keep their bytes, what engines do differently is made equal."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.wire.faults import CallerError, WorkerError
from evenflow.wire.heal import Shape, finish_reason
from evenflow.wire.merge import DONE, Group, Identity, StreamMerge, WholeMerge, total_usage
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
    merge, part = WholeMerge(Identity("id", "shown"), Shape(legacy=legacy)), Group(0, 1)
    for event in events:
        merge.take(part, event)
    answer: dict[str, Any] = json.loads(merge.end([part.parts], total_usage([[part]])))
    return answer


def test_an_event_gets_its_index_and_the_answers_identity() -> None:
    merge = StreamMerge(Identity("chatcmpl-1", "alias"), Shape(legacy=False), with_usage=False)
    event = data_of(merge.take(Group(3, 1), chunk({"delta": {"content": "hi"}}, system_fingerprint="fp")))
    assert event["choices"] == [{"index": 3, "delta": {"role": "assistant", "content": "hi"}}]
    assert (event["id"], event["model"], event["created"]) == ("chatcmpl-1", "alias", 5)
    assert event["system_fingerprint"] == "fp"
    # Another part's stream was made at another time by another process: the answer stays one.
    event = data_of(merge.take(Group(4, 1), chunk({"delta": {}}, created=9, system_fingerprint="other")))
    assert (event["created"], event["system_fingerprint"]) == (5, "fp")


@given(st.text(), st.integers(0, 127))
def test_a_text_keeps_its_bytes(text: str, index: int) -> None:
    raw = json.dumps(text).encode()
    merge = StreamMerge(Identity("x", "m"), Shape(legacy=False), with_usage=False)
    event = b'{"choices":[{"index": 0 ,"delta":{"content": %b }}],"id":"\\"index\\":0"}' % raw
    group = Group(index, 1)
    for _ in range(2):  # the first begins the choice, the second may take the short way
        shown = data_of(out := merge.take(group, event))
        assert raw in out
        assert shown["choices"][0]["index"] == index
        assert shown["choices"][0]["delta"]["content"] == text


COMMON = {"id": "x", "object": "o", "created": 1, "model": "m"}
PIECES = st.fixed_dictionaries(
    {"index": st.integers(0, 2), "delta": st.fixed_dictionaries({"content": st.text()})},
    optional={
        "finish_reason": st.sampled_from([None, "stop", "eos"]),
        "logprobs": st.sampled_from([None, {"content": []}]),
    },
)


@given(st.lists(PIECES, max_size=12), st.booleans(), st.booleans(), st.booleans())
def test_the_short_way_shows_what_the_long_way_does(
    pieces: list[dict[str, Any]], tight: bool, choices_first: bool, legacy: bool
) -> None:
    """An event is either read and written anew, or has its index replaced: no reader can tell which."""
    shown = []
    for short in (True, False):
        merge, group = StreamMerge(Identity("a", "m"), Shape(legacy=legacy), with_usage=False), Group(5, 3)
        out = []
        for piece in pieces:
            choice = dict(piece)
            if legacy:
                choice["text"] = choice.pop("delta")["content"]
            event = {"choices": [choice], **COMMON} if choices_first else {**COMMON, "choices": [choice]}
            separators = (",", ":") if tight else None
            if not short:
                group.before = b""
            out.append(merge.take(group, json.dumps(event, separators=separators).encode()))
        out.append(merge.end_of(group))
        shown.append([json.loads(event[6:]) for event in b"".join(out).split(b"\n\n") if event])
        assert [part.finish_reason is not None for part in group.parts] == [True] * 3
    assert shown[0] == shown[1]


def test_a_common_event_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what makes an emulated choice cheap."""
    merge, group = StreamMerge(Identity("a", "m"), Shape(legacy=False), with_usage=False), Group(0, 1)
    merge.take(group, chunk({"delta": {"content": "a"}, "finish_reason": None}))
    monkeypatch.setattr("evenflow.wire.merge._read", None)
    event = data_of(merge.take(group, chunk({"delta": {"content": "b"}, "finish_reason": None})))
    assert event["choices"] == [{"index": 0, "delta": {"content": "b"}, "finish_reason": None}]


def test_each_choice_has_one_role_and_one_finish() -> None:
    """S39: engines send the role never, once, or with each piece; and some say twice how a choice ended."""
    for roles in ((), (0,), (0, 1, 2)):
        merge, group = StreamMerge(Identity("a", "m"), Shape(legacy=False), with_usage=False), Group(0, 1)
        events = []
        for place in range(3):
            role = {"role": "assistant"} if place in roles else {}
            finish = "stop" if place else None
            events.append(merge.take(group, chunk({"delta": {**role, "content": "a"}, "finish_reason": finish})))
        choices = [data_of(event)["choices"][0] for event in events if event]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant", None]
        assert [choice["finish_reason"] for choice in choices] == [None, "stop"]


def test_an_echo_comes_first_and_once() -> None:
    """Of engines that leave it out; the prompt keeps its bytes."""
    shape = Shape(legacy=True, echoes=[b'"p \\u00e9"'])
    merge, group = StreamMerge(Identity("a", "m"), shape, with_usage=False), Group(0, 1)
    events = [merge.take(group, chunk({"text": text})) for text in ("x", "y")]
    assert [data_of(event)["choices"][0]["text"] for event in events] == ["p éx", "y"]
    merge_whole, group = WholeMerge(Identity("a", "m"), shape), Group(0, 1)
    merge_whole.take(group, chunk({"text": "x"}))
    assert json.loads(merge_whole.end([group.parts], Usage()))["choices"][0]["text"] == "p éx"


def test_no_token_that_nobody_asked_for_is_shown() -> None:
    """`max_tokens: 0` at an engine that makes one all the same."""
    shape = Shape(legacy=True, echoes=[b'"p"'], silent=True)
    merge, group = StreamMerge(Identity("a", "m"), shape, with_usage=True), Group(0, 1)
    assert merge.take(group, chunk({"text": "x", "finish_reason": "length"})) == b""
    assert data_of(merge.end_of(group))["choices"] == [
        {"index": 0, "finish_reason": "length", "logprobs": None, "text": "p"}
    ]
    merge_whole, group = WholeMerge(Identity("a", "m"), Shape(legacy=False, silent=True)), Group(0, 1)
    merge_whole.take(group, chunk({"delta": {"content": "x"}, "finish_reason": "stop"}))
    choice = json.loads(merge_whole.end([group.parts], total_usage([[group]], silent=True)))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_the_best_are_the_likeliest_for_each_token() -> None:
    merge = WholeMerge(Identity("a", "m"), Shape(legacy=True))
    groups = [Group(first, 3, prompt) for prompt, first in enumerate((0, 3))]
    for group, columns in zip(groups, (([-1.0], [-0.1, -0.3], [-0.5]), ([-2.0], [None, -3.0], [-1.0])), strict=True):
        for index, column in enumerate(columns):
            logprobs = {"tokens": ["t"] * len(column), "token_logprobs": column}
            merge.take(group, chunk({"index": index, "text": f"{group.prompt}{index}", "logprobs": logprobs}))
    answer = json.loads(merge.end([group.parts for group in groups], Usage(), 2, with_logprobs=False))
    shown = [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]]
    assert shown == [(0, "01", None), (1, "02", None), (2, "12", None), (3, "10", None)]
    merge = WholeMerge(Identity("a", "m"), Shape(legacy=True))
    merge.take(group := Group(0, 2), chunk({"text": "a"}))
    with pytest.raises(CallerError) as refused:
        merge.end([group.parts], Usage(), 1)
    assert refused.value.param == "best_of"


def test_usage_is_told_once_and_only_to_who_asked() -> None:
    for with_usage in (False, True):
        merge, part = StreamMerge(Identity("x", "m"), Shape(legacy=False), with_usage=with_usage), Group(0, 1)
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
    merge = WholeMerge(Identity("x", "m"), Shape(legacy=False))
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
    merge = StreamMerge(Identity("x", "m"), Shape(legacy=False), with_usage=False)
    event = data_of(merge.take(part, chunk({"delta": {}, "finish_reason": word})))
    assert event["choices"][0]["finish_reason"] == shown
    assert merge.end_of(part) == b""


def test_a_finish_that_is_missing_is_added() -> None:
    part, merge = Group(2, 1), StreamMerge(Identity("x", "m"), Shape(legacy=False), with_usage=False)
    merge.take(part, chunk({"delta": {"content": "a"}, "finish_reason": None}))
    assert data_of(merge.end_of(part))["choices"] == [
        {"index": 2, "finish_reason": "stop", "logprobs": None, "delta": {}}
    ]
    assert merge.end_of(part) == b""
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
    merge, part = StreamMerge(Identity("x", "m"), Shape(legacy=True), with_usage=False), Group(0, 1)
    shown = [data_of(merge.take(part, event))["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert shown == [[0], [2]]
    # And those that have it already keep it.
    right = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [0]}
    event = data_of(merge.take(Group(1, 1), chunk({"text": "a", "logprobs": right})))
    assert event["choices"][0]["logprobs"] == right


@pytest.mark.parametrize("data", [b"what", b"[]", b"5", b'{"choices":5}', b'{"choices":[5]}'])
def test_what_is_no_event_is_the_workers_fault(data: bytes) -> None:
    with pytest.raises(WorkerError):
        StreamMerge(Identity("x", "m"), Shape(legacy=False), with_usage=False).take(Group(0, 1), data)
    with pytest.raises(WorkerError):
        WholeMerge(Identity("x", "m"), Shape(legacy=False)).take(Group(0, 1), data)

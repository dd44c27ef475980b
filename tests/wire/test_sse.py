"""The stream reader against a splitter that is too simple to be wrong, under any cut of the bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.wire.sse import EventReader, EventTooLarge, count_events, payload, split_events

LINES = [
    b"data: one",
    b"data:two",
    b"data:  three",
    b'data: {"choices":[{"delta":{"content":"a\\n\\nb"}}]}',
    b"data: [DONE]",
    b"data:",
    b"data",
    b"database: none",
    b"data : none",
    b": keep-alive",
    b":",
    b"event: message_start",
    b"id: 7",
    b"retry: 10",
    b"\xe2\x82\xac data: no",
    b" data: no",
    b"",
    b"",
    b"",
]
LINE_ENDS = [b"\n", b"\r\n", b"\r"]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Lines with any mixture of line ends; the last event may be cut off."""
    uniform = draw(st.sampled_from([None, *LINE_ENDS]))
    parts = [draw(st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf"]))]
    for line in draw(st.lists(st.sampled_from(LINES), max_size=24)):
        parts += (line, uniform or draw(st.sampled_from(LINE_ENDS)))
    parts.append(draw(st.sampled_from([b"", b"", b"data: cut o"])))
    return b"".join(parts)


raw_streams = st.lists(st.sampled_from([b"\r", b"\n", b"data:", b"data", b" ", b":", b"x"]), max_size=40).map(
    b"".join
)
any_stream = streams() | raw_streams


def reference_payloads(stream: bytes) -> list[bytes]:
    """The data of each whole event, by the words of the standard."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found = []
    for event in text.split(b"\n\n")[:-1]:
        lines = [line.partition(b":") for line in event.split(b"\n")]
        data = [value.removeprefix(b" ") for field, _, value in lines if field == b"data"]
        if data:
            found.append(b"\n".join(data))
    return found


def payloads(block: bytes) -> list[bytes]:
    return [data for data in map(payload, split_events(block)) if data is not None]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[a:b] for a, b in pairwise(edges)]


def check(stream: bytes, pieces: list[bytes]) -> None:
    reader = EventReader()
    given_out = b""
    events: list[bytes] = []
    fed = b""
    for piece in pieces:
        fed += piece
        block = reader.feed(piece)
        given_out += block
        events += payloads(block)
        # Nothing that is whole is kept back, and nothing that is not is given out.
        assert events == reference_payloads(fed)
        assert reader.held == len(fed) - len(given_out)
    assert given_out + reader.take_rest() == stream
    assert reader.held == 0


@given(any_stream, st.lists(st.integers(min_value=0), max_size=12))
def test_any_cut_gives_the_same_events(stream: bytes, places: list[int]) -> None:
    check(stream, cut(stream, places))


@given(any_stream)
def test_one_byte_at_a_time(stream: bytes) -> None:
    check(stream, [stream[i : i + 1] for i in range(len(stream))])


@given(any_stream)
def test_blocks_split_into_their_events_and_are_counted(stream: bytes) -> None:
    events = split_events(stream)
    assert b"".join(events) == stream
    assert b"" not in events
    assert count_events(stream) == len(payloads(stream))
    block = EventReader().feed(stream)
    assert payloads(block) == reference_payloads(stream)


@given(st.binary(max_size=200))
def test_garbage_is_kept_and_never_raises(stream: bytes) -> None:
    assert b"".join(split_events(stream)) == stream
    assert count_events(stream) == len(payloads(stream))
    reader = EventReader()
    assert reader.feed(stream) + reader.take_rest() == stream


def test_a_whole_event_is_handed_on_without_a_copy() -> None:
    event = b'data: {"a":1}\n\n'
    assert EventReader().feed(event) is event


def test_the_late_line_feed_of_a_cut_line_end_goes_out_at_once() -> None:
    reader = EventReader()
    assert reader.feed(b"data: [DONE]\r\n\r") == b"data: [DONE]\r\n\r"
    assert reader.feed(b"\n") == b"\n"
    assert reader.take_rest() == b""


def test_one_line_end_of_two_bytes_is_no_blank_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\r") == b""
    assert reader.feed(b"\n") == b""
    assert reader.feed(b"data: b\r\n") == b""
    assert reader.feed(b"\r\n") == b"data: a\r\ndata: b\r\n\r\n"


def test_a_terminator_of_two_line_ends_stays_whole() -> None:
    events = [b"data: a\r\n\r\n", b"data: b\n\r\n", b": c\r\r\n", b"data: d\r\r", b"data: e\n\n"]
    assert split_events(b"".join(events)) == events


def test_an_event_without_end_is_given_up_at_the_limit() -> None:
    reader = EventReader(bytes_max=100)
    assert reader.feed(b"data: " + b"x" * 94) == b""
    with pytest.raises(EventTooLarge, match="100 bytes"):
        reader.feed(b"y")


def test_whole_events_before_one_that_is_too_large_still_come_out() -> None:
    reader = EventReader(bytes_max=100)
    assert reader.feed(b"data: a\n\ndata: " + b"x" * 200) == b"data: a\n\n"
    with pytest.raises(EventTooLarge):
        reader.feed(b"x")


def test_a_large_event_in_single_bytes_takes_linear_time() -> None:
    reader = EventReader()
    event = b"data: " + b"x" * 200_000 + b"\n\n"
    out = b"".join(reader.feed(event[i : i + 1]) for i in range(len(event)))
    assert out == event


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data: x\r\n\r\n", b"x"),
        (b"data: x\r\r", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\r\n: note\r\ndata:\r\n\r\n", b"a\n"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
        (b"event: message_delta\ndata: x\nid: 3\n\n", b"x"),
        (b"\ndata: x\n\n", b"x"),
        (b"\xef\xbb\xbfdata: x\n\n", b"x"),
        (b"data\n\n", b""),
        (b"data:\n\n", b""),
        (b"data: x\n", b"x"),
        (b": ping\n\n", None),
        (b"event: ping\n\n", None),
        (b"database: x\n\n", None),
        (b"\n\n", None),
        (b"", None),
    ],
)
def test_data_of_an_event(event: bytes, data: bytes | None) -> None:
    assert payload(event) == data
    assert count_events(event) == (data is not None)


def test_count_of_a_block_of_many_kinds() -> None:
    engine = b"data: a\n\n" * 3 + b": ping\n\n" + b"data: [DONE]\n\n"
    assert count_events(engine) == 4
    assert count_events(engine.replace(b"\n", b"\r\n")) == 4
    assert count_events(b": ping\n\ndata: a\ndata: b\n\n") == 1
    assert count_events(b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n") == 2

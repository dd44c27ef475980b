"""Answers cut anywhere come out as in one piece, well framed, with the same usage."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.wire.answer import Head, PlainAnswer, StreamAnswer
from evenflow.wire.faults import CallerError, WorkerError

START = b"HTTP/1.1 200 OK\r\nx-a: 1\r\n"


def event(data: str) -> bytes:
    return b"data: " + data.encode() + b"\n\n"


ROLE = event('{"id":"c","model":"real","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}')
WORDS = [event('{"id":"c","model":"real","choices":[{"index":0,"delta":{"content":"w' + c + '"}}]}') for c in "abcde"]
FINISH = event('{"id":"c","model":"real","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
USAGE = event('{"id":"c","model":"real","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":6}}')
DONE = event("[DONE]")
STREAM = b"".join((ROLE, *WORDS, b": comment\n\n", FINISH, USAGE, DONE))
PLAIN = (
    b'{"id":"c","model":"real","choices":[{"text":"'
    + b"x" * 300
    + b'"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
)

cuts = st.lists(st.integers(0, 2000), max_size=12)


def head(*, http11: bool = True, keep_alive: bool = True, rename: tuple[bytes, bytes] | None = None) -> Head:
    return Head(START, http11=http11, keep_alive=keep_alive, rename=rename)


def pieces(data: bytes, where: list[int]) -> list[bytes]:
    edges = [0, *sorted(at % (len(data) + 1) for at in where), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def run(answer: PlainAnswer | StreamAnswer, parts: list[bytes]) -> bytes:
    return b"".join([answer.take(part, i == len(parts) - 1) for i, part in enumerate(parts)])


def unframed(out: bytes) -> bytes:
    """The body of an answer, its framing checked by a reader of its own."""
    top, _, rest = out.partition(b"\r\n\r\n")
    assert top.startswith(START.strip())
    if b"content-length: " in top:
        assert len(rest) == int(top.rpartition(b"content-length: ")[2].split(b"\r\n")[0])
        return rest
    if b"transfer-encoding: chunked" not in top:
        assert b"connection: close" in top
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
        if not length:
            assert rest == b""
            return body


@settings(max_examples=150, deadline=None)
@given(cuts, st.booleans(), st.booleans())
def test_a_stream_cut_anywhere(where: list[int], http11: bool, hide: bool) -> None:
    answer = StreamAnswer(head(http11=http11), hide_usage=hide, ends_with_done=True)
    body = unframed(run(answer, pieces(STREAM, where)))
    assert body == (STREAM.replace(USAGE, b"") if hide else STREAM)
    assert answer.outcome == b"ok"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 6)
    assert answer.broken is None


@settings(max_examples=100, deadline=None)
@given(cuts)
def test_an_alias_is_kept_in_every_event(where: list[int]) -> None:
    answer = StreamAnswer(head(rename=(b"real", b"alias")), hide_usage=False, ends_with_done=True)
    assert unframed(run(answer, pieces(STREAM, where))) == STREAM.replace(b'"real"', b'"alias"')


@settings(max_examples=100, deadline=None)
@given(cuts, st.booleans(), st.sampled_from([len(PLAIN), -1]), st.booleans())
def test_a_plain_answer_cut_anywhere(where: list[int], http11: bool, length: int, alias: bool) -> None:
    answer = PlainAnswer(head(http11=http11, rename=(b"real", b"alias") if alias else None), length, ok=True)
    body = unframed(run(answer, pieces(PLAIN, where)))
    assert body == (PLAIN.replace(b'"real"', b'"alias"') if alias else PLAIN)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)


@settings(max_examples=100, deadline=None)
@given(cuts, st.integers(0, 4))
def test_an_end_before_the_end_is_told_behind_what_came(where: list[int], words: int) -> None:
    """Report 4."""
    data = b"".join((ROLE, *WORDS[: words + 1]))
    answer = StreamAnswer(head(), hide_usage=True, ends_with_done=True)
    out = run(answer, pieces(data, where))
    assert isinstance(answer.broken, WorkerError)
    body = unframed(out + answer.broken_off(answer.broken))
    assert body.startswith(data)
    assert b'"error"' in body[len(data) :]
    assert b"[DONE]" not in body


@settings(max_examples=60, deadline=None)
@given(cuts, st.sampled_from([b"", ROLE, b": hi\n\n", ROLE + b": hi\n\n"]))
def test_an_error_before_content_is_an_http_error(where: list[int], before: bytes) -> None:
    """Report 3."""
    data = before + event('{"error":{"message":"too long","code":400}}') + DONE
    with pytest.raises(CallerError, match="too long") as raised:
        run(StreamAnswer(head(), hide_usage=True, ends_with_done=True), pieces(data, where))
    assert raised.value.status == 400


def test_an_error_after_content_ends_the_stream() -> None:
    data = b"".join((ROLE, WORDS[0], event('{"error":{"message":"gone"}}'), WORDS[1], DONE))
    answer = StreamAnswer(head(), hide_usage=True, ends_with_done=True)
    body = unframed(run(answer, [data]))
    assert body == ROLE + WORDS[0] + event('{"error":{"message":"gone"}}')
    assert answer.outcome == b"failed"


def test_an_empty_answer_is_a_failure() -> None:
    """Report 53."""
    with pytest.raises(WorkerError):
        PlainAnswer(head(), 0, ok=True).take(b"", True)
    with pytest.raises(WorkerError):
        StreamAnswer(head(), hide_usage=True, ends_with_done=True).take(b"", True)

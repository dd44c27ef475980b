"""The two short cuts, of a client's and of a worker's head, against the general way: bytes, log lines, counts.

The real stages run between fake transports; no socket, no loop and no waiting is part of it. The general way is the
same connection with its memory taken away, or the same bytes cut in two.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import evenflow.gateway
from evenflow.config import Settings, load
from evenflow.gateway import Gateway
from evenflow.request.accept import ClientConnection
from evenflow.request.relay import WorkerConnection

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
ANSWER_BODY = (
    b'{"id":"c","model":"m","choices":[{"index":0,"message":{"content":"hi"}}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}'
)
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer sk-a\r\nX-Kept: 1\r\n"
    b"Content-Length: %b\r\nAccept: */*\r\n\r\n"
)
ANSWER_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-engine: 7\r\ncontent-length: %b\r\n\r\n"
CONFIG = """
tenants: [{name: alice, keys: [sk-a]}, {name: bob, keys: [sk-b]}]
workers: [{url: "http://127.0.0.1:19001", name: w, models: [m], slots: 4%s}]
log: {access: "off"}
%s
"""
AGELESS_S = 1e18
many = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Feed = Callable[[bytes], list[bytes]]


def request(body: bytes = BODY, head: bytes = HEAD) -> bytes:
    return head % str(len(body)).encode() + body


def answer(body: bytes = ANSWER_BODY, head: bytes = ANSWER_HEAD) -> bytes:
    return head % str(len(body)).encode() + body


class FakeTask:
    def add_done_callback(self, done: Any) -> None: ...


class FakeLoop:
    """Holds what is to run soon until `run`; counts the connections that would be opened."""

    def __init__(self) -> None:
        self.soon: list[Any] = []
        self.opened = 0

    def call_soon(self, what: Any) -> None:
        self.soon.append(what)

    def create_task(self, work: Any) -> FakeTask:
        work.close()
        self.opened += 1
        return FakeTask()

    def run(self) -> None:
        while self.soon:
            self.soon.pop(0)()


class FakeTransport:
    """Keeps what is written and how it was ended."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None: ...

    resume_reading = pause_reading


class Lines:
    """An access log that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line)


class Stage:
    """One gateway with one client connection, one worker and three idle connections to it."""

    def __init__(self, loaded: Settings) -> None:
        self.loop = FakeLoop()
        self.gateway = Gateway(loaded)
        self.gateway.compose(self.loop)  # type: ignore[arg-type]
        self.log = Lines()
        self.gateway._settler._access_log = self.log  # type: ignore[assignment]
        (self.worker,) = self.gateway._registry.workers.values()
        self.gateway._registry.probe_succeeded(self.worker)
        self.to_worker: list[FakeTransport] = []
        for _ in range(3):
            connection = WorkerConnection(self.gateway._relay, self.worker)
            transport = FakeTransport()
            connection.connection_made(transport)  # type: ignore[arg-type]
            connection.rest(time.monotonic())
            self.to_worker.append(transport)
        self.stay_young()
        self.client = ClientConnection(self.gateway._front)
        self.to_client = FakeTransport()
        self.client.connection_made(self.to_client)  # type: ignore[arg-type]

    def stay_young(self) -> None:
        for connection in self.worker.idle:
            connection.deadline = AGELESS_S

    def say(self, *reads: bytes) -> None:
        """The client's bytes, as so many reads."""
        for read in reads:
            if read and not self.to_client.closed:
                self.client.data_received(read)
                self.loop.run()

    def reply(self, *reads: bytes) -> None:
        """The worker's bytes for the running call."""
        call = self.client.call
        assert call is not None
        connection = call.connection
        assert connection is not None
        for read in reads:
            if read and not connection._transport.closed:  # type: ignore[union-attr]
                connection.data_received(read)
        self.stay_young()
        self.loop.run()

    def reply_to_all(self) -> None:
        while self.client.call is not None and self.client.call.connection is not None:
            self.reply(answer())

    def outcome(self) -> dict[str, Any]:
        """All that can be seen from outside, without ids and times."""
        metrics = self.gateway._metrics
        return {
            "worker got": nameless(b"".join(b"".join(t.written) for t in self.to_worker)),
            "client got": nameless(b"".join(self.to_client.written)),
            "client closed": self.to_client.closed,
            "worker connections": (sum(t.closed for t in self.to_worker), len(self.worker.idle), self.loop.opened),
            "worker": (self.worker.state, self.worker.answered, self.worker.errors, self.worker.in_flight),
            "log": [timeless(line) for line in self.log.lines],
            "series": {
                key: (dict(s.statuses), s.input_tokens, s.cached_tokens, s.output_tokens, sum(s.times.request.counts))
                for key, s in metrics._series.items()
            },
            "counters": self.gateway.counters(),
        }


def nameless(data: bytes) -> bytes:
    data = re.sub(rb"req-[0-9a-f]{12}-[0-9a-f]+", b"ID", data)
    return re.sub(rb"x-evenflow-queue-ms: \d+", b"x-evenflow-queue-ms: 0", data)


def timeless(line: bytes) -> dict[str, Any]:
    fields = json.loads(nameless(line))
    for name in ("time", "queue_ms", "duration_ms"):
        fields.pop(name, None)
    if fields.get("ttft_ms") is not None:
        fields["ttft_ms"] = "some"
    return fields


Maker = Callable[..., Stage]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Maker]:
    """Makes stages: `stages(sections="limits: {...}", worker=", aliases: {...}")`."""
    known: dict[tuple[str, str], Settings] = {}
    directory: Path = tmp_path_factory.mktemp("settings")

    def make(sections: str = "", worker: str = "") -> Stage:
        key = (worker, sections)
        if key not in known:
            path = directory / f"{len(known)}.yaml"
            path.write_text(CONFIG % key)
            known[key] = load(str(path), environ={}, overrides={})
        return Stage(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evenflow.gateway, "Prober", lambda *_: None)
        yield make


# -- a client's head ------------------------------------------------------------------------------------------------


def after_warm_up(stage: Stage, warm: bytes, reads: tuple[bytes, ...], *, memory: bool) -> dict[str, Any]:
    stage.say(warm)
    stage.reply_to_all()
    assert not stage.to_client.closed
    if not memory:
        stage.client._memo = None
    stage.say(*reads)
    stage.reply_to_all()
    return stage.outcome()


def same_every_way(stages: Maker, data: bytes, cut: int, sections: str = "", warm: bytes | None = None) -> None:
    """`data` behind a request: known again, read in full, and cut in two."""
    warm = request() if warm is None else warm
    cut %= len(data)
    known = after_warm_up(stages(sections), warm, (data,), memory=True)
    assert known == after_warm_up(stages(sections), warm, (data,), memory=False)
    assert known == after_warm_up(stages(sections), warm, (data[:cut], data[cut:]), memory=False)
    assert known == after_warm_up(stages(sections), warm, (data[:cut], data[cut:]), memory=True)


def alone(stages: Maker, *reads: bytes) -> tuple[Any, ...]:
    """What worker and client get of a request on a connection of its own."""
    stage = stages()
    stage.say(*reads)
    stage.reply_to_all()
    seen = stage.outcome()
    return seen["worker got"], seen["client got"], seen["log"], seen["series"]


bodies = st.text(st.characters(codec="ascii"), max_size=80).map(
    lambda text: json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
)


@given(body=bodies, cut=st.integers(min_value=0))
@many
def test_a_known_request_goes_the_same_way(stages: Maker, body: bytes, cut: int) -> None:
    data = request(body)
    same_every_way(stages, data, cut)
    cut %= len(data)
    fresh = alone(stages, data)
    assert fresh == alone(stages, data[:cut], data[cut:])
    stage = stages()
    stage.say(request())
    stage.reply_to_all()
    before = len(b"".join(b"".join(t.written) for t in stage.to_worker)), len(b"".join(stage.to_client.written))
    assert stage.client._memo is not None and stage.client._memo.match(data) > 0  # it is the short cut that is tested
    stage.say(data)
    stage.reply_to_all()
    assert nameless(b"".join(b"".join(t.written) for t in stage.to_worker)[before[0] :]) == fresh[0]
    assert nameless(b"".join(stage.to_client.written)[before[1] :]) == fresh[1]
    assert timeless(stage.log.lines[-1]) == fresh[2][0]


N = str(len(BODY)).encode()
TELL_TALES = {
    "another key": HEAD.replace(b"sk-a", b"sk-b") % N + BODY,
    "a wrong key": HEAD.replace(b"sk-a", b"sk-x") % N + BODY,
    "another value": HEAD.replace(b"X-Kept: 1", b"X-Kept: 2") % N + BODY,
    "one header more": HEAD.replace(b"Accept", b"X-More: 1\r\nAccept") % N + BODY,
    "one header less": HEAD.replace(b"Accept: */*\r\n", b"") % N + BODY,
    "another case": HEAD.replace(b"Content-Length", b"content-length") % N + BODY,
    "another path": HEAD.replace(b"chat/completions", b"completions") % N + BODY,
    "another method": HEAD.replace(b"POST", b"GET") % N + BODY,
    "connection close": HEAD.replace(b"Accept: */*", b"Connection: close") % N + BODY,
    "HTTP/1.0": HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") % N + BODY,
    "plus sign": HEAD % (b"+" + N) + BODY,
    "minus sign": HEAD % (b"-" + N) + BODY,
    "underscore": HEAD % (N[:1] + b"_" + N[1:]) + BODY,
    "space before": HEAD % (b" " + N) + BODY,
    "space behind": HEAD % (N + b" ") + BODY,
    "tab behind": HEAD % (N + b"\t") + BODY,
    "leading zeros": HEAD % (b"000" + N) + BODY,
    "sixteen digits": HEAD % N.zfill(16) + BODY,
    "hexadecimal": HEAD % b"0x3c" + BODY,
    "list of lengths": HEAD % (N + b", " + N) + BODY,
    "no length": HEAD % b"" + BODY,
    "other digits": HEAD % "٦٠".encode() + BODY,
    "body longer": request() + b"x",
    "body much longer": HEAD % b"5" + BODY,
    "body shorter": HEAD % b"61" + BODY,
    "body empty": request(b""),
    "body no JSON": request(b"x" * 60),
    "lone line feed": HEAD.replace(b"\r\n", b"\n") % N + BODY,
    "carriage return alone": HEAD % (N + b"\rX: y") + BODY,
    "line feed in the number": HEAD % (N + b"\n") + BODY,
    "null byte": HEAD % (N + b"\0") + BODY,
    "empty line in front": b"\r\n" + request(),
    "a second length": HEAD % (N + b"\r\nContent-Length: 5") + BODY,
    "the same length twice": HEAD % (N + b"\r\nContent-Length: " + N) + BODY,
    "length and chunks": HEAD % (N + b"\r\nTransfer-Encoding: chunked") + BODY,
    "chunks hidden in the number": HEAD % (N + b"\r\nTransfer-Encoding: chunked\r\n\r\n0") + BODY,
    "two in one read": request() + request(),
    "three in one read": request() + request() + request(),
    "a longer one behind": request() + request(BODY[:-1] + b" }"),
    "another's behind": request() + HEAD.replace(b"sk-a", b"sk-b") % N + BODY,
    "a request in the body": request(request()),
    "a request behind a short body": HEAD % b"0" + request(),
    "a length of nothing": HEAD % b"0",
    "expect": HEAD.replace(b"Accept: */*", b"Expect: 100-continue") % N + BODY,
    "noise": b"\x16\x03\x01" + request(),
}


@pytest.mark.parametrize("name", TELL_TALES)
@given(cut=st.integers(min_value=0))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_head_that_is_not_the_known_one(stages: Maker, name: str, cut: int) -> None:
    data = TELL_TALES[name]
    if name in ("expect", "space before", "another method", "a wrong key", "sixteen digits"):
        # What the head alone decides is said when the head comes, before a body that was cut off has come.
        stage = after_warm_up(stages(), request(), (data,), memory=True)
        assert stage == after_warm_up(stages(), request(), (data,), memory=False)
        return
    same_every_way(stages, data, cut)


@given(
    at=st.integers(min_value=0),
    size=st.integers(0, 6),
    put=st.binary(max_size=4)
    | st.sampled_from([b"\r\n", b"\r\n\r\n", b"0", b"_", b"+1", b" ", b"\r\nTransfer-Encoding: chunked"]),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_edit_of_a_known_request(stages: Maker, at: int, size: int, put: bytes) -> None:
    data = request()
    at %= len(data)
    data = data[:at] + put + data[at + size :]
    if not data:
        return
    known = after_warm_up(stages(), request(), (data,), memory=True)
    assert known == after_warm_up(stages(), request(), (data,), memory=False)


def test_a_body_over_the_limit_is_refused_behind_a_known_head_too(stages: Maker) -> None:
    same_every_way(stages, request(BODY[:-1] + b" " * 100 + b"}"), 40, "limits: {body_bytes: 100}")


PARTS = [
    b"POST /v1/chat/completions HTTP/1.1\r\nX-Open: ",
    b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer sk-b\r\nX-Open: ",
    b"POST ",
]


@pytest.mark.parametrize("part", PARTS)
def test_a_head_begun_behind_a_request_takes_the_next_read(stages: Maker, part: bytes) -> None:
    """The next read belongs to the head that was begun, however much it looks like a request of its own."""

    def run(*, memory: bool) -> dict[str, Any]:
        stage = stages()
        stage.say(request() + part)
        stage.reply_to_all()
        if not memory:
            stage.client._memo = None
        stage.say(request())
        stage.reply_to_all()
        return stage.outcome()

    assert run(memory=True) == run(memory=False)


@pytest.mark.parametrize("cut", [4, 20, 40, 60, 110, 130])
def test_the_end_of_a_head_is_no_head(stages: Maker, cut: int) -> None:
    """A head of which the first part came behind the request before: its second part alone is no request."""

    def run(*, memory: bool) -> dict[str, Any]:
        stage = stages()
        data = request()
        stage.say(data + data[:cut])
        stage.reply_to_all()
        stage.say(data[cut:])
        stage.reply_to_all()
        if not memory:
            stage.client._memo = None
        stage.say(data[cut:])
        stage.reply_to_all()
        return stage.outcome()

    assert run(memory=True) == run(memory=False)


# -- a worker's head ------------------------------------------------------------------------------------------------


def second_answer(
    stage: Stage, warm: bytes, reads: tuple[bytes, ...], *, memory: bool, ask: bytes | None = None
) -> dict[str, Any]:
    ask = request() if ask is None else ask
    stage.say(ask)
    stage.reply(warm)
    stage.say(ask)
    assert stage.client.call is not None
    connection = stage.client.call.connection
    assert connection is not None
    if not memory:
        connection._memo = None
    stage.reply(*reads)
    return stage.outcome()


def same_answer_every_way(
    stages: Maker,
    data: bytes,
    cut: int | None,
    *,
    warm: bytes | None = None,
    ask: bytes | None = None,
    sections: str = "",
    worker: str = "",
) -> None:
    warm = answer() if warm is None else warm
    known = second_answer(stages(sections, worker), warm, (data,), memory=True, ask=ask)
    assert known == second_answer(stages(sections, worker), warm, (data,), memory=False, ask=ask)
    if cut is not None:
        reads = (data[: cut % len(data)], data[cut % len(data) :])
        assert known == second_answer(stages(sections, worker), warm, reads, memory=True, ask=ask)
        assert known == second_answer(stages(sections, worker), warm, reads, memory=False, ask=ask)


answers = st.builds(
    lambda text, used, cached: json.dumps(
        {"choices": [text], "usage": {"prompt_tokens": used, "completion_tokens": cached, "total_tokens": 1}}
    ).encode(),
    st.text(max_size=60),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
) | st.binary(min_size=1, max_size=60)


@given(body=answers, cut=st.integers(min_value=0))
@many
def test_a_known_answer_goes_the_same_way(stages: Maker, body: bytes, cut: int) -> None:
    data = answer(body)
    same_answer_every_way(stages, data, cut)
    stage = stages()
    stage.say(request())
    stage.reply(answer())
    memo = stage.worker.idle[-1]._memo
    assert memo is not None and memo.match(data) > 0  # it is the short cut that is tested
    # and as on a connection that knows no head
    first = stages()
    first.gateway._settler._cost = stage.gateway._settler._cost  # and has learned the same
    first.say(request())
    first.reply(data)
    stage.say(request())
    written = len(b"".join(stage.to_client.written))
    stage.reply(data)
    assert nameless(b"".join(stage.to_client.written)[written:]) == first.outcome()["client got"]
    assert timeless(stage.log.lines[-1]) == first.outcome()["log"][-1]


M = str(len(ANSWER_BODY)).encode()
OTHER_ANSWERS = {
    "another status": ANSWER_HEAD.replace(b"200 OK", b"400 Bad Request") % M + ANSWER_BODY,
    "a failure": ANSWER_HEAD.replace(b"200 OK", b"500 Failed") % M + ANSWER_BODY,
    "another value": ANSWER_HEAD.replace(b"engine: 7", b"engine: 8") % M + ANSWER_BODY,
    "one header more": ANSWER_HEAD.replace(b"content-length", b"x-more: 1\r\ncontent-length") % M + ANSWER_BODY,
    "close": ANSWER_HEAD.replace(b"x-engine: 7", b"connection: close") % M + ANSWER_BODY,
    "leading zeros": ANSWER_HEAD % (b"00" + M) + ANSWER_BODY,
    "a sign": ANSWER_HEAD % (b"+" + M) + ANSWER_BODY,
    "an underscore": ANSWER_HEAD % (M[:1] + b"_" + M[1:]) + ANSWER_BODY,
    "two lengths": ANSWER_HEAD % (M + b"\r\ncontent-length: 3") + ANSWER_BODY,
    "no JSON": answer(b"plain text"),
    "an error in a 200": answer(b'{"error":{"message":"no"}}'),
}


@pytest.mark.parametrize("name", OTHER_ANSWERS)
@given(cut=st.integers(min_value=0))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_answer_that_is_not_the_known_one(stages: Maker, name: str, cut: int) -> None:
    same_answer_every_way(stages, OTHER_ANSWERS[name], cut)


ONE_READ_ONLY = {
    "longer than said": answer() + b"x",
    "two answers": answer() + answer(),
    "shorter than said": answer()[:-1],
    "chunked": ANSWER_HEAD.replace(b"content-length: %b", b"transfer-encoding: chunked")
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(ANSWER_BODY), ANSWER_BODY),
    "length and chunks": ANSWER_HEAD % (M + b"\r\ntransfer-encoding: chunked") + ANSWER_BODY,
    "an interim answer": b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + answer(),
    "no length": ANSWER_HEAD.replace(b"content-length: %b\r\n", b"") + ANSWER_BODY,
    "noise": b"SSH-2.0\r\n" + answer(),
    "nothing": answer(b""),
}


@pytest.mark.parametrize("name", ONE_READ_ONLY)
def test_a_strange_answer_behind_a_known_one(stages: Maker, name: str) -> None:
    same_answer_every_way(stages, ONE_READ_ONLY[name], None)


@given(at=st.integers(min_value=0), size=st.integers(0, 6), put=st.binary(max_size=4))
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_edit_of_a_known_answer(stages: Maker, at: int, size: int, put: bytes) -> None:
    data = answer()
    at %= len(data)
    data = data[:at] + put + data[at + size :]
    same_answer_every_way(stages, data, None)


ASKED = {
    "a page": HEAD.replace(b"X-Kept: 1", b"Origin: https://page.example"),
    "with an id": HEAD.replace(b"X-Kept: 1", b"X-Request-Id: my-id"),
    "HTTP/1.0 that keeps": HEAD.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"X-Kept: 1", b"Connection: keep-alive"),
}


@pytest.mark.parametrize("name", ASKED)
def test_who_asked_makes_the_same_difference(stages: Maker, name: str) -> None:
    same_answer_every_way(stages, answer(), 50, ask=request(head=ASKED[name]))


def test_an_alias_is_shown_behind_a_known_head_too(stages: Maker) -> None:
    ask = request(BODY.replace(b'"m"', b'"alias"'))
    worker = ", aliases: {alias: m}"
    same_answer_every_way(stages, answer(), 50, ask=ask, worker=worker)
    got = second_answer(stages("", worker), answer(), (answer(),), memory=True, ask=ask)["client got"]
    assert got.count(b'"model":"alias"') == 2
    assert b'"model":"m"' not in got


def test_the_last_answer_of_a_connection_says_so(stages: Maker) -> None:
    def run(*, memory: bool) -> dict[str, Any]:
        stage = stages()
        stage.say(request())
        stage.reply(answer())
        stage.say(HEAD.replace(b"X-Kept: 1", b"Connection: close") % N + BODY)
        if not memory:
            stage.client.call.connection._memo = None  # type: ignore[union-attr]
        stage.reply(answer())
        return stage.outcome()

    known = run(memory=True)
    assert known == run(memory=False)
    assert known["client closed"] and b"connection: close" in known["client got"]


EVENT_HEAD = ANSWER_HEAD.replace(b"application/json", b"text/event-stream")
CONTENT = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
STREAMS = {
    "usage": CONTENT + b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\ndata: [DONE]\n\n',
    "an error": b'data: {"error":{"message":"busy","code":429}}\n\n',
    "cut": b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_with_a_length_is_read_as_a_stream_every_time(stages: Maker, name: str) -> None:
    ask = request(BODY[:-1] + b',"stream":true}')
    warm, data = (answer(body, EVENT_HEAD) for body in (STREAMS["usage"], STREAMS[name]))
    same_answer_every_way(stages, data, None, warm=warm, ask=ask)

"""Bad input: each gets a clear 4xx or is closed at its limit, and the next good request is served at once."""

import asyncio
import json
import resource
import socket
import time
from collections.abc import Iterator

import pytest
from support.gateway import EngineMaker, GatewayMaker, GatewayThread, ProcessMaker, served_at_once, wait_until
from support.http import CHAT, Answer, Client, chat, fetch, parse_answer, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

BODY = json.dumps(chat("smuggled")).encode()
LIMITS = {"header_s": 0.5, "body_s": 0.7}


@pytest.fixture
def gateway(engine: MockEngine, gateways: GatewayMaker) -> Iterator[GatewayThread]:
    """A gateway with short limits; at the end it must serve at once and be at rest."""
    gateway = gateways(engine, timeouts=LIMITS)
    yield gateway
    served_at_once(gateway)
    gateway.wait_at_rest()


def said(gateway: GatewayThread, data: bytes, *, within_s: float = 3.0) -> bytes:
    """What the gateway says to these bytes until it closes."""
    with Client(gateway.port, timeout_s=within_s) as client:
        client.send(data)
        return client.read_to_end()


def refused(data: bytes, *statuses: int) -> Answer:
    answer = parse_answer(data)
    assert answer.status in (statuses or (400,)), answer
    assert answer.error
    return answer


# ---- no HTTP at all, and smuggling shapes ----


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\xff\xfe garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS greeting
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST " + CHAT.encode() + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET /health HTTP/1.1\r\n: no name\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad name: x\r\n\r\n",
        b"GET /hea\x00lth HTTP/1.1\r\nhost: g\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: g\r\nx: a\x00b\r\n\r\n",
    ],
    ids=range(11),
)
def test_what_is_no_http_is_refused_and_closed(gateway: GatewayThread, data: bytes) -> None:
    answer = said(gateway, data)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 408", b"HTTP/1.1 505")), answer


def head(*lines: bytes) -> bytes:
    return b"\r\n".join([b"POST " + CHAT.encode() + b" HTTP/1.1", b"host: g", *lines]) + b"\r\n\r\n"


LENGTH = b"content-length: %d" % len(BODY)
SMUGGLED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


@pytest.mark.parametrize(
    "data",
    [
        head(LENGTH, b"transfer-encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
        head(b"transfer-encoding: chunked", LENGTH) + b"0\r\n\r\n" + SMUGGLED,
        head(b"transfer-encoding: chunked", b"transfer-encoding: identity") + b"0\r\n\r\n" + SMUGGLED,
        head(b"transfer-encoding: identity, chunked, identity") + b"0\r\n\r\n" + SMUGGLED,
        head(b"transfer-encoding: xchunked") + b"0\r\n\r\n" + SMUGGLED,
        head(b"transfer-encoding : chunked") + b"0\r\n\r\n" + SMUGGLED,
        head(b"transfer-encoding:\x0bchunked") + b"0\r\n\r\n" + SMUGGLED,
        head(LENGTH, b"content-length: 3") + BODY,
        head(b"content-length: 3", LENGTH) + BODY,
        head(b"content-length: +%d" % len(BODY)) + BODY,
        head(b"content-length: -1") + BODY,
        head(b"content-length: 0x10") + BODY,
        head(b"content-length: %d, %d" % (len(BODY), len(BODY))) + BODY,
        head(b"content-length: 99999999999999999999999") + BODY,
        head(b"content-length: ten") + BODY,
        head(b"x-a: b", b" folded: c", LENGTH) + BODY,
        head(b"x-a: b", b"\tfolded", LENGTH) + BODY,
        b"POST /v1/chat/completions HTTP/1.1\nhost: g\n" + LENGTH + b"\n\n" + BODY,
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\n" + LENGTH + b"\r\n\r\n" + BODY,
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\rx: y\r\n" + LENGTH + b"\r\n\r\n" + BODY,
    ],
    ids=[
        "length and chunked", "chunked and length", "two codings", "chunked not last", "unknown coding",
        "space before colon", "vertical tab", "two lengths", "two lengths reversed", "plus", "negative",
        "hex", "list", "overflow", "words", "folded with colon", "folded", "bare line feeds",
        "one bare line feed", "bare carriage return",
    ],
)  # fmt: skip
def test_smuggling_shapes_reach_no_worker(gateway: GatewayThread, engine: MockEngine, data: bytes) -> None:
    refused(said(gateway, data), 400, 501)
    assert not engine.find("smuggled")


def test_equal_duplicate_lengths_are_refused_or_one(gateway: GatewayThread, engine: MockEngine) -> None:
    data = said(gateway, head(LENGTH, LENGTH, b"connection: close") + BODY)
    assert parse_answer(data).status in (200, 400)
    assert len(engine.find("smuggled")) <= 1


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n{}\r\n0\r\n\r\n",
        b"5;ext=\x00\r\n",
        b"-5\r\nabcde\r\n0\r\n\r\n",
        b"0x5\r\nabcde\r\n0\r\n\r\n",
        b"5\r\nabcdeXX0\r\n\r\n",
        b"5\nabcde\n0\n\n",
        b"fffffffffffffffff\r\na",
        b" 5\r\nabcde\r\n0\r\n\r\n",
    ],
    ids=range(8),
)
def test_broken_chunks_are_refused(gateway: GatewayThread, engine: MockEngine, chunks: bytes) -> None:
    refused(said(gateway, head(b"transfer-encoding: chunked") + chunks), 400, 408, 413)
    assert not engine.received


def test_trailers_and_extensions_are_taken_and_dropped(gateway: GatewayThread, engine: MockEngine) -> None:
    half = len(BODY) // 2
    chunks = b"%x;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nx-trailer: smuggle\r\n\r\n" % (
        half, BODY[:half], len(BODY) - half, BODY[half:],
    )  # fmt: skip
    data = said(gateway, head(b"transfer-encoding: chunked", b"trailer: x-trailer", b"connection: close") + chunks)
    assert parse_answer(data).status == 200
    assert engine.received[0].body == BODY
    assert b"trailer" not in engine.received[0].head.lower()


def test_a_chunked_body_bytewise(gateway: GatewayThread, engine: MockEngine) -> None:
    with Client(gateway.port) as client:
        client.send(head(b"transfer-encoding: chunked"))
        for byte in BODY:
            client.send(b"1\r\n%c\r\n" % byte)
        client.send(b"0\r\n\r\n")
        assert client.read_answer().status == 200
    assert engine.received[0].body == BODY


@pytest.mark.parametrize(
    ("lines", "statuses"),
    [
        ((b"GET /health HTTP/1.1",), (200, 400)),
        ((b"GET /health HTTP/1.1", b"host: a", b"host: b"), (200, 400)),
        ((b"GET http://elsewhere/health HTTP/1.1", b"host: a"), (200, 400, 404)),
        ((b"CONNECT elsewhere:443 HTTP/1.1", b"host: elsewhere"), (400, 404, 405, 501)),
        ((b"OPTIONS * HTTP/1.1", b"host: a"), (200, 204, 400, 404, 405)),
        (
            (b"GET /health HTTP/1.1", b"host: a", b"connection: upgrade", b"upgrade: websocket"),
            (200, 400, 426),
        ),
        ((b"GET //health HTTP/1.1", b"host: a"), (200, 400, 404)),
        ((b"GET /%2e%2e/health HTTP/1.1", b"host: a"), (400, 404)),
    ],
    ids=["no host", "two hosts", "absolute", "connect", "star", "upgrade", "slashes", "dots"],
)
def test_odd_targets(gateway: GatewayThread, lines: tuple[bytes, ...], statuses: tuple[int, ...]) -> None:
    data = said(gateway, b"\r\n".join([*lines, b"connection: close"]) + b"\r\n\r\n")
    assert parse_answer(data).status in statuses


# ---- sizes ----


def test_headers_of_a_megabyte(gateway: GatewayThread) -> None:
    data = head(b"x-large: " + b"a" * 1_000_000, LENGTH) + BODY
    with Client(gateway.port) as client:
        try:
            client.send(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = client.read_answer()
    assert answer.status == 431
    assert answer.error


def test_many_headers_without_an_end(gateway: GatewayThread) -> None:
    with Client(gateway.port) as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n")
        try:
            for number in range(20000):
                client.send(b"x-%d: y\r\n" % number)
        except (BrokenPipeError, ConnectionResetError):
            pass
        # A reset may overtake the answer while we still write.
        data = client.read_to_end()
    assert data == b"" or data.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


def test_a_target_of_a_megabyte(gateway: GatewayThread) -> None:
    with Client(gateway.port) as client:
        try:
            client.send(b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: g\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert client.read_answer().status in (414, 431)


@pytest.mark.parametrize("megabytes", [1.1, 2.1, 9, 31])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_large_bodies_within_the_limit(
    gateway: GatewayThread, engine: MockEngine, megabytes: float, chunked: bool
) -> None:
    """Report 43: an image in base64."""
    image = "iVBORw0KGgo=" * int(megabytes * 1_000_000 / 12)
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + image}}]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    with Client(gateway.port) as client:
        if chunked:
            client.send(head(b"transfer-encoding: chunked"))
            for start in range(0, len(body), 65536):
                piece = body[start : start + 65536]
                client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            client.send(b"0\r\n\r\n")
        else:
            client.send(request_bytes("POST", CHAT, body))
        assert client.read_answer().status == 200
    assert engine.received[0].body == body


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_bodies_over_the_limit(engine: MockEngine, gateways: GatewayMaker, chunked: bool) -> None:
    """Report 43: 413 in OpenAI's shape with and without a Content-Length; and nothing reaches a worker."""
    gateway = gateways(engine, limits={"body_bytes": 100_000})
    body = json.dumps(chat("x" * 200_000)).encode()
    with Client(gateway.port) as client:
        try:
            if chunked:
                client.send(head(b"transfer-encoding: chunked"))
                for start in range(0, len(body), 1000):
                    piece = body[start : start + 1000]
                    client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                client.send(b"0\r\n\r\n")
            else:
                client.send(request_bytes("POST", CHAT, body))
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = client.read_answer()
    assert answer.status == 413
    assert answer.error
    assert not engine.received
    served_at_once(gateway)
    gateway.wait_at_rest()


def test_a_body_at_the_limit_is_taken_and_one_byte_more_is_not(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, limits={"body_bytes": 5000})
    empty = len(json.dumps(chat("")))
    assert post(gateway.port, chat("x" * (5000 - empty))).status == 200
    assert post(gateway.port, chat("x" * (5001 - empty))).status == 413


def test_deep_json(gateway: GatewayThread, engine: MockEngine) -> None:
    for deep in (
        b'{"model":"m","messages":' + b"[" * 100_000,
        b'{"model":"m","x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    ):
        answer = post(gateway.port, deep)
        assert answer.status == 400
        assert answer.error["code"] == "invalid_request_error"
    assert not engine.received


# ---- bodies that are no request ----


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"null", b"[]", b'"text"', b"7", b"{", b"{}", b"{'model':'m'}", b'{"model":"m",}',
        b'{"model":"m"} x', b"\xff\xfe", b'{"model":"\xff"}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","temperature":NaN}', b'{"model":"m","temperature":1e999}', b"\xef\xbb\xbf{}",
    ],
    ids=range(17),
)  # fmt: skip
def test_bodies_that_are_no_request(gateway: GatewayThread, engine: MockEngine, body: bytes) -> None:
    answer = post(gateway.port, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert not engine.received


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 7}, "model"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "3"}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**30}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"stream_options": 5}, "stream_options"),
        ({"seed": 2**64}, "seed"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_wrong_values_name_their_field(
    gateway: GatewayThread, engine: MockEngine, path: str, fields: dict[str, object], param: str
) -> None:
    """S41 and the interface: a 400 that names the field, before anything is sent."""
    base = chat() if path == CHAT else {"model": "m", "prompt": "hello"}
    answer = post(gateway.port, {**base, **fields}, path=path)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert not engine.received


def test_a_missing_model_is_named(gateway: GatewayThread) -> None:
    answer = post(gateway.port, {"messages": []})
    assert answer.status == 400
    assert answer.error["param"] == "model"


@pytest.mark.parametrize("prompt", [[1, "a"], [["a"]], [[1], "a"], {"a": 1}, 7, [], [[-1]], [1.5]], ids=str)
def test_wrong_prompts(gateway: GatewayThread, prompt: object) -> None:
    answer = post(gateway.port, {"model": "m", "prompt": prompt}, path="/v1/completions")
    assert answer.status == 400
    assert answer.error["param"] == "prompt"


def test_a_refused_body_keeps_the_connection_usable(gateway: GatewayThread) -> None:
    with Client(gateway.port) as client:
        for _ in range(3):
            assert client.request("POST", CHAT, b"{").status == 400
            assert client.request("POST", CHAT, chat()).status == 200


# ---- methods and paths ----


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("PATCH", "/metrics", "GET"),
    ],
)
def test_wrong_methods_name_the_right_ones(gateway: GatewayThread, method: str, path: str, allowed: str) -> None:
    answer = fetch(gateway.port, method, path, {"model": "m"} if method != "GET" else None)
    assert answer.status == 405
    assert allowed in (answer.header("allow") or "")
    assert answer.error


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/chat/completions/x", "/v1/", "/nothing", "/v1/chat/completionsx"])
def test_unknown_paths(gateway: GatewayThread, engine: MockEngine, path: str) -> None:
    for method, body in (("POST", chat()), ("GET", None)):
        answer = fetch(gateway.port, method, path, body)
        assert answer.status == 404
        assert answer.error
    assert not engine.received


def test_a_query_does_not_hide_the_path(gateway: GatewayThread) -> None:
    assert post(gateway.port, chat(), path=CHAT + "?api-version=1").status == 200
    assert fetch(gateway.port, "GET", "/health?x=1").status == 200


def test_head(gateway: GatewayThread) -> None:
    with Client(gateway.port) as client:
        for path in ("/health", "/v1/models", "/readiness"):
            answer = client.request("HEAD", path)
            assert answer.status == 200
            assert answer.body == b""
        # Nothing of a body was sent, or the next answer could not be read.
        assert client.request("GET", "/health").status == 200
        assert client.request("HEAD", CHAT).status == 405


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_cross_origin_preflight_needs_no_key(engine: MockEngine, gateways: GatewayMaker, path: str) -> None:
    tenants = [{"name": "alice", "keys": ["sk-alice"]}]
    gateway = gateways(engine, tenants=tenants)
    asked = [
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type,x-stainless-lang"),
    ]
    answer = fetch(gateway.port, "OPTIONS", path, None, asked)
    assert answer.status in (200, 204)
    assert answer.header("access-control-allow-origin") in ("*", "https://app.example")
    allowed = (answer.header("access-control-allow-headers") or "").lower()
    assert "authorization" in allowed
    assert "POST" in (answer.header("access-control-allow-methods") or "")
    # The answers themselves, errors and streams included, carry the origin too.
    origin = [("origin", "https://app.example")]
    for body, key in ((chat(), "sk-alice"), (chat(stream=True), "sk-alice"), (chat(), "sk-wrong")):
        answer = post(gateway.port, body, key=key, headers=origin)
        assert answer.status in (200, 401)
        assert answer.header("access-control-allow-origin") in ("*", "https://app.example")
    assert answer.status == 401


# ---- Expect, pipelining, HTTP/1.0 ----


def test_expect_continue(gateway: GatewayThread, engine: MockEngine) -> None:
    with Client(gateway.port) as client:
        client.send(head(LENGTH, b"expect: 100-continue"))
        assert client.read_line() == b"HTTP/1.1 100 Continue"
        assert client.read_line() == b""
        client.send(BODY)
        assert client.read_answer().status == 200
        # The connection goes on, and a body that comes unasked is fine.
        client.send(head(LENGTH, b"expect: 100-continue") + BODY)
        assert client.read_answer().status == 200
    assert b"expect" not in engine.received[0].head.lower()


def test_expect_with_too_large_a_length_is_refused_before_the_body(gateway: GatewayThread) -> None:
    with Client(gateway.port) as client:
        client.send(head(b"content-length: 999999999", b"expect: 100-continue"))
        answer = client.read_answer()
    assert answer.status == 413
    assert answer.informational == []


def test_pipelined_requests_are_answered_in_order(gateway: GatewayThread, engine: MockEngine) -> None:
    engine.named["slow"] = Behaviour(head_delay_s=0.1, token="slow")
    texts = ["<<slow>> 0", "1", "2", "<<slow>> 3", "4"]
    parts = [request_bytes("POST", CHAT, chat(text, user=f"u{i}", max_tokens=i + 1)) for i, text in enumerate(texts)]
    parts.insert(3, request_bytes("GET", "/health"))
    parts.insert(1, request_bytes("POST", CHAT, chat("streamed", stream=True)))
    with Client(gateway.port) as client:
        client.send(b"".join(parts))
        answers = [client.read_answer() for _ in parts]
    assert [answer.status for answer in answers] == [200] * 7
    assert answers[1].payloads[-1] == b"[DONE]"
    tokens = [a.json["usage"]["completion_tokens"] for i, a in enumerate(answers) if i not in (1, 4)]
    assert tokens == [1, 2, 3, 4, 5]


def test_a_thousand_pipelined_requests_bytewise_split(gateway: GatewayThread) -> None:
    data = request_bytes("POST", CHAT, chat("x")) * 200 + request_bytes("GET", "/health") * 800
    with Client(gateway.port, timeout_s=20) as client:
        for start in range(0, len(data), 777):
            client.send(data[start : start + 777])
        assert {client.read_answer().status for _ in range(1000)} == {200}


def test_pipelining_without_reading_is_bounded(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Answers that nobody takes stop the reading of further requests."""
    engine.behaviour = Behaviour(body=b'"' + b"x" * 1_000_000 + b'"')
    gateway = gateways(engine)
    one = request_bytes("POST", CHAT, chat("x"))
    with Client(gateway.port, receive_buffer=65536, timeout_s=1) as client:
        client.sock.settimeout(0.5)
        try:
            for _ in range(500):
                client.send(one)
        except TimeoutError:
            pass
        time.sleep(0.5)
        assert len(engine.received) < 60
        client.close()
    gateway.wait_at_rest()


def test_what_is_pipelined_behind_a_running_call_is_bounded(engine: MockEngine, gateways: GatewayMaker) -> None:
    """A caller can not fill the memory with requests whose turn has not come."""
    engine.behaviour = Behaviour(gated=True)
    gateway = gateways(engine)
    one = request_bytes("POST", CHAT, chat("x" * 200_000))
    sent = 0
    with Client(gateway.port, timeout_s=0.5) as client:
        try:
            while sent < 200_000_000:
                sent += client.sock.send(one[sent % len(one) :])
        except TimeoutError:
            pass
        assert sent < 40_000_000
        client.sock.settimeout(10)
        engine.open_gate()
        assert client.read_answer().status == 200
    gateway.wait_at_rest()


def test_http_1_0(gateway: GatewayThread, engine: MockEngine) -> None:
    request = b"POST %b HTTP/1.0\r\n%b\r\n\r\n%b" % (CHAT.encode(), LENGTH, BODY)
    answer = parse_answer(said(gateway, request))
    assert answer.status == 200
    assert answer.json["usage"]
    stream = json.dumps(chat(stream=True)).encode()
    request = b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(stream), stream)
    data = said(gateway, request)
    assert b"transfer-encoding" not in data.lower()  # 1.0 has no chunks: ended by closing
    assert data.rstrip().endswith(b"data: [DONE]")
    assert said(gateway, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.")


def test_http_1_0_keep_alive(gateway: GatewayThread) -> None:
    with Client(gateway.port) as client:
        for _ in range(2):
            client.send(b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            answer = client.read_answer()
            assert answer.status == 200
            if (answer.header("connection") or "").lower() != "keep-alive":
                assert client.closed_within(1)
                break


def test_connection_close_is_obeyed(gateway: GatewayThread) -> None:
    for body in (chat(), chat(stream=True), b"{"):
        with Client(gateway.port) as client:
            client.send(request_bytes("POST", CHAT, body, close=True))
            answer = client.read_answer()
            assert answer.complete
            assert (answer.header("connection") or "").lower() == "close"
            assert client.closed_within(1)


# ---- slow and idle callers ----


@pytest.mark.parametrize(
    "data",
    [b"", b"P", b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nx:"],
    ids=["nothing", "byte", "head"],
)
def test_a_head_that_does_not_come_is_ended(gateway: GatewayThread, data: bytes) -> None:
    with Client(gateway.port) as client:
        client.send(data)
        started = time.monotonic()
        answer = client.read_to_end()
        assert time.monotonic() - started < 3
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408")


def test_a_body_that_does_not_come_is_ended(gateway: GatewayThread, engine: MockEngine) -> None:
    for data in (head(LENGTH) + BODY[:10], head(b"transfer-encoding: chunked") + b"5\r\nab"):
        with Client(gateway.port) as client:
            client.send(data)
            started = time.monotonic()
            answer = client.read_to_end()
            assert time.monotonic() - started < 3
        assert answer.startswith(b"HTTP/1.1 408")
    assert not engine.received


def test_dripping_bytes_does_not_extend_the_limit(gateway: GatewayThread) -> None:
    with Client(gateway.port) as client:
        started = time.monotonic()
        try:
            for byte in head(LENGTH) + BODY:
                client.send(bytes([byte]))
                time.sleep(0.05)
                assert time.monotonic() - started < 4
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert client.closed_within(2)


def test_an_idle_kept_connection_is_closed_at_its_limit(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, timeouts={"keep_alive_s": 0.4, "header_s": 5})
    with Client(gateway.port) as client:
        assert client.request("POST", CHAT, chat()).status == 200
        time.sleep(0.2)
        assert client.request("POST", CHAT, chat()).status == 200
        started = time.monotonic()
        assert client.closed_within(3)
        assert 0.3 < time.monotonic() - started < 2


def test_leaving_amid_head_or_body(gateway: GatewayThread, engine: MockEngine) -> None:
    for data in (
        b"",
        b"POST ",
        head(LENGTH),
        head(LENGTH) + BODY[:5],
        head(b"transfer-encoding: chunked") + b"5\r\nab",
    ):
        for leave in (Client.close, Client.reset, Client.half_close):
            client = Client(gateway.port)
            client.send(data)
            leave(client)
            if leave is Client.half_close:
                assert client.closed_within(3)
                client.close()
    assert not engine.received


def raise_descriptor_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} file descriptors, the hard limit is {hard}")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connect_many(port: int, count: int) -> list[socket.socket]:
    sockets = []
    for _ in range(count):
        sock = socket.socket()
        sock.settimeout(5)
        sock.connect(("127.0.0.1", port))
        sockets.append(sock)
    return sockets


@pytest.mark.timeout(60)
def test_ten_thousand_idle_connections(engine: MockEngine, processes: ProcessMaker) -> None:
    raise_descriptor_limit(10_300)
    gateway = processes(engine, timeouts={"header_s": 30})
    served_at_once(gateway)
    descriptors, memory = gateway.descriptors(), gateway.resident_bytes()
    sockets = connect_many(gateway.port, 10_000)
    try:
        wait_until(lambda: gateway.descriptors() >= descriptors + 9_990, 20)
        for _ in range(20):
            served_at_once(gateway)
        assert gateway.resident_bytes() - memory < 10_000 * 8192
    finally:
        for sock in sockets:
            sock.close()
    wait_until(lambda: gateway.descriptors() <= descriptors + 5, 10)
    served_at_once(gateway)


@pytest.mark.timeout(60)
def test_two_thousand_clients_with_a_byte_a_second(engine: MockEngine, processes: ProcessMaker) -> None:
    raise_descriptor_limit(2_300)
    gateway = processes(engine, timeouts={"header_s": 3, "body_s": 3})
    served_at_once(gateway)
    descriptors = gateway.descriptors()
    drip = head(LENGTH) + BODY
    sockets = connect_many(gateway.port, 2000)
    try:
        for position in range(6):
            for sock in sockets:
                try:
                    sock.send(drip[position : position + 1])
                except OSError:
                    pass
            started = time.monotonic()
            served_at_once(gateway)
            time.sleep(max(0.0, 1 - (time.monotonic() - started)))
        # All were ended at their limit although bytes kept coming.
        wait_until(lambda: gateway.descriptors() <= descriptors + 5, 10)
        served_at_once(gateway)
    finally:
        for sock in sockets:
            sock.close()


def test_more_connections_than_allowed(engine: MockEngine, gateways: GatewayMaker) -> None:
    """The bound has a name, and what is over it is told or closed, never left hanging."""
    gateway = gateways(engine, limits={"connections": 50})
    sockets = connect_many(gateway.port, 80)
    try:
        time.sleep(0.2)
        assert gateway.counters()["client_connections"] <= 50
    finally:
        for sock in sockets:
            sock.close()
    gateway.wait_for(client_connections=0)
    served_at_once(gateway)


# ---- the worker's bad input ----


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01garbage",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\nabcdefg",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 1_000_000,
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"",
    ],
    ids=["garbage", "status", "two lengths", "negative", "header", "large head", "upgrade", "nothing"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_garbage_from_a_worker_is_a_502(engines: EngineMaker, gateways: GatewayMaker, raw: bytes, stream: bool) -> None:
    engine = engines()
    engine.named["bad"] = Behaviour(raw=raw)
    gateway = gateways(engine)
    answer = post(gateway.port, chat("<<bad>>", stream=stream))
    assert answer.status == 502
    assert answer.error["code"] == "upstream_error"
    gateway.wait_at_rest()
    wait_until(lambda: post(gateway.port, chat()).status == 200, 3, "served again")


def test_broken_chunks_from_a_worker(engines: EngineMaker, gateways: GatewayMaker) -> None:
    engine = engines()
    start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    engine.named["bad"] = Behaviour(raw=start + b"2\r\n{}\r\nzz\r\n")
    gateway = gateways(engine)
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat("<<bad>>")))
        answer = client.read_answer()
        assert answer.status == 502 or not answer.complete
    gateway.wait_at_rest()
    wait_until(lambda: post(gateway.port, chat()).status == 200, 3, "served again")


@pytest.mark.parametrize("said_bytes", [5000, 100_000_000])
def test_a_worker_that_sends_less_than_it_said(engines: EngineMaker, gateways: GatewayMaker, said_bytes: int) -> None:
    """Report 4: the caller can tell that the answer is cut."""
    engine = engines()
    engine.named["short"] = Behaviour(content_length=said_bytes)
    gateway = gateways(engine)
    answer = post(gateway.port, chat("<<short>>"))
    assert answer.status == 502 or not answer.complete
    gateway.wait_at_rest()
    wait_until(lambda: post(gateway.port, chat()).status == 200, 3, "served again")


def test_interim_answers_of_a_worker_are_skipped(engines: EngineMaker, gateways: GatewayMaker) -> None:
    engine = engines()
    final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    engine.behaviour = Behaviour(
        raw=b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + final
    )
    gateway = gateways(engine)
    answer = post(gateway.port, chat())
    assert answer.status == 200
    assert answer.body == b"{}"
    gateway.wait_at_rest()


def test_bad_input_does_not_spill_into_the_loop(gateway: GatewayThread) -> None:
    """Many at once, then all is as before."""
    shapes = [
        b"\x00" * 100,
        head(LENGTH, b"transfer-encoding: chunked"),
        b"GET /health HTTP/1.1\r\nx",
        BODY,
        b"\r\n" * 50,
    ]

    async def run() -> None:
        async def one(data: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(data)
            try:
                await asyncio.wait_for(reader.read(-1), 5)
            except ConnectionResetError:
                pass
            writer.close()

        await asyncio.gather(*(one(shapes[i % len(shapes)]) for i in range(300)))

    asyncio.run(run())

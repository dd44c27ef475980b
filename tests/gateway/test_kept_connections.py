"""Kept connections, both sides: whatever one exchange leaves behind must not touch the next.

The gateway knows a head again that it saw before on the same connection; these tests make sure that this is never
seen from outside, however requests and answers are cut, joined or varied.
"""

import json
import random
import time
from typing import Any

import pytest
from support.gateway import EngineMaker, GatewayMaker, served_at_once, wait_until
from support.http import CHAT, Answer, Client, chat, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

TENANTS = [{"name": name, "keys": [f"sk-{name}"]} for name in ("a", "b")]


def asked(number: int, chance: random.Random) -> tuple[bytes, int, str | None]:
    """A request, the status it must get, and the text that must reach the engine (None: nothing may)."""
    text = f"number {number} " + "x" * chance.choice((0, 1, 9, 90, 900, 9000))
    body = json.dumps(chat(text, max_tokens=1 + number % 7)).encode()
    kind = chance.randrange(12)
    if kind == 0:
        return request_bytes("POST", CHAT, body, key="sk-wrong"), 401, None
    if kind == 1:
        return request_bytes("POST", CHAT, b"{" + body, key="sk-a"), 400, None
    if kind == 2:
        return request_bytes("GET", "/health"), 200, None
    if kind == 3:
        head = request_bytes("POST", CHAT, None, [("transfer-encoding", "chunked")], key="sk-b")
        half = len(body) // 2
        chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (half, body[:half], len(body) - half, body[half:])
        return head + chunks, 200, text
    if kind == 4:
        return request_bytes("POST", CHAT, body, [("x-odd", str(number))], key="sk-b"), 200, text
    return request_bytes("POST", CHAT, body, key="sk-a" if kind < 9 else "sk-b"), 200, text


def cut(data: bytes, chance: random.Random, pieces: int) -> list[bytes]:
    marks = sorted(chance.randrange(len(data) + 1) for _ in range(pieces))
    return [data[i:j] for i, j in zip([0, *marks], [*marks, len(data)], strict=True) if i < j]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pipelined", [False, True], ids=["one by one", "pipelined"])
def test_many_requests_on_one_connection_in_any_pieces(
    engine: MockEngine, gateways: GatewayMaker, seed: int, pipelined: bool
) -> None:
    chance = random.Random(seed)
    gateway = gateways(engine, tenants=TENANTS)
    asks = [asked(number, chance) for number in range(60)]
    client = Client(gateway.port)
    if pipelined:
        for piece in cut(b"".join(data for data, _, _ in asks), chance, 40):
            client.send(piece)
    for number, (data, status, text) in enumerate(asks):
        if not pipelined:
            for piece in cut(data, chance, chance.choice((0, 0, 0, 1, 3))):
                client.send(piece)
                time.sleep(0.0005)
        answer = client.read_answer()
        assert answer.status == status, (seed, number)
        if text is not None:
            assert answer.json["usage"]["completion_tokens"] == 1 + number % 7, (seed, number)
        if answer.header("connection") == "close":  # refused before its body had come
            assert not pipelined
            client.close()
            client = Client(gateway.port)
    client.close()
    expected = [text for _, _, text in asks if text is not None]
    assert [received.json["messages"][0]["content"] for received in engine.received] == expected
    gateway.wait_at_rest()


@pytest.mark.parametrize(
    "length",
    ["0", "1", "00000", "-5", "+5", " ", "5 5", "0x9", "999", "99999999999999999999", "1e2", "\u00b2"],
    ids=range(12),
)
def test_a_known_head_with_an_odd_length_is_read_as_if_new(
    engine: MockEngine, gateways: GatewayMaker, length: str
) -> None:
    """The first request makes the head known; the second differs in nothing but its length."""
    gateway = gateways(engine, timeouts={"body_s": 0.4, "header_s": 0.4})
    good = request_bytes("POST", CHAT, chat())
    body = json.dumps(chat("second")).encode()
    head, _, _ = good.partition(b"\r\n\r\n")
    odd = head.replace(b"content-length: %d" % len(json.dumps(chat())), b"content-length: " + length.encode("latin-1"))
    alone: list[int] = []
    for data in (b"", good):
        with Client(gateway.port) as client:
            if data:
                client.send(data)
                assert client.read_answer().status == 200
            client.send(odd + b"\r\n\r\n" + body)
            alone.append(client.read_answer().status)
    assert alone[0] == alone[1]
    assert alone[0] in (400, 408, 413)
    assert not engine.find("second")


def test_a_known_head_with_another_key_is_another_caller(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, tenants=TENANTS)
    with Client(gateway.port) as client:
        for key, status in (("sk-a", 200), ("sk-x", 401), ("sk-b", 200), ("sk-a", 200), (None, 401), ("sk-x", 401)):
            assert client.request("POST", CHAT, chat(), key=key).status == status


def test_a_known_head_with_a_key_in_the_body(engine: MockEngine, gateways: GatewayMaker) -> None:
    """The head says nothing about the caller; each body does for itself."""
    gateway = gateways(engine, tenants=TENANTS)
    with Client(gateway.port) as client:
        for key, status in (("sk-a", 200), ("sk-x", 401), ("sk-b", 200)):
            assert client.request("POST", CHAT, chat(api_key=key)).status == status
        assert client.request("POST", CHAT, chat()).status == 401


def test_a_known_head_with_a_body_over_the_limit(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, limits={"body_bytes": 5000})
    with Client(gateway.port) as client:
        assert client.request("POST", CHAT, chat("x" * 3000)).status == 200
        assert client.request("POST", CHAT, chat("x" * 6000)).status == 413


def test_ids_of_requests_with_the_same_head_differ(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    with Client(gateway.port) as client:
        ids = [client.request("POST", CHAT, chat()).header("x-request-id") for _ in range(20)]
    assert len(set(ids)) == 20
    assert [received.header("x-request-id") for received in engine.received] == ids


def test_answers_that_vary_on_a_kept_connection_to_a_worker(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Known answer heads: other lengths, statuses, types, headers and framings in between."""
    engine.named.update(
        a=Behaviour(body=b'{"a":1}'),
        b=Behaviour(body=b'{"a":1000}'),
        c=Behaviour(body=b"text", content_type="text/plain"),
        d=Behaviour(body=b'{"error":{}}', status=400),
        e=Behaviour(body=b'{"a":1}', headers=(("x-more", "1"),)),
        f=Behaviour(body=b'{"a":1}', write_bytes=3),
        g=Behaviour(tokens=2),
    )
    gateway = gateways(engine, slots=1, fleet={"probe_interval_s": 60})
    chance = random.Random(5)
    for _ in range(120):
        name = chance.choice("aaabbcdefgg")
        stream = name == "g" and chance.random() < 0.5
        with Client(gateway.port) as client:
            answer = client.request("POST", CHAT, chat(f"<<{name}>>", stream=stream))
        behaviour = engine.named[name]
        assert answer.status == behaviour.status
        assert answer.complete
        if behaviour.body is not None:
            assert answer.body == behaviour.body
        assert answer.header("x-more") == ("1" if name == "e" else None)
        assert (answer.header("content-type") == "text/plain") == (name == "c")
    assert len({received.connection for received in engine.received}) == 1


def read_slowly(client: Client) -> Answer:
    """More slowly than the gateway writes, so that it is held up until the last byte."""
    answer = client.read_head()
    for _ in client.pieces(answer):
        time.sleep(0.0005)
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("size", [400_000, 9_000_000, 14_000_000, 19_000_000])
def test_a_slow_reader_leaves_its_workers_connection_readable(
    engines: EngineMaker, gateways: GatewayMaker, size: int, stream: bool
) -> None:
    """The worker's last bytes may come while the caller is held up; who gets that connection next is not."""
    event = b"data: " + b"x" * 4000 + b"\n\n"
    events = (*(event,) * (size // len(event)), b"data: [DONE]\n\n")
    engine = engines()
    engine.named["large"] = Behaviour(events=events) if stream else Behaviour(body=b'"' + b"x" * size + b'"')
    gateway = gateways(engine, slots=4, timeouts={"first_byte_s": 3}, fleet={"probe_interval_s": 60})
    readers = [Client(gateway.port, receive_buffer=32768) for _ in range(4)]
    for client in readers:
        client.send(request_bytes("POST", CHAT, chat("<<large>>", stream=stream)))
    time.sleep(0.3)
    for client in readers:
        assert read_slowly(client).complete
        # Whatever connection it came over is used by others while this caller holds on to its own.
        for _ in range(4):
            served_at_once(gateway)
    for client in readers:
        assert client.request("POST", CHAT, chat("again")).status == 200
        client.close()
    gateway.wait_at_rest()


def test_a_call_that_waits_behind_a_large_answer_keeps_its_time_limit(
    engines: EngineMaker, gateways: GatewayMaker
) -> None:
    """Pipelined behind an answer that the caller is slow to read, it waits in the queue no longer than any other."""
    engine = engines()
    engine.named["large"] = Behaviour(body=b'"' + b"x" * 8_000_000 + b'"')
    engine.named["hold"] = Behaviour(gated=True)
    gateway = gateways(engine, slots=1, limits={"queue_timeout_s": 0.5})
    with Client(gateway.port, receive_buffer=32768) as client, Client(gateway.port) as holder:
        client.send(request_bytes("POST", CHAT, chat("<<large>>")))
        wait_until(lambda: engine.find("<<large>>"))
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>")))
        client.send(request_bytes("POST", CHAT, chat("behind")))
        time.sleep(0.2)
        assert read_slowly(client).complete
        started = time.monotonic()
        answer = client.read_answer()
        assert answer.status == 503
        assert time.monotonic() - started < 3
        engine.open_gate()
        assert holder.read_answer().status == 200


def test_a_caller_that_leaves_between_pipelined_requests(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.named["hold"] = Behaviour(gated=True)
    gateway = gateways(engine, slots=1)
    for leave in (Client.close, Client.reset):
        client = Client(gateway.port)
        client.send(b"".join(request_bytes("POST", CHAT, chat(text)) for text in ("<<hold>>", "next", "last")))
        wait_until(lambda: engine.running == 1)
        leave(client)
        gateway.wait_at_rest()
    served_at_once(gateway)
    assert not engine.find("next")


def bodies_seen(engine: MockEngine) -> list[Any]:
    return [received.json for received in engine.received]


def test_a_post_after_a_failed_one_on_the_same_connection(engine: MockEngine, gateways: GatewayMaker) -> None:
    """An error answer ends nothing but its own exchange."""
    engine.named["cut"] = Behaviour(content_length=99)
    engine.named["bad"] = Behaviour(raw=b"no http")
    gateway = gateways(engine)
    with Client(gateway.port) as client:
        assert client.request("POST", CHAT, chat("<<bad>>")).status in (502, 503)
        wait_until(lambda: post(gateway.port, chat()).status == 200)
        assert client.request("POST", CHAT, chat("fine")).status == 200
    assert bodies_seen(engine)[-1] == chat("fine")

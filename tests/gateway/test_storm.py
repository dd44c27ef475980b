"""S29: after any storm of cancelled, timed-out, cut and refused requests, everything is as it was before."""

import asyncio
import os
import random
import socket
import struct
from collections import Counter

import pytest
from support.gateway import AT_REST, EngineMaker, GatewayMaker, GatewayThread, served_at_once, wait_until
from support.http import CHAT, chat, parse_answer, request_bytes
from support.mock_engine import Behaviour, MockEngine

SEED = 20240
BEHAVIOURS = {
    "good": Behaviour(tokens=3),
    "slow": Behaviour(tokens=3, head_delay_s=0.02),
    "paced": Behaviour(tokens=4, chunk_delay_s=0.005),
    "silent": Behaviour(silent=True),
    "stall": Behaviour(tokens=5, stall_after=2),
    "cut": Behaviour(tokens=5, close_after=3),
    "reset": Behaviour(tokens=5, close_after=3, reset=True),
    "gone": Behaviour(close_at_once=True),
    "bad": Behaviour(status=400),
    "fails": Behaviour(status=500),
    "busy": Behaviour(status=429, headers=(("retry-after", "1"),)),
    "garbage": Behaviour(raw=b"no http\r\n\r\n"),
    "error": Behaviour(error_after=0),
    "late": Behaviour(tokens=5, error_after=3),
    "short": Behaviour(content_length=4000),
    "old": Behaviour(tokens=3, http10=True),
    "bytes": Behaviour(tokens=2, chunk_bytes=7, write_bytes=11),
}
# Failures that make the gateway think ill of a worker are rarer, or most requests would find no worker at all.
RARE = {"silent", "stall", "cut", "reset", "gone", "fails", "garbage", "short"}
MARKERS = [name for name in BEHAVIOURS for _ in range(1 if name in RARE else 8)]
# What the caller does: read to the end, or leave at some moment in some way.
PATIENCE_S = (None, None, None, 0.0, 0.001, 0.005, 0.02, 0.1)
BAD_REQUESTS = (
    request_bytes("POST", CHAT, b"{", key="sk-a"),
    request_bytes("POST", CHAT, chat(n=0), key="sk-a"),
    request_bytes("POST", CHAT, chat(), key="sk-wrong"),
    request_bytes("POST", CHAT, {**chat(), "model": "x"}, key="sk-b"),
    request_bytes("POST", "/v1/nothing", chat(), key="sk-b"),
    request_bytes("POST", CHAT, chat("x" * 300_000), key="sk-b"),
    b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 500\r\n\r\nhalf",
    b"GET /health HTTP/1.1\r\n",
    b"\x00garbage\r\n\r\n",
)


def make_request(chance: random.Random) -> bytes:
    if chance.random() < 0.12:
        return chance.choice(BAD_REQUESTS)
    marker = chance.choice(MARKERS)
    key = chance.choice(("sk-a", "sk-b", "sk-c", None))
    fields = {"stream": chance.random() < 0.5, "n": chance.choice((1, 1, 1, 2, 3))}
    path = chance.choice((CHAT, CHAT, "/v1/completions"))
    text = f"<<{marker}>> {'word ' * chance.randrange(200)}"
    body = chat(text, **fields) if path == CHAT else {"model": "m", "prompt": text, **fields}
    return request_bytes("POST", path, body, key=key, close=chance.random() < 0.5)


async def one_caller(port: int, data: bytes, patience_s: float | None, way: str, seen: Counter[str]) -> None:
    """One request on a connection of its own; leaves after its patience, in one of many ways."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        seen["refused"] += 1
        return
    try:
        pieces = chunks(data) if way == "in pieces" else [data]
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        if way == "half close":
            writer.write_eof()
        try:
            async with asyncio.timeout(3.0 if patience_s is None else patience_s):
                answer = parse_answer(await reader.read(65536))
            seen[str(answer.status)] += 1
        except TimeoutError:
            seen["left"] += 1
        except Exception as error:  # noqa: BLE001 - a cut answer may be cut anywhere
            seen[type(error).__name__] += 1
        if way == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        seen["broken"] += 1
    finally:
        writer.transport.abort() if way == "reset" else writer.close()


def chunks(data: bytes) -> list[bytes]:
    step = max(1, len(data) // 5)
    return [data[start : start + step] for start in range(0, len(data), step)]


async def storm(port: int, calls: int, chance: random.Random, together: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    left = calls

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            way = chance.choice(("close", "close", "reset", "half close", "in pieces"))
            await one_caller(port, make_request(chance), chance.choice(PATIENCE_S), way, seen)

    await asyncio.gather(*(caller() for _ in range(together)))
    return seen


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_worker_ends(gateway: GatewayThread, engines: list[MockEngine]) -> int:
    return gateway.counters()["worker_connections_idle"]


def run_storm(gateways: GatewayMaker, engines: list[MockEngine], calls: int, together: int = 120) -> Counter[str]:
    for engine in engines:
        engine.named.update(BEHAVIOURS)
    gateway = gateways(
        *engines,
        slots=8,
        tenants=[
            {"name": "a", "weight": 30, "keys": ["sk-a"], "limits": {"concurrency": 6, "queued": 20}},
            {"name": "b", "keys": ["sk-b"], "limits": {"queued": 20}},
            {"name": "c", "keys": ["sk-c"]},
        ],
        auth={"anonymous": True},
        limits={"queued": 60, "queue_timeout_s": 0.3, "body_bytes": 200_000, "n": 8},
        timeouts={
            "first_byte_s": 0.2, "idle_s": 0.2, "total_s": 1.5,
            "header_s": 0.5, "body_s": 0.5, "keep_alive_s": 1,
        },
        fleet={"probe_interval_s": 0.2},
    )  # fmt: skip
    served_at_once(gateway)
    settle(gateway, engines)
    before = descriptors()
    seen = asyncio.run(storm(gateway.port, calls, random.Random(SEED), together))
    gateway.wait_at_rest(10)
    wait_until(lambda: _served(gateway), 10, "served again")
    gateway.wait_at_rest(5)
    settle(gateway, engines)
    assert all(engine.running == 0 and engine.sequences == 0 for engine in engines)
    wait_until(lambda: descriptors() <= before + 4, 10, f"{descriptors()} descriptors, {before} before")
    counters = gateway.counters()
    assert {name: counters[name] for name in AT_REST if counters[name]} == {}
    return seen


def _served(gateway: GatewayThread) -> bool:
    try:
        served_at_once(gateway)
    except AssertionError:
        return False
    return True


def settle(gateway: GatewayThread, engines: list[MockEngine]) -> None:
    """Kept connections are closed from the workers' side, so that descriptors can be compared."""
    for engine in engines:
        engine.drop_connections()
    wait_until(lambda: open_worker_ends(gateway, engines) <= 2 * len(engines), 5, "idle connections closed")


@pytest.mark.timeout(90)
def test_ten_thousand_requests_ended_in_every_way(engines: EngineMaker, gateways: GatewayMaker) -> None:
    seen = run_storm(gateways, [engines() for _ in range(3)], 10_000)
    print(seen)
    assert seen["left"] > 500, seen
    assert seen["200"] > 500, seen
    for status in ("400", "401", "404", "413", "500", "502", "504"):
        assert seen[status], (status, seen)
    # Which of the two depends on how fast this machine makes the queue drain.
    assert seen["429"] + seen["503"], seen


@pytest.mark.timeout(60)
def test_workers_dying_in_the_storm(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Two of three workers die and come back, again and again, while a stream of calls goes on."""
    fleet = [engines(Behaviour(tokens=3, head_delay_s=0.005)) for _ in range(3)]
    gateway = gateways(*fleet, slots=8, fleet={"probe_interval_s": 0.1})
    before = descriptors()
    data = request_bytes("POST", CHAT, chat(), close=True)

    async def run() -> Counter[str]:
        seen: Counter[str] = Counter()
        ended = False

        async def caller() -> None:
            while not ended:
                await one_caller(gateway.port, data, None, "close", seen)

        async def trouble() -> None:
            nonlocal ended
            for turn in range(8):
                victim = fleet[1 + turn % 2]
                await asyncio.to_thread(victim.stop, reset=bool(turn % 3 == 0))
                await asyncio.sleep(0.15)
                await asyncio.to_thread(victim.start)
                await asyncio.sleep(0.15)
            ended = True

        await asyncio.gather(trouble(), *(caller() for _ in range(20)))
        return seen

    seen = asyncio.run(run())
    assert seen["200"] > 200
    # Only calls that a dying worker had in its hands may fail, and those as 502.
    assert set(seen) <= {"200", "502"}, seen
    assert seen["502"] <= 8 * 8
    gateway.wait_at_rest()
    wait_until(lambda: _served(gateway), 5)
    settle(gateway, fleet)
    wait_until(lambda: descriptors() <= before + 8, 5, "descriptors")

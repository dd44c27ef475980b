"""The interpreter's share of a request: the real stages between fake transports, without a kernel in the way.

    .venv/bin/python benchmarks/hot_path.py [--seconds 2] [--profile]

Prints microseconds for a whole request (plain answer in one read) and for a relayed chunk of a stream. What the
kernel and uvloop add is measured by bench.py; this is the part that a change to our own code moves, and it is steady
on a noisy machine.
"""

import argparse
import asyncio
import cProfile
import os
import pstats
import sys
import tempfile
import time
from typing import Any

from evenflow.config import load
from evenflow.fleet.registry import State
from evenflow.gateway import Gateway
from evenflow.request.accept import ClientConnection
from evenflow.request.relay import WorkerConnection

CONFIG = """
tenants: [{name: t, keys: [sk-test]}]
workers:
  - {url: "http://127.0.0.1:19001", models: [mock], slots: 512}
  - {url: "http://127.0.0.1:19002", models: [mock], slots: 512}
  - {url: "http://127.0.0.1:19003", models: [mock], slots: 512}
  - {url: "http://127.0.0.1:19004", models: [mock], slots: 512}
log: {access: /dev/null}
"""
PADDING = "".join("abcdefghijklmnopqrstuvwxyz "[i * 7 % 27] for i in range(800))
BODY = (
    '{"model":"mock","messages":[{"role":"system","content":"You are a helpful assistant."},'
    '{"role":"user","content":"' + PADDING + '"}],"temperature":0.7,"max_tokens":16,"stream":%s}'
)
ANSWER_BODY = (
    b'{"id":"chatcmpl-8f1c2d3e4b5a69788796a5b4c3d2e1f0","object":"chat.completion","created":1764550000,'
    b'"model":"mock","choices":[{"index":0,"message":{"role":"assistant","content":"'
    + b"The quick brown fox jumps over the lazy dog. " * 3
    + b'"},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":200,"completion_tokens":32,"total_tokens":232}}'
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER_BODY)
) + ANSWER_BODY
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"id":"chatcmpl-8f1c2d3e4b5a69788796a5b4c3d2e1f0","object":"chat.completion.chunk","created":1764550000,'
    b'"model":"mock","choices":[{"index":0,"delta":{"content":" @000001ca4b8e2d00"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


class FakeTransport:
    """Takes writes and does nothing with them."""

    def __init__(self) -> None:
        self.write = self.written = [].append
        self.last: Any = None

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None:
        return None

    def abort(self) -> None:
        return None

    def pause_reading(self) -> None:
        return None

    resume_reading = pause_reading

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1)


def request(stream: str) -> bytes:
    body = (BODY % stream).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway:8000\r\nUser-Agent: bench/1\r\nAccept: */*\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer sk-test\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body


async def measure(seconds: float, profile: bool) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(CONFIG)
        file.flush()
        settings = load(file.name, environ={}, overrides={})
    gateway = Gateway(settings)
    gateway.compose(asyncio.get_running_loop())
    registry, relay = gateway._registry, gateway._relay
    for worker in registry.workers.values():
        registry.probe_succeeded(worker)
        assert worker.state is State.READY
        connection = WorkerConnection(relay, worker)
        transport = FakeTransport()
        transport.write = lambda data: None  # type: ignore[assignment]
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.rest(time.monotonic() + 1e6)
    client = ClientConnection(gateway._front)
    seen: list[bytes] = []
    transport = FakeTransport()
    transport.write = seen.append
    client.connection_made(transport)  # type: ignore[arg-type]
    plain, streamed = request("false"), request("true")

    def one() -> None:
        client.data_received(plain)
        client.call.connection.data_received(ANSWER)  # type: ignore[union-attr]
        seen.clear()
        for worker in registry.workers.values():
            for idle in worker.idle:
                idle.deadline = 1e18  # the loop does not run, so nothing ages

    one()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    result = {"request": repeat(one, seconds)}
    if profile:
        profiler.disable()
    client.data_received(streamed)
    connection = client.call.connection  # type: ignore[union-attr]
    connection.data_received(STREAM_HEAD + CHUNK)

    def chunk() -> None:
        connection.data_received(CHUNK)
        seen.clear()

    result["chunk"] = repeat(chunk, seconds / 2)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    return result


def repeat(what: Any, seconds: float) -> float:
    """Best of several rounds, in microseconds of CPU time."""
    best = float("inf")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.process_time()
        for _ in range(1000):
            what()
        best = min(best, (time.process_time() - began) * 1e3)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    result = asyncio.run(measure(options.seconds, options.profile))
    print(f"python {sys.version.split()[0]} on {os.uname().machine}")
    for name, value in result.items():
        print(f"{name}: {value:.1f} us of interpreter time")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

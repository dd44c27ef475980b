"""The measurements: each takes a running gateway and returns named figures, or raises NotMeasured and why.

Names end in their unit. A phase leaves the mock engine as it found it (no gap, no delay) and never reuses a
connection of another.
"""

import contextlib
import dataclasses
import json
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import lab
from lab import KEY, Cores, Mock, NotMeasured
from peers import Peer

Figures = dict[str, float]

FAST_RATE = 2000.0  # requests per second at which latency is compared
SLOW_SHARE = 0.4  # of their own maximum, for gateways that cannot carry twice the fast rate
PACED_GAP_US = 20_000
OPEN_STREAMS_GAP_US = 1_000_000
FAILURES_MAX = 0.01  # share of answers that may go wrong in a phase whose figures still count
STREAMS_MIN = 0.95  # share of the streams asked for that must be open
ENDLESS_CHUNKS = 10_000_000
ANSWER_PATIENCE_S = 10.0
SLOW_READER_S = 3.0
LEAVES = 5  # clients that leave, each time
LEAVE_PATIENCE_S = 1.0
DELAY_BEFORE_LEAVING_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A gateway that answers, and what is needed to measure it."""

    peer: Peer
    port: int
    process: subprocess.Popen[bytes]
    mock: Mock
    cores: Cores
    seconds: float
    # What the phases so far have found.
    figures: Figures = dataclasses.field(default_factory=dict)

    def load(self, *, beside_direct: bool = False, **options: Any) -> dict[str, Any]:
        targets = {"gateway": self.port}
        if beside_direct:
            targets["direct"] = self.mock.ports[0]
        report = lab.generate_load(self.cores, targets, gateway_process=self.process.pid, **options)
        if self.process.poll() is not None:
            raise NotMeasured(f"the gateway ended with status {self.process.returncode}")
        return report


def memory(gateway: Running) -> Figures:
    """Resident memory after a short warm-up, and with many streams open that each get a chunk a second."""
    gateway.load(seconds=0.5, warmup=0.0, connections=16)
    idle_kb = lab.resident_kb(gateway.process.pid)
    with _pace(gateway.mock, gap_us=OPEN_STREAMS_GAP_US):
        report = gateway.load(
            seconds=1.0,
            warmup=1.0,
            ramp=gateway.peer.opening_s,
            connections=gateway.peer.open_streams,
            chunks=ENDLESS_CHUNKS,
        )
    _pause_for_closing(gateway)
    streams = report["streams_open"]
    figures = {"idle_mb": idle_kb / 1024}
    if streams < STREAMS_MIN * gateway.peer.open_streams:
        raise NotMeasuredInPart(_too_few(report, gateway.peer.open_streams), figures)
    return figures | {
        "open_streams": float(streams),
        "open_streams_mb": report["resident_kb"] / 1024,
        "kb_per_stream": (report["resident_kb"] - idle_kb) / streams,
    }


class NotMeasuredInPart(NotMeasured):
    """A phase that failed half-way; what it had already learned still counts."""

    def __init__(self, reason: str, figures: Figures) -> None:
        super().__init__(reason)
        self.figures = figures


def closed_loop(gateway: Running) -> Figures:
    """As many requests as it takes, 64 at a time."""
    report = gateway.load(seconds=gateway.seconds)
    target = _sound(report, "gateway")
    return {
        "requests_per_second": target["per_second"],
        "cpu_us_per_request": report["cpu_seconds"] / target["answers"] * 1e6,
    }


def open_loop(gateway: Running) -> Figures:
    """Latency at a fixed rate that waits for no answer, against the mock engine asked directly meanwhile."""
    most = gateway.figures.get("requests_per_second")
    if most is None:
        raise NotMeasured("without a maximum there is no rate to choose")
    rate = FAST_RATE if most >= 2 * FAST_RATE else max(1.0, round(SLOW_SHARE * most))
    report = gateway.load(beside_direct=True, seconds=gateway.seconds, rate=rate, connections=128)
    through, direct = _sound(report, "gateway")["latency_us"], _sound(report, "direct")["latency_us"]
    return {
        "rate": rate,
        "direct_p50_us": direct["p50"],
        "direct_p99_us": direct["p99"],
        "added_p50_us": through["p50"] - direct["p50"],
        "added_p99_us": through["p99"] - direct["p99"],
    }


def paced_streams(gateway: Running) -> Figures:
    """Streams of one chunk each 20 ms, as engines send them."""
    with _pace(gateway.mock, gap_us=PACED_GAP_US):
        report = gateway.load(
            seconds=gateway.seconds,
            warmup=0.5,
            ramp=1.0,
            connections=gateway.peer.paced_streams,
            chunks=ENDLESS_CHUNKS,
        )
    _pause_for_closing(gateway)
    target = report["targets"]["gateway"]
    if report["streams_open"] < STREAMS_MIN * gateway.peer.paced_streams or not target["chunks"]:
        raise NotMeasured(_too_few(report, gateway.peer.paced_streams))
    return {
        "chunks_per_second": target["chunks_per_second"],
        "cpu_us_per_chunk": report["cpu_seconds"] / target["chunks"] * 1e6,
        "chunk_transit_p50_us": target["transit_us"]["p50"],
        "chunk_transit_p99_us": target["transit_us"]["p99"],
    }


def client_leaves(gateway: Running) -> Figures:
    """From a client's close to that of its worker's connection: before the first token, and mid-stream."""
    with _pace(gateway.mock, gap_us=PACED_GAP_US, first_us=2_000_000):
        before = _slowest_leave(gateway, read_first=False)
    with _pace(gateway.mock, gap_us=PACED_GAP_US):
        midway = _slowest_leave(gateway, read_first=True)
    return {"leave_before_first_token_ms": before, "leave_mid_stream_ms": midway}


def _slowest_leave(gateway: Running, *, read_first: bool) -> float:
    slowest = 0.0
    for _ in range(LEAVES):
        slowest = max(slowest, _leave(gateway, read_first=read_first))
        if slowest >= LEAVE_PATIENCE_S * 1000:
            break
    return slowest


def _leave(gateway: Running, *, read_first: bool) -> float:
    left_before = gateway.mock.stats()["left"]
    client = _open_stream(gateway.port)
    if read_first:
        client.recv(65536)
    time.sleep(DELAY_BEFORE_LEAVING_S)
    closed_ns = time.monotonic_ns()
    client.close()
    until = time.monotonic() + LEAVE_PATIENCE_S
    while time.monotonic() < until:
        time.sleep(0.01)
        stats = gateway.mock.stats()
        if stats["left"] > left_before:
            noticed_ns: int = stats["last_left_ns"]
            return (noticed_ns - closed_ns) / 1e6
    _pause_for_closing(gateway, patience_s=3.0)
    return LEAVE_PATIENCE_S * 1000  # and more


def slow_reader(gateway: Running) -> Figures:
    """Growth of the gateway's memory while a client reads nothing of an endless stream sent at full speed.

    The last phase of a gateway's life: some never recover.
    """
    with contextlib.closing(_open_stream(gateway.port, receive_buffer_bytes=65536)) as client:
        if not select.select([client], [], [], ANSWER_PATIENCE_S)[0]:
            raise NotMeasured(f"no answer within {ANSWER_PATIENCE_S:.0f} s")
        before_kb = lab.resident_kb(gateway.process.pid)
        most_kb = before_kb
        until = time.monotonic() + SLOW_READER_S
        while time.monotonic() < until:
            time.sleep(0.05)
            most_kb = max(most_kb, lab.resident_kb(gateway.process.pid))
    return {"slow_reader_growth_mb": (most_kb - before_kb) / 1024}


def _open_stream(port: int, *, receive_buffer_bytes: int | None = None) -> socket.socket:
    body = json.dumps(
        {
            "model": "mock",
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
            "max_tokens": ENDLESS_CHUNKS,
        }
    ).encode()
    client = socket.socket()
    if receive_buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.settimeout(ANSWER_PATIENCE_S)
    client.connect(("127.0.0.1", port))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    return client


@contextlib.contextmanager
def _pace(mock: Mock, *, gap_us: int, first_us: int = 0) -> Iterator[None]:
    mock.control(gap_us=gap_us, first_us=first_us)
    try:
        yield
    finally:
        mock.control(gap_us=0)


def _pause_for_closing(gateway: Running, patience_s: float = 5.0) -> None:
    """Waits until the streams are closed on the worker's side too: they shall not cost the next phase."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until and gateway.mock.stats()["busy"]:
        time.sleep(0.05)


def _too_few(report: dict[str, Any], wanted: int) -> str:
    target = report["targets"]["gateway"]
    opened = f"only {report['streams_open']} of {wanted} streams opened"
    return f"{opened} ({target['refused']} refused, {target['broken']} broken)"


def _sound(report: dict[str, Any], name: str) -> dict[str, Any]:
    target: dict[str, Any] = report["targets"][name]
    failures = target["refused"] + target["broken"] + target["connect_errors"]
    if failures > FAILURES_MAX * target["answers"] or not target["answers"]:
        raise NotMeasured(f"{failures} of {failures + target['answers']} requests went wrong ({name})")
    return target

"""A raw HTTP/1.1 client for tests: bytes out as given, answers in as they came, framing kept visible.

`Client` is one blocking connection. `exchange` is one request on a connection of its own inside an event
loop, for many at once. Neither retries, pools or follows anything.
"""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

Headers = Iterable[tuple[str, str]]


@dataclass(slots=True)
class Answer:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    # The framing was followed to its end.
    complete: bool = False
    # 1xx answers that came before.
    informational: list[int] = field(default_factory=list)
    first_byte_s: float = 0.0

    def header(self, name: str) -> str | None:
        values = [value for other, value in self.headers if other == name]
        return ", ".join(values) if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object, its shape checked."""
        error = self.json["error"]
        assert set(error) >= {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str), error
        assert error["message"]
        assert isinstance(error["type"], str), error
        return dict(error)

    @property
    def payloads(self) -> list[bytes]:
        return [line[5:].strip() for line in self.body.splitlines() if line.startswith(b"data:")]


class ClosedEarlyError(Exception):
    """The peer ended the connection before a whole head had come."""


def request_bytes(
    method: str,
    path: str,
    body: Any = None,
    headers: Headers = (),
    *,
    key: str | None = None,
    close: bool = False,
) -> bytes:
    """A well-formed request; a body that is not bytes is written as JSON."""
    lines = [f"{method} {path} HTTP/1.1", "host: gateway"]
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    if close:
        lines.append("connection: close")
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + data


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


CHAT = "/v1/chat/completions"


class Client:
    """One connection. All waits end after `timeout_s` with TimeoutError."""

    # Those that a failed test left open; closed behind each test.
    left_open: ClassVar[set["Client"]] = set()

    def __init__(self, port: int, *, timeout_s: float = 10.0, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(timeout_s)
        try:
            self.sock.connect(("127.0.0.1", port))
        except OSError:
            self.sock.close()
            raise
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray()
        self.left_open.add(self)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> float:
        self.sock.close()
        left_s = time.monotonic()
        self.left_open.discard(self)
        return left_s

    def reset(self) -> float:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return self.close()

    # ---- reading ----

    def _more(self) -> bool:
        try:
            data = self.sock.recv(65536)
        except ConnectionResetError:
            return False
        self.buffer += data
        return bool(data)

    def read_line(self) -> bytes:
        while b"\n" not in self.buffer:
            if not self._more():
                raise ClosedEarlyError(bytes(self.buffer))
        line, _, rest = bytes(self.buffer).partition(b"\n")
        self.buffer[:] = rest
        return line.rstrip(b"\r")

    def read_head(self) -> Answer:
        informational: list[int] = []
        while True:
            version, status, *reason = self.read_line().decode("latin-1").split(" ", 2)
            assert version in ("HTTP/1.0", "HTTP/1.1"), version
            answer = Answer(int(status), "".join(reason), [], informational=informational)
            answer.first_byte_s = time.monotonic()
            while line := self.read_line().decode("latin-1"):
                name, _, value = line.partition(":")
                answer.headers.append((name.lower(), value.strip()))
            if answer.status >= 200:
                return answer
            informational.append(answer.status)

    def pieces(self, answer: Answer, *, head: bool = False) -> Iterator[bytes]:
        """The body as it comes, without its framing; sets `answer.complete` at a proper end."""
        if head or answer.status in (204, 304):
            answer.complete = True
        elif "chunked" in (answer.header("transfer-encoding") or ""):
            yield from self._chunks(answer)
        elif (length := answer.header("content-length")) is not None:
            yield from self._counted(answer, int(length))
        else:
            while self.buffer or self._more():
                yield self._take(len(self.buffer))
            answer.complete = True

    def _take(self, size: int) -> bytes:
        taken = bytes(self.buffer[:size])
        del self.buffer[:size]
        return taken

    def _counted(self, answer: Answer, left: int) -> Iterator[bytes]:
        while left:
            if not self.buffer and not self._more():
                return
            piece = self._take(left)
            left -= len(piece)
            yield piece
        answer.complete = True

    def _chunks(self, answer: Answer) -> Iterator[bytes]:
        try:
            while size := int(self.read_line(), 16):
                while len(self.buffer) < size + 2:
                    if not self._more():
                        return
                yield self._take(size)
                self._take(2)
            self.read_line()
            answer.complete = True
        except ClosedEarlyError:
            return

    def read_answer(self, *, head: bool = False) -> Answer:
        answer = self.read_head()
        answer.body = b"".join(self.pieces(answer, head=head))
        return answer

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Payloads of SSE events as they come (events ended by an empty line, `\\n` or `\\r\\n`)."""
        held = b""
        for piece in self.pieces(answer):
            held = (held + piece).replace(b"\r\n", b"\n")
            *blocks, held = held.split(b"\n\n")
            for block in blocks:
                lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    yield b"\n".join(lines)

    def request(self, method: str, path: str, body: Any = None, headers: Headers = (), **options: Any) -> Answer:
        self.send(request_bytes(method, path, body, headers, **options))
        return self.read_answer(head=method == "HEAD")

    def read_to_end(self) -> bytes:
        while self._more():
            pass
        return self._take(len(self.buffer))

    def closed_within(self, seconds: float) -> bool:
        """The peer closes within this time; whatever it still says is thrown away."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            try:
                if not self.sock.recv(65536):
                    return True
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True
        return False


def fetch(port: int, method: str, path: str, body: Any = None, headers: Headers = (), **options: Any) -> Answer:
    """One request on a connection of its own."""
    timeout_s = options.pop("timeout_s", 10.0)
    with Client(port, timeout_s=timeout_s) as client:
        return client.request(method, path, body, headers, close=True, **options)


def post(port: int, body: Any, *, path: str = CHAT, headers: Headers = (), **options: Any) -> Answer:
    return fetch(port, "POST", path, body, headers, **options)


async def exchange(port: int, data: bytes, *, timeout_s: float = 30.0) -> Answer:
    """Sends one `connection: close` request and reads until the peer closes."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            return parse_answer(await reader.read(-1))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def parse_answer(data: bytes) -> Answer:
    """A whole answer out of a connection's bytes."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        raise ClosedEarlyError(data[:200])
    status_line, *lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    answer = Answer(int(status_line.split(" ")[1]), "", [(name.lower(), value.strip()) for name, _, value in pairs])
    if "chunked" not in (answer.header("transfer-encoding") or ""):
        length = answer.header("content-length")
        answer.body = rest if length is None else rest[: int(length)]
        answer.complete = length is None or len(rest) >= int(length)
        return answer
    body = bytearray()
    while rest:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        if size == 0:
            answer.complete = True
            break
        body += rest[:size]
        rest = rest[size + 2 :]
    answer.body = bytes(body)
    return answer

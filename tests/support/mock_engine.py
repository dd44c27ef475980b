"""A scriptable OpenAI-compatible engine on real sockets, in a thread of its own.

How one request is answered is a `Behaviour`. It is chosen, first match wins, by
    1. a marker in the request's body: `<<name>>` with `engine.named["name"]`,
    2. the next entry of `engine.script`,
    3. `engine.behaviour`.
Every request is recorded with its raw head, its body and the times at which things happened to it, so that a
test can say what reached the engine and when the gateway let go of it. It never decides anything by chance.
"""

import asyncio
import json
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

MARKER = re.compile(rb"<<(\w+)>>")
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
}
FOREVER_S = 3600.0
# What a caller may ask for; more is cut off as a context window would.
TOKENS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one request is answered; the default is a prompt, correct answer."""

    status: int = 200
    # Extra response headers, as written.
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str | None = None
    # The whole body instead of a generated one; answered unstreamed even when a stream was asked for.
    body: bytes | None = None
    # Bytes written instead of any HTTP answer, then the connection is closed.
    raw: bytes | None = None
    # Bytes that nobody asked for, in the same write behind a whole answer; the connection stays open.
    extra: bytes = b""
    # Output tokens a choice; else the request's max_tokens, else 4. A token is `token` and its number.
    tokens: int | None = None
    token: str = "word"
    # Input tokens reported; else the words of the prompt.
    input_tokens: int | None = None
    cached_tokens: int = 0
    # Tool calls streamed instead of text: raw `delta` objects, JSON.
    deltas: tuple[str, ...] | None = None
    # Leaves `n` unread, without a word, and makes one choice of each prompt.
    ignores_n: bool = False
    # Each choice has tokens of its own, by the seed it has: asked for, plus its index.
    own_tokens: bool = False
    # Log-probabilities of the tokens of choices by their seeds, for those who ask; in the shape of chat on all routes,
    # as llama.cpp has them, or in the route's own.
    logprobs: tuple[float, ...] | None = None
    logprobs_of_chat: bool = False
    # Whole SSE blocks, bytes as given, instead of generated ones.
    events: tuple[bytes, ...] | None = None
    # Waits: before the head, after the head, between events; until `engine.gate` opens.
    head_delay_s: float = 0.0
    first_delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    gated: bool = False
    # The same gate, but after the head and the first `gated_after` events.
    gated_after: int | None = None
    # Never answers at all.
    silent: bool = False
    # Closes before any byte of the answer.
    close_at_once: bool = False
    # Ends the connection after so many events without the terminating chunk, or falls silent there.
    close_after: int | None = None
    stall_after: int | None = None
    # The two closings above are a reset (RST) instead of an orderly end.
    reset: bool = False
    # Writes an error event after so many events and goes on as `after_error` says: done, close or go_on.
    error_after: int | None = None
    error_event: bytes = b'{"error":{"message":"engine failed","type":"server_error","param":null,"code":500}}'
    after_error: str = "done"
    # The usage chunk of a stream: asked (vLLM's way), always, no_choices (always, without the member), never.
    usage: str = "asked"
    # A content-length other than the true one.
    content_length: int | None = None
    # Each TCP write has at most so many bytes; each HTTP chunk likewise, events cut anywhere.
    write_bytes: int | None = None
    chunk_bytes: int | None = None
    # Answers as HTTP/1.0, ended by closing.
    http10: bool = False
    # Reads the request's body this slowly (bytes a second) before answering.
    read_rate: int | None = None


@dataclass(slots=True, eq=False)
class Received:
    """One request as the engine saw it. Times are `time.monotonic()`."""

    head: bytes
    body: bytes
    connection: int
    # Running number on its connection, 0 for the first.
    reuse: int
    arrived_s: float
    sent_bytes: int = 0
    # Answer's last byte handed to the kernel.
    finished_s: float | None = None
    # The gateway closed the connection before that.
    aborted_s: float | None = None

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode()

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [(n.strip().lower(), v.strip()) for n, _, v in (line.partition(":") for line in lines) if n]

    def header(self, name: str) -> str | None:
        values = [value for other, value in self.headers if other == name]
        return ", ".join(values) if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class MockEngine:
    """One engine on a port of the kernel's choice. `start` and `stop` may repeat; the port stays."""

    def __init__(self, models: tuple[str, ...] = ("m",), name: str = "mock") -> None:
        self.models = models
        self.name = name
        self.behaviour = Behaviour()
        self.script: deque[Behaviour] = deque()
        self.named: dict[str, Behaviour] = {}
        # Requests other than the gateway's probes, in order of arrival; and the probes.
        self.received: list[Received] = []
        self.probes: list[Received] = []
        # Calls and sequences being answered now, and the most there ever were.
        self.running = self.running_max = 0
        self.sequences = self.sequences_max = 0
        self.connections_opened = 0
        self.healthy = True
        # What /metrics answers; None: there is no such page.
        self.metrics: Callable[[], bytes] | None = None
        # Other pages, by path.
        self.pages: dict[str, bytes] = {}
        # What every probe and page gets instead.
        self.probed_as: Behaviour | None = None
        # Waits before each accept.
        self.accept_delay_s = 0.0
        # Closes a kept connection that was idle for so long; or just as a further request comes in on it.
        self.idle_close_s: float | None = None
        self.close_on_reuse = False
        # A small send buffer makes back-pressure visible soon.
        self.send_buffer: int | None = None
        self.port = 0
        self._gate: asyncio.Event | None = None
        self._open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()
        self._thread: threading.Thread | None = None
        self._accepting: asyncio.Task[None]
        self._stopping = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._connections)

    # ---- life ----

    def start(self) -> "MockEngine":
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(4096)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._stopping = False
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"mock-{self.port}", daemon=True)
        self._thread.start()
        assert started.wait(5)
        return self

    def stop(self, *, reset: bool = False) -> None:
        """The process dies: the listener and every connection close at once."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return

        def end() -> None:
            self._stopping = True
            self._accepting.cancel()
            if self._listener is not None:
                self._listener.close()
            for connection in list(self._connections):
                connection.drop(reset=reset)
            # Closed transports are released by the loop in its next rounds.
            loop.call_later(0.01, loop.stop)

        loop.call_soon_threadsafe(end)
        thread.join(5)
        self._loop = self._thread = None

    def open_gate(self) -> None:
        self._open = True
        self._call(lambda: self._gate.set() if self._gate else None)

    def close_gate(self) -> None:
        self._open = False
        self._call(lambda: self._gate.clear() if self._gate else None)

    def drop_connections(self) -> None:
        def drop() -> None:
            for connection in list(self._connections):
                connection.drop()

        self._call(drop)

    def _call(self, action: Callable[[], object]) -> None:
        loop = self._loop
        if loop is None:
            return
        done = threading.Event()

        def run() -> None:
            action()
            done.set()

        loop.call_soon_threadsafe(run)
        assert done.wait(5)

    def _run(self, started: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._loop = loop
        self._gate = asyncio.Event()
        if self._open:
            self._gate.set()
        self._accepting = loop.create_task(self._accept(loop))
        loop.call_soon(started.set)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._listener is not None
        while True:
            if self.accept_delay_s:
                await asyncio.sleep(self.accept_delay_s)
            accepted, _ = await loop.sock_accept(self._listener)
            if self.send_buffer is not None:
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)
            number = self.connections_opened
            self.connections_opened += 1
            try:
                await loop.connect_accepted_socket(lambda n=number: Connection(self, n), accepted)  # type: ignore[misc]
            except asyncio.CancelledError:
                accepted.close()
                raise

    # ---- choice and counting ----

    def choose(self, received: Received) -> Behaviour:
        marker = MARKER.search(received.body)
        if marker is not None and (named := self.named.get(marker[1].decode())) is not None:
            return named
        if self.script:
            return self.script.popleft()
        return self.behaviour

    def begin(self, sequences: int) -> None:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        self.sequences += sequences
        self.sequences_max = max(self.sequences_max, self.sequences)

    def end(self, sequences: int) -> None:
        self.running -= 1
        self.sequences -= sequences

    def find(self, text: str) -> list[Received]:
        """The received requests whose body has this text."""
        return [received for received in self.received if text.encode() in received.body]


class Connection(asyncio.Protocol):
    """One connection of the gateway; reads on while it answers, so that a closing is seen at once."""

    def __init__(self, engine: MockEngine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.served = 0
        self.current: Received | None = None
        self.buffer = bytearray()
        self.changed = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.gone = False
        self.transport: asyncio.Transport
        self.task: asyncio.Task[None]

    # ---- protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.engine._connections.add(self)
        if self.engine._stopping:
            transport.abort()
        self.task = asyncio.get_running_loop().create_task(self.run())

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.changed.set()

    def eof_received(self) -> bool:
        self.leave()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.leave()
        self.engine._connections.discard(self)
        self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def leave(self) -> None:
        if not self.gone and self.current is not None and self.current.finished_s is None:
            self.current.aborted_s = time.monotonic()
        self.gone = True
        self.changed.set()

    def drop(self, *, reset: bool = False) -> None:
        self.gone = True
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    # ---- requests ----

    async def run(self) -> None:
        while (received := await self.read_request()) is not None:
            probe = received.method == "GET"
            if self.engine.close_on_reuse and received.reuse and not probe:
                break
            (self.engine.probes if probe else self.engine.received).append(received)
            self.current = received
            if not probe:
                keep = await self.answer(received)
            elif self.engine.probed_as is not None:
                keep = await self.play(self.engine.probed_as, received, {})
            else:
                keep = self.answer_probe(received)
            self.current = None
            if not keep or (received.header("connection") or "").lower() == "close":
                break
        self.transport.close()

    async def read_request(self) -> Received | None:
        idle_s = self.engine.idle_close_s if self.served else None
        if not await self.read_until(lambda: b"\r\n\r\n" in self.buffer, idle_s):
            return None
        end = self.buffer.index(b"\r\n\r\n") + 4
        head = bytes(self.buffer[:end])
        del self.buffer[:end]
        received = Received(head, b"", self.number, self.served, time.monotonic())
        self.served += 1
        behaviour = self.engine.behaviour
        if behaviour.read_rate is not None:
            await self.read_slowly(int(received.header("content-length") or 0), behaviour.read_rate)
        body = await self.read_body(received)
        if body is None:
            return None
        received.body = body
        received.arrived_s = time.monotonic()
        return received

    async def read_slowly(self, size: int, rate: int) -> None:
        while len(self.buffer) < size and not self.gone:
            self.transport.pause_reading()
            await asyncio.sleep(65536 / rate)
            self.changed.clear()
            self.transport.resume_reading()
            await self.changed.wait()

    async def read_body(self, received: Received) -> bytes | None:
        if "chunked" in (received.header("transfer-encoding") or ""):
            body = bytearray()
            while True:
                if not await self.read_until(lambda: b"\r\n" in self.buffer):
                    return None
                line, _, _ = bytes(self.buffer).partition(b"\r\n")
                size = int(line, 16)
                whole = len(line) + 2 + size + 2
                if not await self.read_until(lambda whole=whole: len(self.buffer) >= whole):  # type: ignore[misc]
                    return None
                body += self.buffer[len(line) + 2 : whole - 2]
                del self.buffer[:whole]
                if size == 0:
                    return bytes(body)
        size = int(received.header("content-length") or 0)
        if not await self.read_until(lambda: len(self.buffer) >= size):
            return None
        taken = bytes(self.buffer[:size])
        del self.buffer[:size]
        return taken

    async def read_until(self, ready: Callable[[], bool], idle_s: float | None = None) -> bool:
        while not ready():
            if self.gone:
                return False
            self.changed.clear()
            try:
                async with asyncio.timeout(idle_s if not self.buffer else None):
                    await self.changed.wait()
            except TimeoutError:
                return False
        return True

    # ---- answers ----

    def answer_probe(self, received: Received) -> bool:
        status, body = 200, b""
        path = received.path.split("?")[0]
        if path == "/v1/models":
            models = [{"id": m, "object": "model", "created": 1, "owned_by": "mock"} for m in self.engine.models]
            body = dump({"object": "list", "data": models})
        elif path == "/health":
            status = 200 if self.engine.healthy else 503
        elif path == "/metrics" and self.engine.metrics is not None:
            body = self.engine.metrics()
        elif path in self.engine.pages:
            body = self.engine.pages[path]
        else:
            status, body = 404, b'{"detail":"Not Found"}'
        self.transport.write(
            head_bytes(status, [("content-type", "application/json"), ("content-length", str(len(body)))]) + body
        )
        received.finished_s = time.monotonic()
        return True

    async def answer(self, received: Received) -> bool:
        behaviour = self.engine.choose(received)
        try:
            asked = json.loads(received.body)
        except ValueError:
            asked = {}
        asked = asked if isinstance(asked, dict) else {}
        sequences = prompt_count(asked) * int(asked.get("n") or 1)
        self.engine.begin(sequences)
        try:
            return await self.play(behaviour, received, asked)
        finally:
            self.engine.end(sequences)

    async def play(self, b: Behaviour, received: Received, asked: dict[str, Any]) -> bool:
        if b.head_delay_s:
            await asyncio.sleep(b.head_delay_s)
        if b.gated and self.engine._gate is not None:
            await self.engine._gate.wait()
        if b.silent:
            await asyncio.sleep(FOREVER_S)
        if b.close_at_once:
            return self.hang_up(b)
        if b.raw is not None:
            await self.write(b, received, b.raw)
            received.finished_s = time.monotonic()
            return False
        if asked.get("stream") and b.body is None and b.status == 200:
            return await self.stream(b, received, asked)
        body = b.body if b.body is not None else whole_body(b, received.path, asked, self.engine)
        return await self.write_whole(b, received, body)

    async def write_whole(self, b: Behaviour, received: Received, body: bytes) -> bool:
        headers = [("content-type", b.content_type or "application/json"), *b.headers]
        if not b.http10:
            headers.append(("content-length", str(len(body) if b.content_length is None else b.content_length)))
        await self.write(b, received, head_bytes(b.status, headers, b.http10) + body + b.extra)
        if b.content_length is not None and b.content_length > len(body):
            return self.hang_up(b)
        received.finished_s = time.monotonic()
        return not b.http10

    async def stream(self, b: Behaviour, received: Received, asked: dict[str, Any]) -> bool:
        framing = [] if b.http10 else [("transfer-encoding", "chunked")]
        headers = [
            ("content-type", b.content_type or "text/event-stream; charset=utf-8"),
            *framing,
            *b.headers,
        ]
        await self.write(b, received, head_bytes(b.status, headers, b.http10))
        if b.first_delay_s:
            await asyncio.sleep(b.first_delay_s)
        events = b.events if b.events is not None else generated_events(b, received.path, asked, self.engine)
        for number, event in enumerate(events):
            if number and b.chunk_delay_s:
                await asyncio.sleep(b.chunk_delay_s)
            if b.gated_after == number and self.engine._gate is not None:
                await self.engine._gate.wait()
            if b.close_after == number:
                return self.hang_up(b)
            if b.stall_after == number:
                await asyncio.sleep(FOREVER_S)
            if b.error_after == number:
                await self.write_event(b, received, b"data: " + b.error_event + b"\n\n")
                if b.after_error == "close":
                    return self.hang_up(b)
                if b.after_error == "done":
                    await self.write_event(b, received, b"data: [DONE]\n\n")
                    break
            await self.write_event(b, received, event)
        if not b.http10:
            await self.write(b, received, b"0\r\n\r\n")
        received.finished_s = time.monotonic()
        return not b.http10

    async def write_event(self, b: Behaviour, received: Received, event: bytes) -> None:
        step = b.chunk_bytes or len(event) or 1
        for start in range(0, len(event), step):
            piece = event[start : start + step]
            await self.write(b, received, piece if b.http10 else b"%x\r\n%b\r\n" % (len(piece), piece))

    async def write(self, b: Behaviour, received: Received, data: bytes) -> None:
        step = b.write_bytes or len(data) or 1
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            self.transport.write(piece)
            received.sent_bytes += len(piece)
            await self.writable.wait()
            if b.write_bytes:
                await asyncio.sleep(0)

    def hang_up(self, b: Behaviour) -> bool:
        if b.reset:
            self.drop(reset=True)
        return False


# ---- what an engine says ----


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def head_bytes(status: int, headers: list[tuple[str, str]], http10: bool = False) -> bytes:
    version = "HTTP/1.0" if http10 else "HTTP/1.1"
    lines = [
        f"{version} {status} {REASONS.get(status, 'Status')}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def prompts_of(asked: dict[str, Any]) -> list[Any]:
    if "messages" in asked:
        return [asked["messages"]]
    prompt = asked.get("prompt", asked.get("input", ""))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def prompt_count(asked: dict[str, Any]) -> int:
    return len(prompts_of(asked)) if "prompt" in asked else 1


def words_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, dict):
        return words_in(value.get("content", ""))
    if isinstance(value, list):
        return sum(words_in(item) for item in value)
    return 1


def token_count(b: Behaviour, asked: dict[str, Any]) -> int:
    if b.tokens is not None:
        return b.tokens
    limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
    return min(limit, TOKENS_MAX) if isinstance(limit, int) else 4


def usage_for(b: Behaviour, asked: dict[str, Any]) -> dict[str, Any]:
    input_tokens = b.input_tokens if b.input_tokens is not None else sum(words_in(p) for p in prompts_of(asked))
    output = token_count(b, asked) * len(prompts_of(asked)) * int(asked.get("n") or 1)
    details = {"cached_tokens": b.cached_tokens} if b.cached_tokens else None
    return {
        "prompt_tokens": input_tokens,
        "total_tokens": input_tokens + output,
        "completion_tokens": output,
        "prompt_tokens_details": details,
    }


def whole_body(b: Behaviour, path: str, asked: dict[str, Any], engine: MockEngine) -> bytes:
    model = asked.get("model", engine.models[0])
    usage = usage_for(b, asked)
    if b.status != 200:
        return dump(
            {
                "object": "error",
                "message": "mock error",
                "type": "BadRequestError",
                "param": None,
                "code": b.status,
            }
        )
    choices = choices_of(b, asked)
    text = text_of(b, asked, 0)
    if path.startswith("/v1/chat/completions"):
        return dump(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": model,
                "choices": [
                    {
                        "index": i,
                        "message": {"role": "assistant", "content": text_of(b, asked, i), "tool_calls": []},
                        "logprobs": logprobs_of(b, path, asked, i, texts_of(b, asked, i)),
                        "finish_reason": "stop",
                        "stop_reason": None,
                    }
                    for i in choices
                ],
                "usage": usage,
                "prompt_logprobs": None,
            }
        )
    if path.startswith("/v1/completions"):
        return dump(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "created": 1,
                "model": model,
                "choices": [
                    {
                        "index": i,
                        "text": text_of(b, asked, i),
                        "logprobs": logprobs_of(b, path, asked, i, texts_of(b, asked, i)),
                        "finish_reason": "length",
                        "stop_reason": None,
                    }
                    for i in choices
                ],
                "usage": usage,
            }
        )
    if path.startswith("/v1/embeddings"):
        data = [{"index": i, "object": "embedding", "embedding": [0.25, -0.5]} for i in range(len(prompts_of(asked)))]
        usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return dump({"id": "embd-1", "object": "list", "created": 1, "model": model, "data": data, "usage": usage})
    if path.startswith("/v1/responses"):
        return dump(
            {
                "id": "resp_1",
                "object": "response",
                "created_at": 1,
                "status": "completed",
                "model": model,
                "output": [
                    {
                        "type": "message",
                        "id": "msg_1",
                        "role": "assistant",
                        "status": "completed",
                        "content": [{"type": "output_text", "text": text, "annotations": []}],
                    }
                ],
                "usage": {
                    "input_tokens": usage["prompt_tokens"],
                    "output_tokens": usage["completion_tokens"],
                    "total_tokens": usage["total_tokens"],
                },
            }
        )
    if path.startswith("/v1/messages"):
        return dump(
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": model,
                "content": [{"type": "text", "text": text}],
                "stop_reason": "end_turn",
                "usage": {
                    "input_tokens": usage["prompt_tokens"],
                    "output_tokens": usage["completion_tokens"],
                },
            }
        )
    return dump(
        {
            "id": "other-1",
            "object": "list",
            "model": model,
            "data": [],
            "results": [],
            "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]},
        }
    )


def choices_of(b: Behaviour, asked: dict[str, Any]) -> range:
    return range(len(prompts_of(asked)) * (1 if b.ignores_n else int(asked.get("n") or 1)))


def seed_of(asked: dict[str, Any], index: int) -> int:
    return int(asked.get("seed") or 0) + index


def token_of(b: Behaviour, asked: dict[str, Any], index: int, place: int) -> str:
    return f"{b.token}{seed_of(asked, index)}.{place} " if b.own_tokens else f"{b.token}{place} "


def texts_of(b: Behaviour, asked: dict[str, Any], index: int) -> list[str]:
    """The tokens of a choice."""
    return [token_of(b, asked, index, place) for place in range(token_count(b, asked))]


def text_of(b: Behaviour, asked: dict[str, Any], index: int) -> str:
    return "".join(texts_of(b, asked, index)).rstrip()


def logprobs_of(b: Behaviour, path: str, asked: dict[str, Any], index: int, tokens: list[str]) -> Any:
    """Log-probabilities of some tokens of a choice, None when nobody asked for them."""
    if b.logprobs is None or asked.get("logprobs") in (None, False):
        return None
    value = b.logprobs[seed_of(asked, index) % len(b.logprobs)]
    if b.logprobs_of_chat or path.startswith("/v1/chat/"):
        if asked["logprobs"] == 0:
            return None
        return {"content": [{"token": token, "logprob": value, "bytes": [], "top_logprobs": []} for token in tokens]}
    return {"tokens": tokens, "token_logprobs": [value] * len(tokens), "top_logprobs": None, "text_offset": []}


def generated_events(b: Behaviour, path: str, asked: dict[str, Any], engine: MockEngine) -> Iterator[bytes]:
    for payload in generated_payloads(b, path, asked, engine):
        yield b"data: " + payload + b"\n\n"
    yield b"data: [DONE]\n\n"


def generated_payloads(b: Behaviour, path: str, asked: dict[str, Any], engine: MockEngine) -> Iterator[bytes]:
    chat = path.startswith("/v1/chat/")
    model = asked.get("model", engine.models[0])
    choices = choices_of(b, asked)
    frame = {
        "id": "chatcmpl-1" if chat else "cmpl-1",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": model,
    }

    def chunk(index: int, delta: Any, finish: str | None = None) -> bytes:
        pieces = [delta["content"]] if delta.get("content") else []
        logprobs = logprobs_of(b, path, asked, index, pieces) if pieces else None
        if chat:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        else:
            choice = {
                "index": index,
                "text": delta.get("content", ""),
                "logprobs": logprobs,
                "finish_reason": finish,
            }
        return dump({**frame, "choices": [choice]})

    if chat:
        yield from (chunk(index, {"role": "assistant", "content": ""}) for index in choices)
    if b.deltas is not None:
        yield from (chunk(0, json.loads(delta)) for delta in b.deltas)
    else:
        for token in range(token_count(b, asked)):
            yield from (chunk(index, {"content": token_of(b, asked, index, token)}) for index in choices)
    yield from (chunk(i, {}, "tool_calls" if b.deltas is not None else "stop") for i in choices)
    wants = bool((asked.get("stream_options") or {}).get("include_usage"))
    if b.usage == "no_choices":
        yield dump({**frame, "usage": usage_for(b, asked)})
    elif b.usage == "always" or (b.usage == "asked" and wants):
        yield dump({**frame, "choices": [], "usage": usage_for(b, asked)})


@dataclass(slots=True)
class Unconnectable:
    """An address that neither accepts nor refuses: its backlog is full, so that a connect waits for ever."""

    listener: socket.socket = field(default_factory=socket.socket)
    fillers: list[socket.socket] = field(default_factory=list)

    def start(self) -> str:
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(0)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self.listener.getsockname())
            self.fillers.append(filler)
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def stop(self) -> None:
        for sock in (self.listener, *self.fillers):
            sock.close()


def variant(behaviour: Behaviour, **changes: Any) -> Behaviour:
    return replace(behaviour, **changes)

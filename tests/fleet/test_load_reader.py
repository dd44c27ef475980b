"""Reading loads over sockets: at their interval, apart from each other, and less often where nothing is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from evenflow.config import Secret, WorkerSettings
from evenflow.fleet import pages
from evenflow.fleet.engines.load import LoadReport
from evenflow.fleet.load import LoadReader, completed
from evenflow.fleet.registry import Registry, Worker

PAGE = b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 3\n"
Answer = Callable[[str], Awaitable[bytes]]


def ok(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)


class Page:
    """A server that counts what it is asked and answers by path."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[float, str, str]] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        authorization = next((x for x in head.splitlines() if x.lower().startswith("authorization")), "")
        self.asked.append((time.monotonic(), path, authorization))
        try:
            writer.write(await self.answer(path))
            await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def reading(
    *answers: Answer, interval_s: float = 0.05
) -> AsyncIterator[tuple[Registry, list[Page], LoadReader, list[tuple[str, LoadReport]]]]:
    registry, pages, servers = Registry(), [], []
    for number, answer in enumerate(answers):
        page = Page(answer)
        server = await asyncio.start_server(page.serve, "127.0.0.1", 0)
        page.port = server.sockets[0].getsockname()[1]
        worker = Worker(
            WorkerSettings(
                url=f"http://127.0.0.1:{page.port}", name=f"w{number}", models=("m",), api_key=Secret("sk-worker")
            )
        )
        registry.add(worker)
        registry.probe_succeeded(worker)
        pages.append(page)
        servers.append(server)
    reports: list[tuple[str, LoadReport]] = []
    reader = LoadReader(registry, lambda worker, load, now: reports.append((worker.name, load)), interval_s)
    reader.start()
    try:
        yield registry, pages, reader, reports
    finally:
        await reader.stop()
        for server in servers:
            server.close()
    left = [task for task in asyncio.all_tasks() if (task.get_name() or "").startswith("load ")]
    assert not left


async def metrics(path: str) -> bytes:
    return ok(PAGE) if path == "/metrics" else ok(b'{"total_slots": 4}')


async def hang(path: str) -> bytes:
    await asyncio.sleep(30)
    return b""


def test_reports_come_at_their_interval_with_what_is_told_elsewhere() -> None:
    async def run() -> None:
        async with reading(metrics) as (_, pages, _, reports):
            await asyncio.sleep(0.5)
            assert 4 <= len(reports) <= 11
            assert reports[0] == ("w0", LoadReport("llamacpp", 3.0, 1.0, sequences_max=4))
            paths = [path for _, path, _ in pages[0].asked]
            assert paths.count("/props") == 1  # it does not change
            assert all("Bearer sk-worker" in authorization for _, _, authorization in pages[0].asked)

    asyncio.run(run())


def test_a_page_that_hangs_delays_no_other() -> None:
    async def run() -> None:
        async with reading(hang, metrics) as (_, _, _, reports):
            await asyncio.sleep(0.5)
            assert len([name for name, _ in reports if name == "w1"]) >= 4

    asyncio.run(run())


NOTHING: dict[str, bytes] = {
    "missing": ok(b"", b"404 Not Found"),
    "refused": ok(b"", b"401 Unauthorized"),
    "a page of another kind": ok(b"<html></html>"),
    "no HTTP": b"garbage\r\n\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    "gzip that is none": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello",
    "cut short": b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\nllamacpp:requests_processing 1\n",
}


@pytest.mark.parametrize("kind", NOTHING)
def test_a_worker_that_tells_nothing_is_asked_seldom(kind: str) -> None:
    async def answer(path: str) -> bytes:
        return NOTHING[kind]

    async def run() -> None:
        async with reading(answer) as (_, pages, _, reports):
            await asyncio.sleep(0.4)
            assert not reports
            assert len(pages[0].asked) == 1

    asyncio.run(run())


def test_an_endless_page_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", 1000)

    async def answer(path: str) -> bytes:
        return ok(b"# noise\n" * 1000 + PAGE)

    async def run() -> None:
        async with reading(answer) as (_, _, _, reports):
            await asyncio.sleep(0.3)
            assert not reports

    asyncio.run(run())


def test_one_late_page_is_no_reason_to_ask_seldom() -> None:
    asked = 0

    async def answer(path: str) -> bytes:
        nonlocal asked
        asked += 1
        return ok(b"", b"503 Busy") if asked % 4 == 3 else await metrics(path)

    async def run() -> None:
        async with reading(answer) as (_, pages, _, _):
            await asyncio.sleep(0.6)
            assert len(pages[0].asked) >= 6

    asyncio.run(run())


def test_workers_come_and_go() -> None:
    async def run() -> None:
        async with reading(metrics, metrics) as (registry, pages, reader, reports):
            await asyncio.sleep(0.15)
            del registry.workers["w1"]
            reader.follow()
            await asyncio.sleep(0.05)
            asked = len(pages[1].asked)
            await asyncio.sleep(0.2)
            assert len(pages[1].asked) == asked
            registry.unreachable(registry.workers["w0"], "down")  # one that is down is not asked
            await asyncio.sleep(0.1)
            asked, told = len(pages[0].asked), len(reports)
            await asyncio.sleep(0.2)
            assert (len(pages[0].asked), len(reports)) == (asked, told)

    asyncio.run(run())


def test_what_the_report_tells_itself_counts() -> None:
    report = LoadReport("sglang", 0.0, 0.0, kv_tokens=5)
    assert completed(report, {"kv_tokens": 9, "sequences_max": 7}) == LoadReport(
        "sglang", 0.0, 0.0, kv_tokens=5, sequences_max=7
    )

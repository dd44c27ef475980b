"""Reading loads over sockets: at their interval, apart from each other, and less often where nothing is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from evenflow.config import Secret, WorkerSettings
from evenflow.fleet import load as load_module
from evenflow.fleet import pages
from evenflow.fleet.engines.load import LoadReport
from evenflow.fleet.load import LATE_S, LoadReader, Silence, completed, pause_after
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
    assert not load_tasks()


def load_tasks() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("load ") and not task.done()]


async def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.01)


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


def test_how_long_it_is_left_alone() -> None:
    def pauses(silence: Silence, *, told_before: bool) -> list[float]:
        return [pause_after(silence, in_a_row, 0.5, told_before=told_before) for in_a_row in range(1, 8)]

    for told_before in (False, True):
        assert pauses(Silence.MISSING, told_before=told_before) == [30, 60, 60, 60, 60, 60, 60]
        assert pauses(Silence.OTHER, told_before=told_before) == [2, 4, 8, 16, 30, 30, 30]
    assert pauses(Silence.LATE, told_before=False) == [2, 4, 8, 16, 30, 30, 30]
    assert pauses(Silence.LATE, told_before=True) == [0.5, 0.5, LATE_S, LATE_S, LATE_S, LATE_S, LATE_S]


@pytest.mark.parametrize(
    ("answer", "silence"),
    [
        (ok(b"", b"404 Not Found"), Silence.MISSING),
        (ok(b"", b"401 Unauthorized"), Silence.MISSING),
        (ok(b"", b"501 Not Implemented"), Silence.MISSING),
        (ok(b"<html></html>"), Silence.MISSING),
        (ok(b"# TYPE python_info gauge\npython_info 1\n"), Silence.OTHER),
        (ok(b""), Silence.OTHER),
        (ok(b"", b"503 Service Unavailable"), Silence.LATE),
        (ok(b"", b"429 Too Many Requests"), Silence.LATE),
        (b"", Silence.LATE),
    ],
)
def test_why_it_told_nothing(answer: bytes, silence: Silence, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Silence] = []

    def pause(silence: Silence, in_a_row: int, interval_s: float, *, told_before: bool) -> float:
        seen.append(silence)
        assert in_a_row == len(seen)
        assert not told_before
        return interval_s

    monkeypatch.setattr(load_module, "pause_after", pause)

    async def same(path: str) -> bytes:
        return answer

    async def run() -> None:
        async with reading(same):
            await wait_for(lambda: len(seen) >= 3)
        assert set(seen) == {silence}

    asyncio.run(run())


def test_a_page_that_drips_is_late_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for bytes is short, and the page would take a minute."""
    monkeypatch.setattr(load_module, "PAGE_TIMEOUT_S", 0.2)
    silences: list[Silence] = []
    monkeypatch.setattr(load_module, "pause_after", lambda silence, *_, **__: silences.append(silence) or 0.05)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n")
        try:
            for _ in range(1000):
                writer.write(b"\n")
                await asyncio.sleep(0.02)
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        registry = Registry()
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        worker = Worker(WorkerSettings(url=url, name="w0", models=("m",)))
        registry.add(worker)
        registry.probe_succeeded(worker)
        reader = LoadReader(registry, lambda *_: None, 0.05)
        reader.start()
        await wait_for(lambda: len(silences) >= 2)
        await reader.stop()
        server.close()
        await asyncio.sleep(0.05)
        assert set(silences) == {Silence.LATE}

    asyncio.run(run())


def test_one_that_comes_back_may_be_another_engine() -> None:
    """What is told once is asked again, and a missing page is forgotten."""
    slots, missing = 4, False

    async def answer(path: str) -> bytes:
        if path == "/metrics":
            return ok(b"", b"404 Not Found") if missing else ok(PAGE)
        return ok(b'{"total_slots": %d}' % slots)

    async def run() -> None:
        nonlocal slots, missing
        async with reading(answer) as (registry, pages, _, reports):
            worker = registry.workers["w0"]
            await wait_for(lambda: len(reports) >= 2)
            registry.unreachable(worker, "down")
            await asyncio.sleep(0.15)
            slots = 9
            registry.probe_succeeded(worker)
            await wait_for(lambda: reports[-1][1].sequences_max == 9)
            missing = True
            asked = len(pages[0].asked)
            await wait_for(lambda: len(pages[0].asked) > asked)
            await asyncio.sleep(0.2)
            assert len(pages[0].asked) <= asked + 2  # one may have been under way

    asyncio.run(run())


def test_what_is_told_once_is_asked_again_when_it_was_late() -> None:
    asked = 0

    async def answer(path: str) -> bytes:
        nonlocal asked
        if path == "/metrics":
            return ok(PAGE)
        asked += 1
        return ok(b"", b"503 Busy") if asked == 1 else ok(b'{"total_slots": 4}')

    async def run() -> None:
        async with reading(answer) as (_, _, _, reports):
            await wait_for(lambda: len(reports) >= 4)
        assert [report.sequences_max for _, report in reports[:3]] == [None, 4, 4]
        assert asked == 2

    asyncio.run(run())


def test_what_is_never_told_is_asked_a_few_times() -> None:
    async def answer(path: str) -> bytes:
        return ok(PAGE) if path == "/metrics" else ok(b"", b"503 Busy")

    async def run() -> None:
        async with reading(answer) as (_, pages, _, reports):
            await wait_for(lambda: len(reports) >= 6)
            assert len([path for _, path, _ in pages[0].asked if path == "/props"]) == load_module.ONCE_TRIES

    asyncio.run(run())


def test_sglang_tells_its_maximum_at_one_of_two_addresses() -> None:
    async def answer(path: str) -> bytes:
        if path == "/metrics":
            return ok(b"sglang:num_queue_reqs 2\n")
        if path == "/get_server_info":
            return ok(b'{"max_running_requests": 48, "max_total_num_tokens": 9000}')
        return ok(b"", b"404 Not Found")

    async def run() -> None:
        async with reading(answer) as (_, _, _, reports):
            await wait_for(lambda: bool(reports))
        assert reports[0][1] == LoadReport("sglang", 2.0, kv_tokens=9000, sequences_max=48)

    asyncio.run(run())


def test_a_fault_in_taking_a_report_does_not_end_the_reading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_module, "PAUSES_MISSING_S", (0.05,))
    taken = 0

    def take(worker: Worker, load: LoadReport, now: float) -> None:
        nonlocal taken
        taken += 1
        raise RuntimeError("a mistake of ours")

    async def run() -> None:
        async with reading(metrics) as (registry, _, _, _):
            second = LoadReader(registry, take, 0.05)
            second.start()
            await wait_for(lambda: taken >= 2)
            await second.stop()

    asyncio.run(run())
    assert "reading the load of worker w0 failed" in caplog.text
    assert "sk-worker" not in caplog.text


def test_following_is_idempotent_and_needs_a_start() -> None:
    async def run() -> None:
        async with reading(metrics) as (registry, _, reader, _):
            idle = LoadReader(registry, lambda *_: None)
            idle.follow()  # not started: nothing to do
            await idle.stop()
            for _ in range(5):
                reader.follow()
            assert len(load_tasks()) == 1
            registry.workers.clear()
            reader.follow()
            await reader.stop()  # also what was left a moment ago has ended
            assert not load_tasks()
            reader.follow()
            assert not load_tasks()

    asyncio.run(run())


def test_what_the_report_tells_itself_counts() -> None:
    report = LoadReport("sglang", 0.0, 0.0, kv_tokens=5)
    assert completed(report, {"kv_tokens": 9, "sequences_max": 7}) == LoadReport(
        "sglang", 0.0, 0.0, kv_tokens=5, sequences_max=7
    )

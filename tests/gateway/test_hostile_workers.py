"""Pages of a worker that is unwell, or worse: none stops the gateway, fills it, or speaks to another worker."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import pytest
from support.gateway import EngineMaker, GatewayMaker
from support.http import chat, fetch, post
from support.mock_engine import Behaviour, MockEngine

from evenflow.config import WorkerSettings
from evenflow.fleet import pages
from evenflow.fleet.engines.load import read_load
from evenflow.fleet.load import LoadReader
from evenflow.fleet.probe import model_ids
from evenflow.fleet.registry import Registry, Worker

Page = Callable[[str], Awaitable[bytes]]


def test_a_page_made_to_be_slow_is_read_fast() -> None:
    for page in (
        b"tgi_queue_size 3\n" + b"tgi_a{\n" * 50_000,
        b"tgi_queue_size 3\ntgi_a{" + b"x" * 4_000_000,
        b'tgi_queue_size 3\ntgi_a{x="' + b'\\"' * 2_000_000,
    ):
        began = time.perf_counter()
        report = read_load(page)
        assert time.perf_counter() - began < 1.0
        assert report is not None
        assert report.waiting == 3


@pytest.mark.parametrize(
    "page",
    [b"[" * 200_000, b'{"data":[{"id":"\\ud800"}]}', b'{"data":[5]}', b'{"data":{}}', b"", b"\xff", b'{"data":[{}]}'],
    ids=["deep", "half a pair", "numbers", "no list", "empty", "no text", "no id"],
)
def test_a_list_of_models_that_is_none(page: bytes) -> None:
    with pytest.raises(ValueError, match="list of models"):
        model_ids(page)


async def served(page: Page, use: Callable[[Worker], Awaitable[None]]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        try:
            writer.write(await page(head.decode()))
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        await use(Worker(WorkerSettings(url=f"http://127.0.0.1:{port}", name="w", models=("m",))))
    finally:
        server.close()


def answer(body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body)


def test_a_page_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", 10_000)

    async def endless(head: str) -> bytes:
        return answer(b"x" * 100_000)

    async def use(worker: Worker) -> None:
        client = pages.new_client(1.0)
        with pytest.raises(ValueError, match="larger than"):
            await pages.read_page(client, worker, "/health")
        await client.aclose()

    asyncio.run(served(endless, use))


def test_cookies_are_not_kept() -> None:
    heads: list[str] = []

    async def page(head: str) -> bytes:
        heads.append(head)
        return answer(b"ok", b"set-cookie: a=%b\r\n" % (b"x" * 1000))

    async def use(worker: Worker) -> None:
        client = pages.new_client(1.0)
        for _ in range(3):
            assert await pages.read_page(client, worker, "/health") == (200, b"ok")
        await client.aclose()

    asyncio.run(served(page, use))
    assert not any("cookie" in head.lower() for head in heads)


@pytest.mark.parametrize(
    "told", [b"[" * 200_000, b'{"total_slots": 1' + b"0" * 401 + b"}", b'{"total_slots": -4}', b"5"]
)
def test_what_is_told_once_may_be_nonsense(told: bytes) -> None:
    reports = []

    async def page(head: str) -> bytes:
        return answer(told if "/props" in head else b"llamacpp:requests_deferred 1\nllamacpp:requests_processing 1\n")

    async def use(worker: Worker) -> None:
        registry = Registry()
        registry.add(worker)
        registry.probe_succeeded(worker)
        reader = LoadReader(registry, lambda worker, load, now: reports.append(load), 0.02)
        reader.start()
        await asyncio.sleep(0.3)
        await reader.stop()

    asyncio.run(served(page, use))
    assert len(reports) > 2
    assert all(report.sequences_max is None for report in reports)


@pytest.mark.parametrize("tokens", ["1" + "0" * 400, "1" + "0" * 23, "-5", "1e300", '"many"'])
def test_usage_beyond_belief_is_not_believed(engine: MockEngine, gateways: GatewayMaker, tokens: str) -> None:
    """And leaks nothing: the slot comes back, the tenant's share is not lost for ever."""
    body = json.dumps({"id": "x", "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]})
    usage = f', "usage": {{"prompt_tokens": {tokens}, "completion_tokens": 1}}}}'
    engine.behaviour = Behaviour(body=body[:-1].encode() + usage.encode())
    gateway = gateways(engine)
    assert post(gateway.port, chat()).status == 200
    gateway.wait_at_rest()
    (pool,) = fetch(gateway.port, "GET", "/admin/v1/queues").json["pools"]
    shown = [tenant for tier in pool["tiers"] for group in tier["groups"] for tenant in group["tenants"]]
    assert all(tenant["virtual_time"] < 1e9 for tenant in shown)


def test_one_tenants_prompts_say_nothing_of_anothers(engines: EngineMaker, gateways: GatewayMaker) -> None:
    engine = engines(Behaviour(input_tokens=5000, tokens=1))
    tenants = [
        {"name": "odd", "keys": ["sk-odd"]},
        {"name": "b", "keys": ["sk-b"], "limits": {"tokens_per_minute": 3000}},
    ]
    gateway = gateways(engine, tenants=tenants)
    for _ in range(60):
        post(gateway.port, chat("short"), key="sk-odd")
    engine.behaviour = Behaviour(input_tokens=2000, tokens=1)
    assert post(gateway.port, chat("x" * 8000, max_tokens=1), key="sk-b").status == 200

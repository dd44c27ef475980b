"""Reads the load of every worker, again and again, without ever holding up a request.

One task for each worker, so that a hung page delays no other. A worker is asked every `interval_s`; one whose page is
missing or is no metrics page is asked again after two seconds, then half a minute, then a minute, and one that is down
is not. Reports and decides nothing.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import httpx2
import msgspec

from evenflow.fleet.engines.load import ENGINES, LoadReport, read_load
from evenflow.fleet.pages import READS_MAX_S, new_client, read_page
from evenflow.fleet.registry import Registry, Worker

INTERVAL_S = 0.5
TIMEOUT_S = 1.0
# After so many pages that told nothing, the next is read so much later; the last holds on.
PAUSES_S = (2.0, 30.0, 60.0)


class LoadReader:
    """Runs one task for each worker until `stop`. `report` takes the worker, its load, and the monotonic time."""

    def __init__(
        self,
        registry: Registry,
        report: Callable[[Worker, LoadReport, float], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._registry = registry
        self._report = report
        self._interval_s = interval_s
        self._client: httpx2.AsyncClient | None = None
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._client = new_client(TIMEOUT_S)
        self.follow()

    def follow(self) -> None:
        """Takes up workers that have come, and leaves those that have gone."""
        workers = set(self._registry.workers.values())
        for worker in [worker for worker in self._tasks if worker not in workers]:
            self._tasks.pop(worker).cancel()
        for worker in workers:
            if worker not in self._tasks:
                self._tasks[worker] = asyncio.create_task(self._watch(worker), name=f"load {worker.name}")

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _watch(self, worker: Worker) -> None:
        silent = 0
        told: dict[str, int] | None = None
        while True:
            if worker.live:
                load = await self._read(worker)
                if load is None:
                    silent += 1
                else:
                    silent = 0
                    if told is None:
                        told = await self._read_once(worker, load.kind)
                    self._report(worker, completed(load, told), monotonic())
            # A page that was there a moment ago may only be late.
            late = silent <= 2 and told is not None
            await asyncio.sleep(self._interval_s if not silent or late else PAUSES_S[min(silent, len(PAUSES_S)) - 1])

    async def _read(self, worker: Worker) -> LoadReport | None:
        page = await self._get(worker, "/metrics")
        return None if page is None else read_load(page)

    async def _read_once(self, worker: Worker, kind: str) -> dict[str, int]:
        """What the engine tells elsewhere of what does not change, by the names of `LoadReport`."""
        where = ENGINES[kind].once
        page = await self._get(worker, where[0]) if where is not None else None
        if where is None or page is None:
            return {}
        try:
            members = _members.decode(page)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        found = {"sequences_max": members.get(where[1]), "kv_tokens": members.get(where[2])}
        return {name: int(raw) for name, raw in found.items() if raw is not None and _COUNT.fullmatch(raw)}

    async def _get(self, worker: Worker, path: str) -> bytes | None:
        assert self._client is not None
        try:
            async with asyncio.timeout(READS_MAX_S):
                status, page = await read_page(self._client, worker, path)
        except (httpx2.HTTPError, OSError, ValueError, TimeoutError):
            return None
        return page if status == 200 else None


# A count of at most twelve digits, as JSON has it.
_COUNT = re.compile(rb"[1-9][0-9]{0,11}")
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def completed(load: LoadReport, told: dict[str, int]) -> LoadReport:
    """The report with what was told elsewhere, where the report itself does not tell it."""
    return replace(
        load,
        kv_tokens=load.kv_tokens or told.get("kv_tokens"),
        sequences_max=load.sequences_max or told.get("sequences_max"),
    )

"""Reads the load of every worker, again and again, without ever holding up a request.

One task for each worker, so that a hung page delays no other. A worker that is down is not asked. Of the others, after
an answer that

    1. tells the load                            asked again after `interval_s`
    2. is late or broken, where it told before   after `interval_s`, and from the third in a row on after `LATE_S`
    3. is late or broken, where it never told,   after pauses that double up to half a minute
       or is metrics of other things             (some engines tell nothing before their first request)
    4. says that there is no such page           after half a minute, then every minute

What does not change is asked once, wherever the engine tells it, and again when the worker was down in between.
Reports and decides nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from time import monotonic

import httpx2

from evenflow.fleet.engines.load import ENGINES, LoadReport, is_metrics, read_load, read_once
from evenflow.fleet.pages import new_client, read_page
from evenflow.fleet.registry import Registry, Worker

log = logging.getLogger("evenflow.fleet")

INTERVAL_S = 0.5
# For connecting and for each wait for bytes; and for the page as a whole: a report that is older says nothing of now.
TIMEOUT_S = 1.0
PAGE_TIMEOUT_S = 2.0
# Pages in a row that may be late before a worker is asked less often, and how often then.
LATE_MAX = 3
LATE_S = 2.0
# After so many pages of one kind in a row the next is read so much later; the last holds on.
PAUSES_NOTHING_S = (2.0, 4.0, 8.0, 16.0, 30.0)
PAUSES_MISSING_S = (30.0, 60.0)
# How often something is asked that is told once and did not come in time.
ONCE_TRIES = 3
# Answers that speak of this moment only.
PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))


class Silence(Enum):
    """Why a worker told nothing."""

    LATE = "late"
    OTHER = "metrics of other things"
    MISSING = "missing"


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
        # None while it does not run.
        self._client: httpx2.AsyncClient | None = None
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        # Cancelled, and not yet at their end.
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._client = new_client(TIMEOUT_S)
        # Compressing a page costs an engine more than sending it.
        self._client.headers["accept-encoding"] = "identity"
        self.follow()
        self._registry.on_workers_changed.append(self.follow)

    def follow(self) -> None:
        """Takes up workers that have come, and leaves those that have gone. Does nothing unless it runs."""
        if self._client is None:
            return
        workers = set(self._registry.workers.values())
        for worker in [worker for worker in self._tasks if worker not in workers]:
            task = self._tasks.pop(worker)
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            task.cancel()
        for worker in workers:
            if worker not in self._tasks:
                watch = _Watch(worker, self._client, self._report, self._interval_s)
                self._tasks[worker] = asyncio.create_task(watch.run(), name=f"load {worker.name}")

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *self._leaving]
        self._tasks.clear()
        client, self._client = self._client, None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if client is not None:
            await client.aclose()


class _Watch:
    """What is known of one worker while it is read."""

    __slots__ = ("_client", "_in_a_row", "_interval_s", "_once", "_report", "_silence", "_told", "_tries", "_worker")

    def __init__(
        self,
        worker: Worker,
        client: httpx2.AsyncClient,
        report: Callable[[Worker, LoadReport, float], None],
        interval_s: float,
    ) -> None:
        self._worker = worker
        self._client = client
        self._report = report
        self._interval_s = interval_s
        self._forget()

    def _forget(self) -> None:
        # Whether it told its load at all; the last silence, and how many of its kind came in a row.
        self._told = False
        self._silence: Silence | None = None
        self._in_a_row = 0
        # What it tells once, None until it did; and how often it was asked in vain.
        self._once: dict[str, int] | None = None
        self._tries = 0

    async def run(self) -> None:
        while True:
            pause_s = self._interval_s
            if self._worker.live:
                try:
                    pause_s = await self._turn()
                except Exception:  # the edge of the task: one fault must not end the reading of this worker for good
                    log.exception("reading the load of worker %s failed; it is read again later", self._worker.name)
                    pause_s = PAUSES_MISSING_S[0]
            else:
                # Whatever comes back may be another engine.
                self._forget()
            await asyncio.sleep(pause_s)

    async def _turn(self) -> float:
        """Reads once and reports; gives the pause until the next time."""
        load = await self._read()
        if isinstance(load, LoadReport):
            self._told, self._silence, self._in_a_row = True, None, 0
            if self._once is None:
                self._once = await self._read_once(load.kind)
            # It may have gone down in the meantime.
            if self._worker.live:
                self._report(self._worker, completed(load, self._once or {}), monotonic())
            return self._interval_s
        self._in_a_row = self._in_a_row + 1 if load is self._silence else 1
        self._silence = load
        return pause_after(load, self._in_a_row, self._interval_s, told_before=self._told)

    async def _read(self) -> LoadReport | Silence:
        page = await self._get("/metrics")
        if isinstance(page, Silence):
            return page
        load = read_load(page)
        if load is None:
            return Silence.OTHER if is_metrics(page) else Silence.MISSING
        return load

    async def _read_once(self, kind: str) -> dict[str, int] | None:
        """What the engine tells elsewhere of what does not change; None when that is worth another try."""
        once = ENGINES[kind].once
        for path in once.paths if once is not None else ():
            page = await self._get(path)
            if isinstance(page, bytes):
                return read_once(kind, page)
            if page is Silence.LATE:
                self._tries += 1
                return None if self._tries < ONCE_TRIES else {}
        return {}

    async def _get(self, path: str) -> bytes | Silence:
        try:
            async with asyncio.timeout(PAGE_TIMEOUT_S):
                status, page = await read_page(self._client, self._worker, path)
        except (httpx2.HTTPError, OSError, TimeoutError):
            return Silence.LATE
        except ValueError:  # too large
            return Silence.MISSING
        if status != 200:
            return Silence.LATE if status in PASSING else Silence.MISSING
        return page


def pause_after(silence: Silence, in_a_row: int, interval_s: float, *, told_before: bool) -> float:
    """How long a worker is left alone that told nothing so often."""
    if silence is Silence.LATE and told_before:  # (2)
        return interval_s if in_a_row < LATE_MAX else max(interval_s, LATE_S)
    pauses = PAUSES_MISSING_S if silence is Silence.MISSING else PAUSES_NOTHING_S  # (4), (3)
    return pauses[min(in_a_row, len(pauses)) - 1]


def completed(load: LoadReport, told: dict[str, int]) -> LoadReport:
    """The report with what was told elsewhere, where the report itself does not tell it."""
    return replace(
        load,
        kv_tokens=load.kv_tokens or told.get("kv_tokens"),
        sequences_max=load.sequences_max or told.get("sequences_max"),
    )

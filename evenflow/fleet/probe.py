"""Asks every worker, again and again, whether it lives and what it serves.

One task for each worker, so that a hung one delays no other. A worker is asked every `interval_s` while all is well
and at once when the relay met trouble with it; `/health` is asked first, `/v1/models` when an engine has no
`/health`. Reports to the registry and decides nothing.
"""

import asyncio
import contextlib
import logging

import httpx2
import msgspec

from evenflow.fleet.pages import READS_MAX_S, new_client, read_page
from evenflow.fleet.registry import Registry, Worker

log = logging.getLogger("evenflow.fleet")

# A worker that is down is asked more often than one that is well, to be back soon.
INTERVAL_DOWN_S = 0.5
# Between two probes of a worker that is down, whoever asks.
WAKE_PAUSE_S = 0.05
# Probes between two readings of the model list.
MODELS_EVERY = 5


class Prober:
    """Runs one task for each worker until `stop`."""

    def __init__(self, registry: Registry, interval_s: float, timeout_s: float = 2.0) -> None:
        self._registry = registry
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        # None while it does not run.
        self._client: httpx2.AsyncClient | None = None
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        # Cancelled, and not yet at their end.
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self, wait_s: float) -> None:
        """Starts all tasks; returns when each worker was asked once, or after `wait_s`."""
        self._client = new_client(self._timeout_s)
        asked = self.follow()
        self._registry.on_workers_changed.append(self.follow)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in asked)), wait_s)

    def follow(self) -> list[asyncio.Event]:
        """Takes up workers that have come, and leaves those that have gone. Does nothing unless it runs.

        Returns an event for each that came, set when it was asked for the first time.
        """
        client = self._client
        if client is None:
            return []
        workers = set(self._registry.workers.values())
        for worker in [worker for worker in self._tasks if worker not in workers]:
            task = self._tasks.pop(worker)
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            task.cancel()
        first = []
        for worker in self._registry.workers.values():
            if worker not in self._tasks:
                asked = asyncio.Event()
                first.append(asked)
                watch = self._watch(worker, client, asked)
                self._tasks[worker] = asyncio.create_task(watch, name=f"probe {worker.name}")
        return first

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *self._leaving]
        self._tasks.clear()
        client, self._client = self._client, None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if client is not None:
            await client.aclose()

    async def _watch(self, worker: Worker, client: httpx2.AsyncClient, asked: asyncio.Event) -> None:
        wake = asyncio.Event()
        worker.wake_probe = wake.set
        turn = 0
        while True:
            wake.clear()
            try:
                await self._probe(worker, client, with_models=turn % MODELS_EVERY == 0 or not worker.models)
                self._registry.probe_succeeded(worker)
            except (httpx2.HTTPError, OSError, ValueError, TimeoutError) as error:
                self._registry.probe_failed(worker, f"probe failed: {describe(error)}")
            turn += 1
            asked.set()
            pause_s = self._interval_s
            if not worker.live or worker.health.probe_failures:
                # Whoever meets trouble with it asks for a probe, and it may be much trouble.
                await asyncio.sleep(WAKE_PAUSE_S)
                pause_s = min(INTERVAL_DOWN_S, pause_s)
            # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await wake.wait()

    async def _probe(self, worker: Worker, client: httpx2.AsyncClient, *, with_models: bool) -> None:
        async with asyncio.timeout(READS_MAX_S):
            status, _ = await read_page(client, worker, "/health")
            healthless = status in (404, 405, 501)
            if not healthless and status >= 400:
                raise ValueError(f"/health answered {status}")
            if healthless or (with_models and not worker.models_given):
                status, page = await read_page(client, worker, "/v1/models")
                if status >= 400:
                    raise ValueError(f"/v1/models answered {status}")
                if not worker.models_given:
                    self._registry.set_models(worker, model_ids(page))


def model_ids(page: bytes) -> frozenset[str]:
    """The ids of an OpenAI model list. Raises ValueError for anything else."""
    try:
        return frozenset(model.id for model in _listing.decode(page).data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("/v1/models did not answer with a list of models") from None


class _Model(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    data: list[_Model]


_listing = msgspec.json.Decoder(_Listing)


def describe(error: Exception) -> str:
    """An error in words that name no secret: its kind, and its text unless it may hold a URL."""
    if isinstance(error, ValueError):
        return str(error) or type(error).__name__
    return _PLAIN_WORDS.get(type(error).__name__, type(error).__name__)


_PLAIN_WORDS = {
    "ConnectError": "connection refused",
    "ConnectTimeout": "no connection in time",
    "TimeoutError": "no answer in time",
    "ReadTimeout": "no answer in time",
}

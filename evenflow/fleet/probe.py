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
# Probes between two readings of the model list.
MODELS_EVERY = 5


class Prober:
    """Runs one task for each worker until `stop`."""

    def __init__(self, registry: Registry, interval_s: float, timeout_s: float = 2.0) -> None:
        self._registry = registry
        self._interval_s = interval_s
        self._client = new_client(timeout_s)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, wait_s: float) -> None:
        """Starts all tasks; returns when each worker was asked once, or after `wait_s`."""
        first: list[asyncio.Event] = []
        for worker in self._registry.workers.values():
            asked = asyncio.Event()
            first.append(asked)
            self._tasks.append(asyncio.create_task(self._watch(worker, asked), name=f"probe {worker.name}"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in first)), wait_s)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _watch(self, worker: Worker, asked: asyncio.Event) -> None:
        wake = asyncio.Event()
        worker.wake_probe = wake.set
        turn = 0
        while True:
            wake.clear()
            try:
                await self._probe(worker, with_models=turn % MODELS_EVERY == 0 or not worker.models)
                self._registry.probe_succeeded(worker)
            except (httpx2.HTTPError, OSError, ValueError, TimeoutError) as error:
                self._registry.probe_failed(worker, f"probe failed: {describe(error)}")
            turn += 1
            asked.set()
            if worker.live:
                # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await wake.wait()
            else:
                await asyncio.sleep(min(INTERVAL_DOWN_S, self._interval_s))

    async def _probe(self, worker: Worker, *, with_models: bool) -> None:
        async with asyncio.timeout(READS_MAX_S):
            status, _ = await read_page(self._client, worker, "/health")
            healthless = status in (404, 405, 501)
            if not healthless and status >= 400:
                raise ValueError(f"/health answered {status}")
            if healthless or (with_models and not worker.models_given):
                status, page = await read_page(self._client, worker, "/v1/models")
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

"""The gateway: joins the stages of a request, starts and stops them.

`Gateway.compose` is the whole stack on one screen. One event loop runs everything; the stages call each other
directly, and what joins them is set here and nowhere else.
"""

import asyncio
import contextlib
import gc
import logging
import random
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic

from prometheus_client.core import Metric

from evenflow.api.admin import AdminRoutes
from evenflow.api.fleet import FleetRoutes
from evenflow.api.local import LocalRoutes
from evenflow.config import ConfigErrors, Settings, TierSettings
from evenflow.fleet.joining import Joining
from evenflow.fleet.load import LoadReader
from evenflow.fleet.probe import Prober
from evenflow.fleet.registry import Registry, Worker
from evenflow.observe.access_log import open_access_log
from evenflow.observe.metrics import Metrics, gauge
from evenflow.policy.cost import CostModel
from evenflow.policy.fairness import Group, Ticket, Tier
from evenflow.policy.placement import placement_named
from evenflow.request.accept import ClientConnection, Front
from evenflow.request.authenticate import Authenticator
from evenflow.request.decode import Decoder
from evenflow.request.enqueue import Enqueuer
from evenflow.request.older import OlderDecoder
from evenflow.request.place import Scheduler
from evenflow.request.relay import Relay
from evenflow.request.settle import Settler
from evenflow.tenancy.directory import Directory, Member
from evenflow.timers import Wheel

log = logging.getLogger("evenflow")

BACKLOG = 4096
# Seconds that the start waits for the first probes, so that the first caller finds the workers known.
FIRST_PROBES_S = 3.0
# Groups of the configuration that a reload does not change.
AT_START_ONLY = ("workers", "fleet", "log", "database")
# Objects made between two collections: the hot path makes no cycles, so collecting often finds nothing.
GC_THRESHOLDS = (100_000, 50, 100)


class Gateway:
    """One gateway process. Built from settings, `start`ed on the running loop, `stop`ped with a bound."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.port = settings.listen.port
        self._server: asyncio.Server | None = None
        self._second: asyncio.TimerHandle | None = None

    @property
    def settings(self) -> Settings:
        """Those in force."""
        return self._settings

    def compose(self, loop: asyncio.AbstractEventLoop) -> None:
        """accept → authenticate → decode → enqueue → place → relay → settle, and what they stand on."""
        settings = self._settings
        scheduling = settings.scheduling
        self._wheel = wheel = Wheel(loop)
        self._metrics = metrics = Metrics()
        self._access_log = open_access_log(settings.log.access)
        self._registry = registry = Registry()
        self._directory = directory = Directory(settings)
        self._cost = cost = CostModel()
        cost.configure(*cost_of(settings))
        tiers = tuple(tier_of(tier) for tier in scheduling.tiers)
        placement = placement_named(scheduling.placement)(random.Random())

        self._authenticator = authenticator = Authenticator(directory)
        self._scheduler = scheduler = Scheduler(registry, tiers, placement, metrics.decisions)
        self._settler = settler = Settler(scheduler, cost, metrics, self._access_log)
        self._relay = relay = Relay(
            loop, wheel, registry, scheduler, settler, cost, metrics, settings.timeouts
        )
        self._enqueuer = enqueuer = Enqueuer(registry, scheduler, cost, settler, limits=settings.limits)
        self._older = older = OlderDecoder(authenticator, registry)
        self._decoder = decoder = Decoder(authenticator, older, settings.limits.n)
        self._front = front = Front(
            wheel,
            authenticator,
            decoder,
            enqueuer,
            relay,
            settler,
            listen=settings.listen,
            limits=settings.limits,
            timeouts=settings.timeouts,
        )
        scheduler.start = relay.start
        scheduler.no_worker = enqueuer.refuse_unserved
        relay.split = enqueuer.split
        metrics.gauges = self._gauges
        local = LocalRoutes(front, registry, authenticator, metrics)
        local.mount()
        AdminRoutes(front, local, scheduler, settler, authenticator).mount()
        self._joining = joining = Joining(registry, settings.fleet)
        FleetRoutes(front, local, registry, joining, authenticator).mount()
        for worker in settings.workers:
            registry.add(Worker(worker))
        joining.restore()
        self._prober = Prober(registry, settings.fleet.probe_interval_s)
        self._load_reader = LoadReader(registry, registry.load_reported)
        registry.on_gone = relay.forget
        registry.on_silent = relay.rescue

    async def start(self) -> None:
        """Listens, with every worker asked once before. Raises OSError when the address cannot be had."""
        loop = asyncio.get_running_loop()
        self.compose(loop)
        self._wheel.start()
        self._access_log.start(loop)
        await self._prober.start(FIRST_PROBES_S)
        self._load_reader.start()
        listen = self._settings.listen
        try:
            self._server = await loop.create_server(
                lambda: ClientConnection(self._front), listen.host, listen.port, backlog=BACKLOG
            )
        except OSError:
            await self._close()
            raise
        self.port = self._server.sockets[0].getsockname()[1]
        self._each_second()

    async def stop(self, drain_s: float | None = None) -> None:
        """Takes nothing new, lets what runs and waits end within `drain_s`, then breaks the rest off."""
        if drain_s is None:
            drain_s = self._settings.listen.drain_s
        front = self._front
        self._relay.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(front.connections):
            connection.drain()
        loop = asyncio.get_running_loop()
        until = loop.time() + drain_s
        while self._settler.live and loop.time() < until:
            await asyncio.sleep(0.02)
        for connection in list(front.connections):
            connection.stop()
        until = loop.time() + 1.0
        while front.connections and loop.time() < until:
            await asyncio.sleep(0.01)
        await self._close()

    async def _close(self) -> None:
        if self._second is not None:
            self._second.cancel()
        for connection in list(self._front.connections):
            connection.abort()
        await self._load_reader.stop()
        await self._prober.stop()
        await self._relay.close()
        self._wheel.stop()
        await asyncio.sleep(0)  # lets the aborted transports report their end
        self._access_log.close()

    def _each_second(self) -> None:
        self._second = asyncio.get_running_loop().call_later(1.0, self._each_second)
        self._registry.each_second(monotonic())
        self._joining.each_second()
        self._older.each_second(monotonic())
        self._scheduler.each_second()
        self._settler.each_second()

    def reload(self, settings: Settings) -> None:
        """Takes another configuration in force at once. What runs and waits goes on, under the new schedule.

        Addresses, workers, probes and logs stay those of the start; what differs there is told in the log.
        """
        for name in AT_START_ONLY:
            if getattr(settings, name) != getattr(self._settings, name):
                log.warning("%s: a change here needs a restart; the rest is in force now", name)
        if (settings.listen.host, settings.listen.port) != (self._settings.listen.host, self._settings.listen.port):
            log.warning("listen: another address needs a restart; the rest is in force now")
        old, self._settings = self._settings, settings
        tiers = tuple(tier_of(tier) for tier in settings.scheduling.tiers)
        names = self._scheduler.tier_names()
        self._directory = directory = Directory(settings, self._directory, monotonic())
        self._authenticator.directory = directory
        self._front.configure(settings.listen, settings.limits, settings.timeouts)
        self._front.forget_heads()
        self._relay.timeouts = settings.timeouts
        self._decoder.n_max = settings.limits.n
        self._cost.configure(*cost_of(settings))
        if schedule_of(old) != schedule_of(settings):
            self._scheduler.reschedule(tiers, partial(same_tier, names, [tier.name for tier in tiers]))
        if old.scheduling.placement != settings.scheduling.placement:
            self._scheduler.place_by(placement_named(settings.scheduling.placement)(random.Random()))
        self._enqueuer.configure(settings.limits)
        self._scheduler.resume(directory.everyone())

    def counters(self) -> dict[str, int]:
        """What is held right now; all but idle connections are 0 when nothing is under way."""
        workers = self._registry.workers.values()
        members = self._directory.everyone()
        return {
            "calls": self._settler.live,
            "in_flight": sum(member.in_flight for member in members),
            "queued": self._scheduler.waiting(),
            "leases": sum(worker.in_flight for worker in workers),
            "client_connections": len(self._front.connections),
            "worker_connections_busy": sum(len(worker.busy) for worker in workers),
            "worker_connections_idle": sum(len(worker.idle) for worker in workers),
        }

    def _gauges(self) -> Iterable[Metric]:
        workers = self._registry.workers.values()
        members = self._directory.everyone()
        yield gauge(
            "evenflow_queued",
            "Requests that wait, by tenant.",
            ["tenant"],
            (([member.name], member.queued) for member in members),
        )
        yield gauge(
            "evenflow_in_flight",
            "Requests that run, by tenant.",
            ["tenant"],
            (([member.name], member.in_flight) for member in members),
        )
        names = ["worker"]
        yield gauge("evenflow_worker_up", "1 when chosen.", names, (([w.name], w.live) for w in workers))
        yield gauge(
            "evenflow_worker_in_flight", "Running sequences.", names, (([w.name], w.in_flight) for w in workers)
        )
        yield gauge("evenflow_worker_slots", "Sequences at most.", names, (([w.name], w.slots) for w in workers))
        yield gauge(
            "evenflow_fairness_bound_ratio",
            "Largest difference of normalised service between waiting tenants, against its proved bound.",
            [],
            [([], max((pool.queue.bound_ratio() for pool in self._scheduler.pools), default=0.0))],
        )


def tier_of(tier: TierSettings) -> Tier:
    """What the queue needs of a configured tier."""
    groups = tuple(Group(group.name, group.weight) for group in tier.groups)
    return Tier(tier.name, tier.min_share, groups, tier.max_wait_s)


def cost_of(settings: Settings) -> tuple[bool, float, float, float]:
    """What `CostModel.configure` takes."""
    weights = settings.scheduling.token_cost
    return settings.scheduling.cost == "tokens", weights.input, weights.cached, weights.output


def schedule_of(settings: Settings) -> tuple[object, ...]:
    """What the fair queue depends on; while it stays the same the queue keeps its counters."""
    tenants = sorted((tenant.name, tenant.group, tenant.weight) for tenant in settings.tenants)
    return settings.scheduling.tiers, tenants, settings.auth.anonymous


def same_tier(before: list[str], after: list[str], ticket: Ticket) -> int:
    """Where a ticket waits after a reload: in the tier of the same name, or its tenant's if that is lower."""
    name, tier = before[ticket.tier], ticket.tenant.tier if isinstance(ticket.tenant, Member) else 0
    return max(tier, after.index(name)) if name in after else tier


def serve(settings: Settings, read: Callable[[], Settings] | None = None) -> int:
    """Runs a gateway until SIGTERM or SIGINT; returns the exit status. `read` reads the configuration at SIGHUP."""
    import uvloop

    logging.basicConfig(
        level=settings.log.level.upper(), stream=sys.stderr, format="evenflow: %(levelname)s %(message)s"
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    logging.getLogger("httpcore2").setLevel(logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        return uvloop.run(_serve(settings, read))
    return 130


async def _reload(gateway: Gateway, read: Callable[[], Settings], one_at_a_time: asyncio.Lock) -> None:
    """A configuration with mistakes is refused whole, and the running one stays. What is read last is in force last."""
    async with one_at_a_time:
        await _read_and_take(gateway, read)


async def _read_and_take(gateway: Gateway, read: Callable[[], Settings]) -> None:
    try:
        settings = await asyncio.get_running_loop().run_in_executor(None, read)
    except ConfigErrors as errors:
        log.error("reload refused, the running configuration stays in force:\n%s", errors)
        return
    for warning in settings.warnings:
        log.warning("%s", warning)
    gateway.reload(settings)
    log.info("the configuration was read again and is in force")


async def _serve(settings: Settings, read: Callable[[], Settings] | None) -> int:
    loop = asyncio.get_running_loop()
    if read is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    gateway = Gateway(settings)
    try:
        await gateway.start()
    except OSError as error:
        listen = settings.listen
        print(
            f"evenflow: cannot listen on {listen.host}:{listen.port}: {error.strerror or error}. Choose another "
            "with --port, or stop what runs there.",
            file=sys.stderr,
        )
        return 1
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    reloads: set[asyncio.Task[None]] = set()
    one_at_a_time = asyncio.Lock()
    if read is not None:

        def hang_up() -> None:
            task = loop.create_task(_reload(gateway, read, one_at_a_time))
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, hang_up)
    host = settings.listen.host
    print(f"evenflow: listening on http://{host}:{gateway.port}", file=sys.stderr, flush=True)
    await stopping.wait()
    log.info("stopping: running requests have %g s to end", gateway.settings.listen.drain_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    await gateway.stop()
    return 0

"""The life of a request, in the order in which the files sort.

    accept        bytes of a client become a Call
    authenticate  its key becomes a tenant
    decode        its body becomes the few values that decisions need
    enqueue       it becomes a Ticket in the fair queue, or is refused
    place         the ticket's turn comes, a worker with room is chosen: a Lease
    relay         bytes go to the worker and its answer comes back
    settle        the slot returns, the true cost is charged, one log line is written

Between the stages travel the small objects below. A call is in exactly one stage, and every way out of each stage
ends in settle.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenflow.fleet.registry import Worker
    from evenflow.policy.fairness import Ticket
    from evenflow.request.accept import ClientConnection
    from evenflow.request.relay import WorkerConnection
    from evenflow.tenancy.directory import Member
    from evenflow.wire.faults import Fault
    from evenflow.wire.openai import Request, Route, Usage


class Lease:
    """Slots of one worker, held until `give_back`, which may be called on every way out."""

    __slots__ = ("held", "slots", "work", "worker")

    def __init__(self, worker: "Worker", slots: int, work: float) -> None:
        self.worker = worker
        self.slots = slots
        self.work = work
        self.held = True
        worker.in_flight += slots
        worker.work += work

    def give_back(self) -> None:
        if self.held:
            self.held = False
            worker = self.worker
            worker.in_flight -= self.slots
            # Sums of floats drift; an idle worker has no work.
            worker.work = worker.work - self.work if worker.in_flight else 0.0


class Call:
    """One request of a client, from its head to its log line."""

    __slots__ = (
        # -- accept: what came in
        "client",  # where the answer goes; None once the client has left
        "method",
        "path",
        "query",  # with its leading "?", or empty
        "route",  # the relayed route, None for what the gateway answers itself
        "forward",  # header lines that travel on to the worker, as bytes
        "bearer",  # the key of `Authorization: Bearer`, None without one
        "api_key",  # the key of `x-api-key`, None without one
        "origin",  # of a page that asks across sites, None for all others
        "forwarded",  # True when a proxy stands between the caller and us
        "request_id",
        "keep_alive",  # the connection stays open after the answer
        "http11",
        "body",
        "fault",  # known wrong before its body had come
        "accepted_s",
        # -- authenticate, decode
        "tenant",
        "request",
        # -- enqueue, place
        "reserved",  # tokens taken out of the tenant's rate, None when it has none
        "ticket",
        "lease",
        "attempts",  # workers it was given to, so far
        "failed_on",  # the last worker that failed it
        "dispatched_s",
        # -- relay
        "connection",  # the worker connection that carries it
        "shown",  # True once a byte of the answer was written
        "first_byte_s",
        "output_tokens",  # counted by events while a stream runs
        "charge_at",  # output tokens at which the next charge is due
        "usage",  # what the engine told, None until then
        # -- settle
        "ended",
    )

    def __init__(self, client: "ClientConnection", accepted_s: float) -> None:
        self.client: ClientConnection | None = client
        self.method = b""
        self.path = b""
        self.query = b""
        self.route: Route | None = None
        self.forward: list[bytes] = []
        self.bearer: bytes | None = None
        self.api_key: bytes | None = None
        self.origin: bytes | None = None
        self.forwarded = False
        self.request_id = b""
        self.keep_alive = True
        self.http11 = True
        self.body = b""
        self.fault: Fault | None = None
        self.accepted_s = accepted_s
        self.tenant: Member | None = None
        self.request: Request | None = None
        self.reserved: float | None = None
        self.ticket: Ticket | None = None
        self.lease: Lease | None = None
        self.attempts = 0
        self.failed_on: Worker | None = None
        self.dispatched_s = 0.0
        self.connection: WorkerConnection | None = None
        self.shown = False
        self.first_byte_s = 0.0
        self.output_tokens = 0
        self.charge_at = 0
        self.usage: Usage | None = None
        self.ended = False

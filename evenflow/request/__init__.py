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
    from evenflow.observe.why import Rival, Waited
    from evenflow.policy.fairness import Ticket
    from evenflow.policy.limits import TenantLimits
    from evenflow.request.accept import ClientConnection
    from evenflow.request.fanout import Fanout, Sink
    from evenflow.request.relay import WorkerConnection
    from evenflow.tenancy.directory import Member
    from evenflow.wire.faults import Fault
    from evenflow.wire.http import RequestHead
    from evenflow.wire.merge import Group
    from evenflow.wire.older import Form
    from evenflow.wire.openai import Request, Route, Usage


class Lease:
    """Slots of one worker, held until `give_back`, which may be called on every way out."""

    __slots__ = ("held", "prompt_work", "slots", "tokens", "work", "worker")

    def __init__(self, worker: "Worker", slots: int, work: float, prompt_work: float, tokens: float) -> None:
        self.worker = worker
        self.slots = slots
        self.work = work
        # The part of it that the prompt takes.
        self.prompt_work = prompt_work
        self.tokens = tokens
        self.held = True
        worker.in_flight += slots
        worker.work += work
        worker.tokens += tokens

    def prompt_done(self) -> None:
        """The answer has begun: the prompt is computed, and no more before what comes to this worker next."""
        done = self.prompt_work
        if done and self.held:
            self.prompt_work = 0.0
            self.work -= done
            self.worker.work -= done

    def give_back(self) -> None:
        if self.held:
            self.held = False
            worker = self.worker
            worker.in_flight -= self.slots
            if worker.in_flight:
                worker.work -= self.work
                worker.tokens -= self.tokens
            else:  # sums of floats drift; an idle worker has no work
                worker.work = worker.tokens = 0.0


class Call:
    """One request of a client, from its head to its log line."""

    __slots__ = (
        "accepted_s",  # accept: when it was whole
        "attempts",  # place: workers it was given to, so far
        "body",  # accept: as it came; decode: as it goes on; emptied once a retry is no more possible
        "charge_at",  # relay: output tokens at which the next charge is due
        "client",  # where the answer goes; None once it is written, or the client has left
        "connection",  # relay: the worker connection that carries it
        "dispatched_s",  # place
        "ended",  # settle: nothing is held any more
        "failed_on",  # place: the last worker that failed it
        "fanout",  # fanout: what joins the parts of a call of several; None for all others
        "fault",  # accept: known to be wrong before its body had come
        "first_byte_s",  # relay
        "form",  # decode: how the answer is written for a caller of an older service; None for all others
        "head",  # accept
        "keep_alive",  # the client's connection stays open after the answer
        "lease",  # place
        "part",  # fanout: which part of another call it is; None for a caller's own
        "opened",  # accept: a stream's head was written to keep it alive, before its worker had answered
        "output_tokens",  # relay: counted by events while a stream runs
        "request",  # decode
        "request_id",
        "reserved",  # enqueue: tokens taken out of the tenant's rate, None when it has none
        "reserved_from",  # enqueue: whose rate that was, which a reload may replace
        "rivals",  # place: the workers it could have gone to, None when there was no choice
        "route",  # accept: the relayed route, None for what the gateway answers itself
        "shown",  # relay: a byte of the answer was written
        "tenant",  # authenticate
        "ticket",  # enqueue
        "usage",  # relay: what the engine told, None until then
        "waited",  # enqueue: what it waited for, None when its turn came at once
    )

    def __init__(
        self,
        client: "ClientConnection | Sink",
        head: "RequestHead",
        route: "Route | None",
        tenant: "Member | None",
        request_id: bytes,
    ) -> None:
        self.client: ClientConnection | Sink | None = client
        self.head = head
        self.route = route
        self.tenant = tenant
        self.request_id = request_id
        self.keep_alive = head.keep_alive
        self.body = b""
        self.fault: Fault | None = None
        self.accepted_s = 0.0
        self.request: Request | None = None
        self.reserved: float | None = None
        self.reserved_from: TenantLimits | None = None
        self.ticket: Ticket | None = None
        self.lease: Lease | None = None
        self.attempts = 0
        self.failed_on: Worker | None = None
        self.dispatched_s = 0.0
        self.connection: WorkerConnection | None = None
        self.shown = False
        self.first_byte_s = 0.0
        self.opened = False
        self.output_tokens = 0
        self.charge_at = 0
        self.usage: Usage | None = None
        self.waited: Waited | None = None
        self.rivals: tuple[Rival, ...] | None = None
        self.fanout: Fanout | None = None
        self.form: Form | None = None
        self.part: Group | None = None
        self.ended = False

"""Queues that the fair one is compared with, behind the part of its interface that a world uses.

    fcfs           the oldest, whoever's it is
    round_robin    one of each tenant in turn
    least_counter  whose tenant was charged least, ever
    vtc            the virtual token counter (Sheng et al., OSDI 2024): least charged, where a tenant that becomes
                   backlogged is lifted to the least counter of those that are, or of whoever waited last

None of them knows tiers or groups; all keep FIFO inside a tenant and its concurrency. The two with counters charge
input when a request is dispatched and output as it is produced, per weight. A pick looks at every tenant that waits:
they are here to be measured, not to be fast. They never read a clock or draw a random number.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from math import inf
from typing import Protocol

from evenflow.policy.fairness import ENDED, STARTED, WAITING, FairQueue, Tenant, Ticket, Tier
from evenflow.sim.model import Charging, Policy


class Queue(Protocol):
    """What a world needs of a queue. `evenflow.policy.fairness.FairQueue` says what each does."""

    waiting: int

    def submit(self, ticket: Ticket) -> None: ...

    def peek(self, lanes: Collection[Hashable] | None = None) -> Ticket | None: ...

    def start(self, ticket: Ticket) -> None: ...

    def start_now(self, ticket: Ticket) -> bool: ...

    def cancel(self, ticket: Ticket) -> None: ...

    def give_back(self, ticket: Ticket) -> None: ...

    def progress(self, ticket: Ticket, cost: float) -> None: ...

    def finish(self, ticket: Ticket, cost: float) -> None: ...

    def shed(self, tier_above: int) -> Ticket | None: ...

    def take_all(self, lane: Hashable | None = None) -> list[Ticket]: ...

    def promote(self, now: float) -> int: ...

    def bound_ratio(self) -> float: ...


class _Account:
    """A tenant in one queue: its tickets, oldest first, its counter, and when its last turn was."""

    __slots__ = ("counter", "tenant", "tickets", "turn")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.tickets: deque[Ticket] = deque()
        self.counter = 0.0
        self.turn = 0


class Fcfs:
    """First come, first served; the others differ in whose turn it is and in what they note."""

    __slots__ = ("_accounts", "_backlogged", "_last", "_next", "_sequence", "waiting")

    def __init__(self, tiers: Sequence[Tier] = ()) -> None:
        self.waiting = 0
        self._accounts: dict[Tenant, _Account] = {}
        # Those that have a ticket waiting.
        self._backlogged: dict[Tenant, _Account] = {}
        # Whose queue ran empty last.
        self._last: _Account | None = None
        self._sequence = 0
        # What `peek` last found; None after any change.
        self._next: Ticket | None = None

    def submit(self, ticket: Ticket) -> None:
        tenant = ticket.tenant
        account = self._account(tenant)
        ticket.sequence = self._sequence = self._sequence + 1
        ticket.state = WAITING
        if not account.tickets:
            self._lift(account)
            self._backlogged[tenant] = account
        account.tickets.append(ticket)
        tenant.queued += 1
        self.waiting += 1
        self._next = None

    def peek(self, lanes: Collection[Hashable] | None = None) -> Ticket | None:
        if self._next is None:
            best: tuple[float, int] = (inf, 0)
            for tenant, account in self._backlogged.items():
                if tenant.concurrency is None or tenant.in_flight < tenant.concurrency:
                    key = (self._key(account), account.tickets[0].sequence)
                    if self._next is None or key < best:
                        best, self._next = key, account.tickets[0]
        return self._next

    def start(self, ticket: Ticket) -> None:
        account = self._accounts[ticket.tenant]
        if ticket.state != WAITING or account.tickets[0] is not ticket:
            raise ValueError("Only the ticket that `peek` returned can start.")
        self._take_out(ticket)
        self._run(ticket, account)

    def start_now(self, ticket: Ticket) -> bool:
        tenant = ticket.tenant
        if self.waiting or (tenant.concurrency is not None and tenant.in_flight >= tenant.concurrency):
            return False
        account = self._account(tenant)
        ticket.sequence = self._sequence = self._sequence + 1
        self._lift(account)
        self._last = account
        self._run(ticket, account)
        return True

    def cancel(self, ticket: Ticket) -> None:
        if ticket.state == WAITING:
            self._take_out(ticket)
            ticket.state = ENDED

    def give_back(self, ticket: Ticket) -> None:
        tenant, account = ticket.tenant, self._accounts[ticket.tenant]
        account.counter -= ticket.charged / (tenant.weight or 1.0)
        ticket.charged = 0.0
        ticket.state = WAITING
        tenant.in_flight -= 1
        tenant.queued += 1
        self.waiting += 1
        place = 0
        while place < len(account.tickets) and account.tickets[place].sequence < ticket.sequence:
            place += 1
        account.tickets.insert(place, ticket)
        self._backlogged[tenant] = account
        self._next = None

    def progress(self, ticket: Ticket, cost: float) -> None:
        if cost > ticket.charged and ticket.state == STARTED:
            self._charge(self._accounts[ticket.tenant], ticket, cost)

    def finish(self, ticket: Ticket, cost: float) -> None:
        if ticket.state == STARTED:
            ticket.state = ENDED
            tenant = ticket.tenant
            self._charge(self._accounts[tenant], ticket, cost)
            tenant.in_flight -= 1
            tenant.served += cost

    def shed(self, tier_above: int) -> Ticket | None:
        """The newest of the longest queue per weight."""
        if not self._backlogged:
            return None
        longest = max(
            self._backlogged.values(),
            key=lambda account: len(account.tickets) / (account.tenant.weight or 1e-9),
        )
        ticket = longest.tickets[-1]
        self.cancel(ticket)
        return ticket

    def take_all(self, lane: Hashable | None = None) -> list[Ticket]:
        tickets = [ticket for account in self._backlogged.values() for ticket in account.tickets]
        tickets.sort(key=lambda ticket: ticket.sequence)
        for ticket in tickets:
            self.cancel(ticket)
        return tickets

    def promote(self, now: float) -> int:
        return 0

    def bound_ratio(self) -> float:
        """There is no bound to keep."""
        return 0.0

    # -- parts -----------------------------------------------------------------------------------------------

    def _key(self, account: _Account) -> float:
        """The tenant with the least goes next, between equals the one with the oldest ticket."""
        return 0.0

    def _lift(self, account: _Account) -> None:
        """The account becomes backlogged; it is not among the backlogged yet."""

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(tenant)
        return account

    def _take_out(self, ticket: Ticket) -> None:
        account = self._accounts[ticket.tenant]
        if account.tickets[0] is ticket:
            account.tickets.popleft()
        else:
            account.tickets.remove(ticket)
        if not account.tickets:
            del self._backlogged[ticket.tenant]
            self._last = account
        ticket.tenant.queued -= 1
        self.waiting -= 1
        self._next = None

    def _run(self, ticket: Ticket, account: _Account) -> None:
        ticket.state = STARTED
        ticket.tenant.in_flight += 1
        account.turn = self._sequence = self._sequence + 1
        self._charge(account, ticket, ticket.estimate)

    def _charge(self, account: _Account, ticket: Ticket, cost: float) -> None:
        """Brings what the ticket was charged to `cost`."""
        account.counter += (cost - ticket.charged) / (ticket.tenant.weight or 1e-9)
        ticket.charged = cost
        self._next = None


class RoundRobin(Fcfs):
    """The tenant whose last turn is longest ago."""

    __slots__ = ()

    def _key(self, account: _Account) -> float:
        return account.turn


class LeastCounter(Fcfs):
    """The tenant that was charged least per weight. One that was idle has all of its absence to catch up with."""

    __slots__ = ()

    def _key(self, account: _Account) -> float:
        return account.counter


class Vtc(LeastCounter):
    __slots__ = ()

    def _lift(self, account: _Account) -> None:
        if self._backlogged:
            floor = min(other.counter for other in self._backlogged.values())
        elif self._last is not None:
            floor = self._last.counter
        else:
            return
        account.counter = max(account.counter, floor)


QUEUES: dict[Policy, Callable[[Sequence[Tier]], Queue]] = {
    "fair": FairQueue,
    "fcfs": Fcfs,
    "round_robin": RoundRobin,
    "least_counter": LeastCounter,
    "vtc": Vtc,
}
# Those that charge as their authors had it, whatever a scenario says.
CHARGES: dict[Policy, Charging] = {"least_counter": "progress", "vtc": "progress"}

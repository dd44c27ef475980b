"""The fair queue: whose turn it is, by tiered start-time fair queueing with charge and correction.

What it is. Tiers are strict. In a tier groups compete, and in a group its tenants, each level by the same rule: an
entity of weight w has a counter V, the cost it was charged divided by w, and the least V goes next. A ticket is
charged its estimate when it starts and corrected to its true cost while it runs and when it ends. An entity that
becomes backlogged starts at max(V, virtual time), where virtual time is the largest V seen at a pick.

What it promises. Equal inputs give equal order. A tenant's tickets start in the order they came. Something starts
whenever anything may. For two tenants i, j of a group that both wait, V_i - V_j <= (E_i + O_i)/w_i + R_j/w_j: E is the
largest estimate started, O and R the largest under- and over-estimate in flight; for groups of a tier the same.
No call looks at all tenants or all tickets, apart from `bound_ratio` and `snapshot`, which are for scrapes.

What it never does: wait, read a clock, draw a random number, lock, log, look at a prompt or know a worker.

Words used below. A *lane* is a class of tickets that can run on the same workers. A *race* is one lane at one level:
the entities that have something to start in it. A *line* is one entity's place in one race.
"""

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Any

# A tenant that is idle is remembered while it has debt. Up to so many in a group are also kept without any, since
# making an account costs more than a decision; beyond it they are forgotten, and in a group where nothing waits the
# least debts with them.
IDLE_KEPT_MAX = 64
# A heap or a tenant's queue may hold so many dead entries before it is worth while to look at its size.
DEAD_KEPT_MIN = 16
# What a caller is told when nothing is known of how fast the pool serves.
WAIT_UNKNOWN_S = 1.0
# Beyond this the counters of a group or tier start again near zero when nothing waits in it: a float has 53 bits.
VIRTUAL_TIME_MAX = 2.0**36

NEW, WAITING, STARTED, ENDED = range(4)

# Numbers tickets over all queues, so that a ticket keeps its age when pools are regrouped.
_sequence = count(1)


class Tenant:
    """Whose traffic it is. One object for all queues: it counts over all of them."""

    __slots__ = ("concurrency", "group", "in_flight", "name", "queued", "queued_max", "served", "weight")

    def __init__(
        self,
        name: str,
        group: str,
        weight: float = 10.0,
        *,
        concurrency: int | None = None,
        queued_max: int | None = None,
    ) -> None:
        self.name = name
        self.group = group
        # 0 is allowed here: such a tenant is served only while nobody else of its group waits.
        self.weight = weight
        # Started tickets (not slots) that may run at once; further ones wait. None: no limit.
        self.concurrency = concurrency
        # Read by the stage that admits tickets, not by the queue.
        self.queued_max = queued_max
        # Started and not ended, and waiting. Written by the queues only.
        self.in_flight = 0
        self.queued = 0
        # True cost of all that has finished.
        self.served = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Tenants that share one weight against other groups of the tier."""

    name: str
    weight: float


@dataclass(frozen=True, slots=True)
class Tier:
    """Groups that go before those of every later tier. `min_share` is the floor of a lower tier, 0 is none."""

    name: str
    min_share: float = 0.0
    groups: tuple[Group, ...] = field(default=())


class Ticket:
    """A call's place in the queue. One object per call: from `submit` or `start_now` to `finish` or `cancel`."""

    __slots__ = ("account", "call", "charged", "estimate", "lane", "sequence", "slots", "state", "tenant", "tier")

    # Who the ticket is charged to; set by the queue that took it, which need not be the one that ends it.
    account: "_Account"
    # Its age: lower is older.
    sequence: int

    def __init__(
        self, tenant: Tenant, tier: int, lane: Hashable, slots: int, estimate: float, call: Any = None
    ) -> None:
        self.tenant = tenant
        self.tier = tier
        self.lane = lane
        self.slots = slots
        # Cost at which it is charged when it starts; finite, >= 0.
        self.estimate = estimate
        # Cost charged until now.
        self.charged = 0.0
        self.state = NEW
        self.call = call

    @property
    def waiting(self) -> bool:
        return self.state == WAITING


class _Level:
    """Where entities of one kind compete: the groups of a tier, or the tenants of a group."""

    __slots__ = ("races", "racing", "vt", "weight")

    def __init__(self) -> None:
        # Virtual time: the largest V seen at a pick in any lane.
        self.vt = 0.0
        self.races: dict[Hashable, _Race] = {}
        # Entities that are in a race, and their weights together.
        self.racing = 0
        self.weight = 0.0

    def race(self, lane: Hashable) -> "_Race":
        race = self.races.get(lane)
        if race is None:
            race = self.races[lane] = _Race(self)
        return race


class _Race:
    """One lane at one level.

    The heap holds (V, age, line). An entry is live when it is its line's own `entry`. V only rises without the heap
    being told; an entry that comes to the top too early is put where it belongs. When V falls a new entry is pushed
    and the old one is dead. The lane has its own virtual time: where one lane is stuck and another flows, those who
    join the stuck one must not queue behind everything that the other served.
    """

    __slots__ = ("heap", "level", "live", "vt")

    def __init__(self, level: _Level) -> None:
        self.level = level
        self.heap: list[tuple[float, int, _Line]] = []
        self.live = 0
        self.vt = level.vt

    def push(self, key: float, age: int, line: "_Line") -> None:
        line.entry = entry = (key, age, line)
        heap = self.heap
        heappush(heap, entry)
        if len(heap) > 3 * self.live + DEAD_KEPT_MIN:
            self.heap = [entry for entry in heap if entry[2].entry is entry]
            heapify(self.heap)


class _Line:
    """One entity's place in one race; a tenant's also holds its tickets."""

    __slots__ = ("entity", "entry", "left", "lift", "race", "tickets", "upper", "waiting")

    def __init__(self, entity: "_Entity", race: _Race, upper: "_Line | None") -> None:
        self.entity = entity
        self.race = race
        # The line of a tenant's group in the same lane; a group's own has none.
        self.upper = upper
        # Its live entry in the race's heap; None while it has nothing to start or may not start anything.
        self.entry: tuple[float, int, _Line] | None = None
        # What it stands above its entity's V in this lane: one that waits in a slow lane and joins a fast one starts
        # level with the fast one, and keeps its place in the slow one.
        self.lift = 0.0
        # Where its last start here left it, if it had a lift then: the debt it comes back with.
        self.left = 0.0
        # Sorted by age. Cancelled tickets stay until they come to the front or outnumber the others.
        self.tickets: deque[Ticket] = deque()
        self.waiting = 0

    def enter(self, age: int) -> None:
        """Its entity has something to start here: it is level with whom it meets, or keeps its debt."""
        entity, race = self.entity, self.race
        level = race.level
        if not race.live and race.vt < level.vt:
            race.vt = level.vt
        floor = race.vt if race.vt > self.left else self.left
        v = entity.v
        if not entity.racing:
            level.racing += 1
            level.weight += entity.weight
            if v < floor:
                entity.v = entity.v_started = v = floor
                entity.race = race
        elif v < floor:
            self.lift = floor - v
            if v < entity.v_started:
                entity.v_started = v
        entity.racing += 1
        race.live += 1
        race.push(v + self.lift, age, self)

    def leave(self) -> None:
        """Its entity has nothing to start here any more, or may not."""
        entity, race = self.entity, self.race
        heap = race.heap
        if heap[0] is self.entry:
            heappop(heap)
        self.entry = None
        self.lift = 0.0
        race.live -= 1
        entity.racing -= 1
        if not entity.racing:
            level = race.level
            level.racing -= 1
            # No rounding may outlive the entities it came from.
            level.weight = level.weight - entity.weight if level.racing else 0.0

    def head(self) -> Ticket:
        """The oldest waiting ticket; there must be one."""
        tickets = self.tickets
        while tickets[0].state != WAITING:
            tickets.popleft()
        return tickets[0]

    def charge(self, cost: float) -> None:
        """Its entity was picked here: virtual time moves to it, and it pays."""
        entity, race = self.entity, self.race
        v = entity.v
        key = v + self.lift
        if race.vt < key < inf:
            race.vt = key
            if race.level.vt < key:
                race.level.vt = key
        step = cost / entity.divisor
        entity.v = entity.v_started = v + step
        entity.race = race
        if step > entity.estimate_max:
            entity.estimate_max = step
        if self.lift:
            self.left = key + step


class _Entity:
    """A tenant's account or a group: what competes at a level."""

    __slots__ = (
        "divisor",
        "estimate_max",
        "lines",
        "over_max",
        "peak",
        "race",
        "racing",
        "under_max",
        "v",
        "v_started",
        "weight",
    )

    def __init__(self, weight: float) -> None:
        self.weight = weight
        # Weight 0 stands at infinity, after everybody else, and no charge moves it.
        self.divisor = weight or inf
        self.v = 0.0 if weight else inf
        self.lines: dict[Hashable, _Line] = {}
        # How many of its lines are in their race.
        self.racing = 0
        # For the bound, all in units of V. Where V was set last other than by a correction, and in which race (None:
        # when nothing waited); the largest V; E, O and R.
        self.v_started = self.v
        self.race: _Race | None = None
        self.peak = self.v
        self.estimate_max = 0.0
        self.under_max = 0.0
        self.over_max = 0.0

    def correct_up(self, cost: float) -> None:
        self.v += cost / self.divisor
        under = self.v - self.v_started
        if under > self.under_max:
            self.under_max = under

    def correct_down(self, cost: float) -> None:
        v = self.v
        if v > self.peak:
            self.peak = v
        self.v = v = v - cost / self.divisor
        over = self.peak - v
        if over > self.over_max:
            self.over_max = over
        if self.racing:
            for line in self.lines.values():
                entry = line.entry
                if entry is not None and v + line.lift < entry[0]:
                    line.race.push(v + line.lift, entry[1], line)


class _Group(_Entity):
    __slots__ = ("age", "idle", "inside", "longest", "longest_min", "name", "served", "tier", "waiting")

    def __init__(self, name: str, weight: float, tier: "_Tier") -> None:
        super().__init__(weight)
        self.name = name
        self.tier = tier
        # Its tenants compete here.
        self.inside = _Level()
        # Among groups of equal V the lowest goes first: the age of the ticket that made it backlogged, then of its
        # last pick.
        self.age = 0
        self.waiting = 0
        # True cost of all that has finished.
        self.served = 0.0
        # Heap of (V, age, account) of the tenants that have neither waiting nor running tickets. V may have changed.
        self.idle: list[tuple[float, int, _Account]] = []
        # Heap of (-waiting per weight, age, account), made when the queue overflows and given up when this group
        # has less than `longest_min` waiting. An entry may claim more than is true, never less.
        self.longest: list[tuple[float, int, _Account]] | None = None
        self.longest_min = 0

    def forget_idle(self) -> None:
        """Forgets up to two tenants without debt; where nothing waits, the least indebted of too many.

        Twice what one call can add, so that memory returns without a pause in which it is cleared.
        """
        idle, inside = self.idle, self.inside
        for _ in range(2):
            if len(idle) <= IDLE_KEPT_MAX:
                return
            floor = inside.vt
            if inside.racing:
                floor = min(race.vt for race in inside.races.values() if race.live)
                if idle[0][0] > floor:
                    return
            _, age, account = idle[0]
            if account.in_flight or account.has_waiting():
                heappop(idle)
                account.parked = False
            elif account.v > floor and account.v != idle[0][0] and account.v < inf:
                heapreplace(idle, (account.v, age, account))
            elif account.v <= floor or account.v == inf or not self.waiting:
                heappop(idle)
                if floor < account.v < inf:
                    inside.vt = account.v
                del self.tier.accounts[account.tenant]


class _Account(_Entity):
    """A tenant in one tier of one queue."""

    __slots__ = ("age", "group", "in_flight", "parked", "tenant")

    def __init__(self, tenant: Tenant, group: _Group) -> None:
        super().__init__(tenant.weight)
        self.tenant = tenant
        self.group = group
        self.age = next(_sequence)
        # Started through this account and not ended.
        self.in_flight = 0
        # Whether it has an entry in its group's `idle`.
        self.parked = False

    def line(self, lane: Hashable) -> _Line:
        """Its line in a lane, made when there is none."""
        line = self.lines.get(lane)
        if line is None:
            group = self.group
            upper = group.lines.get(lane)
            if upper is None:
                upper = group.lines[lane] = _Line(group, group.tier.level.race(lane), None)
            line = self.lines[lane] = _Line(self, group.inside.race(lane), upper)
        return line

    def has_waiting(self) -> bool:
        for line in self.lines.values():
            if line.waiting:
                return True
        return False

    def waiting(self) -> int:
        return sum(line.waiting for line in self.lines.values())

    def park(self) -> None:
        """Notes that it may be forgotten, if nothing of it waits or runs."""
        if not self.in_flight and not self.racing and not self.has_waiting():
            group = self.group
            if not self.parked:
                self.parked = True
                heappush(group.idle, (self.v, self.age, self))
            if len(group.idle) > IDLE_KEPT_MAX:
                group.forget_idle()


class _Tier:
    __slots__ = ("accounts", "credit", "estimate_max", "groups", "index", "level", "min_share", "name", "queue")

    def __init__(self, index: int, tier: Tier, queue: "FairQueue") -> None:
        self.index = index
        self.name = tier.name
        self.queue = queue
        self.level = _Level()
        self.groups = {group.name: _Group(group.name, group.weight, self) for group in tier.groups}
        self.accounts: dict[Tenant, _Account] = {}
        # The floor: what it earns of each cost started above it while it waits, what it has earned, and the largest
        # estimate it ever had, which is as much as it may save up.
        self.min_share = tier.min_share
        self.credit = 0.0
        self.estimate_max = 0.0

    def account(self, tenant: Tenant) -> _Account:
        """The tenant's account, made when there is none. A group this tier does not list has weight 1."""
        account = self.accounts.get(tenant)
        if account is None:
            group = self.groups.get(tenant.group)
            if group is None:
                group = self.groups[tenant.group] = _Group(tenant.group, 1.0, self)
            account = self.accounts[tenant] = _Account(tenant, group)
        return account

    def pick(self, lanes: Collection[Hashable] | None) -> Ticket | None:
        """The ticket that goes next among these lanes: least V of the groups, then least V of its tenants.

        In a lane a group and then a tenant is chosen by their place in that lane. Only when a group stands equally
        in several lanes do its tenants compete over all of them.
        """
        races = self.level.races
        if lanes is None:
            if len(races) == 1:
                for lane, race in races.items():
                    top = self._top_group(race, lane)
                    return top.head() if top is not None else None
            lanes = races
        best: tuple[float, int, _Line] | None = None
        chosen: _Line | None = None
        for lane in lanes:
            lane_race = races.get(lane)
            if lane_race is None or not lane_race.live:
                continue
            line = self._top_group(lane_race, lane)
            if line is None:
                continue
            entry = lane_race.heap[0]
            if best is None or entry[:2] < best[:2]:
                best, chosen = entry, line
            elif entry[:2] == best[:2]:
                assert line.entry is not None and chosen is not None and chosen.entry is not None
                if line.entry[:2] < chosen.entry[:2]:
                    best, chosen = entry, line
        return chosen.head() if chosen is not None else None

    def _top_group(self, race: _Race, lane: Hashable) -> _Line | None:
        """The line of the tenant that goes next in this lane; its group is then at the top of `race`."""
        while race.live:
            heap = race.heap
            entry = heap[0]
            line = entry[2]
            if line.entry is not entry:
                heappop(heap)
                continue
            group = line.entity
            assert isinstance(group, _Group)
            key = group.v + line.lift
            if key != entry[0] or group.age != entry[1]:
                line.entry = entry = (key, group.age, line)
                heapreplace(heap, entry)
                continue
            top = self._top_tenant(group.inside.races[lane])
            if top is not None:
                return top
        return None

    def _top_tenant(self, race: _Race) -> _Line | None:
        """The line of the tenant that goes next in its group; it is then at the top of `race`."""
        while race.live:
            heap = race.heap
            entry = heap[0]
            line = entry[2]
            if line.entry is not entry:
                heappop(heap)
                continue
            head = line.tickets[0]
            if head.state != WAITING:
                head = line.head()
            tenant = head.tenant
            if tenant.concurrency is not None and tenant.in_flight >= tenant.concurrency:
                # It reached its concurrency through another queue.
                self.queue._leave(line)
                continue
            key = line.entity.v + line.lift
            if key != entry[0] or head.sequence != entry[1]:
                line.entry = entry = (key, head.sequence, line)
                heapreplace(heap, entry)
                continue
            return line
        return None


class FairQueue:
    """What waits before one pool of workers. Owned by the scheduler; not safe to enter from two threads."""

    __slots__ = ("_floors", "_fresh", "_next", "_tiers", "waiting")

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = [_Tier(index, tier, self) for index, tier in enumerate(tiers)]
        self._floors = [tier for tier in self._tiers[1:] if tier.min_share > 0.0]
        # Tickets that wait; cancelled ones are not counted.
        self.waiting = 0
        # What `peek()` last found, and whether nothing has changed since.
        self._next: Ticket | None = None
        self._fresh = True

    # -- in and out ----------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Puts a new ticket at the end of its tenant's queue."""
        if ticket.state != NEW:
            raise ValueError("A ticket can be submitted once; make a new one.")
        tenant = ticket.tenant
        account = self._tiers[ticket.tier].account(tenant)
        line = account.lines.get(ticket.lane) or account.line(ticket.lane)
        ticket.account = account
        ticket.sequence = next(_sequence)
        line.tickets.append(ticket)
        self._count_in(ticket, line)
        if line.entry is None and (tenant.concurrency is None or tenant.in_flight < tenant.concurrency):
            self._enter(line)

    def peek(self, lanes: Collection[Hashable] | None = None) -> Ticket | None:
        """The ticket that goes next among those that wait in these lanes, None if none may start.

        1. A lower tier whose credit covers its next ticket goes first (`min_share`).
        2. Else the first tier that has anything to start in these lanes.
        """
        if lanes is None and self._fresh:
            ticket = self._next
            if ticket is None:
                return None
            tenant = ticket.tenant
            if tenant.concurrency is None or tenant.in_flight < tenant.concurrency:
                return ticket
        ticket = self._pick(lanes)
        if lanes is None:
            self._next = ticket
            self._fresh = True
        return ticket

    def start(self, ticket: Ticket) -> None:
        """Takes out what `peek` returned, and charges its estimate to its tenant and its group."""
        if ticket.state != WAITING:
            raise ValueError("Only a waiting ticket can start.")
        tenant, account = ticket.tenant, ticket.account
        line = account.lines[ticket.lane]
        upper = line.upper
        if line.head() is not ticket or line.entry is None or upper is None:
            raise ValueError("Only the ticket that `peek` returned can start.")
        self._fresh = False
        line.tickets.popleft()
        line.waiting -= 1
        group = account.group
        group.waiting -= 1
        self.waiting -= 1
        tenant.queued -= 1
        tenant.in_flight += 1
        account.in_flight += 1
        ticket.state = STARTED
        ticket.charged = cost = ticket.estimate
        upper.charge(cost)
        group.age = next(_sequence)
        line.charge(cost)
        if self._floors:
            self._credit(group.tier, cost)
        if not line.waiting:
            self._leave(line)
        if tenant.concurrency is not None and tenant.in_flight >= tenant.concurrency:
            self._hold(tenant)

    def start_now(self, ticket: Ticket) -> bool:
        """Starts a new ticket if nothing waits in this queue and its tenant may; else False, and nothing is done.

        The same as `submit`, `peek` and `start`, without the heaps.
        """
        if self.waiting or ticket.state:
            return False
        tenant = ticket.tenant
        if tenant.concurrency is not None and tenant.in_flight >= tenant.concurrency:
            return False
        tier = self._tiers[ticket.tier]
        account = tier.accounts.get(tenant)
        if account is None:
            account = tier.account(tenant)
        group = account.group
        cost = ticket.estimate

        # The group, then the tenant: level with virtual time, or virtual time with it; then it pays.
        level = tier.level
        v = group.v
        if v < level.vt:
            v = level.vt
        elif v < inf:
            level.vt = v
        step = cost / group.divisor
        group.v = group.v_started = v + step
        group.race = None
        if step > group.estimate_max:
            group.estimate_max = step

        level = group.inside
        v = account.v
        if v < level.vt:
            v = level.vt
        elif v < inf:
            level.vt = v
        step = cost / account.divisor
        account.v = account.v_started = v + step
        account.race = None
        if step > account.estimate_max:
            account.estimate_max = step

        group.age = ticket.sequence = next(_sequence)
        tenant.in_flight += 1
        account.in_flight += 1
        ticket.account = account
        ticket.state = STARTED
        ticket.charged = cost
        return True

    def cancel(self, ticket: Ticket) -> None:
        """Takes a waiting ticket out; nothing was charged. One that does not wait stays as it is."""
        if ticket.state != WAITING:
            return
        account = ticket.account
        queue = account.group.tier.queue
        queue._fresh = False
        ticket.state = ENDED
        line = account.lines[ticket.lane]
        line.waiting -= 1
        account.group.waiting -= 1
        queue.waiting -= 1
        ticket.tenant.queued -= 1
        tickets = line.tickets
        if not line.waiting:
            tickets.clear()
            if line.entry is not None:
                queue._leave(line)
            account.park()
        elif len(tickets) > 2 * line.waiting + DEAD_KEPT_MIN:
            line.tickets = deque([ticket for ticket in tickets if ticket.state == WAITING])

    def give_back(self, ticket: Ticket) -> None:
        """A started ticket that never ran: to the head of its tenant's queue, its charge returned.

        A tenant that had gone idle meanwhile is first levelled and then refunded, so that it is not behind where it
        would be had the ticket never started, nor ahead by more than the refund.
        """
        if ticket.state != STARTED:
            raise ValueError("Only a started ticket can be given back.")
        tenant, account = ticket.tenant, ticket.account
        former = account.group.tier.queue
        charged = ticket.charged
        ticket.charged = 0.0
        tenant.in_flight -= 1
        account.in_flight -= 1
        former._fresh = False
        self._fresh = False
        if former is not self:
            account.correct_down(charged)
            account.group.correct_down(charged)
            account.park()
            ticket.account = account = self._tiers[ticket.tier].account(tenant)
            charged = 0.0
        line = account.line(ticket.lane)
        tickets = line.tickets
        place = 0
        while place < len(tickets) and tickets[place].sequence < ticket.sequence:
            place += 1
        tickets.insert(place, ticket)
        self._count_in(ticket, line)
        self.resume(tenant)
        group = account.group
        group.correct_down(charged)
        account.correct_down(charged)
        upper = line.upper
        assert upper is not None
        if ticket.sequence < group.age:
            group.age = ticket.sequence
        for older in (line, upper):
            entry = older.entry
            if entry is not None and ticket.sequence < entry[1]:
                older.race.push(older.entity.v + older.lift, ticket.sequence, older)

    # -- while it runs -------------------------------------------------------------------------------------------

    def progress(self, ticket: Ticket, cost: float) -> None:
        """Charges a started ticket up to `cost` in all, never down."""
        more = cost - ticket.charged
        if more > 0.0 and ticket.state == STARTED:
            ticket.charged = cost
            account = ticket.account
            group = account.group
            group.tier.queue._fresh = False
            group.correct_up(more)
            account.correct_up(more)

    def finish(self, ticket: Ticket, cost: float) -> None:
        """Ends a started ticket and corrects its charge to its true cost. One that does not run stays as it is."""
        if ticket.state != STARTED:
            return
        ticket.state = ENDED
        tenant, account = ticket.tenant, ticket.account
        group = account.group
        more = cost - ticket.charged
        if more:
            ticket.charged = cost
            group.tier.queue._fresh = False
            if more > 0.0:
                group.correct_up(more)
                account.correct_up(more)
            else:
                group.correct_down(-more)
                account.correct_down(-more)
        tenant.in_flight -= 1
        tenant.served += cost
        group.served += cost
        account.in_flight -= 1
        if tenant.concurrency is not None:
            self.resume(tenant)
        if not account.in_flight and not account.racing:
            if not account.parked:
                account.park()
            elif len(group.idle) > IDLE_KEPT_MAX:
                group.forget_idle()

    def resume(self, tenant: Tenant) -> None:
        """The tenant went under its concurrency, here or in another queue: its tickets compete again.

        It comes back as one that becomes backlogged does, at max(V, virtual time): what it could not use while it
        was full is not saved up, and the age of its tickets still decides between equals.
        """
        if tenant.concurrency is not None and tenant.in_flight >= tenant.concurrency:
            return
        for tier in self._tiers:
            account = tier.accounts.get(tenant)
            if account is not None:
                for line in account.lines.values():
                    if line.waiting and line.entry is None:
                        self._enter(line)

    # -- when it is too much -------------------------------------------------------------------------------------

    def shed(self, tier_above: int) -> Ticket | None:
        """Cancels and returns the newest ticket of the longest queue per weight in the lowest tier that waits.

        None if that tier is above `tier_above`. Longest is decided among groups, then among the tenants of one; a
        group's queues are ranked when this is first called, at less than it cost to fill them, and the ranking is
        kept up until half of them is gone.
        """
        for tier in reversed(self._tiers):
            if tier.index < tier_above:
                break
            groups = [group for group in tier.groups.values() if group.waiting]
            if groups:
                ticket = self._newest_of_longest(max(groups, key=_waiting_per_weight))
                self.cancel(ticket)
                return ticket
        return None

    def wait_estimate_s(self, tenant: Tenant, tier: int, rate: float) -> float:
        """Seconds until what the tenant has waiting is served, if all that wait now go on waiting.

        Its cost, times how much of its group's and of its tier's weight is not its own, by the cost per second.
        """
        if not rate > 0.0:
            return WAIT_UNKNOWN_S
        account = self._tiers[tier].accounts.get(tenant)
        if account is None:
            return 0.0
        # Tickets of one tenant cost about the same: its oldest stands for the rest, or all would be looked at.
        cost = sum(line.waiting * line.head().estimate for line in account.lines.values() if line.waiting)
        if not cost:
            return 0.0
        group = account.group
        inside, among = group.inside.weight, group.tier.level.weight
        parts = max(1.0, inside / account.divisor) * max(1.0, among / group.divisor)
        return cost * parts / rate

    # -- for display ---------------------------------------------------------------------------------------------

    def bound_ratio(self) -> float:
        """How much of the fairness bound is used by the worst pair that waits in one lane. Above 1 is a defect."""
        worst = 0.0
        for tier in self._tiers:
            for level in (tier.level, *(group.inside for group in tier.groups.values())):
                for race in level.races.values():
                    worst = max(worst, _worst_pair(race))
        return worst

    def snapshot(self) -> list[dict[str, Any]]:
        """Tiers, their groups, and the tenants that are remembered, as plain data."""
        tiers = []
        for tier in self._tiers:
            groups: dict[str, dict[str, Any]] = {
                group.name: {
                    "name": group.name,
                    "weight": group.weight,
                    "waiting": group.waiting,
                    "in_flight": 0,
                    "virtual_time": group.v if group.v < inf else None,
                    "served_cost": group.served,
                    "tenants": [],
                }
                for group in tier.groups.values()
            }
            for account in tier.accounts.values():
                group = groups[account.group.name]
                group["in_flight"] += account.in_flight
                group["tenants"].append(
                    {
                        "name": account.tenant.name,
                        "weight": account.weight,
                        "waiting": account.waiting(),
                        "in_flight": account.in_flight,
                        "virtual_time": account.v if account.v < inf else None,
                        "served_cost": account.tenant.served,
                    }
                )
            tiers.append(
                {
                    "name": tier.name,
                    "min_share": tier.min_share,
                    "credit": tier.credit,
                    "groups": list(groups.values()),
                }
            )
        return tiers

    # -- parts ---------------------------------------------------------------------------------------------------

    def _pick(self, lanes: Collection[Hashable] | None) -> Ticket | None:
        for tier in self._floors:  # (1)
            if tier.credit > 0.0 and tier.level.racing:
                ticket = tier.pick(lanes)
                if ticket is not None and ticket.estimate <= tier.credit:
                    return ticket
        for tier in self._tiers:  # (2)
            if tier.level.racing:
                ticket = tier.pick(lanes)
                if ticket is not None:
                    return ticket
        return None

    def _count_in(self, ticket: Ticket, line: _Line) -> None:
        group = ticket.account.group
        ticket.state = WAITING
        line.waiting += 1
        group.waiting += 1
        self.waiting += 1
        ticket.tenant.queued += 1
        if self._floors and ticket.estimate > group.tier.estimate_max:
            group.tier.estimate_max = ticket.estimate
        if group.longest is not None:
            account = ticket.account
            heappush(group.longest, (-account.waiting() * (1 / account.weight if account.weight else inf), account.age, account))

    def _enter(self, line: _Line) -> None:
        """A tenant's line joins its race, and its group's line the one above."""
        self._fresh = False
        age = line.head().sequence
        upper = line.upper
        assert upper is not None
        if upper.entry is None:
            group = upper.entity
            assert isinstance(group, _Group)
            if not group.racing:
                group.age = age
            upper.enter(group.age)
        line.enter(age)

    def _leave(self, line: _Line) -> None:
        """A tenant's line leaves its race, and its group's line the one above if it was the last."""
        line.leave()
        if not line.race.live:
            upper = line.upper
            assert upper is not None
            upper.leave()
            if not upper.race.level.racing:
                group = upper.entity
                assert isinstance(group, _Group)
                group.tier.credit = 0.0

    def _hold(self, tenant: Tenant) -> None:
        """The tenant is at its concurrency: none of its lines competes until `resume`."""
        for tier in self._tiers:
            account = tier.accounts.get(tenant)
            if account is not None and account.racing:
                for line in account.lines.values():
                    if line.entry is not None:
                        self._leave(line)

    def _credit(self, started: _Tier, cost: float) -> None:
        """Lower tiers that wait earn their share of what started above them; one that is served pays."""
        for tier in self._floors:
            if tier is started:
                tier.credit = max(0.0, tier.credit - cost)
            elif tier.index > started.index and tier.level.racing:
                tier.credit = min(tier.credit + tier.min_share * cost, tier.estimate_max)

    def _newest_of_longest(self, group: _Group) -> Ticket:
        longest = group.longest
        if longest is None or group.waiting < group.longest_min or len(longest) > 2 * group.waiting + DEAD_KEPT_MIN:
            longest = [
                (-_waiting_per_weight(account), account.age, account)
                for account in group.tier.accounts.values()
                if account.group is group and account.has_waiting()
            ]
            heapify(longest)
            group.longest = longest
            group.longest_min = group.waiting // 2
        while True:
            claimed, age, account = longest[0]
            if not account.has_waiting():
                heappop(longest)
            elif claimed != -_waiting_per_weight(account):
                heapreplace(longest, (-_waiting_per_weight(account), age, account))
            else:
                return _newest(account)


def _waiting_per_weight(entity: _Group | _Account) -> float:
    waiting = entity.waiting if isinstance(entity, _Group) else entity.waiting()
    return waiting / entity.weight if entity.weight else inf


def _newest(account: _Account) -> Ticket:
    newest: Ticket | None = None
    for line in account.lines.values():
        if line.waiting:
            tickets = line.tickets
            while tickets[-1].state != WAITING:
                tickets.pop()
            if newest is None or tickets[-1].sequence > newest.sequence:
                newest = tickets[-1]
    assert newest is not None
    return newest


def _worst_pair(race: _Race) -> float:
    """The largest (V_i - V_j) / (E_i + O_i + R_j) of a race, by Dinkelbach's iteration: a few passes, not all pairs.

    As first of a pair counts who was last picked or levelled in this lane: one served through another lane may be
    ahead in this one by all that it got there.
    """
    lines = [entry[2] for entry in race.heap if entry[2].entry is entry and entry[2].entity.v < inf]
    behind = [(line.entity.v + line.lift, line.entity.over_max) for line in lines]
    ahead = [
        (line.entity.v + line.lift, line.entity.estimate_max + line.entity.under_max)
        for line in lines
        if line.entity.race is race or line.entity.race is None
    ]
    if not ahead:
        return 0.0
    ratio = 0.0
    while True:
        first = max(ahead, key=lambda one: one[0] - ratio * one[1])
        second = min(behind, key=lambda one: one[0] + ratio * one[1])
        bound = first[1] + second[1]
        # What rounding may have done to sums of this size is no debt.
        gap = first[0] - second[0] - 1e-12 * max(1.0, abs(first[0]), abs(second[0]))
        if gap <= 0.0:
            return ratio
        worse = gap / bound if bound else inf
        if worse <= ratio or worse == inf:
            return max(worse, ratio)
        ratio = worse

"""The fair queue: whose turn it is, by tiered start-time fair queueing with charge and correction.

What it is. Tiers are strict. In a tier groups compete, and in a group its tenants, each level by the same rule:
an entity of weight w has a counter V, the cost it was charged divided by w, and the least V goes next. A ticket is
charged its estimate when it starts, and corrected to its true cost while it runs and when it ends. An entity that
becomes backlogged starts at max(V, virtual time), where virtual time is the largest V seen at a pick.

What it promises. Equal inputs give equal order. A tenant's tickets start in the order they came. Something starts
whenever anything may. For two tenants i, j of a group that both wait, V_i - V_j <= (E_i + O_i)/w_i + R_j/w_j, where
E is the largest estimate started, O and R the largest under- and over-estimate in flight; the same for groups of a
tier. No call looks at all tenants or all tickets, save those that say so.

What it never does: wait, read a clock, draw a random number, lock, log, look at a prompt, or know a worker.

Words used below. A *lane* is a class of tickets that can run on the same workers. A *race* is one lane at one level:
the entities that have something to start there. A *line* is one entity's place in one race.
"""

import sys
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Any

# A tenant without tickets is remembered while it has debt. So many in a group are kept even without, since making
# an account costs more than a decision. Beyond it they are forgotten, and where nothing waits the least debts too.
IDLE_KEPT_MAX = 256
# A heap or a tenant's queue may hold so many dead entries before it is worth while to count them.
DEAD_KEPT_MIN = 16
# What a caller is told while nothing is known of how fast the pool serves.
WAIT_UNKNOWN_S = 1.0
# Virtual time beyond which a level starts again at zero as soon as nothing waits there: a float has 53 bits.
VIRTUAL_TIME_MAX = 2.0**32

# What a lowered group weighs against the least of those whose tier it is.
GUEST_SHARE = 1 / 128
# Tickets that one call moves up at most, so that a crowd does not hold up everything else.
PROMOTED_MAX = 1000

NEW, WAITING, STARTED, ENDED = range(4)

# (V, age, line) in the heap of a race. Not typed as a tuple: see `_Race.heap`.
_Entry = Any

# Numbers tickets over all queues, so that a ticket keeps its age when pools are regrouped.
_sequence = count(1)


def _new_entry(key: float, age: int, line: "_Line") -> _Entry:
    """One object, whoever holds it."""
    return (key, age, line)


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
    """Groups that go before those of every later tier.

    Of a lower tier, `min_share` is the floor, 0 is none; and `max_wait_s` is how long a ticket waits there at most
    before it is moved up to the next tier, None is for ever.
    """

    name: str
    min_share: float = 0.0
    groups: tuple[Group, ...] = ()
    max_wait_s: float | None = None


class Ticket:
    """A call's place in the queue. One object per call: from `submit` or `start_now` to `finish` or `cancel`."""

    __slots__ = (
        "account",
        "ask",
        "call",
        "charged",
        "estimate",
        "lane",
        "length",
        "prompt_work",
        "sequence",
        "since_s",
        "slots",
        "state",
        "tenant",
        "tier",
        "tokens",
    )

    # Who the ticket is charged to; set by the queue that took it, which need not be the one that ends it.
    account: "_Account"
    # Its age: lower is older.
    sequence: int

    def __init__(
        self, tenant: Tenant, tier: int, lane: Any, slots: int, estimate: float, call: Any = None
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
        # Tokens that it is thought to keep in a worker's memory; for placement, not read by the queue.
        self.tokens = 0.0
        # The part of the estimate that its prompt makes; for placement, too.
        self.prompt_work = 0.0
        # What else placement is told of it; None when that would change nothing.
        self.ask: Any = None
        # How much it adds to the length of a queue: 1 and something for the size of its body.
        self.length = 1.0
        # When it came into its tier, in seconds; read only where a tier has a `max_wait_s`.
        self.since_s = 0.0

    @property
    def waiting(self) -> bool:
        return self.state == WAITING

    @property
    def tier_name(self) -> str:
        """Of the queue that took it, which a reload may have replaced."""
        return self.account.group.tier.name


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

    def restart(self, entities: "Iterable[_Entity]") -> None:
        """Puts virtual time at zero and everybody's V as far from it as it was. Nothing may be in a race."""
        past = self.vt
        self.vt = 0.0
        for race in self.races.values():
            race.vt = 0.0
            race.heap.clear()
        for entity in entities:
            entity.v -= past
            entity.v_started -= past
            entity.peak -= past
            for line in entity.lines.values():
                line.left -= past


class _Race:
    """One lane at one level.

    The heap holds (V, age, line). An entry is live when it is its line's own `entry`. V may rise without the heap
    being told: an entry that comes to the top too early is then put where it belongs. When V falls a new entry is
    pushed and the old one is dead; the heap is built anew when the dead outnumber the live two to one.

    A lane has its own virtual time, which follows the level's only while nothing waits in the lane. Where one lane
    is stuck and another flows, those who come to the stuck one need not queue behind all that the other served.
    """

    __slots__ = ("heap", "level", "live", "vt")

    def __init__(self, level: _Level) -> None:
        self.level = level
        # Of `_Entry`: an entry is known by its identity, which a compiler that unpacks tuples would lose.
        self.heap: list[_Entry] = []
        self.live = 0
        self.vt = level.vt

    def push(self, key: float, age: int, line: "_Line") -> None:
        line.entry = entry = _new_entry(key, age, line)
        heap = self.heap
        heappush(heap, entry)
        if len(heap) > 3 * self.live + DEAD_KEPT_MIN:
            self.heap = [entry for entry in heap if entry[2].entry is entry]
            heapify(self.heap)

    def top_group(self) -> "_Line | None":
        """Of the groups in this race: the line of the tenant that goes next. Its group is then on top."""
        while self.live:
            heap = self.heap
            entry = heap[0]
            line: _Line = entry[2]
            if line.entry is not entry:
                heappop(heap)
                continue
            group = line.group
            key = group.v + line.lift
            if key != entry[0] or group.age != entry[1]:
                line.entry = entry = _new_entry(key, group.age, line)
                heapreplace(heap, entry)
                if heap[0] is not entry:
                    continue
            assert line.inner is not None
            top = line.inner.top_tenant()
            if top is not None:
                return top
        return None

    def top_tenant(self) -> "_Line | None":
        """Of the tenants in this race: the line of the one that goes next. It is then on top."""
        while self.live:
            heap = self.heap
            entry = heap[0]
            line: _Line = entry[2]
            if line.entry is not entry:
                heappop(heap)
                continue
            head = line.tickets[0]
            if head.state != WAITING:
                head = line.head()
            tenant = head.tenant
            if tenant.concurrency is not None and tenant.in_flight >= tenant.concurrency:
                # It got there through another queue.
                line.withdraw()
                continue
            key = line.entity.v + line.lift
            if key != entry[0] or head.sequence != entry[1]:
                line.entry = entry = _new_entry(key, head.sequence, line)
                heapreplace(heap, entry)
                if heap[0] is not entry:
                    continue
            return line
        return None


class _Line:
    """One entity's place in one race; a tenant's also holds its tickets."""

    __slots__ = (
        "cost",
        "entity",
        "entry",
        "group",
        "inner",
        "left",
        "length",
        "lift",
        "race",
        "tickets",
        "upper",
        "waiting",
    )

    def __init__(
        self,
        entity: "_Entity",
        group: "_Group",
        race: _Race,
        upper: "_Line | None",
        inner: _Race | None,
    ) -> None:
        self.entity = entity
        # The tenant's group, or the group itself.
        self.group = group
        self.race = race
        # Of a tenant's line: its group's line in the same lane. Of a group's: the race of its tenants in that lane.
        self.upper = upper
        self.inner = inner
        # Its live entry in the race's heap; None while it has nothing to start, or may not start anything.
        self.entry: _Entry = None
        # How far it stands above its entity's V in this lane. One that waits in a slow lane and joins a fast one
        # starts level with the fast one, yet keeps its place in the slow one.
        self.lift = 0.0
        # Where its last start here put it, if it had a lift then: the debt it comes back with.
        self.left = 0.0
        # Oldest first. Cancelled ones stay until they come to the front or outnumber the others.
        self.tickets: deque[Ticket] = deque()
        # How many of them wait; their estimates and lengths together.
        self.waiting = 0
        self.cost = 0.0
        self.length = 0.0

    def head(self) -> Ticket:
        """The oldest waiting ticket; there must be one."""
        tickets = self.tickets
        while tickets[0].state != WAITING:
            tickets.popleft()
        return tickets[0]

    def join(self) -> None:
        """A tenant may start something here: it joins its race, and its group the one above."""
        age = self.head().sequence
        upper, group = self.upper, self.group
        assert upper is not None
        if upper.entry is None:
            if not group.racing:
                group.age = age
                tier = group.tier
                if not tier.level.racing and tier.level.vt > VIRTUAL_TIME_MAX:
                    tier.level.restart(tier.groups.values())
            upper.enter(group.age)
            if not group.inside.racing and group.inside.vt > VIRTUAL_TIME_MAX:
                group.restart()
        self.enter(age)

    def withdraw(self) -> None:
        """A tenant has nothing to start here, or may not: it leaves its race, and its group if it was the last."""
        self.leave()
        upper = self.upper
        if not self.race.live and upper is not None:
            upper.leave()
            if not upper.race.level.racing:
                self.group.tier.credit = 0.0

    def enter(self, age: int) -> None:
        """Joins its race level with whom it meets, or with its debt."""
        entity, race = self.entity, self.race
        level = race.level
        if not race.live and race.vt < level.vt:
            race.vt = level.vt
        floor = race.vt
        if floor < self.left:
            floor = self.left
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
        # For the bound, all in units of V. Where V was last put other than by a correction, and in which race (None:
        # when nothing waited); the largest V before it fell; E, O and R.
        self.v_started = self.v
        self.race: _Race | None = None
        self.peak = self.v
        self.estimate_max = 0.0
        self.under_max = 0.0
        self.over_max = 0.0

    def correct_up(self, cost: float) -> None:
        self.v = v = self.v + cost / self.divisor
        under = v - self.v_started
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
    __slots__ = ("age", "idle", "inside", "length", "name", "ranking", "served", "tier", "waiting")

    def __init__(self, name: str, weight: float, tier: "_Tier") -> None:
        super().__init__(weight)
        self.name = name
        self.tier = tier
        # Its tenants compete here.
        self.inside = _Level()
        # Among groups of equal V the lowest goes first: the age of the ticket that made it backlogged, from then on
        # that of its last pick.
        self.age = 0
        self.waiting = 0
        self.length = 0.0
        # True cost of all that has finished.
        self.served = 0.0
        # Heap of (V, age, account) of tenants without tickets. V may have changed since, and they may have some.
        self.idle: list[tuple[float, int, _Account]] = []
        # Its queues by length, while it overflows.
        self.ranking: _Ranking | None = None

    def forget_idle(self) -> None:
        """Forgets up to two tenants without tickets and debt; where nothing waits, the least indebted of too many.

        One call adds one at most, so memory returns without a pause in which it is cleared.
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
            key, age, account = idle[0]
            v = account.v
            if account.in_flight or account.has_waiting():
                heappop(idle)
                account.parked = False
            elif v > floor and v != key:
                heapreplace(idle, (v, age, account))
            elif v <= floor or not self.waiting:
                heappop(idle)
                if floor < v < inf:
                    inside.vt = v
                del self.tier.accounts[account.tenant]

    def restart(self) -> None:
        """See `_Level.restart`. Rare, and only those are remembered that run something or are too few to matter."""
        past = self.inside.vt
        self.inside.restart(account for account in self.tier.accounts.values() if account.group is self)
        self.idle = [(key - past, age, account) for key, age, account in self.idle]


class _Account(_Entity):
    """A tenant in one tier of one queue."""

    __slots__ = ("age", "group", "in_flight", "parked", "served", "tenant")

    def __init__(self, tenant: Tenant, group: _Group) -> None:
        super().__init__(tenant.weight)
        self.tenant = tenant
        self.group = group
        self.age = next(_sequence)
        # True cost of all that has finished here.
        self.served = 0.0
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
                inner = group.inside.race(lane)
                upper = group.lines[lane] = _Line(group, group, group.tier.level.race(lane), None, inner)
            assert upper.inner is not None
            line = self.lines[lane] = _Line(self, group, upper.inner, upper, None)
        return line

    def has_waiting(self) -> bool:
        return any(line.waiting for line in self.lines.values())

    def waiting(self) -> int:
        return sum(line.waiting for line in self.lines.values())

    def length(self) -> float:
        return sum(line.length for line in self.lines.values())

    def newest(self) -> Ticket | None:
        """The youngest waiting ticket."""
        newest: Ticket | None = None
        for line in self.lines.values():
            if line.waiting:
                tickets = line.tickets
                while tickets[-1].state != WAITING:
                    tickets.pop()
                if newest is None or tickets[-1].sequence > newest.sequence:
                    newest = tickets[-1]
        return newest

    def park(self) -> None:
        """Notes that it may be forgotten, if nothing of it waits or runs."""
        if not self.in_flight and not self.racing and not self.has_waiting():
            group = self.group
            if not self.parked:
                self.parked = True
                heappush(group.idle, (self.v, self.age, self))
            if len(group.idle) > IDLE_KEPT_MAX:
                group.forget_idle()


class _Ranking:
    """The queues of one group by length per weight, longest first.

    Made when the group first has to shed, from all its queues, and given up when half of what waited then is gone:
    making it costs less than it took to fill them, and who never overflows pays nothing. An entry claims what its
    queue had or more; it is live while it is the queue's own claim.
    """

    __slots__ = ("_claims", "_heap", "waiting_min")

    def __init__(self, accounts: Iterable[_Account], waiting: int) -> None:
        self._claims = {account: _length(account) for account in accounts if account.has_waiting()}
        self._heap = [(-length, account.age, account) for account, length in self._claims.items()]
        heapify(self._heap)
        self.waiting_min = waiting // 2

    def grew(self, account: _Account) -> None:
        """The account has one more waiting."""
        length = _length(account)
        if length > self._claims.get(account, 0.0):
            self._claims[account] = length
            heappush(self._heap, (-length, account.age, account))

    def longest(self) -> _Account:
        """The account with the longest queue; something must wait."""
        heap, claims = self._heap, self._claims
        while True:
            claimed, age, account = heap[0]
            length = _length(account)
            if claims.get(account) != -claimed:
                heappop(heap)
            elif not length:
                heappop(heap)
                del claims[account]
            elif length != -claimed:
                claims[account] = length
                heapreplace(heap, (-length, age, account))
            else:
                return account


def _length(entity: _Group | _Account) -> float:
    """Length of what waits, per weight."""
    length = entity.length if isinstance(entity, _Group) else entity.length()
    if not length:
        return 0.0
    return length / entity.weight if entity.weight else inf


class _Tier:
    __slots__ = (
        "accounts",
        "cost",
        "credit",
        "estimate_max",
        "groups",
        "index",
        "least",
        "level",
        "max_wait_s",
        "min_share",
        "name",
        "queue",
    )

    def __init__(self, index: int, tier: Tier, queue: "FairQueue") -> None:
        self.index = index
        self.name = tier.name
        self.queue = queue
        self.level = _Level()
        self.groups = {group.name: _Group(group.name, group.weight, self) for group in tier.groups}
        self.accounts: dict[Tenant, _Account] = {}
        # The least weight of those that are listed here.
        self.least = min((group.weight for group in tier.groups), default=1.0)
        # The floor: the share it earns of each cost started above it while it waits; what it has earned; and the
        # largest estimate it ever had, which is as much as it may save.
        self.min_share = tier.min_share
        self.credit = 0.0
        self.estimate_max = 0.0
        # How long a ticket waits here before it moves up a tier; None in the highest.
        self.max_wait_s = tier.max_wait_s if index else None
        # Estimates of all that waits here.
        self.cost = 0.0

    def account(self, tenant: Tenant) -> _Account:
        """The tenant's account, made when there is none."""
        account = self.accounts.get(tenant)
        if account is None:
            group = self.groups.get(tenant.group)
            if group is None:
                group = self.groups[tenant.group] = _Group(tenant.group, self._guest_weight(tenant.group), self)
            account = self.accounts[tenant] = _Account(tenant, group)
        return account

    def _guest_weight(self, name: str) -> float:
        """The weight of a group that this tier does not list.

        1. Its tenants have moved up to here: the weight of their own tier.
        2. They were lowered: far less than those whose tier it is, whose floor they would else take, and among
           themselves as in their own tier.
        """
        home, weight, most = self.queue.homes.get(name, (self.index, 1.0, 1.0))
        if home >= self.index:  # (1)
            return weight
        return max(GUEST_SHARE * self.least * weight / most, sys.float_info.min)  # (2)

    def pick(self, lanes: Collection[Hashable] | None) -> Ticket | None:
        """The ticket that goes next among these lanes: least V of the groups, then least V of its tenants.

        Both are chosen by their place in one lane. Where a group stands equally in several, its tenants compete over
        all of these.
        """
        races = self.level.races
        if lanes is None:
            if len(races) == 1:
                for race in races.values():
                    top = race.top_group()
                    return top.head() if top is not None else None
            lanes = races
        best: tuple[float, int] | None = None
        best_inside: tuple[float, int] | None = None
        chosen: _Line | None = None
        for lane in lanes:
            lane_race = races.get(lane)
            if lane_race is None or not lane_race.live:
                continue
            line = lane_race.top_group()
            if line is None or line.entry is None:
                continue
            among, inside = lane_race.heap[0][:2], line.entry[:2]
            if best is None or best_inside is None or (among, inside) < (best, best_inside):
                best, best_inside, chosen = among, inside, line
        return chosen.head() if chosen is not None else None


class FairQueue:
    """What waits before one pool of workers. Owned by the scheduler; not safe to enter from two threads."""

    __slots__ = ("_floors", "_fresh", "_next", "_tiers", "homes", "length", "waiting")

    def __init__(self, tiers: Sequence[Tier]) -> None:
        # Of each group: the index of its tier, its weight, and the largest weight there.
        self.homes = {
            group.name: (index, group.weight, max(other.weight for other in tier.groups))
            for index, tier in reversed(list(enumerate(tiers)))
            for group in tier.groups
        }
        self._tiers = [_Tier(index, tier, self) for index, tier in enumerate(tiers)]
        self._floors = [tier for tier in self._tiers[1:] if tier.min_share > 0.0]
        # Tickets that wait, and their lengths together; cancelled ones are not counted.
        self.waiting = 0
        self.length = 0.0
        # What `peek()` last found, and whether nothing has changed since.
        self._next: Ticket | None = None
        self._fresh = True

    # -- in and out ------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Puts a new ticket at the end of its tenant's queue."""
        if ticket.state:
            raise ValueError("A ticket can be submitted once. Make a new one.")
        tenant, tier, lane = ticket.tenant, self._tiers[ticket.tier], ticket.lane
        account = tier.accounts.get(tenant)
        if account is None:
            account = tier.account(tenant)
        line = account.lines.get(lane)
        if line is None:
            line = account.line(lane)
        ticket.account = account
        ticket.sequence = next(_sequence)
        line.tickets.append(ticket)
        self._count_in(ticket, line)
        if line.entry is None and (tenant.concurrency is None or tenant.in_flight < tenant.concurrency):
            self._fresh = False
            line.join()

    def peek(self, lanes: Collection[Hashable] | None = None) -> Ticket | None:
        """The ticket that goes next among those that wait in these lanes; None if none of them may start.

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
        ticket = self._credited(lanes) if self._floors else None  # (1)
        if ticket is None:
            for tier in self._tiers:  # (2)
                if tier.level.racing:
                    ticket = tier.pick(lanes)
                    if ticket is not None:
                        break
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
        if line.entry is None or upper is None or line.head() is not ticket:
            raise ValueError("Only the ticket that `peek` returned can start.")
        self._fresh = False
        line.tickets.popleft()
        self._count_out(ticket, line)
        tenant.in_flight += 1
        account.in_flight += 1
        ticket.state = STARTED
        ticket.charged = cost = ticket.estimate
        group = account.group
        upper.charge(cost)
        group.age = next(_sequence)
        line.charge(cost)
        if self._floors:
            self._credit(group.tier, cost)
        if not line.waiting:
            line.withdraw()
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
        queue._count_out(ticket, line)
        tickets = line.tickets
        if not line.waiting:
            tickets.clear()
            if line.entry is not None:
                line.withdraw()
            account.park()
        elif len(tickets) > 2 * line.waiting + DEAD_KEPT_MIN:
            line.tickets = deque([ticket for ticket in tickets if ticket.state == WAITING])

    def give_back(self, ticket: Ticket) -> None:
        """A started ticket that never ran: to the head of its tenant's queue, its charge returned.

        A tenant that was not competing meanwhile is first levelled and then refunded: not behind where it would be
        had the ticket never started, nor ahead of the others by more than the refund.
        """
        if ticket.state != STARTED:
            raise ValueError("Only a started ticket can be given back.")
        tenant, account = ticket.tenant, ticket.account
        former = account.group.tier.queue
        charged = ticket.charged
        ticket.charged = 0.0
        tenant.in_flight -= 1
        account.in_flight -= 1
        former._fresh = self._fresh = False
        if former is not self:
            # Pools were regrouped while it ran: it was charged there, and waits here.
            account.group.correct_down(charged)
            account.correct_down(charged)
            account.park()
            ticket.tier = self._tier_like(account.group.tier)
            ticket.account = account = self._tiers[ticket.tier].account(tenant)
            charged = 0.0
        line = account.line(ticket.lane)
        _insert_by_age(line.tickets, ticket)
        self._count_in(ticket, line)
        self.resume(tenant)
        group = account.group
        group.correct_down(charged)
        account.correct_down(charged)
        if ticket.sequence < group.age:
            group.age = ticket.sequence
        # Its tenant is older again in this lane, its group in every one.
        for older in (line, *group.lines.values()):
            if older.entry is not None and ticket.sequence < older.entry[1]:
                older.race.push(older.entity.v + older.lift, ticket.sequence, older)

    def _tier_like(self, other: _Tier) -> int:
        """The index of the tier of this queue that has the name of another's; the lowest when there is none."""
        return next((tier.index for tier in self._tiers if tier.name == other.name), len(self._tiers) - 1)

    # -- while it runs ---------------------------------------------------------------------------------------

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
        account.served += cost
        account.in_flight -= 1
        if tenant.concurrency is not None and tenant.queued:
            self.resume(tenant)
        if not account.in_flight and not account.racing and not account.parked:
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
                        self._fresh = False
                        line.join()

    # -- when it is too much ---------------------------------------------------------------------------------

    def shed(self, tier_above: int) -> Ticket | None:
        """Cancels and returns the newest ticket of the longest queue per weight in the lowest tier that waits.

        None if that tier is above `tier_above`. The longest group is chosen first, then the longest of its tenants.
        """
        for tier in reversed(self._tiers):
            if tier.index < tier_above:
                break
            group = max(tier.groups.values(), key=_length, default=None)
            if group is not None and group.waiting:
                ranking = group.ranking
                if ranking is None:
                    accounts = (account for account in tier.accounts.values() if account.group is group)
                    ranking = group.ranking = _Ranking(accounts, group.waiting)
                ticket = ranking.longest().newest()
                assert ticket is not None
                self.cancel(ticket)
                return ticket
        return None

    def take_all(self, lane: Hashable | None = None) -> list[Ticket]:
        """Cancels and returns all that waits in a lane, or in all, oldest first; also what may not start now.

        For a pool that goes, or a lane without workers. Looks at every tenant that is remembered.
        """
        taken = [
            ticket
            for tier in self._tiers
            for account in tier.accounts.values()
            for line_lane, line in account.lines.items()
            if line.waiting and (lane is None or line_lane == lane)
            for ticket in line.tickets
            if ticket.state == WAITING
        ]
        taken.sort(key=lambda ticket: ticket.sequence)
        for ticket in taken:
            self.cancel(ticket)
        return taken

    def promote(self, now: float) -> int:
        """Moves tickets that waited in their tier for its `max_wait_s` up to the next one, a crowd in several calls.

        Returns how many. There they wait among the others of their tenant by age, and count as new. Looks at every
        tenant that is remembered in a tier that has a `max_wait_s`.
        """
        moved = 0
        for tier in self._tiers[1:]:
            if tier.max_wait_s is not None and any(group.waiting for group in tier.groups.values()):
                due_s = now - tier.max_wait_s
                for account in list(tier.accounts.values()):
                    for line in list(account.lines.values()):
                        while line.waiting and line.head().since_s <= due_s:
                            self._move_up(line, now)
                            moved += 1
                            if moved == PROMOTED_MAX:
                                return moved
        return moved

    def _move_up(self, line: "_Line", now: float) -> None:
        """The head of a line. It is taken out of its deque, and not only marked: it waits again elsewhere."""
        ticket = line.head()
        line.tickets.popleft()
        self._count_out(ticket, line)
        if not line.waiting:
            if line.entry is not None:
                line.withdraw()
            ticket.account.park()
        ticket.tier -= 1
        ticket.since_s = now
        ticket.account = account = self._tiers[ticket.tier].account(ticket.tenant)
        line = account.line(ticket.lane)
        _insert_by_age(line.tickets, ticket)
        self._count_in(ticket, line)
        self._fresh = False
        if line.entry is not None and ticket.sequence < line.entry[1]:
            line.race.push(line.entity.v + line.lift, ticket.sequence, line)
        self.resume(ticket.tenant)

    def waiting_above(self, tier: int) -> int:
        """How many wait in higher tiers."""
        return sum(group.waiting for higher in self._tiers[:tier] for group in higher.groups.values())

    def share(self, tenant: Tenant, tier: int) -> float:
        """The part of the pool that the tenant has now by weight, among those of its tier that wait; 0 to 1."""
        account = self._tiers[tier].accounts.get(tenant)
        if account is None:
            return 1.0
        group = account.group
        return 1.0 / (_parts(account, group.inside) * _parts(group, group.tier.level))

    def wait_estimate_s(
        self, tenant: Tenant, tier: int, rate: float, *, running: float = 0.0, own: float = 0.0
    ) -> float:
        """Seconds until all that the tenant has waiting has its turn, if who waits now goes on waiting.

        Its cost but for `own`, that of the ticket which asks, divided by its part of the pool's rate in cost per
        second: by weight in its group, and its group's in the tier; after `running`, the cost of what runs, and all
        that waits in higher tiers.
        """
        if not rate > 0.0:
            return WAIT_UNKNOWN_S
        above = running
        for higher in self._tiers[:tier]:
            above += higher.cost
        account = self._tiers[tier].accounts.get(tenant)
        if account is None:
            return above / rate
        cost = max(0.0, sum(line.cost for line in account.lines.values()) - own)
        group = account.group
        return (above + cost * _parts(account, group.inside) * _parts(group, group.tier.level)) / rate

    # -- for display -----------------------------------------------------------------------------------------

    def bound_ratio(self) -> float:
        """How much of the fairness bound is used by the worst pair that waits in one lane; above 1 is a defect.

        Looks at every tenant that waits.
        """
        worst = 0.0
        for tier in self._tiers:
            for level in (tier.level, *(group.inside for group in tier.groups.values())):
                for race in level.races.values():
                    worst = max(worst, _worst_pair(race))
        return worst

    def tenants(self) -> dict[str, Tenant]:
        """Those that are remembered, by name."""
        return {tenant.name: tenant for tier in self._tiers for tenant in tier.accounts}

    def snapshot(self) -> list[dict[str, Any]]:
        """Tiers, their groups, and the tenants that are remembered, as plain data. Looks at every one of them."""
        tiers = []
        for tier in self._tiers:
            groups = {group.name: _shown(group, group.waiting, group.served) for group in tier.groups.values()}
            for group in groups.values():
                group["tenants"] = []
            for account in tier.accounts.values():
                shown = _shown(account, account.waiting(), account.served)
                shown["in_flight"] = account.in_flight
                group = groups[account.group.name]
                group["in_flight"] += account.in_flight
                group["tenants"].append(shown)
            tiers.append(
                {
                    "name": tier.name,
                    "min_share": tier.min_share,
                    "credit": tier.credit,
                    "waiting": sum(group["waiting"] for group in groups.values()),
                    "groups": list(groups.values()),
                }
            )
        return tiers

    # -- parts -----------------------------------------------------------------------------------------------

    def _count_in(self, ticket: Ticket, line: _Line) -> None:
        group = line.group
        estimate = ticket.estimate
        ticket.state = WAITING
        ticket.tenant.queued += 1
        line.waiting += 1
        line.cost += estimate
        length = ticket.length
        line.length += length
        group.waiting += 1
        group.length += length
        self.waiting += 1
        self.length += length
        tier = group.tier
        tier.cost += estimate
        if estimate > tier.estimate_max:
            tier.estimate_max = estimate
        if group.ranking is not None:
            group.ranking.grew(ticket.account)

    def _count_out(self, ticket: Ticket, line: _Line) -> None:
        group = line.group
        estimate, length = ticket.estimate, ticket.length
        ticket.tenant.queued -= 1
        line.waiting -= 1
        group.waiting -= 1
        self.waiting -= 1
        group.tier.cost -= estimate
        group.length -= length
        self.length -= length
        if line.waiting:
            line.cost -= estimate
            line.length -= length
        else:  # no rounding may outlive the tickets it came from
            line.cost = line.length = 0.0
            if not group.waiting:
                group.length = 0.0
                if not self.waiting:
                    self.length = 0.0
                    for tier in self._tiers:
                        tier.cost = 0.0
        if group.ranking is not None and group.waiting < group.ranking.waiting_min:
            group.ranking = None

    def _hold(self, tenant: Tenant) -> None:
        """The tenant is at its concurrency: none of its lines competes until `resume`."""
        for tier in self._tiers:
            account = tier.accounts.get(tenant)
            if account is not None and account.racing:
                for line in account.lines.values():
                    if line.entry is not None:
                        line.withdraw()

    def _credited(self, lanes: Collection[Hashable] | None) -> Ticket | None:
        """The next ticket of the first lower tier whose credit covers it."""
        for tier in self._floors:
            if tier.credit > 0.0 and tier.level.racing:
                ticket = tier.pick(lanes)
                if ticket is not None and ticket.estimate <= tier.credit:
                    return ticket
        return None

    def _credit(self, started: _Tier, cost: float) -> None:
        """Lower tiers that wait earn their share of what started above them; one that is served pays."""
        for tier in self._floors:
            if tier is started:
                tier.credit = max(0.0, tier.credit - cost)
            elif tier.index > started.index and tier.level.racing:
                tier.credit = min(tier.credit + tier.min_share * cost, tier.estimate_max)


def _insert_by_age(tickets: deque[Ticket], ticket: Ticket) -> None:
    """Before all younger ones. It goes near the front when it was given back, and to the back when it moved up."""
    if not tickets or tickets[-1].sequence < ticket.sequence:
        tickets.append(ticket)
        return
    place = 0
    while tickets[place].sequence < ticket.sequence:
        place += 1
    tickets.insert(place, ticket)


def _parts(entity: _Entity, level: _Level) -> float:
    """How many times an entity's own share a level serves."""
    active = level.weight if entity.racing else level.weight + entity.weight
    # Weight 0 is served after all the others; that they will all have gone once is as good a guess as any.
    return max(1.0, active / entity.weight) if entity.weight else level.racing + 1.0


def _shown(entity: _Group | _Account, waiting: int, served: float) -> dict[str, Any]:
    return {
        "name": entity.name if isinstance(entity, _Group) else entity.tenant.name,
        "weight": entity.weight,
        "waiting": waiting,
        "in_flight": 0,
        # None: weight 0, always last.
        "virtual_time": entity.v if entity.v < inf else None,
        "served_cost": served,
    }


def _worst_pair(race: _Race) -> float:
    """The largest (V_i - V_j) / (E_i + O_i + R_j) of a race, by Dinkelbach's iteration: some passes, not all pairs.

    First of a pair can be who was last picked or levelled in this lane. One served through another lane may be ahead
    in this one by all that it got there.
    """
    lines = [entry[2] for entry in race.heap if entry[2].entry is entry and entry[2].entity.v < inf]
    behind = [(line.entity.v + line.lift, line.entity.over_max) for line in lines]
    ahead = [
        (line.entity.v + line.lift, line.entity.estimate_max + line.entity.under_max)
        for line in lines
        if line.entity.race is race or line.entity.race is None
    ]
    ratio = 0.0
    while ahead:
        first = max(ahead, key=lambda one, ratio=ratio: one[0] - ratio * one[1])  # type: ignore[misc]
        second = min(behind, key=lambda one, ratio=ratio: one[0] + ratio * one[1])  # type: ignore[misc]
        bound = first[1] + second[1]
        # What rounding may have done to sums of this size is no debt.
        gap = first[0] - second[0] - 1e-12 * max(1.0, abs(first[0]), abs(second[0]))
        worse = gap / bound if bound else (inf if gap > 0.0 else 0.0)
        if worse <= ratio or worse == inf:
            return max(ratio, worse)
        ratio = worse
    return 0.0

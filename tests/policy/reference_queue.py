"""The fair queue again, slow and plain: no heaps, no laziness, exact fractions, everything looked at every time.

Tests compare the real one with it, step by step. It shares no code with it. An operation first changes tickets and
counters; then `_settle` compares who competes with who did, and levels those that join.
"""

import sys
from collections.abc import Collection, Hashable, Sequence
from fractions import Fraction
from itertools import count

from evenflow.policy.fairness import Tier

# A tenant that comes back joins its lanes in this order; tests use these.
LANES_IN_ORDER: tuple[Hashable, ...] = ("red", "blue")


class Entity:
    """A tenant or a group. `at` in a lane is V plus its lift there."""

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = Fraction(weight)
        self.v = Fraction(0)
        self.lift: dict[Hashable, Fraction] = {}
        self.left: dict[Hashable, Fraction] = {}
        self.competes: set[Hashable] = set()
        # Lanes in the order in which it first had something there: one that resumes joins them so.
        self.seen: list[Hashable] = []
        self.age = 0

    def at(self, lane: Hashable) -> Fraction:
        return self.v + self.lift.get(lane, Fraction(0))


class Level:
    def __init__(self) -> None:
        self.vt = Fraction(0)
        self.lane_vt: dict[Hashable, Fraction] = {}
        self.members: list[Entity] = []

    def join(self, entity: Entity, lane: Hashable) -> None:
        if not any(lane in member.competes for member in self.members):
            self.lane_vt[lane] = self.vt
        floor = max(self.lane_vt[lane], entity.left.get(lane, Fraction(0)))
        if not entity.competes:
            entity.v = max(entity.v, floor)
        else:
            entity.lift[lane] = max(Fraction(0), floor - entity.v)
        entity.competes.add(lane)

    def leave(self, entity: Entity, lane: Hashable) -> None:
        entity.competes.remove(lane)
        entity.lift.pop(lane, None)

    def charge(self, entity: Entity, lane: Hashable, cost: float) -> None:
        at = entity.at(lane)
        self.lane_vt[lane] = max(self.lane_vt[lane], at)
        self.vt = max(self.vt, at)
        step = Fraction(cost) / entity.weight
        entity.v += step
        if entity.lift.get(lane):
            entity.left[lane] = at + step


class ReferenceTicket:
    def __init__(self, tenant: str, tier: int, lane: Hashable, estimate: float) -> None:
        self.tenant, self.tier, self.lane, self.estimate = tenant, tier, lane, estimate
        self.age = 0
        self.charged = 0.0


class ReferenceQueue:
    """`tenants`: name → (group, weight, concurrency)."""

    def __init__(self, tiers: Sequence[Tier], tenants: dict[str, tuple[str, float, int | None]]) -> None:
        self._tenants = tenants
        self._clock = count(1)
        self._share = [tier.min_share for tier in tiers]
        self._credit = [Fraction(0) for _ in tiers]
        self._largest = [0.0 for _ in tiers]
        self._weights = [{group.name: group.weight for group in tier.groups} for tier in tiers]
        self._among = [Level() for _ in tiers]
        self._inside: list[dict[str, Level]] = [{} for _ in tiers]
        self._groups: list[dict[str, Entity]] = [{} for _ in tiers]
        self._accounts: list[dict[str, Entity]] = [{} for _ in tiers]
        self.waiting: list[ReferenceTicket] = []
        self.running: list[ReferenceTicket] = []

    def in_flight(self, tenant: str) -> int:
        return sum(ticket.tenant == tenant for ticket in self.running)

    def v(self, tier: int, tenant: str) -> Fraction | None:
        account = self._accounts[tier].get(tenant)
        return account.v if account is not None else None

    # -- the same operations --

    def submit(self, ticket: ReferenceTicket) -> None:
        ticket.age = next(self._clock)
        self._wait(ticket)
        self._settle(ticket.tenant)

    def peek(self, lanes: Collection[Hashable] | None = None) -> ReferenceTicket | None:
        for tier, share in enumerate(self._share):
            if tier and share and self._credit[tier]:
                ticket = self._pick(tier, lanes)
                if ticket is not None and ticket.estimate <= self._credit[tier]:
                    return ticket
        for tier in range(len(self._share)):
            ticket = self._pick(tier, lanes)
            if ticket is not None:
                return ticket
        return None

    def start(self, ticket: ReferenceTicket) -> None:
        tier, lane, cost = ticket.tier, ticket.lane, ticket.estimate
        group, account, inside = self._entities(ticket)
        self.waiting.remove(ticket)
        self.running.append(ticket)
        ticket.charged = cost
        self._among[tier].charge(group, lane, cost)
        inside.charge(account, lane, cost)
        group.age = next(self._clock)
        for lower, share in enumerate(self._share):
            if lower == 0 or not share:
                continue
            if lower == tier:
                self._credit[lower] = max(Fraction(0), self._credit[lower] - Fraction(cost))
            elif lower > tier and any(group.competes for group in self._groups[lower].values()):
                earned = self._credit[lower] + Fraction(share) * Fraction(cost)
                self._credit[lower] = min(earned, Fraction(self._largest[lower]))
        self._settle(ticket.tenant)

    def start_now(self, ticket: ReferenceTicket) -> bool:
        concurrency = self._tenants[ticket.tenant][2]
        if self.waiting or (concurrency is not None and self.in_flight(ticket.tenant) >= concurrency):
            return False
        group, account, _ = self._entities(ticket)
        # Where nothing waits, a debt kept in one lane is not asked for.
        kept = [(entity, entity.left) for entity in (group, account)]
        group.left, account.left = {}, {}
        largest = self._largest[ticket.tier]
        self.submit(ticket)
        assert self.peek() is ticket
        self.start(ticket)
        self._largest[ticket.tier] = largest
        for entity, left in kept:
            entity.left = left
        return True

    def cancel(self, ticket: ReferenceTicket) -> None:
        if ticket in self.waiting:
            self.waiting.remove(ticket)
            self._settle(ticket.tenant)

    def give_back(self, ticket: ReferenceTicket) -> None:
        group, account, _ = self._entities(ticket)
        self.running.remove(ticket)
        self._wait(ticket)
        self._settle(ticket.tenant)
        for entity in (group, account):
            entity.v -= Fraction(ticket.charged) / entity.weight
        group.age = min(group.age, ticket.age)
        ticket.charged = 0.0

    def progress(self, ticket: ReferenceTicket, cost: float) -> None:
        if cost > ticket.charged:
            self._correct(ticket, cost)

    def finish(self, ticket: ReferenceTicket, cost: float) -> None:
        self._correct(ticket, cost)
        self.running.remove(ticket)
        self._settle(ticket.tenant)

    # -- parts --

    def _wait(self, ticket: ReferenceTicket) -> None:
        self.waiting.append(ticket)
        self.waiting.sort(key=lambda one: one.age)
        self._largest[ticket.tier] = max(self._largest[ticket.tier], ticket.estimate)
        _, account, _ = self._entities(ticket)
        if ticket.lane not in account.seen:
            account.seen.append(ticket.lane)

    def _correct(self, ticket: ReferenceTicket, cost: float) -> None:
        group, account, _ = self._entities(ticket)
        for entity in (group, account):
            entity.v += (Fraction(cost) - Fraction(ticket.charged)) / entity.weight
        ticket.charged = cost

    def _weight(self, tier: int, name: str) -> float:
        """A group that the tier does not list has moved up, with its own weight, or was lowered, to far less."""
        weights = self._weights[tier]
        home = next((index for index, listed in enumerate(self._weights) if name in listed), None)
        if name in weights or home is None or home >= tier:
            return weights.get(name, 1.0 if home is None else self._weights[home].get(name, 1.0))
        mine = self._weights[home]
        return max(min(weights.values(), default=1.0) / 128 * mine[name] / max(mine.values()), sys.float_info.min)

    def _entities(self, ticket: ReferenceTicket) -> tuple[Entity, Entity, Level]:
        tier = ticket.tier
        name, weight, _ = self._tenants[ticket.tenant]
        if name not in self._groups[tier]:
            self._groups[tier][name] = group = Entity(name, self._weight(tier, name))
            self._among[tier].members.append(group)
            self._inside[tier][name] = Level()
        inside = self._inside[tier][name]
        if ticket.tenant not in self._accounts[tier]:
            self._accounts[tier][ticket.tenant] = account = Entity(ticket.tenant, weight)
            inside.members.append(account)
        return self._groups[tier][name], self._accounts[tier][ticket.tenant], inside

    def _heads(self, tier: int, tenant: str) -> dict[Hashable, ReferenceTicket]:
        heads: dict[Hashable, ReferenceTicket] = {}
        for ticket in self.waiting:
            if ticket.tenant == tenant and ticket.tier == tier:
                heads.setdefault(ticket.lane, ticket)
        return heads

    def _settle(self, tenant: str) -> None:
        group_name, _, concurrency = self._tenants[tenant]
        full = concurrency is not None and self.in_flight(tenant) >= concurrency
        for tier, accounts in enumerate(self._accounts):
            account = accounts.get(tenant)
            if account is None:
                continue
            group, among, inside = self._groups[tier][group_name], self._among[tier], self._inside[tier][group_name]
            heads = {} if full else self._heads(tier, tenant)
            for lane in [lane for lane in account.competes if lane not in heads]:
                inside.leave(account, lane)
                if not any(lane in member.competes for member in inside.members):
                    among.leave(group, lane)
            for lane in account.seen:
                if lane in heads and lane not in account.competes:
                    if lane not in group.competes:
                        if not group.competes:
                            group.age = heads[lane].age
                        among.join(group, lane)
                    inside.join(account, lane)
            if not any(one.competes for one in self._groups[tier].values()):
                self._credit[tier] = Fraction(0)

    def _pick(self, tier: int, lanes: Collection[Hashable] | None) -> ReferenceTicket | None:
        found = []
        for lane in LANES_IN_ORDER if lanes is None else lanes:
            groups = [group for group in self._groups[tier].values() if lane in group.competes]
            if not groups:
                continue
            group = min(groups, key=lambda one: (one.at(lane), one.age))
            heads = [
                (account.at(lane), self._heads(tier, name)[lane].age, self._heads(tier, name)[lane])
                for name, account in self._accounts[tier].items()
                if lane in account.competes and self._tenants[name][0] == group.name
            ]
            at, age, ticket = min(heads, key=lambda one: one[:2])
            found.append(((group.at(lane), group.age), (at, age), ticket))
        return min(found, key=lambda one: one[:2])[2] if found else None

"""`max_wait_s`: what waited long in a lower tier moves up one, in its order, and counts once."""

import random

import pytest

from evenflow.policy.fairness import FairQueue, Group, Tenant, Ticket, Tier

KEYS, SLOW = Tenant("a", "keys"), Tenant("b", "slow")


def queue(max_wait_s: float | None = 10.0, tiers: int = 2) -> FairQueue:
    lower = [Tier(f"low{n}", 0.0, (Group(f"slow{n}" if n else "slow", 5.0),), max_wait_s) for n in range(tiers - 1)]
    return FairQueue([Tier("high", 0.0, (Group("keys", 10.0),)), *lower])


def ticket(tenant: Tenant, tier: int, since_s: float = 0.0, name: str = "") -> Ticket:
    made = Ticket(tenant, tier, "lane", 1, 10.0, name)
    made.since_s = since_s
    return made


def drain(fair: FairQueue) -> list[str]:
    order = []
    while (head := fair.peek()) is not None:
        fair.start(head)
        order.append(head.call)
        fair.finish(head, 10.0)
    return order


def test_nothing_moves_before_its_time() -> None:
    fair = queue()
    fair.submit(ticket(SLOW, 1, 5.0))
    assert fair.promote(14.9) == 0
    assert fair.promote(15.0) == 1
    assert fair.promote(1e9) == 0  # in the highest there is nowhere to go


def test_a_tier_without_a_limit_keeps_what_it_has() -> None:
    fair = queue(None)
    fair.submit(ticket(SLOW, 1))
    assert fair.promote(1e9) == 0


def test_order_and_counts_survive_the_move() -> None:
    fair = queue()
    tenant = Tenant("b", "slow")
    for number in range(6):
        fair.submit(ticket(tenant, 1, float(number), f"{number}"))
    assert fair.promote(12.0) == 3
    assert (fair.waiting, tenant.queued) == (6, 6)
    fair.submit(ticket(tenant, 0, 12.0, "new above"))
    assert drain(fair) == ["0", "1", "2", "new above", "3", "4", "5"]
    assert (fair.waiting, tenant.queued, tenant.in_flight, fair.length) == (0, 0, 0, 0.0)


def test_it_competes_with_the_weight_of_its_own_group() -> None:
    fair = queue()
    one, other = Tenant("a", "keys"), Tenant("b", "slow")
    for _number in range(30):
        fair.submit(ticket(other, 1, 0.0, "b"))
        fair.submit(ticket(one, 0, 0.0, "a"))
    fair.promote(10.0)
    first = drain(fair)[:30]
    assert first.count("a") == pytest.approx(20, abs=1)  # keys : slow = 10 : 5


def test_one_tier_at_a_time_and_the_wait_begins_anew() -> None:
    fair = queue(tiers=3)
    fair.submit(ticket(SLOW, 2))
    assert fair.promote(10.0) == 1
    assert fair.promote(19.9) == 0
    assert fair.promote(20.0) == 1
    assert fair.promote(100.0) == 0


def test_a_tenant_at_its_concurrency_moves_and_still_waits() -> None:
    fair = queue()
    tenant = Tenant("b", "slow", concurrency=1)
    running = ticket(tenant, 1)
    assert fair.start_now(running)
    waiting = ticket(tenant, 1, 0.0, "w")
    fair.submit(waiting)
    assert fair.promote(10.0) == 1
    assert fair.peek() is None
    fair.finish(running, 10.0)
    assert fair.peek() is waiting


@pytest.mark.parametrize("seed", range(30))
def test_random_moves_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    fair = queue(5.0, tiers=3)
    tenants = [
        Tenant(f"t{n}", rng.choice(["keys", "slow", "slow1"]), concurrency=rng.choice([None, 1, 2]))
        for n in range(5)
    ]
    now, waiting, running = 0.0, [], []
    for step in range(400):
        now += rng.random()
        action = rng.random()
        if action < 0.45:
            one = ticket(rng.choice(tenants), rng.randrange(3), now, f"{step}")
            fair.submit(one)
            waiting.append(one)
        elif action < 0.7:
            head = fair.peek()
            if head is not None:
                fair.start(head)
                waiting.remove(head)
                running.append(head)
        elif action < 0.8 and running:
            fair.finish(running.pop(rng.randrange(len(running))), rng.random() * 20)
        elif action < 0.85 and running:
            back = running.pop(rng.randrange(len(running)))
            fair.give_back(back)
            waiting.append(back)
        elif action < 0.9 and waiting:
            fair.cancel(waiting.pop(rng.randrange(len(waiting))))
        else:
            fair.promote(now)
        assert fair.waiting == len(waiting), f"seed {seed}"
        assert fair.length == pytest.approx(len(waiting)), f"seed {seed}"
        for tenant in tenants:
            assert tenant.queued == sum(one.tenant is tenant for one in waiting), f"seed {seed}"
            assert tenant.in_flight == sum(one.tenant is tenant for one in running), f"seed {seed}"
    for one in running:
        fair.finish(one, 10.0)
    assert sorted(drain(fair)) == sorted(one.call for one in waiting)

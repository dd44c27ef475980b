"""What Alpa's weights and LMDeploy's quotas mean once loaded: the real queue, on tenants of the directory.

Where the older services failed (a weight or quota of 0, a user or a group that is not listed), what holds here.
"""

import json
import random
from collections import Counter
from itertools import pairwise

import pytest

from evenflow.config import ConfigErrors, load
from evenflow.policy.fairness import FairQueue, Group, Tenant, Ticket, Tier
from evenflow.tenancy.directory import Directory


class Pool:
    """A queue in front of one slot, for the tenants of a loaded file."""

    def __init__(self, settings):
        self.settings = settings
        self.directory = Directory(settings)
        self.tenants = {member.name: member for member in self.directory.members}
        self.queue = FairQueue(
            [
                Tier(tier.name, tier.min_share, tuple(Group(group.name, group.weight) for group in tier.groups))
                for tier in settings.scheduling.tiers
            ]
        )

    def of_user(self, user_id: str | None) -> Tenant:
        """The tenant of a user_id, or of none: one of that name, else the configured one."""
        found = self.tenants.get(user_id or "")
        return found or self.tenants[self.settings.auth.default_user]

    def of_key(self, key: str | None) -> Tenant:
        found = self.directory.anonymous if key is None else self.directory.tenant_of(key.encode())
        assert found is not None
        return found

    def submit(self, tenant, items=1, cost=1.0):
        for _ in range(items):
            self.queue.submit(Ticket(tenant, tenant.tier, "lane", 1, cost))

    def serve(self, items):
        """Starts and finishes so many, one at a time; how many of each tenant."""
        return Counter(self.serve_in_order(items))

    def serve_in_order(self, items):
        names = []
        for _ in range(items):
            ticket = self.queue.peek()
            if ticket is None:
                break
            self.queue.start(ticket)
            self.queue.finish(ticket, ticket.estimate)
            names.append(ticket.tenant.name)
        return names


@pytest.fixture
def pool(tmp_path):
    def of(value):
        path = tmp_path / "old.json"
        path.write_text(json.dumps(value))
        return Pool(load(str(path), environ={}))

    return of


def qos(**groups):
    users = {
        group: [{"id": name, "quota_pct": quota} for name, quota in entries.items()]
        for group, entries in groups.items()
    }
    return {"enable_user_qos": True, "user_groups": list(groups), "user_group_map": users}


BRONZE = {"a": 30, "b": 30, "c": 40, "default": 0}


# LMDeploy


def test_quotas_are_shares_of_every_hundred(pool):  # S17
    here = pool(qos(bronze=BRONZE))
    for name in "abc":
        here.submit(here.of_user(name), 700)
    for _ in range(10):
        served = here.serve(100)
        assert all(abs(served[name] - share) <= 1 for name, share in (("a", 30), ("b", 30), ("c", 40))), served


@pytest.mark.parametrize("seed", range(5))
def test_quotas_are_shares_in_cost_when_requests_differ(pool, seed):  # S22
    here, rng = pool(qos(bronze=BRONZE)), random.Random(seed)
    for name in "abc":
        for _ in range(600):
            here.submit(here.of_user(name), cost=float(rng.randint(1, 20)))
    here.serve(1000)
    total = sum(tenant.served for tenant in here.tenants.values())
    for name, share in (("a", 0.3), ("b", 0.3), ("c", 0.4)):
        assert here.tenants[name].served / total == pytest.approx(share, abs=0.01), f"seed {seed}"


def test_absent_users_hold_no_capacity(pool):  # S18
    here = pool(qos(bronze=BRONZE))
    here.submit(here.of_user("a"), 300)
    here.submit(here.of_user("c"), 300)
    served = here.serve(70)
    assert abs(served["a"] - 30) <= 1
    assert abs(served["c"] - 40) <= 1
    here.submit(here.of_user("b"), 300)
    served = here.serve(100)
    assert all(abs(served[name] - share) <= 1 for name, share in (("a", 30), ("b", 30), ("c", 40))), served


def test_a_user_alone_gets_everything(pool):  # S13
    for name in BRONZE:
        here = pool(qos(bronze=BRONZE))
        here.submit(here.of_user(name), 50)
        assert here.serve(50) == {name: 50}


def test_quota_0_is_served_only_when_nobody_else_of_its_group_waits(pool):  # S19
    here = pool(qos(gold={"a": 100, "zero": 0}))
    here.submit(here.of_user("zero"), 5)
    here.submit(here.of_user("a"), 3)
    assert here.serve_in_order(4) == ["a", "a", "a", "zero"]
    here.submit(here.of_user("a"), 1)
    assert here.serve_in_order(9) == ["a", "zero", "zero", "zero", "zero"]


def test_users_of_quota_0_are_served_in_the_order_they_came(pool):
    here = pool(qos(gold={"a": 0, "b": 0, "default": 0}))  # crashed LMDeploy when it started
    for name in ("b", "a", "b", "new", "a"):
        here.submit(here.of_user(name))
    assert here.serve_in_order(9) == ["b", "a", "b", "default", "a"]


def test_quota_0_of_a_higher_group_goes_before_every_lower_group(pool):
    here = pool(qos(gold={"a": 100, "zero": 0}, iron={"b": 100}))
    here.submit(here.of_user("b"), 2)
    here.submit(here.of_user("zero"), 2)
    assert here.serve_in_order(4) == ["zero", "zero", "b", "b"]


def test_a_quota_of_1_per_cent_is_never_stalled(pool):  # S19
    here = pool(qos(gold={"big": 99, "small": 1}))
    here.submit(here.of_user("small"), 3)
    assert here.serve(2) == {"small": 2}
    here = pool(qos(gold={"big": 99, "small": 1}))
    here.submit(here.of_user("small"), 30)
    here.submit(here.of_user("big"), 1000)
    order = here.serve_in_order(1000)
    turns = [index for index, name in enumerate(order) if name == "small"]
    assert len(turns) in (9, 10, 11)
    assert max(after - before for before, after in pairwise(turns)) <= 101


def test_groups_are_strict(pool):  # S16
    here = pool(qos(gold={"g": 100}, silver={"s": 100}, bronze={"b": 100}))
    for name in "bsg":
        here.submit(here.of_user(name), 2)
    assert here.serve_in_order(3) == ["g", "g", "s"]
    here.submit(here.of_user("g"))
    assert here.serve_in_order(9) == ["g", "s", "b", "b"]


def test_users_that_are_not_listed_share_one_bucket(pool):  # S20
    here = pool(qos(gold={"g": 100}, silver={"s": 80, "default": 20}))
    for number in range(50):  # each of them crashed LMDeploy, which has no default with two groups
        here.submit(here.of_user(f"stranger-{number}"), 4)
    here.submit(here.of_user("s"), 400)
    served = here.serve(100)
    assert abs(served["default"] - 20) <= 1
    assert abs(served["s"] - 80) <= 1


def test_users_that_are_not_listed_belong_to_the_third_of_several_groups(pool):  # S20
    here = pool(qos(gold={"g": 100}, silver={"s": 100}, bronze={"b": 90, "default": 10}, iron={"i": 100}))
    here.submit(here.of_user("i"))
    here.submit(here.of_user("stranger"))
    here.submit(here.of_user(None))  # a request without a user_id
    here.submit(here.of_user("s"))
    assert here.serve_in_order(9) == ["s", "default", "default", "i"]


def test_a_user_called_default_is_no_way_into_a_higher_group(pool):
    # LMDeploy looked it up like any user and found the entry of the first group.
    here = pool(qos(gold={"g": 100, "default": 0}, silver={"s": 100, "default": 0}, bronze={"b": 90, "default": 10}))
    assert here.of_user("default").group == "bronze"
    assert [member.group for member in here.directory.members if member.name == "default"] == ["bronze"]


def test_a_default_group_without_an_entry_for_it_serves_strangers_last(pool):
    here = pool(qos(gold={"g": 100}))
    here.submit(here.of_user("stranger"), 2)
    here.submit(here.of_user("g"), 2)
    assert here.serve_in_order(9) == ["g", "g", "default", "default"]


@pytest.mark.parametrize(
    ("order", "users"),
    [(["gold"], {"gold": [], "iron": []}), (["gold", "iron"], {"gold": []})],
)
def test_a_group_that_is_listed_once_is_refused_at_load(pool, order, users):
    with pytest.raises(ConfigErrors, match="iron"):
        pool({"enable_user_qos": True, "user_groups": order, "user_group_map": users})


# Alpa


KEYS = {"allowed_api_keys": ["sk-30", "sk-10", "sk-none"], "api_key_weights": {"sk-30": 30, "sk-10": 10}}


def test_weights_of_keys_are_shares(pool):  # S10, S3
    here = pool(KEYS)
    for key in ("sk-30", "sk-10", "sk-none"):
        here.submit(here.of_key(key), 300)
    served = here.serve(100)
    shares = [served[here.of_key(key).name] for key in ("sk-30", "sk-10", "sk-none")]
    assert all(abs(share - due) <= 1 for share, due in zip(shares, (60, 20, 20), strict=True)), shares


def test_two_weights_are_a_ratio_in_every_window_of_four(pool):  # S10
    here = pool(KEYS)
    here.submit(here.of_key("sk-30"), 300)
    here.submit(here.of_key("sk-10"), 100)
    order = here.serve_in_order(400)
    big = here.of_key("sk-30").name
    assert {order[at : at + 4].count(big) for at in range(397)} <= {2, 3, 4}
    assert {order[at : at + 4].count(big) for at in range(0, 397, 4)} == {3}


@pytest.mark.parametrize("keys", [1, 3])
def test_keys_and_requests_without_one_are_10_to_1(pool, keys):  # S9, S11
    here = pool(KEYS)
    here.submit(here.of_key(None), 300)
    for key in KEYS["allowed_api_keys"][:keys]:
        here.submit(here.of_key(key), 300)
    served = here.serve(220)
    assert abs(served["anonymous"] - 20) <= 1


def test_a_weight_of_0_is_refused_at_load(pool):
    with pytest.raises(ConfigErrors, match=r"api_key_weights \(entry 1\): must be at least"):
        pool({"allowed_api_keys": ["sk"], "api_key_weights": {"sk": 0}})


def test_the_weight_of_a_key_lasts_over_a_reload(pool):
    here = pool(KEYS)
    again = pool({**KEYS, "allowed_api_keys": ["sk-none", "sk-new", "sk-30"]})
    directory = Directory(again.settings, here.directory)
    assert directory.tenant_of(b"sk-30") is here.of_key("sk-30")
    assert directory.tenant_of(b"sk-10") is None
    assert here.of_key("sk-30").weight == 30

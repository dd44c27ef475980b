"""Whole runs: many random ones under watch, and what the parts of a world do, statement by statement."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from sim.scenarios import SMALL, random_scenario

from evenflow.policy.fairness import Group, Tier
from evenflow.sim.invariants import Watch
from evenflow.sim.model import Arrival, Fault, Result, Scenario, TenantSpec, Traffic
from evenflow.sim.world import World, run

ONE_TIER = (Tier("standard", 0.0, (Group("keys", 1.0),)),)


def scenario(arrivals: Sequence[Arrival], *, tenants: Sequence[TenantSpec] = (), **changes: object) -> Scenario:
    names = dict.fromkeys(arrival.tenant for arrival in arrivals)
    tenants = tuple(tenants) or tuple(TenantSpec(name) for name in names)
    traffic = Traffic("test", tenants, sorted(arrivals, key=lambda arrival: arrival.time_s))
    return replace(Scenario(traffic, (SMALL,), ONE_TIER), **changes)  # type: ignore[arg-type]


def flood(
    tenant: str, count: int, time_s: float = 0.0, *, input_tokens: int = 20, output_tokens: int = 40
) -> list[Arrival]:
    return [Arrival(time_s, tenant, input_tokens, output_tokens) for _ in range(count)]


def watched(one: Scenario) -> Result:
    return run(one, check=Watch(one))


def outcomes(result: Result) -> list[str]:
    return [record.outcome for record in result.records]


def order(result: Result) -> list[str]:
    """Tenants in the order in which their requests were dispatched."""
    dispatched = [record for record in result.records if record.dispatched_s is not None]
    return [record.arrival.tenant for record in sorted(dispatched, key=lambda record: record.dispatched_s or 0.0)]


# -- random worlds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_seed", range(0, 1000, 50))
def test_fifty_random_worlds_keep_every_promise_after_every_event(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        one = random_scenario(seed)
        result = watched(one)
        assert result.bound_ratio <= 1.0 + 1e-9, f"seed {seed}"
        assert len(result.records) == len(one.traffic.arrivals), f"seed {seed}"
        # What the engines computed is what the records say.
        output = sum(record.output_tokens for record in result.records)
        assert sum(entry[3] for entry in result.service) == output, f"seed {seed}"
        times = [entry[0] for entry in result.service]
        assert times == sorted(times), f"seed {seed}"


def test_the_random_worlds_are_of_every_kind_and_use_the_whole_bound() -> None:
    worlds = [random_scenario(seed) for seed in range(300)]
    results = [watched(one) for one in worlds]
    for outcome in ("ok", "refused", "left", "failed"):
        assert sum(outcomes(result).count(outcome) for result in results) > 300, outcome
    assert {fault.kind for one in worlds for fault in one.faults} == {
        "dead",
        "slow",
        "hanging",
        "stale_reports",
        "leave_storm",
    }
    assert sum(record.attempts > 1 for result in results for record in result.records) > 50
    assert max(result.bound_ratio for result in results) > 0.99


@pytest.mark.parametrize("seed", range(20))
def test_the_same_seed_gives_the_same_result_watched_or_not(seed: int) -> None:
    first, second = watched(random_scenario(seed)), run(random_scenario(seed))
    assert first.records == second.records
    assert first.service == second.service
    assert first.limits == second.limits
    assert first.ended_s == second.ended_s


def test_another_seed_breaks_ties_otherwise() -> None:
    arrivals = [Arrival(float(second), "a", 10, 5) for second in range(20)]
    engines = (SMALL, SMALL, SMALL)
    chosen = [
        [record.engine for record in run(scenario(arrivals, engines=engines, seed=seed)).records] for seed in (1, 2)
    ]
    assert chosen[0] != chosen[1]


# -- the life of a request -----------------------------------------------------------------------------------------


def test_a_lone_request_runs_at_once_and_its_record_says_so() -> None:
    result = watched(scenario([Arrival(1.0, "a", 100, 11)]))
    (record,) = result.records
    assert record.outcome == "ok"
    assert record.dispatched_s == 1.0
    assert record.first_token_s == pytest.approx(1.05)
    # Ten steps of 20 ms, 1 ms for the sequence and a µs for each KV token.
    assert record.ended_s == pytest.approx(1.05 + 10 * 0.021 + 1e-6 * sum(range(101, 111)))
    assert (record.engine, record.output_tokens, record.attempts) == (0, 11, 1)
    assert sum(entry[2] for entry in result.service) == 100
    assert sum(entry[3] for entry in result.service) == 11


def test_max_tokens_cuts_an_answer() -> None:
    (record,) = watched(scenario([Arrival(1.0, "a", 10, 50, max_tokens=7)])).records
    assert record.output_tokens == 7


def test_two_that_flood_share_by_weight_and_fcfs_does_not() -> None:
    tenants = (TenantSpec("a", weight=30.0), TenantSpec("b", weight=10.0))
    arrivals = flood("b", 40) + flood("a", 40)
    fair = order(watched(scenario(arrivals, tenants=tenants, slots=2)))
    assert fair[2:30].count("a") == pytest.approx(21, abs=2)
    fcfs = order(watched(scenario(arrivals, tenants=tenants, slots=2, policy="fcfs")))
    assert fcfs == ["b"] * 40 + ["a"] * 40


def test_round_robin_takes_one_of_each_in_turn() -> None:
    arrivals = flood("a", 9) + flood("b", 9, input_tokens=200) + flood("c", 9)
    turns = order(watched(scenario(arrivals, slots=1, policy="round_robin")))
    assert turns[3:] in (["b", "c", "a"] * 8, ["c", "a", "b"] * 8, ["a", "b", "c"] * 8) or all(
        set(turns[at : at + 3]) == {"a", "b", "c"} for at in range(3, 24, 3)
    )


def test_vtc_lifts_one_that_comes_late_and_a_plain_counter_lets_it_catch_up() -> None:
    arrivals = flood("a", 60) + flood("c", 60) + flood("b", 30, 10.0)
    late = {
        policy: order(watched(scenario(arrivals, slots=1, policy=policy)))  # type: ignore[arg-type]
        for policy in ("vtc", "least_counter")
    }
    came = {policy: names.index("b") for policy, names in late.items()}
    assert late["least_counter"][came["least_counter"] :][:6] == ["b"] * 6
    assert late["vtc"][came["vtc"] :][:6].count("b") <= 3


@pytest.mark.parametrize("charging", ["estimate", "progress", "completion", "max_tokens"])
def test_every_way_of_charging_ends_at_the_same_true_cost(charging: str) -> None:
    arrivals = flood("a", 30, output_tokens=90) + flood("b", 30, output_tokens=9)
    served: dict[str, float] = {}

    def note(world: World) -> None:
        served.update({name: tenant.served for name, tenant in world.tenants.items()})

    run(scenario(arrivals, charging=charging, slots=3), check=note)
    assert served == {"a": 30 * (20 + 2 * 90), "b": 30 * (20 + 2 * 9)}


def test_a_request_that_waited_too_long_is_refused() -> None:
    result = watched(scenario(flood("a", 20), slots=1, queue_timeout_s=2.0))
    assert outcomes(result).count("ok") == 3
    assert {record.ended_s for record in result.records if record.outcome == "refused"} == {2.0}


def test_a_client_that_leaves_the_queue_pays_nothing_and_one_that_runs_pays_what_was_produced() -> None:
    gone = [Arrival(0.0, "a", 20, 400, leaves_after_s=1.0), Arrival(0.0, "a", 20, 400, leaves_after_s=0.5)]
    served: list[float] = []

    def note(world: World) -> None:
        served.append(world.tenants["a"].served)

    result = run(scenario(gone, slots=1), check=note)
    running, queued = result.records
    assert outcomes(result) == ["left", "left"]
    assert queued.dispatched_s is None
    assert 0 < running.output_tokens < 400
    assert served[-1] == 20 + 2 * running.output_tokens


def test_a_tenant_is_refused_over_its_own_bound_and_the_flood_is_shed_over_the_common_one() -> None:
    tenants = (TenantSpec("a", queued_max=3), TenantSpec("b"))
    result = watched(scenario(flood("a", 10), tenants=tenants, slots=1))
    assert outcomes(result) == ["ok"] * 4 + ["refused"] * 6
    result = watched(scenario(flood("a", 10) + flood("b", 2, 0.1), slots=1, queued_max=5))
    assert [record.outcome for record in result.records if record.arrival.tenant == "b"] == ["ok", "ok"]
    assert outcomes(result).count("refused") == 6


def test_a_request_that_no_engine_could_hold_fails_and_holds_nothing() -> None:
    result = watched(scenario([Arrival(0.0, "a", 1990, 11), Arrival(0.1, "a", 10, 10)]))
    assert outcomes(result) == ["failed", "ok"]


def test_a_tenant_runs_no_more_than_its_concurrency() -> None:
    most = 0

    def note(world: World) -> None:
        nonlocal most
        most = max(most, world.tenants["a"].in_flight)

    run(scenario(flood("a", 20), tenants=(TenantSpec("a", concurrency=2),), slots=8), check=note)
    assert most == 2


def test_a_run_can_be_cut() -> None:
    result = watched(scenario(flood("a", 20), slots=1, until_s=2.0))
    assert result.ended_s == 2.0
    assert "" in outcomes(result)


def test_progress_is_told_about_each_second_and_grows() -> None:
    parts: list[float] = []
    run(scenario(flood("a", 30), slots=1), progress=parts.append)
    assert parts == sorted(parts)
    assert 10 < len(parts) < 40
    assert 0.0 <= parts[0] < parts[-1] <= 1.0


# -- what goes wrong -----------------------------------------------------------------------------------------------


def test_what_a_dead_worker_refuses_goes_elsewhere() -> None:
    fault = Fault("dead", 0.0, 100.0, 0)
    result = watched(scenario(flood("a", 4, 0.1), engines=(SMALL, SMALL), faults=(fault,), slots=2))
    assert outcomes(result) == ["ok"] * 4
    assert {record.engine for record in result.records} == {1}
    assert {record.attempts for record in result.records} == {1, 2}


def test_what_a_dying_worker_runs_is_tried_again_before_its_first_token_and_fails_after_it() -> None:
    arrivals = [Arrival(0.0, "a", 20, 200), Arrival(0.0, "a", 20, 200), Arrival(0.95, "b", 900, 5)]
    fault = Fault("dead", 1.0, 100.0, 0)
    result = watched(
        scenario(arrivals, engines=(SMALL, SMALL), faults=(fault,), slots=4, placement="round_robin")
    )
    first, second, late = result.records
    assert sorted([first.outcome, second.outcome]) == ["failed", "ok"]
    failed = first if first.outcome == "failed" else second
    assert 0 < failed.output_tokens < 200
    assert late.outcome == "ok"


def test_when_the_last_worker_is_gone_everybody_is_told() -> None:
    fault = Fault("dead", 1.0, 3.0)
    arrivals = [*flood("a", 20), *flood("a", 2, 2.0), *flood("a", 2, 4.0)]
    result = watched(scenario(arrivals, slots=1, faults=(fault,)))
    assert outcomes(result)[-4:] == ["refused", "refused", "ok", "ok"]
    assert "failed" in outcomes(result)
    assert max(record.ended_s or 0.0 for record in result.records[:20]) <= 2.0


def test_a_storm_takes_the_part_of_all_clients_that_it_says() -> None:
    fault = Fault("leave_storm", 1.0, 1.0, factor=0.5)
    result = watched(scenario(flood("a", 200), slots=4, faults=(fault,)))
    assert 70 < outcomes(result).count("left") < 130
    assert {record.ended_s for record in result.records if record.outcome == "left"} == {1.0}


def test_a_slow_worker_gets_less_work() -> None:
    fault = Fault("slow", 0.0, 100.0, 0, 10.0)
    arrivals = [Arrival(0.05 * index, "a", 20, 40) for index in range(200)]
    result = watched(scenario(arrivals, engines=(SMALL, SMALL), faults=(fault,), slots=8))
    engines = [record.engine for record in result.records]
    assert engines.count(0) < engines.count(1) / 2


def test_slots_are_learned_from_the_engine_and_stand_still_while_its_reports_are_stale() -> None:
    arrivals = [Arrival(0.02 * index, "a", 100, 100) for index in range(600)]
    result = watched(scenario(arrivals))
    # The engine batches eight; one or two more wait in it.
    settled = [limit for time_s, _, limit in result.limits if 10.0 < time_s < 60.0]
    assert result.limits[0] == (0.0, 0, 32)
    assert settled == [] or all(7 <= limit <= 11 for limit in settled)
    assert 7 <= result.limits[-1][2] <= 11
    fault = Fault("stale_reports", 0.0, 1000.0)
    frozen = watched(scenario(arrivals, faults=(fault,), until_s=0.9))
    assert frozen.limits == [(0.0, 0, 32)]


def test_memory_that_is_known_keeps_calls_out_of_the_engines_own_queue() -> None:
    arrivals = flood("a", 60, input_tokens=300, output_tokens=100)

    def most_running(kv_told: bool) -> int:
        most = 0

        def note(world: World) -> None:
            nonlocal most
            most = max(most, world.workers[0].in_flight)

        run(scenario(arrivals, slots=8, kv_told=kv_told), check=note)
        return most

    assert most_running(False) == 8
    assert most_running(True) == 4


def test_a_lower_tier_waits_for_the_higher_and_gets_its_floor() -> None:
    tenants = (TenantSpec("high"), TenantSpec("low", tier=1))
    arrivals = flood("low", 40) + flood("high", 40)
    for share, expected in ((0.0, 0), (0.25, 8)):
        tiers = (Tier("high", 0.0, ()), Tier("low", share, ()))
        names = order(watched(scenario(arrivals, tenants=tenants, tiers=tiers, slots=1, cost="sequences")))
        assert names[1:41].count("low") == pytest.approx(expected, abs=1)


def test_a_ticket_moves_up_a_tier_when_it_has_waited_long_enough() -> None:
    tenants = (TenantSpec("high"), TenantSpec("low", tier=1))
    arrivals = [*flood("high", 1), *flood("low", 1), *flood("high", 40)]
    tiers = (Tier("high"), Tier("low", max_wait_s=3.0))
    result = watched(scenario(arrivals, tenants=tenants, tiers=tiers, slots=1))
    (low,) = [record for record in result.records if record.arrival.tenant == "low"]
    assert low.dispatched_s is not None
    assert 3.0 <= low.dispatched_s < 8.0

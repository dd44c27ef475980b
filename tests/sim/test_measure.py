"""Figures of runs that can be told by hand."""

import random

import pytest
from sim.scenarios import SMALL, random_scenario

from evenflow.sim import measure
from evenflow.sim.model import Arrival, Record, Result, Scenario, TenantSpec, Traffic
from evenflow.sim.world import run


def result(
    service: list[tuple[float, str, int, int]],
    arrivals: list[Arrival],
    tenants: tuple[TenantSpec, ...] = (TenantSpec("a"), TenantSpec("b")),
    *,
    ended_s: float = 100.0,
    waiting_until_s: float = 100.0,
) -> Result:
    scenario = Scenario(Traffic("hand", tenants, arrivals), (SMALL,), ())
    records = [
        Record(arrival, "ok", arrival.time_s + 1.0, waiting_until_s, waiting_until_s) for arrival in arrivals
    ]
    return Result(scenario, records, service, ended_s=ended_s)


def each_second(tenant: str, tokens: int, seconds: range) -> list[tuple[float, str, int, int]]:
    return [(float(second), tenant, tokens, 0) for second in seconds]


def asks(tenant: str, tokens: int, seconds: range) -> list[Arrival]:
    return [Arrival(float(second), tenant, tokens, 0) for second in seconds]


def by_time(*parts: list) -> list:
    return sorted([one for part in parts for one in part], key=lambda one: getattr(one, "time_s", None) or 0.0)


def test_who_gets_less_than_another_and_asked_for_more_counts_by_how_much() -> None:
    seconds = range(100)
    service = each_second("a", 30, seconds) + each_second("b", 10, seconds)
    arrivals = by_time(asks("a", 50, seconds), asks("b", 50, seconds))
    largest, average = measure.windowed_difference(result(sorted(service), arrivals), 10.0)
    assert largest == pytest.approx(20.0)
    assert average == pytest.approx(20.0)


def test_who_got_all_it_asked_for_does_not_count() -> None:
    seconds = range(100)
    service = each_second("a", 30, seconds) + each_second("b", 10, seconds)
    arrivals = by_time(asks("a", 50, seconds), asks("b", 10, seconds))
    assert measure.windowed_difference(result(sorted(service), arrivals), 10.0) == (0.0, 0.0)


def test_output_counts_twice_and_service_is_taken_per_weight() -> None:
    seconds = range(100)
    service = [(float(second), "a", 0, 15) for second in seconds] + each_second("b", 10, seconds)
    arrivals = by_time(asks("a", 50, seconds), asks("b", 50, seconds))
    tenants = (TenantSpec("a", weight=30.0), TenantSpec("b", weight=10.0))
    assert measure.windowed_difference(result(sorted(service), arrivals, tenants), 10.0) == (0.0, 0.0)


def test_the_largest_difference_is_that_of_the_worst_window() -> None:
    service = each_second("a", 30, range(100)) + each_second("b", 10, range(50)) + each_second("b", 30, range(50, 100))
    arrivals = by_time(asks("a", 50, range(100)), asks("b", 50, range(100)))
    largest, average = measure.windowed_difference(result(sorted(service), arrivals), 10.0)
    assert largest == pytest.approx(20.0)
    assert 5.0 < average < 15.0


def test_jain_is_one_for_equal_shares_per_weight_and_falls_to_one_over_n() -> None:
    arrivals = [Arrival(0.0, "a", 1, 1), Arrival(0.0, "b", 1, 1)]
    tenants = (TenantSpec("a", weight=30.0), TenantSpec("b", weight=10.0))
    fair = each_second("a", 30, range(100)) + each_second("b", 10, range(100))
    assert measure.jain(result(sorted(fair), arrivals, tenants), 10.0) == pytest.approx(1.0)
    unfair = each_second("a", 30, range(100))
    assert measure.jain(result(unfair, arrivals, tenants), 10.0) == pytest.approx(0.5)


def test_jain_looks_only_at_windows_in_which_two_of_a_group_are_backlogged() -> None:
    arrivals = [Arrival(0.0, "a", 1, 1), Arrival(0.0, "b", 1, 1)]
    service = each_second("a", 30, range(100))
    assert measure.jain(result(service, arrivals, waiting_until_s=5.0), 10.0) == 1.0
    apart = (TenantSpec("a"), TenantSpec("b", tier=1))
    assert measure.jain(result(service, arrivals, apart), 10.0) == 1.0


def test_throughput_is_input_and_output_by_the_length_of_the_run() -> None:
    assert measure.throughput(result([(1.0, "a", 100, 0), (2.0, "b", 0, 300)], [], ended_s=4.0)) == 100.0
    assert measure.throughput(result([], [], ended_s=0.0)) == 0.0


def test_quantiles_are_by_nearest_rank() -> None:
    values = list(range(100))
    random.Random(1).shuffle(values)
    assert measure.quantiles(values) == (50, 90, 99)
    assert measure.quantiles([7.0]) == (7.0, 7.0, 7.0)
    assert measure.quantiles([]) == (0.0, 0.0, 0.0)


def test_waits_are_told_for_each_tenant() -> None:
    waits = measure.waits(result([], [Arrival(1.0, "a", 1, 1)]))
    assert waits["a"].queue.p50 == 1.0
    assert waits["a"].first_token.p99 == 99.0
    assert waits["b"].queue == (0.0, 0.0, 0.0)


def test_light_is_who_asks_for_less_than_its_share_by_weight() -> None:
    service = each_second("a", 100, range(100))
    arrivals = by_time(asks("a", 150, range(100)), asks("b", 40, range(100)))
    assert measure.light_tenants(result(service, arrivals)) == ["b"]
    tenants = (TenantSpec("a", weight=90.0), TenantSpec("b", weight=10.0))
    assert measure.light_tenants(result(service, arrivals, tenants)) == []


def test_a_run_without_requests_has_figures() -> None:
    figures = measure.summary(run(Scenario(Traffic("none", (TenantSpec("a"),), ()), (SMALL,), ())))
    assert figures["requests"] == figures["difference_max"] == figures["tokens_per_s"] == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_random_runs_have_figures_that_hang_together(seed: int) -> None:
    one = run(random_scenario(seed))
    figures = measure.summary(one)
    ended = figures["ok"] + figures["refused"] + figures["left"] + figures["failed"]
    assert ended == figures["requests"] == len(one.records)
    assert 0.0 < figures["jain"] <= 1.0 + 1e-9
    assert 0.0 <= figures["difference_mean"] <= figures["difference_max"]
    assert figures["first_token_p50_s"] <= figures["first_token_p90_s"] <= figures["first_token_p99_s"]

"""The table, the lines and the picture tell what a result holds."""

import sys
from itertools import chain
from pathlib import Path

import pytest

from evenflow.policy.fairness import Group, Tier
from evenflow.sim import report
from evenflow.sim.engine import PROFILES
from evenflow.sim.model import Arrival, Record, Result, Scenario, TenantSpec, Traffic
from evenflow.sim.traffic import generate
from evenflow.sim.world import run

TIERS = (
    Tier("first", groups=(Group("keys", 30.0), Group("web", 10.0))),
    Tier("last", groups=(Group("batch", 10.0),)),
)
PROFILE = PROFILES["a10g-7b"]


def by_hand(*tenants: TenantSpec, seconds: int = 40, served: dict[str, float]) -> Result:
    """All wait from 0 to the end; each gets so many input tokens in every second."""
    arrivals = [Arrival(0.0, tenant.name, 100, 10) for tenant in tenants]
    scenario = Scenario(Traffic("by hand", tenants, arrivals), (PROFILE,), TIERS, name="by hand")
    result = Result(scenario, ended_s=float(seconds))
    result.records = [Record(one, "ok", 1.0, float(seconds), float(seconds)) for one in arrivals]
    result.service = list(
        chain.from_iterable(
            [(second + 0.5, name, int(tokens), 0) for name, tokens in served.items()] for second in range(seconds)
        )
    )
    return result


def simulated(policy: str = "fair", **changes: object) -> Result:
    traffic = generate(tenants=12, requests=400, rate=2.0, seed=1)
    scenario = Scenario(traffic, (PROFILE,), TIERS, policy=policy, name=policy, **changes)  # type: ignore[arg-type]
    return run(scenario)


# ----------------------------------------------------------------------------------------------------
# Shares


def test_shares_are_of_the_tier_and_due_by_both_levels_of_weight() -> None:
    result = by_hand(
        TenantSpec("a", "keys", 30.0),
        TenantSpec("b", "keys", 10.0),
        TenantSpec("c", "web", 5.0),
        TenantSpec("d", "batch", 1.0, tier=1),
        served={"a": 60, "b": 20, "c": 20, "d": 500},
        seconds=60,
    )
    shares = report.shares(result)
    # keys : web is 30 : 10, and in keys a : b is 30 : 10; nobody waits beside d in its tier.
    assert set(shares) == {"a", "b", "c"}
    assert [round(shares[name].due, 6) for name in "abc"] == [0.5625, 0.1875, 0.25]
    assert [round(shares[name].got, 6) for name in "abc"] == [0.6, 0.2, 0.2]


def test_a_share_is_of_what_was_served_while_its_tenant_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SHARE_WINDOWS_MIN", 1)
    result = by_hand(TenantSpec("a"), TenantSpec("b"), TenantSpec("c"), served={"a": 10, "b": 10, "c": 20})
    result.records[2].first_token_s = 10.0
    shares = report.shares(result)
    assert shares["c"] == pytest.approx((0.5, 1 / 3))
    # A quarter in the first window, and half of the rest after it: of 400 and three times 200.
    assert shares["a"] == pytest.approx((0.4, 0.4 * 1 / 3 + 0.6 * 0.5))
    assert report.Contended(result).share(["a", "b"]) == pytest.approx((0.8, 0.4 * 2 / 3 + 0.6))
    assert report.Contended(result).share(["nobody"]) is None


def test_who_did_not_wait_all_through_a_window_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SHARE_WINDOWS_MIN", 1)
    result = by_hand(TenantSpec("a"), TenantSpec("b"), served={"a": 10, "b": 30})
    result.records[1].first_token_s = 9.9
    assert report.shares(result) == {}
    result.records[1].first_token_s = 10.0
    assert report.shares(result)["b"].got == pytest.approx(0.75)


def test_who_hardly_waited_has_no_share() -> None:
    assert report.shares(by_hand(TenantSpec("a"), TenantSpec("b"), served={"a": 1, "b": 1}, seconds=59)) == {}
    assert len(report.shares(by_hand(TenantSpec("a"), TenantSpec("b"), served={"a": 1, "b": 1}, seconds=60))) == 2


def test_service_at_the_end_of_a_window_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SHARE_WINDOWS_MIN", 1)
    result = by_hand(TenantSpec("a"), TenantSpec("b"), served={})
    result.service = [(10.0, "a", 100, 0), (10.0, "b", 0, 50), (20.0, "a", 300, 0), (20.0, "b", 100, 0)]
    shares = report.shares(result)
    assert shares["a"].got == pytest.approx((100 + 300) / 600)


# ----------------------------------------------------------------------------------------------------
# The table


def test_the_table_fits_in_100_columns_however_many_runs() -> None:
    results = [simulated(), simulated("fcfs"), simulated("vtc"), simulated(slots=4), simulated(slots=None)]
    lines = report.table(results).splitlines()
    assert max(map(len, lines)) <= report.WIDTH
    assert sum(line.startswith("requests ") for line in lines) == 2
    assert all(line == line.rstrip() for line in lines)


def test_columns_are_aligned_and_the_figures_are_those_of_the_run() -> None:
    fair, fcfs = simulated(), simulated("fcfs")
    lines = report.table([fair, fcfs]).splitlines()
    head, *rows = lines[: lines.index("")]
    assert head.split() == ["fair", "fcfs"]
    assert {len(row) for row in (head, *rows)} == {len(head)}
    assert rows[0].split() == ["requests", "400", "400"]
    ok = [sum(record.outcome == "ok" for record in result.records) for result in (fair, fcfs)]
    assert rows[1].split() == ["ok", *map(str, ok)]


def test_rows_come_by_demand_and_the_rest_together() -> None:
    result = simulated()
    lines = report.table([result], tenants=5).splitlines()
    rows = lines[lines.index("fair") + 2 :]
    assert len(rows) == 6
    assert rows[-1].split()[:2] == ["7", "others"]
    demand = [row.demand for row in report.tenant_rows(result)]
    assert demand == sorted(demand, reverse=True)
    counted = [int(row.split()[2].replace(",", "")) for row in rows]
    assert sum(counted) == 400


def test_outcomes_are_shown_when_there_are_any() -> None:
    assert "refused" not in report.table([simulated()])
    assert "  refused" in report.table([simulated(queued_max=5)])
    assert "  not ended" in report.table([by_hand_unended()])


def by_hand_unended() -> Result:
    result = by_hand(TenantSpec("a"), TenantSpec("b"), served={"a": 1, "b": 1})
    result.records[0].outcome = ""
    return result


def test_an_empty_result_has_a_table() -> None:
    scenario = Scenario(Traffic("none", (TenantSpec("a"),), ()), (PROFILE,), TIERS, name="none")
    text = report.table([Result(scenario)])
    assert "requests" in text and "–" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.00"), (1.234, "1.23"), (9.999, "10.0"), (99.96, "100"), (12345.6, "12,346")]
)
def test_seconds_have_three_figures(value: float, text: str) -> None:
    assert report.seconds(value) == text


# ----------------------------------------------------------------------------------------------------
# Comparisons


def test_a_comparison_is_one_line_about_whom_it_is_about() -> None:
    base = by_hand(TenantSpec("a"), TenantSpec("b"), served={"a": 10, "b": 30}, seconds=60)
    other = by_hand(TenantSpec("a"), TenantSpec("b"), served={"a": 30, "b": 30}, seconds=60)
    line = report.comparison(base, other, ["a"])
    assert line == (
        "by hand: share of a 50% (was 25%), p90 TTFT of a 60.0 s (was 60.0 s), tokens per second 60 (was 40)"
    )
    assert "\n" not in report.comparison(simulated(), simulated("fcfs"))
    assert "p90 TTFT" in report.comparison(simulated(), simulated("fcfs"))
    assert "answered" not in report.comparison(simulated(), simulated("fcfs"))
    assert ", answered " in report.comparison(simulated(), simulated(queued_max=5))


# ----------------------------------------------------------------------------------------------------
# The picture


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    report.plot([simulated(), simulated("fcfs", slots=None)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
    scenario = Scenario(Traffic("none", (TenantSpec("a"),), ()), (PROFILE,), TIERS, name="none")
    report.plot([Result(scenario)], path)
    with pytest.raises(report.NoPlot, match="choose another file"):
        report.plot([simulated()], tmp_path / "none" / "plot.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(report.NoPlot, match=r"install evenflow\[sim\] for the plot"):
        report.plot([simulated()], tmp_path / "plot.png")

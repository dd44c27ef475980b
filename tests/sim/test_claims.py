"""What is said of the schedule, held by replays of public traces where they are at hand."""

import sys
from pathlib import Path

import pytest

from evenflow.sim.engine import PROFILES
from evenflow.sim.invariants import Watch
from evenflow.sim.model import Scenario, Traffic
from evenflow.sim.traffic import read_trace
from evenflow.sim.world import run

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "traces"
ARENA = TRACES / "vtc_arena" / "arena_27tenants.csv"
SERVEGEN = TRACES / "servegen" / "mmid_20min_10rps.csv"

sys.path.append(str(ROOT / "benchmarks"))
import schedule  # noqa: E402


def trace(path: Path) -> Traffic:
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    return read_trace(path)


def test_the_arena_log_is_served_fairly_at_the_same_throughput() -> None:
    """Against first come, first served: less than half of the largest difference, at most 2 % fewer tokens a second,
    and a tenth of the wait of light tenants."""
    log = trace(ARENA)
    base = schedule.reference(log)
    ours = schedule.arena(log)
    assert ours["difference_max"] <= 0.45 * base["difference_max"]
    assert ours["difference_mean"] <= 0.55 * base["difference_mean"]
    assert ours["tokens_per_s"] >= 0.98 * base["tokens_per_s"]
    assert base["light_first_token_p90_s"] > 100
    assert ours["light_first_token_p90_s"] <= 8

def test_the_bound_holds_in_every_moment_of_the_arena_log_and_is_used() -> None:
    scenario = Scenario(trace(ARENA), (PROFILES["a10g-7b"],), schedule.TIERS, slots="auto", kv_told=True)
    result = run(scenario, check=Watch(scenario))
    assert 0.5 < result.bound_ratio <= 1


def test_learned_slots_are_as_good_as_the_best_fixed_ones() -> None:
    """Within 20 % of the best wait of light tenants that any number gives at about full throughput."""
    log = trace(ARENA)
    learned = schedule.arena(log)
    fixed = [schedule.arena(log, slots=count, kv_told=False) for count in range(16, 41, 2)]
    full = max(one["tokens_per_s"] for one in fixed)
    best = min(one["light_first_token_p90_s"] for one in fixed if one["tokens_per_s"] >= 0.97 * full)
    assert learned["light_first_token_p90_s"] <= 1.2 * best
    assert learned["tokens_per_s"] >= 0.97 * full


def test_bursty_tenants_on_four_engines_get_equal_shares() -> None:
    for line in schedule.backlogged(trace(SERVEGEN)).splitlines()[2:]:
        assert float(line.split("|")[3]) >= 0.98, line


def test_a_quiet_tenant_beside_a_flood() -> None:
    """Half of its share while another asks for ten times its own: p99 at most twice that alone and one service."""
    alone = schedule.isolation()
    assert alone.beside_flood_s <= 2 * alone.solo_s + alone.service_s
    assert alone.beside_flood_fcfs_s > 100  # and so the test tells something

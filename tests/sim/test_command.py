"""The command answers its questions in a line each, and tells of mistakes in one."""

import argparse
import json
import re
import sys
from math import inf
from pathlib import Path

import pytest

from evenflow.sim import command
from evenflow.sim.engine import PROFILES
from evenflow.sim.model import Arrival, Fault, Record
from evenflow.sim.setup import KINDS, OPTIONS, Notes, Setup, Traffics, scenario

SMALL = ["--tenants", "4", "--requests", "200", "--rate", "2"]

CONFIG = """
workers:
  - {name: one, url: "http://127.0.0.1:9001", slots: 12}
  - {name: two, url: "http://127.0.0.1:9002", slots: 12}
scheduling:
  tiers:
    - {name: live, groups: [{name: premium, weight: 30}, {name: keys, weight: 10}]}
    - {name: later, min_share: 0.05, groups: [{name: batch}]}
tenants:
  - {name: alice, group: premium, weight: 20, keys: [sk-alice]}
  - {name: bob, keys: [sk-bob], limits: {concurrency: 2, queued: 50}}
  - {name: night, group: batch, keys: [sk-night]}
limits: {queue_timeout_s: 77, queued: 123}
"""


def sim(*arguments: str) -> int:
    parser = argparse.ArgumentParser("evenflow sim", allow_abbrev=False)
    command.add_arguments(parser)
    return command.main(parser.parse_args(arguments))


def made(**changes: object) -> Setup:
    return Setup(requests=200, rate=2.0, **changes)  # type: ignore[arg-type]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("EVENFLOW_CONFIG", "EVENFLOW_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "evenflow.yaml"
    path.write_text(CONFIG)
    return path


# ----------------------------------------------------------------------------------------------------
# What it answers


def test_alone_it_shows_what_fairness_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim() == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "What this shows" in out and "Try next" in out
    assert max(map(len, out.splitlines())) < 140
    waits = [float(out.split(before)[1].split(" s")[0]) for before in ("wait behind it: ", "fair queueing they wait ")]
    assert waits[0] > 10 * waits[1]


def test_what_if_a_tenant_had_more_weight(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(*SMALL, "--compare", "more: weight.tenant-0=50") == 0
    answer = capsys.readouterr().out.splitlines()[-1]
    assert answer.startswith("more: share of tenant-0 ")
    now, was = answer.split("tenant-0 ")[1].split("% (was ")[:2]
    assert int(now) > int(was.split("%")[0]) + 10


def test_how_many_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(*SMALL, "--find-engines", "p99_ttft_s<2", "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    (answer,) = told["answers"]
    engines = len(told["scenarios"][0]["engines"])
    assert answer.startswith(f"fair: p99_ttft_s<2 needs {engines} engines: ")
    assert told["scenarios"][0]["figures"]["first_token_p99_s"] < 2.0
    assert engines > 1
    assert sim(*SMALL, "--engines", str(engines - 1), "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scenarios"][0]["figures"]["first_token_p99_s"] >= 2.0


def test_a_condition_that_never_holds_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ENGINES_MAX", 8)
    assert sim(*SMALL, "--find-engines", "p50_ttft_s.tenant-0<0.0001") == 0
    assert "does not hold with 8 engines either" in capsys.readouterr().out


def test_who_is_refused_waits_for_ever() -> None:
    arrival = Arrival(1.0, "a", 1, 1)
    wanted = command._condition(" p50_ttft_s.a < 2 ")
    records = [Record(arrival, "ok", 1.0, 2.0, 3.0), Record(arrival, "refused", None, None, 1.0)]
    assert command.figure(wanted, records) == inf
    assert command.figure(wanted, [*records, records[0]]) == 1.0
    assert command.figure(wanted, [Record(arrival, "left")]) == 0.0


def test_equal_commands_print_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("1", "1", "2"):
        assert sim(*SMALL, "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_the_fairness_bound_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(*SMALL, "--json", "-") == 0
    (told,) = json.loads(capsys.readouterr().out)["scenarios"]
    assert 0.0 < told["figures"]["bound_ratio"] <= 1.0 + 1e-9


def test_json_has_each_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert sim(*SMALL, "--compare", "fcfs: policy=fcfs", "--json", str(path)) == 0
    told = json.loads(path.read_text())
    assert [one["policy"] for one in told["scenarios"]] == ["fair", "fcfs"]
    assert sum(tenant["requests"] for tenant in told["scenarios"][1]["tenants"]) == 200
    assert "tokens per second" in capsys.readouterr().out


def test_a_fitted_profile_goes_in_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "access.log"
    rows = []
    for i in range(60):
        first_s, tokens = i * 3.0 + 0.2, 20 + i
        beside = 1 + i % 3
        for _ in range(beside):
            took_s = (tokens - 1) * (0.02 + 0.001 * beside)
            rows.append(
                {"time": first_s + took_s, "outcome": "ok", "worker": "w", "queue_ms": 0.0, "ttft_ms": 200.0 * beside}
                | {"duration_ms": (0.2 * beside + took_s) * 1e3, "input_tokens": 400, "cached_tokens": 0}
                | {"output_tokens": tokens}
            )
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sim("--fit", str(log), "--engine", "l4-8b") == 0
    out = capsys.readouterr().out
    assert "kv_tokens: 90000" in out
    (tmp_path / "engine.yaml").write_text(out)
    assert sim(*SMALL, "--engine", str(tmp_path / "engine.yaml")) == 0
    assert "1 × fitted" in capsys.readouterr().out


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert sim(*SMALL, "--plot", str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ----------------------------------------------------------------------------------------------------
# How a scenario is made


def test_a_configuration_decides_who_shares(config: Path) -> None:
    setup = made(config=OPTIONS["config"].convert(str(config)))
    one = scenario("x", setup, Traffics(), Notes())
    assert [(tier.name, tier.min_share, [group.name for group in tier.groups]) for tier in one.tiers] == [
        ("live", 0.0, ["premium", "keys"]),
        ("later", 0.05, ["batch"]),
    ]
    assert [(spec.name, spec.group, spec.weight, spec.tier) for spec in one.traffic.tenants] == [
        ("alice", "premium", 20.0, 0),
        ("bob", "keys", 10.0, 0),
        ("night", "batch", 10.0, 1),
    ]
    assert one.traffic.tenants[1].concurrency == 2 and one.traffic.tenants[1].queued_max == 50
    assert (len(one.engines), one.slots, one.queue_timeout_s, one.queued_max) == (2, 12, 77.0, 123)
    assert {arrival.tenant for arrival in one.traffic.arrivals} == {"alice", "bob", "night"}


def test_slots_that_are_not_configured_are_learned(config: Path) -> None:
    config.write_text(CONFIG.replace(", slots: 12", ""))
    setup = made(config=OPTIONS["config"].convert(str(config)))
    assert scenario("x", setup, Traffics(), Notes()).slots == "auto"
    config.write_text(CONFIG.replace(", slots: 12", "", 1))
    notes = Notes()
    setup = made(config=OPTIONS["config"].convert(str(config)))
    assert scenario("x", setup, Traffics(), notes).slots == "auto"
    assert notes.lines == ["note: all engines have the slots of the first worker: auto"]


def test_the_command_line_goes_before_the_configuration(config: Path) -> None:
    settings = OPTIONS["config"].convert(str(config))
    setup = made(config=settings, engines=5, slots="none", queue_timeout_s=3.0, placement="round_robin")
    one = scenario("x", setup, Traffics(), Notes())
    assert (len(one.engines), one.slots, one.queue_timeout_s, one.placement) == (5, None, 3.0, "round_robin")


def test_tenants_of_a_trace_are_matched_or_dealt(config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    head = "arrival_s,tenant,input_tokens,output_tokens\n"
    settings = OPTIONS["config"].convert(str(config))
    notes = Notes()
    trace.write_text(head + "0,bob,9,9\n1,mallory,9,9\n2,eve,9,9\n")
    one = scenario("x", Setup(trace=str(trace), config=settings), Traffics(), notes)
    assert [arrival.tenant for arrival in one.traffic.arrivals] == ["bob", "anonymous", "anonymous"]
    assert "2 tenants of the trace are not in the configuration" in notes.lines[0]
    notes = Notes()
    trace.write_text(head + "".join(f"{i},{i},9,9\n" for i in range(4)))
    one = scenario("x", Setup(trace=str(trace), config=settings), Traffics(), notes)
    assert [arrival.tenant for arrival in one.traffic.arrivals] == ["alice", "bob", "night", "alice"]
    assert "the 4 tenants of the trace are dealt to the 3" in notes.lines[0]


def test_settings_reach_what_they_name(config: Path) -> None:
    setup = made(config=OPTIONS["config"].convert(str(config)))
    for text in (
        "weight.premium=50",
        "weight.bob=7",
        "group.bob=batch",
        "concurrency.alice=3",
        "queued.alice=4",
        "min_share.later=0.2",
        "max_wait_s.later=60",
        "engine.kv_tokens=20000",
        "engine.prefix_cache=true",
        "slots=9",
    ):
        setup = command.with_setting(setup, text, "--set")
    one = scenario("x", setup, Traffics(), Notes())
    assert one.tiers[0].groups[0].weight == 50.0
    assert (one.tiers[1].min_share, one.tiers[1].max_wait_s) == (0.2, 60.0)
    alice, bob, _ = one.traffic.tenants
    assert (alice.concurrency, alice.queued_max) == (3, 4)
    assert (bob.weight, bob.group, bob.tier) == (7.0, "batch", 1)
    assert (one.engines[0].kv_tokens, one.engines[0].prefix_cache, one.slots) == (20000, True, 9)


def test_the_engine_is_the_first_that_holds_the_longest_request(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,tenant,input_tokens,output_tokens\n0,a,50000,9\n")
    notes = Notes()
    assert scenario("x", Setup(trace=str(trace)), Traffics(), notes).engines[0].kv_tokens >= 50009
    assert notes.lines == []
    setup = Setup(trace=str(trace), engine=OPTIONS["engine"].convert("a10g-7b"))
    scenario("x", setup, Traffics(), notes)
    assert "1 requests are longer than the 10,000 tokens" in notes.lines[0]


def test_faults() -> None:
    assert command.fault_of("dead:1:10:20") == Fault("dead", 10.0, 20.0, 1)
    assert command.fault_of("slow:0:10:20:3") == Fault("slow", 10.0, 20.0, 0, 3.0)
    assert command.fault_of("leave_storm:5:0.5") == Fault("leave_storm", 5.0, 5.0, 0, 0.5)


def test_faults_happen(capsys: pytest.CaptureFixture[str]) -> None:
    faults = ("--fault", "dead:0:10:30", "--fault", "leave_storm:50:1", "--fault", "slow:1:5:50:2")
    assert sim(*SMALL, "--engines", "2", *faults, "--json", "-") == 0
    (told,) = json.loads(capsys.readouterr().out)["scenarios"]
    assert told["figures"]["left"] > 0


# ----------------------------------------------------------------------------------------------------
# The progress bar


def test_the_bar_tells_how_far_it_is() -> None:
    assert command.bar_line("fair", 1000, 0.5, 10.0) == (
        "fair                     [############------------]  50%  500 of 1,000  50/s  10 s left"
    )
    assert command.bar_line("fair", 1000, 0.0, 0.0).endswith("0 of 1,000  0/s  …")


def test_the_bar_is_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "REDRAW_S", 0.0)
    assert sim(*SMALL) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert sim(*SMALL) == 0
    err = capsys.readouterr().err
    assert "of 200" in err and err.endswith("\r\x1b[K")


# ----------------------------------------------------------------------------------------------------
# The page


def test_the_page_names_options_and_settings_that_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "SIMULATION.md").read_text()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    named = set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", page))
    assert len(named) > 15
    assert named <= flags
    for kind in KINDS:
        assert f"`{kind}." in page, kind
    for profile in PROFILES:
        assert f"`{profile}`" in page, profile


# ----------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trace", "/none.csv"], "/none.csv:1: file"),
        (["--trace", "/"], "/:1: file"),
        (["--config", "/none.yaml"], "--config"),
        (["--tenants", "0"], "--tenants"),
        (["--requests", "1.5"], "--requests"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "1e-300"], "--rate"),
        (["--rate", "1e-8"], "--rate"),
        (["--requests", "999999999999"], "--requests"),
        (["--engines", "1000000"], "--engines"),
        (["--skew", "-1"], "--skew"),
        (["--skew", "1e9"], "--skew"),
        (["--burst", "1e9"], "--burst"),
        (["--one-shot", "5000"], "--one-shot"),
        (["--engine", "h200"], "--engine"),
        (["--engines", "-3"], "--engines"),
        (["--slots", "many"], "--slots"),
        (["--policy", "fare"], "--policy"),
        (["--placement", "best"], "--placement"),
        (["--charging", "never"], "--charging"),
        (["--fault", "dead"], "--fault"),
        (["--fault", "tired:0:1:2"], "--fault"),
        (["--fault", "dead:0:2:1"], "--fault"),
        (["--fault", "dead:0.5:1:2"], "--fault"),
        (["--fault", "dead:3:1:2"], "--fault"),
        (["--fault", "slow:0:1:2:0"], "--fault"),
        (["--fault", "leave_storm:1:2"], "--fault"),
        (["--set", "slots"], "--set"),
        (["--set", "slotz=4"], "did you mean 'slots'"),
        (["--set", "weight.tenant-99=4"], "--set: weight.tenant-99"),
        (["--set", "weight.tenant-1=0"], "--set: weight.tenant-1"),
        (["--set", "group.tenant-1=none"], "--set: group.tenant-1"),
        (["--set", "min_share.all=1"], "--set: min_share.all"),
        (["--set", "max_wait_s.none=1"], "--set: max_wait_s.none"),
        (["--set", "height.x=1"], "--set"),
        (["--set", "engine.colour=1"], "--set: engine.colour"),
        (["--set", "engine.kv_tokens=0"], "engine.kv_tokens"),
        (["--compare", "more"], "--compare"),
        (["--compare", "more: slots=x"], "--compare: more: slots"),
        (["--compare", "more: weight.nobody=5"], "--compare: more: weight.nobody"),
        (["--find-engines", "soon"], "--find-engines"),
        (["--find-engines", "p99_ttft_s<."], "--find-engines"),
        (["--find-engines", "p99_ttft_s.nobody<2"], "--find-engines"),
        (["--plot", "/none/a.png"], "--plot"),
        (["--plot", "/"], "--plot"),
        (["--json", "/none/a.json"], "--json"),
        (["--fit", "/none.log"], "/none.log"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert sim(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("evenflow sim: ") and err.count("\n") == 1
    assert named in err
    assert ";" in err or "did you mean" in err
    assert "Traceback" not in err


def test_an_unreadable_engine_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("kv_tokens: many\n")
    assert sim("--engine", str(path)) == 2
    assert str(path) in capsys.readouterr().err


def test_a_plot_that_cannot_be_drawn_is_said_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "run", None)
    assert sim("--plot", "a.png") == 2
    assert "install evenflow[sim] for the plot" in capsys.readouterr().err

"""What made a log is found in it again."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from evenflow.observe.access_log import log_names, never_ran_line, ran_line
from evenflow.policy.fairness import Group, Tier
from evenflow.sim.engine import PROFILES
from evenflow.sim.fit import FitError, Measured, fit, fit_log, profile_yaml, read_profile
from evenflow.sim.model import EngineProfile, Record, Scenario
from evenflow.sim.traffic import generate
from evenflow.sim.world import run

TIERS = (Tier("all", groups=(Group("keys", 10.0),)),)
NAMES = log_names("t", "m", "chat")


def simulated(profile: EngineProfile, *, engines: int, rate: float, seed: int = 3) -> list[Record]:
    traffic = generate(requests=400, rate=rate, seed=seed)
    return run(Scenario(traffic, (profile,) * engines, TIERS)).records


def write_log(path: Path, records: Iterable[Record]) -> Path:
    """As the gateway writes it, times rounded as there."""
    lines = [never_ran_line(1.0, b"r", NAMES, 429, b"refused", 0.01, "queue_full")]
    for record in records:
        if record.outcome != "ok":
            continue
        assert record.ended_s is not None and record.dispatched_s is not None and record.first_token_s is not None
        began_s = record.arrival.time_s
        lines.append(
            ran_line(
                1.8e9 + record.ended_s,
                b"r",
                NAMES,
                200,
                b"ok",
                b'"engine-%d"' % record.engine,
                record.dispatched_s - began_s,
                record.first_token_s - began_s,
                record.ended_s - began_s,
                record.arrival.input_tokens,
                record.cached_tokens,
                record.output_tokens,
                1.0,
                None,
            )
        )
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("name", list(PROFILES))
@pytest.mark.parametrize(("engines", "rate"), [(1, 0.5), (2, 3.0)])
def test_a_simulated_engine_is_found_again(tmp_path: Path, name: str, engines: int, rate: float) -> None:
    profile = replace(PROFILES[name], step_per_kv_token_s=0.0)
    found = fit_log(write_log(tmp_path / "access.log", simulated(profile, engines=engines, rate=rate)), PROFILES[name])
    for field in ("prefill_tokens_per_s", "step_s", "step_per_sequence_s"):
        assert getattr(found.profile, field) == pytest.approx(getattr(profile, field), rel=0.1), field
    assert found.error < 0.05
    assert found.sequences > 1


def test_the_cost_of_a_full_cache_becomes_that_of_sequences(tmp_path: Path) -> None:
    profile = PROFILES["a10g-7b"]
    found = fit_log(write_log(tmp_path / "access.log", simulated(profile, engines=1, rate=0.5)), profile)
    assert found.profile.step_per_sequence_s > profile.step_per_sequence_s
    assert found.error < 0.1


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    for profile in PROFILES.values():
        path.write_text(profile_yaml(profile))
        assert read_profile(path) == profile


def test_too_little_is_said(tmp_path: Path) -> None:
    base = PROFILES["l4-8b"]
    few = simulated(base, engines=1, rate=0.5)[:5]
    with pytest.raises(FitError, match="5 requests are too few"):
        fit_log(write_log(tmp_path / "access.log", few), base)
    with pytest.raises(FitError, match="0 requests are too few"):
        fit({}, base)
    # Answers that came in one piece, as without `stream`.
    whole = [Measured(float(i), i + 0.5, i + 0.5, 100, 50) for i in range(50)]
    with pytest.raises(FitError, match="stream: true"):
        fit({"a": whole}, base)


def test_an_engine_that_always_ran_alike_cannot_be_told_apart() -> None:
    alike = [Measured(i * 10.0, i * 10.0 + 0.5, i * 10.0 + 1.5, 10, 101) for i in range(50)]
    with pytest.raises(FitError, match="few and with many requests at once"):
        fit({"a": alike}, PROFILES["l4-8b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", ":1: row: "),
        ('{"duration_ms": 5, "outcome": "ok", "ttft_ms": 5, "worker": "w"}\n', ":1: time: "),
        ('{"duration_ms": "x", "outcome": "ok", "ttft_ms": 5, "worker": "w", "time": 1}\n', ":1: duration_ms: "),
    ],
)
def test_what_is_no_access_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "access.log"
    path.write_text(text)
    with pytest.raises(FitError, match=message):
        fit_log(path, PROFILES["l4-8b"])
    with pytest.raises(FitError, match="cannot be read"):
        fit_log(tmp_path, PROFILES["l4-8b"])
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(FitError, match="not UTF-8"):
        fit_log(path, PROFILES["l4-8b"])


GOOD = {
    "kv_tokens": "9000",
    "sequences_max": "4",
    "step_s": "1e-2",
    "step_per_sequence_s": "0",
    "prefill_tokens_per_s": "9",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_tokens": "-1"}, "kv_tokens: "),
        ({"kv_tokens": "1.5"}, "kv_tokens: "),
        ({"kv_tokens": ".inf"}, "kv_tokens: "),
        ({"kv_tokens": "[1]"}, "kv_tokens: "),
        ({"step_s": "0"}, "step_s: "),
        ({"step_s": "true"}, "step_s: "),
        ({"prefill_tokens_per_s": "0"}, "prefill_tokens_per_s: "),
        ({"prefix_cache": "maybe"}, "prefix_cache: "),
        ({"colour": "red"}, "colour: "),
    ],
)
def test_a_bad_profile_is_refused_by_field(tmp_path: Path, change: dict[str, str], message: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in GOOD.items()))
    assert read_profile(path).step_s == 0.01
    path.write_text("".join(f"{key}: {value}\n" for key, value in (GOOD | change).items()))
    with pytest.raises(FitError, match=message):
        read_profile(path)
    path.write_text("kv_tokens: 9000\n")
    with pytest.raises(FitError, match="sequences_max: is missing"):
        read_profile(path)

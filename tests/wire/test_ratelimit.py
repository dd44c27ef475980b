"""The x-ratelimit lines: values of the buckets, durations as OpenAI writes them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.policy.limits import TenantLimits
from evenflow.wire.ratelimit import duration, rate_limit_lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, b"0s"),
        (-1.0, b"0s"),
        (0.12, b"120ms"),
        (0.9994, b"999ms"),
        (1.0, b"1s"),
        (7.5, b"7.5s"),
        (7.04, b"7s"),
        (59.96, b"1m0s"),
        (60.0, b"1m0s"),
        (72.34, b"1m12.3s"),
        (360.0, b"6m0s"),
        (3600.0, b"60m0s"),
    ],
)
def test_durations(seconds: float, text: bytes) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e6))
def test_every_duration_can_be_read_back(seconds: float) -> None:
    match = re.fullmatch(rb"(?:(\d+)m)?([\d.]+)(ms|s)", duration(seconds))
    assert match
    read = int(match[1] or 0) * 60 + float(match[2]) / (1000 if match[3] == b"ms" else 1)
    assert read == pytest.approx(seconds, abs=0.051)


def test_lines_of_both_buckets() -> None:
    limits = TenantLimits(60, 6000)
    assert limits.reserve(0.0, 300.0) is None
    assert rate_limit_lines(limits, 0.0) == (
        b"x-ratelimit-limit-requests: 60\r\nx-ratelimit-remaining-requests: 59\r\nx-ratelimit-reset-requests: 1s\r\n"
        b"x-ratelimit-limit-tokens: 6000\r\nx-ratelimit-remaining-tokens: 5700\r\nx-ratelimit-reset-tokens: 3s\r\n"
    )
    assert rate_limit_lines(limits, 0.5).splitlines()[1] == b"x-ratelimit-remaining-requests: 59"
    assert rate_limit_lines(limits, 1.0).splitlines()[1:3] == [
        b"x-ratelimit-remaining-requests: 60",
        b"x-ratelimit-reset-requests: 0s",
    ]


def test_a_bucket_that_is_not_there_has_no_lines() -> None:
    assert rate_limit_lines(TenantLimits(None, None), 0.0) == b""
    assert b"tokens" not in rate_limit_lines(TenantLimits(5, None), 0.0)
    assert b"requests" not in rate_limit_lines(TenantLimits(None, 5), 0.0)


def test_a_debt_is_shown_as_nothing_left() -> None:
    limits = TenantLimits(None, 600)
    limits.reserve(0.0, 100.0)
    limits.settle(0.0, 100.0, 1200.0)
    lines = rate_limit_lines(limits, 0.0).splitlines()
    assert lines[1:] == [b"x-ratelimit-remaining-tokens: 0", b"x-ratelimit-reset-tokens: 2m0s"]

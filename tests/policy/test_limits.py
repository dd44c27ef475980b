"""Token buckets: never more than the limit in any minute, both or neither, and what is refused costs nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.policy.limits import Refused, TenantLimits, TokenBucket


def test_a_full_minute_at_once_then_as_it_refills() -> None:
    limits = TenantLimits(60, None)
    assert [limits.reserve(0.0, 1.0) for _ in range(60)] == [None] * 60
    refused = limits.reserve(0.0, 1.0)
    assert isinstance(refused, Refused)
    assert refused.which == "requests"
    assert refused.retry_after_s == pytest.approx(1.0)
    assert limits.reserve(0.99, 1.0) is not None
    assert limits.reserve(1.01, 1.0) is None


def test_both_or_neither() -> None:
    """S32: a request that lacks tokens takes no request from its tenant."""
    limits = TenantLimits(2, 100)
    assert limits.reserve(0.0, 100.0) is None
    refused = limits.reserve(0.0, 50.0)
    assert refused is not None
    assert refused.which == "tokens"
    assert refused.retry_after_s == pytest.approx(30.0)
    assert limits.requests is not None
    assert limits.requests.remaining(0.0) == 1


def test_refund_gives_all_back_and_settle_the_difference() -> None:
    """Report 33."""
    limits = TenantLimits(2, 100)
    limits.reserve(0.0, 80.0)
    limits.refund(0.0, 80.0)
    assert limits.reserve(0.0, 90.0) is None
    limits.settle(0.0, 90.0, 10.0)
    assert limits.tokens is not None
    assert limits.tokens.remaining(0.0) == 90
    limits.settle(0.0, 0.0, 150.0)  # more was used than there is: the next one pays
    assert limits.reserve(0.0, 1.0) is not None
    assert limits.tokens.level(0.0) == pytest.approx(-60.0)


def test_a_request_larger_than_the_limit_passes_a_full_bucket() -> None:
    limits = TenantLimits(None, 100)
    assert limits.reserve(0.0, 1000.0) is None
    refused = limits.reserve(0.0, 1.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(901 * 0.6)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 20)), max_size=80))
def test_no_window_of_a_minute_holds_more_than_two_limits(limit: int, asked: list[tuple[float, float]]) -> None:
    """A bucket lets through at most its size and a minute's refill in any minute, whatever is asked."""
    bucket = TokenBucket(limit)
    now, taken = 0.0, []
    for pause, units in asked:
        now += pause
        units = min(units, limit)
        if bucket.wait_s(now, units) == 0.0:
            bucket.add(now, -units)
            taken.append((now, units))
    for end, _ in taken:
        assert sum(units for at, units in taken if end - 60.0 < at <= end) <= 2 * limit + 1e-6


def test_the_wait_it_tells_is_enough_and_not_too_long() -> None:
    bucket = TokenBucket(30)
    bucket.add(0.0, -30.0)
    wait_s = bucket.wait_s(0.0, 7.0)
    assert bucket.reset_s(0.0) == pytest.approx(60.0)
    assert bucket.wait_s(wait_s - 0.1, 7.0) > 0.0
    assert bucket.wait_s(wait_s + 1e-9, 7.0) == 0.0

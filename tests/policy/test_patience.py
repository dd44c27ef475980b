"""Patience: who waits in vain waits less long, nobody else, and an empty queue is forgiven by its owner."""

from math import sqrt

import pytest

from evenflow.policy.patience import SHORTEST, Patience


def test_each_interval_with_a_request_in_vain_shortens() -> None:
    patience = Patience()
    assert patience.limit_s(60.0) == 60.0
    for interval in range(1, 10):
        for second in range(5):  # many in one interval count once
            patience.waited_in_vain(100.0 * interval + second, 60.0)
        assert patience.limit_s(60.0) == pytest.approx(60.0 / sqrt(1 + interval))


def test_never_below_a_part_of_what_is_configured() -> None:
    patience = Patience()
    for interval in range(10_000):
        patience.waited_in_vain(61.0 * interval, 60.0)
    assert patience.limit_s(60.0) == 60.0 * SHORTEST


def test_an_interval_is_as_long_as_the_limit() -> None:
    patience = Patience()
    patience.waited_in_vain(0.0, 10.0)
    patience.waited_in_vain(9.99, 10.0)
    assert patience.limit_s(10.0) == pytest.approx(10.0 / sqrt(2))
    patience.waited_in_vain(10.0, 10.0)
    assert patience.limit_s(10.0) == pytest.approx(10.0 / sqrt(3))

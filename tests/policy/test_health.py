"""When a worker may be chosen: the table, what is counted, back-off, trial and ramp."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.policy.health import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    STABLE_S,
    TABLE,
    TIMES,
    Event,
    Health,
    State,
)


def ready(now: float = 0.0) -> Health:
    health = Health()
    assert health.on(Event.PROBE_SUCCEEDED, now)
    return health


def ejected(health: Health, now: float) -> None:
    """By requests that fail."""
    while health.state is State.READY:
        health.on(Event.FAILED, now)
    assert health.state is State.SUSPECT


def test_the_table_names_every_state_and_leaves_the_last_for_good() -> None:
    assert set(TABLE) == set(State)
    assert TABLE[State.GONE] == {}
    assert all(Event.REMOVE in row for state, row in TABLE.items() if state is not State.GONE)
    reached = {State.STARTING} | {state for row in TABLE.values() for state in row.values()}
    assert reached == set(State)


@pytest.mark.parametrize("event", [Event.UNREACHABLE, Event.SILENT])
def test_what_needs_no_second_time(event: Event) -> None:
    health = ready()
    assert health.on(event, 100.0)
    assert health.state is State.SUSPECT
    # The first time it may come back as soon as a probe has found it well.
    assert health.on(Event.PROBE_SUCCEEDED, 100.1)
    assert health.state is State.READY
    assert not health.on_trial


@pytest.mark.parametrize(("event", "times"), TIMES.items())
def test_what_must_happen_several_times_in_a_row(event: Event, times: int) -> None:
    health = ready()
    for _ in range(5):
        for _ in range(times - 1):
            assert not health.on(event, 1.0)
        health.answered()
        health.on(Event.PROBE_SUCCEEDED, 1.0)
    for _ in range(times - 1):
        assert not health.on(event, 1.0)
    assert health.on(event, 1.0)
    assert health.state is State.SUSPECT


def test_the_first_probe_decides_alone() -> None:
    assert Health().on(Event.PROBE_FAILED, 0.0)


def test_backoff_doubles_while_it_fails_its_trials() -> None:
    """Its probes succeed all the time: it hangs on work and answers /health."""
    health, now, waits = ready(), 1000.0, []
    ejected(health, now)
    for _ in range(9):
        began = now
        while not health.on(Event.PROBE_SUCCEEDED, now):
            now += 0.25
        waits.append(now - began)
        assert health.on_trial
        assert health.slots_max == 1.0
        # On trial the first failure is one too many.
        assert health.on(Event.FAILED, now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, BACKOFF_MAX_S, BACKOFF_MAX_S, BACKOFF_MAX_S]
    assert waits[0] == BACKOFF_S


def test_a_trial_that_ends_well_opens_the_way_by_and_by() -> None:
    health = ready()
    ejected(health, 1000.0)
    assert health.on(Event.PROBE_SUCCEEDED, 1000.0 + BACKOFF_S)
    assert not health.ramp(32)  # on trial nothing grows by itself
    health.answered()
    assert not health.on_trial
    allowed = [health.slots_max]
    while health.ramp(32):
        allowed.append(health.slots_max)
    assert allowed == [2.0, 4.0, 8.0, 16.0, inf]
    # It is as good as any now: three failures, not one.
    assert not health.on(Event.FAILED, 1010.0)


def test_flapping_costs_more_and_more_until_it_is_well_for_a_while() -> None:
    health, now, waits = ready(0.0), 1000.0, []
    for _ in range(5):
        assert health.on(Event.UNREACHABLE, now)
        began = now
        while not health.on(Event.PROBE_SUCCEEDED, now):
            now += 0.25
        waits.append(now - began)
        now += 1.0
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert health.on(Event.UNREACHABLE, now + STABLE_S)
    assert health.on(Event.PROBE_SUCCEEDED, now + STABLE_S)


def test_an_operator_need_not_wait_for_a_backoff() -> None:
    health = ready()
    ejected(health, 1000.0)
    assert health.on(Event.DRAIN, 1000.0)
    assert health.on(Event.RESUME, 1000.1)
    assert health.state is State.STARTING
    assert health.on(Event.PROBE_SUCCEEDED, 1000.2)


@given(st.lists(st.tuples(st.sampled_from([*Event, None]), st.floats(0.0, 70.0)), max_size=60))
def test_whatever_happens(steps: list[tuple[Event | None, float]]) -> None:
    """Only the table's ways are gone, none comes back before its time, and a slot is always left for a trial."""
    health, now = Health(), 0.0
    for event, pause_s in steps:
        now += pause_s
        before, until_s = health.state, health.until_s
        if event is None:
            health.answered()
            health.ramp(8)
            changed = False
        else:
            changed = health.on(event, now)
        assert changed == (health.state is not before)
        if changed:
            assert event is not None
            assert TABLE[before][event] is health.state
        if before is State.SUSPECT and health.state is State.READY:
            assert now >= until_s
        assert health.until_s - now <= BACKOFF_MAX_S
        assert health.slots_max >= 1.0
        assert health.slots_max == inf or health.state in (State.READY, State.DRAINING)

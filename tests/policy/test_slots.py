"""Learned slots: the rule, what freezes it, and that it settles where an engine runs well."""

import pytest

from evenflow.policy.slots import (
    GREW,
    MEASURE_EVERY,
    SLOTS_MAX,
    SLOTS_MIN,
    SLOTS_START,
    WINDOW,
    LearnedSlots,
)


def reached(slots: LearnedSlots) -> LearnedSlots:
    slots.reached = True
    return slots


def test_what_waits_in_the_engine_lowers_it_by_half_of_what_is_too_much() -> None:
    slots = LearnedSlots(32)
    assert slots.report(0.0, 9.0, 32)
    assert slots.limit == 28
    assert not slots.report(0.5, 1.0, 28)  # one that waits is no queue, and the limit was not reached
    assert slots.limit == 28


def test_a_limit_that_binds_grows_by_one() -> None:
    slots = LearnedSlots(32)
    assert not slots.report(0.0, 0.0, 5)
    assert reached(slots).report(0.5, 0.0, 32)
    assert slots.limit == 33
    assert not slots.report(1.0, 0.0, 33)  # reached is since the last report
    assert reached(slots).report(1.5, 1.0, 33)


def test_one_queue_is_cut_for_once() -> None:
    """While more is in flight than the limit, the last cut is still on its way."""
    slots = LearnedSlots(32)
    slots.report(0.0, 11.0, 32)
    assert slots.limit == 27
    for _ in range(10):
        assert not slots.report(0.5, 10.0, 30)
    assert slots.limit == 27
    assert slots.report(1.0, 3.0, 27)
    assert slots.limit == 26


def test_it_stays_between_its_bounds() -> None:
    slots = LearnedSlots(32)
    for _ in range(100):
        slots.report(0.0, 1000.0, 0)
    assert slots.limit == SLOTS_MIN
    for _ in range(3000):
        reached(slots).report(0.0, 0.0, slots.limit)
    assert slots.limit == SLOTS_MAX


@pytest.mark.parametrize(("maximum", "limit"), [(8, 8), (2, 2), (1, 1), (0, 1), (10_000, 32)])
def test_the_engine_knows_its_maximum(maximum: int, limit: int) -> None:
    slots = LearnedSlots()
    slots.learn_maximum(maximum)
    assert slots.limit == limit
    for _ in range(10):
        slots.report(0.0, 100.0, 0)
    assert slots.limit == min(SLOTS_MIN, max(1, maximum))


def windows(slots: LearnedSlots, seconds: float, count: int = 1) -> None:
    for _ in range(count):
        slots.reached = True
        for _ in range(WINDOW):
            slots.first_token(seconds)


def test_without_reports_first_tokens_lead() -> None:
    slots = LearnedSlots()
    windows(slots, 0.2, 3)  # the best is measured
    assert slots.limit == SLOTS_START
    windows(slots, 0.2, 10)
    assert slots.limit == SLOTS_START + 10
    windows(slots, 0.2 * GREW + 0.2)
    assert slots.limit < SLOTS_START + 10


def test_first_tokens_say_nothing_once_reports_were_seen() -> None:
    slots = LearnedSlots()
    slots.report(0.0, 0.0, 0)
    windows(slots, 0.1, 3)
    windows(slots, 60.0, 10)
    assert slots.limit == SLOTS_START


def test_a_load_that_has_changed_for_good_is_learned() -> None:
    """The best is measured anew, so that longer prompts are not taken for a queue for ever."""
    slots = LearnedSlots()
    windows(slots, 0.1, 3)
    windows(slots, 0.4, MEASURE_EVERY)
    assert slots.limit == SLOTS_MIN
    windows(slots, 0.4, 3 + 20)
    assert slots.limit > SLOTS_MIN


def test_while_the_best_is_measured_a_quarter_of_the_limit_holds() -> None:
    slots = LearnedSlots()
    windows(slots, 0.2)
    assert slots.limit == SLOTS_START // 4
    windows(slots, 0.2, 2)
    assert slots.limit == SLOTS_START
    windows(slots, 0.2, MEASURE_EVERY)
    limit = slots.limit
    windows(slots, 0.2)
    assert slots.limit == limit // 4
    windows(slots, 0.2, 2)
    assert slots.limit == limit


class Engine:
    """Runs `good` sequences and queues the rest; time to first token grows with the queue."""

    def __init__(self, good: int, demand: int) -> None:
        self.good, self.demand = good, demand

    def step(self, slots: LearnedSlots, in_flight: int, ends: int) -> tuple[int, float]:
        """What is in flight follows the limit down only as sequences end, so many in each step."""
        slots.reached = self.demand > slots.limit
        wanted = min(self.demand, slots.limit)
        in_flight = wanted if wanted >= in_flight else max(wanted, in_flight - ends)
        return in_flight, float(max(0, in_flight - self.good))


@pytest.mark.parametrize("good", [4, 8, 24, 64, 200])
@pytest.mark.parametrize("start", [4, 32, 400])
def test_reports_settle_it_near_what_the_engine_runs_well(good: int, start: int) -> None:
    slots, engine, in_flight = LearnedSlots(start), Engine(good, 1000), 0
    seen = []
    for step in range(1500):
        in_flight, waiting = engine.step(slots, in_flight, max(1, in_flight // 10))
        slots.report(step * 0.5, waiting, in_flight)
        seen.append(slots.limit)
    settled = seen[-100:]
    assert min(settled) >= 0.8 * good
    assert max(settled) <= 1.2 * good + 2


@pytest.mark.parametrize("good", [8, 24, 64])
def test_first_tokens_settle_it_within_a_factor_of_two(good: int) -> None:
    slots, engine, in_flight = LearnedSlots(), Engine(good, 1000), 0
    seen = []
    for _ in range(600):
        in_flight, waiting = engine.step(slots, in_flight, WINDOW)
        for _ in range(WINDOW):
            slots.first_token(0.2 + 0.2 * waiting / good * 4)
        seen.append(slots.limit)
    settled = sorted(seen[-200:])[100]
    assert good / 2 <= settled <= good * 2

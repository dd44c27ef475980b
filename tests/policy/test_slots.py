"""Learned slots: the rule, what freezes it, and that it settles where an engine runs well."""

import random
from collections import deque

import pytest

from evenflow.policy.slots import (
    BACK_OFF,
    BACK_OFF_MUCH,
    GREW,
    MEASURE_EVERY,
    MUCH,
    NOISE_S,
    RAISES_SMALL,
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


def test_a_limit_that_is_far_too_low_grows_by_a_part_of_itself() -> None:
    slots = LearnedSlots(320)
    for _ in range(RAISES_SMALL):
        reached(slots).report(0.0, 0.0, slots.limit)
    assert slots.limit == 320 + RAISES_SMALL  # by one, as long as it may be near
    reached(slots).report(0.0, 0.0, slots.limit)
    assert slots.limit == 320 + RAISES_SMALL + 11
    slots.report(0.0, 2.0, slots.limit)  # something queues
    limit = slots.limit
    reached(slots).report(0.0, 0.0, slots.limit)
    assert slots.limit == limit + 1


def test_without_reports_nothing_moves() -> None:
    slots = LearnedSlots(32)
    slots.report(0.0, 11.0, 32)
    slots.reached = True
    for _ in range(100 * WINDOW):
        assert not slots.first_token(9.0)
    assert slots.limit == 27
    assert slots.reported_s == 0.0


def windows(slots: LearnedSlots, seconds: float, count: int = 1) -> None:
    """So many windows of first tokens, each with what is passed over before it."""
    for _ in range(count):
        slots.reached = True
        while slots._passed_over:
            slots.first_token(60.0)  # of before the cut, and so of no account
        for _ in range(WINDOW):
            slots.first_token(seconds)


def measured(seconds: float, start: int = SLOTS_START) -> LearnedSlots:
    slots = LearnedSlots(start)
    windows(slots, seconds)
    assert slots.limit == SLOTS_MIN  # the best is measured where nothing queues
    windows(slots, seconds)
    assert slots.limit == start
    return slots


def test_without_reports_first_tokens_lead() -> None:
    slots = measured(0.2)
    windows(slots, 0.2, 10)
    assert slots.limit == SLOTS_START + 10
    windows(slots, 0.2 * GREW + NOISE_S)  # not yet
    assert slots.limit == SLOTS_START + 11
    windows(slots, 0.2 * GREW + NOISE_S + 0.01)
    assert slots.limit == int((SLOTS_START + 11) * BACK_OFF)


def test_a_limit_that_is_not_reached_stays() -> None:
    slots = measured(0.2)
    for _ in range(10 * WINDOW):
        slots.reached = False
        assert not slots.first_token(0.2)


def test_a_long_queue_halves_it() -> None:
    slots = measured(0.2)
    windows(slots, (0.2 * GREW + NOISE_S) * MUCH + 0.1)
    assert slots.limit == SLOTS_START * BACK_OFF_MUCH


def test_what_was_sent_before_a_cut_is_no_reason_for_another() -> None:
    slots = measured(0.2)
    windows(slots, 3.0)
    limit = slots.limit
    for _ in range(SLOTS_START):  # all that may have been in flight
        assert not slots.first_token(3.0)
    windows(slots, 0.2)
    assert slots.limit == limit + 1


def test_first_tokens_say_nothing_once_reports_were_seen() -> None:
    slots = LearnedSlots()
    slots.report(0.0, 0.0, 0)
    windows(slots, 0.1, 3)
    windows(slots, 60.0, 10)
    assert slots.limit == SLOTS_START


def test_a_first_report_ends_a_measurement() -> None:
    slots = LearnedSlots()
    windows(slots, 0.1)
    assert slots.limit == SLOTS_MIN
    assert slots.report(0.0, 0.0, 0)
    assert slots.limit == SLOTS_START
    assert not slots.report(0.5, 0.0, 0)


def test_a_load_that_has_changed_for_good_is_learned() -> None:
    """Longer prompts are not taken for a queue for ever: the least limit shows that nothing better is to be had."""
    slots = measured(0.1)
    lowest = slots.limit
    for _ in range(60):
        windows(slots, 0.4)
        lowest = min(lowest, slots.limit)
    assert lowest == SLOTS_MIN
    assert slots.limit >= SLOTS_START


def test_now_and_then_the_best_is_measured_anew_with_a_quarter_of_the_limit() -> None:
    slots = measured(0.2)
    for _ in range(MEASURE_EVERY * WINDOW):
        slots.first_token(0.2)  # never reached
    assert slots.limit == SLOTS_START
    windows(slots, 0.2)
    assert slots.limit == SLOTS_START // 4
    windows(slots, 0.3)
    assert slots.limit == SLOTS_START
    windows(slots, 0.6)  # twice the new best
    assert slots.limit == SLOTS_START + 1


def test_a_start_that_was_too_much_is_not_gone_back_to() -> None:
    slots = LearnedSlots()
    windows(slots, 3.0)
    windows(slots, 0.2)
    assert slots.limit == SLOTS_MIN
    windows(slots, 0.2)
    assert slots.limit == SLOTS_MIN + 1


class Engine:
    """Runs `good` sequences at their full speed, queues the rest first come, first served, and never lacks work.

    A sequence takes 0.2 s to its first token and 4 s more in the mean.
    """

    def __init__(self, good: int, slots: LearnedSlots, seed: int) -> None:
        self.good, self.slots, self.rng = good, slots, random.Random(seed)
        self.now = 0.0
        self.running: list[float] = []
        self.queue: deque[float] = deque()
        self.limits: list[int] = []
        self.busy: list[float] = []

    def run(self, seconds: float, *, reports: bool, step_s: float = 0.1) -> None:
        end, report_s = self.now + seconds, self.now
        while self.now < end:
            self.now += step_s
            self.running = [ends for ends in self.running if ends > self.now]
            self._dispatch()
            while self.queue and len(self.running) < self.good:
                waited = self.now - self.queue.popleft()
                self.running.append(self.now + 0.2 + self.rng.expovariate(1 / 4))
                if not reports:
                    self.slots.first_token(waited + 0.2 * self.rng.uniform(0.9, 1.3))
            if reports and self.now >= report_s:
                report_s += 0.5
                self.slots.report(self.now, len(self.queue), len(self.running) + len(self.queue))
            self.limits.append(self.slots.limit)
            self.busy.append(len(self.running) / self.good)

    def _dispatch(self) -> None:
        in_flight = len(self.running) + len(self.queue)
        self.queue.extend([self.now] * (self.slots.limit - in_flight))
        self.slots.reached = True


def inside(limits: list[int], low: float, high: float) -> float:
    return sum(low <= limit <= high for limit in limits) / len(limits)


GOOD = [4, 8, 24, 64, 200]


@pytest.mark.parametrize("good", GOOD)
@pytest.mark.parametrize("start", [4, 32, 400])
def test_reports_settle_it_near_what_the_engine_runs_well(good: int, start: int) -> None:
    """Within 20 %, and the one or two that the rule keeps waiting; the engine is never idle."""
    slots = LearnedSlots(start)
    engine = Engine(good, slots, seed=good + start)
    # What is in the engine's queue cannot be called back: before that has gone no limit can be right.
    engine.run(60 + 4.5 * max(0, start - good) / good, reports=True)
    engine.limits.clear()
    engine.busy.clear()
    engine.run(100, reports=True)
    assert inside(engine.limits, 0.8 * good, 1.2 * good + 2) == 1.0
    assert sum(engine.busy) / len(engine.busy) > 0.99


@pytest.mark.parametrize("good", GOOD)
@pytest.mark.parametrize("start", [4, 32, 400])
def test_first_tokens_settle_it_within_a_factor_of_two(good: int, start: int) -> None:
    """But while the best is measured anew; and so most of the engine is used."""
    slots = LearnedSlots(start)
    engine = Engine(good, slots, seed=good + start)
    engine.run(800, reports=False)
    engine.limits.clear()
    engine.busy.clear()
    engine.run(1500, reports=False)
    assert inside(engine.limits, good / 2, good * 2) > 0.95
    assert sum(engine.busy) / len(engine.busy) > 0.94


def test_with_reports_a_large_engine_is_filled_in_a_minute() -> None:
    slots = LearnedSlots()
    engine = Engine(1000, slots, seed=1)
    engine.run(75, reports=True)
    assert slots.limit > 900

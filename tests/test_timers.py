"""The wheel: never early, at most about a tick late, whatever moves."""

import random
from math import inf
from typing import Any

import pytest

from evenflow import timers
from evenflow.timers import TICK_S, Wheel


class Entry:
    def __init__(self, clock: "Clock", deadline: float) -> None:
        self.clock = clock
        self.deadline = deadline
        self.wheel_at = inf
        self.fired: list[float] = []

    def on_deadline(self, now: float) -> None:
        self.fired.append(now)


class Clock:
    """Time that a test moves; also the loop, of which the wheel wants only `call_later`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due: Any = None

    def monotonic(self) -> float:
        return self.now

    def call_later(self, delay: float, what: Any) -> Any:
        self.due = what
        return self

    def cancel(self) -> None:
        self.due = None

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            self.due()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timers, "time", clock)
    return clock


def test_many_entries_that_move(clock: Clock) -> None:
    chance = random.Random(1)
    wheel = Wheel(clock)  # type: ignore[arg-type]
    wheel.start()
    entries = [Entry(clock, clock.now + chance.uniform(0.0, 20.0)) for _ in range(300)]
    for entry in entries:
        wheel.arm(entry)
    for _ in range(100):
        clock.run(0.1)
        for entry in chance.sample(entries, 20):
            if not entry.fired:
                entry.deadline = clock.now + chance.uniform(0.0, 20.0)
                wheel.arm(entry)
    last = {entry: entry.deadline for entry in entries if not entry.fired}
    clock.run(40.0)
    for entry in entries:
        assert len(entry.fired) == 1
    for entry, deadline in last.items():
        assert deadline <= entry.fired[0] <= deadline + 2.5 * TICK_S


def test_never_is_never_and_later_needs_no_arming(clock: Clock) -> None:
    wheel = Wheel(clock)  # type: ignore[arg-type]
    wheel.start()
    never, later = Entry(clock, clock.now + 1.0), Entry(clock, clock.now + 1.0)
    for entry in (never, later):
        wheel.arm(entry)
    never.deadline = inf
    later.deadline = clock.now + 5.0
    began = clock.now
    clock.run(10.0)
    assert never.fired == []
    assert later.fired[0] >= began + 5.0
    assert never.wheel_at == inf  # it left the wheel, and may be armed again
    never.deadline = clock.now + 1.0
    wheel.arm(never)
    clock.run(2.0)
    assert len(never.fired) == 1

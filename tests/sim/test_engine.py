"""The event-driven engine: against one that goes step by step, and statement by statement."""

import random
from dataclasses import replace
from math import inf

import pytest
from sim.scenarios import SMALL

from evenflow.sim.engine import NEVER, PROFILES, Engine, Run
from evenflow.sim.model import EngineProfile

# A step takes a second whatever runs, and so does each prompt token, so that times can be told by hand.
PLAIN = EngineProfile("plain", 100, 8, 1.0, 0.0, 0.0, 1.0)


def drive(engine: Engine, until_s: float = inf, now: float = 0.0) -> tuple[dict[int, float], dict[int, float], float]:
    """Lets an engine run by itself; when each run had its first token, when it ended, and the time at the end."""
    begun: dict[int, float] = {}
    done: dict[int, float] = {}
    engine.plan(now)
    while engine.next_s <= until_s and engine.next_s < inf:
        now = engine.next_s
        engine.advance(now)
        begun.update({run.number: now for run in engine.begun})
        done.update({run.number: now for run in engine.done})
        engine.begun.clear()
        engine.due.clear()
        engine.done.clear()
        engine.plan(now)
    return begun, done, now


def submit(engine: Engine, *runs: Run) -> None:
    for run in runs:
        engine.submit(run)


# -- against a reference -------------------------------------------------------------------------------------------


class StepEngine:
    """The same engine, one step at a time and nothing clever: what it does in a step is written as one reads it."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.waiting: list[Run] = []
        # (run, tokens produced)
        self.running: list[list] = []
        self.left: set[int] = set()
        self.begun: dict[int, float] = {}
        self.done: dict[int, float] = {}

    def boundary(self, now: float) -> float:
        """What happens at the end of a step; how long the next thing takes, 0 when there is nothing to do."""
        profile = self.profile
        self.running = [one for one in self.running if one[0].number not in self.left and one[1] < one[0].output_tokens]
        self.waiting = [run for run in self.waiting if run.number not in self.left]
        batch: list[Run] = []
        while self.waiting and len(self.running) < profile.sequences_max:
            if self.peak(self.waiting[0]) > profile.kv_tokens:
                break
            batch.append(self.waiting.pop(0))
            self.running.append([batch[-1], 0])
        if batch:
            return sum(run.input_tokens for run in batch) / profile.prefill_tokens_per_s
        if not self.running:
            return 0.0
        kv = sum(run.input_tokens + produced for run, produced in self.running)
        return (
            profile.step_s + len(self.running) * profile.step_per_sequence_s + kv * profile.step_per_kv_token_s
        )

    def peak(self, run: Run) -> int:
        """The most KV tokens that all that runs and this one will ever hold."""
        rest = [(one.input_tokens, max(produced, 1), one.output_tokens) for one, produced in self.running]
        rest.append((run.input_tokens, 1, run.output_tokens))
        return max(
            sum(given + produced + step for given, produced, output in rest if produced + step <= output)
            for step in range(max(output for _, _, output in rest) + 1)
        )

    def end_step(self, now: float) -> None:
        """A prefill gives its batch a first token and the others nothing; a step gives one to each."""
        new = [one for one in self.running if one[1] == 0]
        for one in new or self.running:
            run = one[0]
            one[1] += 1
            if run.number not in self.left:
                if one[1] == 1:
                    self.begun[run.number] = now
                if one[1] == run.output_tokens:
                    self.done[run.number] = now


@pytest.mark.parametrize("seed", range(60))
def test_it_does_what_going_step_by_step_does(seed: int) -> None:
    rng = random.Random(seed)
    profile = EngineProfile(
        "random",
        kv_tokens=rng.choice((60, 200, 1000)),
        sequences_max=rng.choice((2, 5, 20)),
        step_s=0.0101,
        step_per_sequence_s=rng.choice((0.0, 0.00037)),
        step_per_kv_token_s=rng.choice((0.0, 0.0000173)),
        prefill_tokens_per_s=1733.0,
    )
    runs = [Run(number, "a", rng.randint(1, 30), rng.randint(1, 30)) for number in range(40)]
    acts = [(rng.random() * 4.0, run, "submit") for run in runs]
    acts += [(rng.random() * 4.0 + 0.1, run, "cancel") for run in runs if rng.random() < 0.2]
    acts.sort(key=lambda act: act[0])

    slow = StepEngine(profile)
    submitted: set[int] = set()
    pending, now, ends_s = list(acts), 0.0, None
    while pending or ends_s is not None:
        if pending and (ends_s is None or pending[0][0] < ends_s):
            now, run, what = pending.pop(0)
            if what == "submit":
                slow.waiting.append(run)
                submitted.add(run.number)
            elif run.number in submitted:
                slow.left.add(run.number)
        else:
            assert ends_s is not None
            now = ends_s
            slow.end_step(now)
            ends_s = None
        if ends_s is None:
            takes_s = slow.boundary(now)
            ends_s = now + takes_s if takes_s else None

    engine = Engine(profile)
    begun: dict[int, float] = {}
    done: dict[int, float] = {}
    submitted.clear()
    now = 0.0
    for time_s, run, what in acts:
        more_begun, more_done, now = drive(engine, time_s, now)
        begun.update(more_begun)
        done.update(more_done)
        if what == "submit":
            engine.submit(run)
            submitted.add(run.number)
        elif run.number in submitted:
            engine.cancel(time_s, run)
        engine.plan(time_s)
        now = time_s
    more_begun, more_done, _ = drive(engine, now=now)
    begun.update(more_begun)
    done.update(more_done)
    assert begun == pytest.approx(slow.begun, abs=1e-6), f"seed {seed}"
    assert done == pytest.approx(slow.done, abs=1e-6), f"seed {seed}"
    assert engine.report(now).kv_tokens == 0


# -- statement by statement ----------------------------------------------------------------------------------------


def test_a_prefill_ends_with_the_first_token_and_each_step_yields_one() -> None:
    engine = Engine(PLAIN)
    submit(engine, Run(1, "a", 5, 4))
    begun, done, _ = drive(engine)
    assert begun == {1: 5.0}
    assert done == {1: 8.0}


def test_a_prefill_stalls_those_that_decode() -> None:
    engine = Engine(PLAIN)
    submit(engine, Run(1, "a", 5, 4))
    drive(engine, 5.5)
    submit(engine, Run(2, "a", 10, 1))
    begun, done, _ = drive(engine, now=5.5)
    # The step that had begun ends at 6; then ten seconds of prefill; then two steps are left.
    assert begun == {2: 16.0}
    assert done == {2: 16.0, 1: 18.0}


def test_a_step_takes_longer_with_sequences_and_with_kv_tokens() -> None:
    engine = Engine(replace(PLAIN, step_per_sequence_s=0.1, step_per_kv_token_s=0.01))
    submit(engine, Run(1, "a", 5, 3), Run(2, "a", 5, 3))
    begun, done, _ = drive(engine)
    assert begun == {1: 10.0, 2: 10.0}
    # Two steps of 1 + 2 x 0.1, with 12 and 14 KV tokens.
    assert done[1] == done[2] == pytest.approx(10.0 + 1.2 + 0.12 + 1.2 + 0.14)


def test_what_the_cache_cannot_hold_to_its_end_waits_and_nobody_overtakes_it() -> None:
    engine = Engine(PLAIN)
    submit(engine, Run(1, "a", 40, 20), Run(2, "a", 50, 20), Run(3, "a", 1, 1))
    engine.plan(0.0)
    assert engine.report(0.0) == (2, 1, 41)
    begun, done, _ = drive(engine)
    assert begun[2] >= done[1]
    assert begun[3] >= begun[2]


def test_it_admits_where_the_worst_moment_to_come_fits_although_the_sum_of_the_ends_does_not() -> None:
    engine = Engine(PLAIN)
    # Ends hold 60 + 60 > 100; but the short one is gone before the long one has grown.
    submit(engine, Run(1, "a", 10, 50), Run(2, "a", 55, 5))
    engine.plan(0.0)
    assert engine.report(0.0).running == 2


def test_it_admits_as_soon_as_one_that_begins_later_has_grown_less_when_another_ends() -> None:
    engine = Engine(PLAIN)
    submit(engine, Run(1, "a", 40, 20), Run(2, "a", 30, 20))
    begun, done, _ = drive(engine)
    # Both begin with the first token of the prefill. At its end the first holds 60: the second may have 40 then, ten
    # more than its prompt, so the first has ten tokens to go, and makes its eleventh after 50 s.
    assert begun == {1: 40.0, 2: 80.0}
    assert done == {1: 89.0, 2: 99.0}


def test_it_batches_no_more_than_its_maximum() -> None:
    engine = Engine(replace(PLAIN, sequences_max=2))
    submit(engine, *[Run(number, "a", 1, 2) for number in range(5)])
    engine.plan(0.0)
    assert engine.report(0.0).running == 2
    assert engine.report(0.0).waiting == 3


def test_it_knows_what_it_could_never_hold() -> None:
    assert Engine(PLAIN).fits(Run(1, "a", 50, 50))
    assert not Engine(PLAIN).fits(Run(1, "a", 50, 51))


def test_charge_points_come_at_their_token_and_each_sixteenth_after_it() -> None:
    engine = Engine(PLAIN)
    run = Run(1, "a", 1, 40)
    run.charge_at = 10
    engine.submit(run)
    engine.plan(0.0)
    due = []
    while engine.next_s < inf:
        now = engine.next_s
        engine.advance(now)
        due += [(now, produced) for _, produced in engine.due]
        engine.due.clear()
        engine.plan(now)
    assert due == [(10.0, 10), (26.0, 26)]


def test_a_run_that_is_never_charged_costs_three_events() -> None:
    engine = Engine(PLAIN)
    run = Run(1, "a", 1, 90)
    assert run.charge_at == NEVER
    engine.submit(run)
    engine.plan(0.0)
    events = 0
    while engine.next_s < inf:
        engine.advance(engine.next_s)
        engine.plan(engine.next_s)
        events += 1
    assert events <= 3


def test_one_that_is_cancelled_has_produced_what_it_had_and_frees_its_room_at_the_end_of_the_step() -> None:
    engine = Engine(PLAIN)
    first, second = Run(1, "a", 60, 40), Run(2, "a", 60, 2)
    submit(engine, first, second)
    _, _, _ = drive(engine, 63.0)
    assert engine.cancel(63.5, first) == 4
    engine.plan(63.5)
    begun, done, _ = drive(engine, now=63.5)
    assert begun == {2: 124.0}
    assert list(done) == [2]
    assert engine.report(200.0) == (0, 0, 0)


def test_one_that_is_cancelled_while_it_waits_or_is_prefilled_has_produced_nothing() -> None:
    engine = Engine(PLAIN)
    first, second = Run(1, "a", 60, 40), Run(2, "a", 60, 2)
    submit(engine, first, second)
    drive(engine, 30.0)
    assert engine.cancel(30.0, first) == 0
    assert engine.cancel(30.0, second) == 0
    engine.plan(30.0)
    begun, done, _ = drive(engine, now=30.0)
    assert begun == done == {}
    assert engine.report(100.0) == (0, 0, 0)


def test_death_loses_everything_and_says_what_each_had_produced() -> None:
    engine = Engine(PLAIN)
    first, second = Run(1, "a", 60, 40), Run(2, "a", 60, 2)
    submit(engine, first, second)
    drive(engine, 63.0)
    assert engine.die(63.5) == [(first, 4), (second, 0)]
    engine.plan(63.5)
    assert engine.dead
    assert engine.next_s == inf
    assert engine.report(64.0) == (0, 0, 0)
    engine.revive()
    submit(engine, Run(3, "a", 60, 40))
    begun, _, _ = drive(engine, now=70.0)
    assert begun == {3: 130.0}


def test_a_slow_engine_takes_so_many_times_longer_from_the_end_of_the_step_on() -> None:
    engine = Engine(PLAIN)
    submit(engine, Run(1, "a", 5, 11))
    drive(engine, 7.0)
    engine.slow(3.0)
    engine.plan(7.5)
    drive(engine, 14.0, now=7.5)
    engine.unslow(3.0)
    engine.plan(14.5)
    _, done, _ = drive(engine, now=14.5)
    # Tokens: 1 at 5, 4 at 8; then one each 3 s: 5 at 11, 6 at 14, 7 at 17; then one a second.
    assert done == {1: 21.0}


def test_a_hanging_engine_accepts_and_goes_on_later_where_it_stood() -> None:
    engine = Engine(PLAIN)
    first = Run(1, "a", 5, 11)
    submit(engine, first)
    drive(engine, 7.0)
    engine.hang(7.5)
    submit(engine, Run(2, "a", 2, 1))
    engine.plan(7.5)
    assert engine.next_s == inf
    assert engine.produced(100.0, first) == 3
    assert engine.report(100.0).waiting == 1
    engine.unhang(107.5)
    begun, done, _ = drive(engine, now=107.5)
    assert begun == {2: 110.0}
    assert done == {2: 110.0, 1: 117.0}


def test_an_engine_that_hangs_in_a_prefill_ends_it_later() -> None:
    engine = Engine(PLAIN)
    submit(engine, Run(1, "a", 5, 1))
    drive(engine, 1.0)
    engine.hang(2.0)
    engine.plan(2.0)
    engine.unhang(10.0)
    begun, _, _ = drive(engine, now=10.0)
    assert begun == {1: 13.0}


def test_a_prompt_that_shares_its_first_blocks_is_computed_from_where_it_differs() -> None:
    engine = Engine(replace(PLAIN, prefix_cache=True), block_tokens=10)
    submit(engine, Run(1, "a", 30, 1, (1, 2, 3)))
    drive(engine)
    same, other = Run(2, "a", 25, 1, (1, 2, 9)), Run(3, "a", 20, 1, (1, 2))
    submit(engine, same)
    begun, _, _ = drive(engine, now=100.0)
    assert same.cached_tokens == 20
    assert begun == {2: 105.0}
    submit(engine, other)
    drive(engine, now=200.0)
    # The last token of a prompt is always computed.
    assert other.cached_tokens == 19


def test_the_prefix_cache_forgets_what_was_used_longest_ago() -> None:
    engine = Engine(replace(PLAIN, kv_tokens=40, prefix_cache=True), block_tokens=10)
    for number, prefix in enumerate(((1,), (2,), (3,), (1,), (4,), (5,))):
        submit(engine, Run(number, "a", 11, 1, prefix))
        drive(engine, now=100.0 * number)
    kept, gone = Run(10, "a", 11, 1, (1,)), Run(11, "a", 11, 1, (2,))
    submit(engine, kept)
    drive(engine, now=1000.0)
    submit(engine, gone)
    drive(engine, now=2000.0)
    assert kept.cached_tokens == 10
    assert gone.cached_tokens == 0


def test_output_is_tallied_by_owner_without_looking_at_each_token() -> None:
    engine = Engine(PLAIN)
    submit(engine, Run(1, "a", 5, 10), Run(2, "b", 5, 4), Run(3, "b", 5, 4))
    drive(engine, 16.5)
    output: dict[str, int] = {}
    engine.take_output(16.5, output)
    assert output == {"a": 2, "b": 4}
    drive(engine, now=16.5)
    engine.take_output(100.0, output)
    assert output == {"a": 10, "b": 8}
    engine.take_output(200.0, output)
    assert output == {"a": 10, "b": 8}


def test_a_profile_in_which_nothing_takes_time_is_refused() -> None:
    with pytest.raises(ValueError, match="Give times above 0"):
        Engine(replace(PLAIN, step_s=0.0))


@pytest.mark.parametrize("name", [*PROFILES])
def test_every_named_profile_serves_a_hundred_requests(name: str) -> None:
    engine = Engine(PROFILES[name])
    assert engine.profile.name == name
    submit(engine, *[Run(number, "a", 200, 100) for number in range(100)])
    _, done, now = drive(engine)
    assert len(done) == 100
    # Between a laptop and a machine of a large service.
    assert 10.0 < 30_000 / now < 50_000.0


def test_equal_inputs_give_equal_times() -> None:
    def once() -> tuple[dict[int, float], dict[int, float], float]:
        engine = Engine(SMALL)
        submit(engine, *[Run(number, "a", 100 + number, 50 + number) for number in range(40)])
        return drive(engine)

    assert once() == once()

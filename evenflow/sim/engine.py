"""One continuously batching engine in virtual time: what it runs, what waits in it, and when something next happens.

Every running sequence gains a token in each decode step. So between two changes of the batch nothing needs to be
looked at: a token clock counts steps, the time of any number of steps is a closed form, and the next event is the
nearest finish or charge point. A request costs a few events however long its answer is.

    submit, cancel, die, slow, hang ... → plan(now) → `next_s` → advance(now) → `begun`, `due`, `done` → plan(now)

How it batches. What is submitted waits in one FIFO queue. At the end of a step the oldest are admitted for as long as
the KV cache can hold them and all that runs up to its last token, at the worst moment to come (LightLLM's rule, with
true output lengths); so nothing is ever preempted. Their prompts are then computed while decoding stands still, which
ends with the first token of each. A cache of prompt blocks saves computing them again, but takes no room of the
running. It never waits, reads a clock, draws a random number, or knows a policy.
"""

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush
from math import inf, sqrt
from typing import NamedTuple

from evenflow.sim.model import EngineProfile

# Two times closer than this are the same end of a step.
SAME_S = 1e-9
# Uncached prompt tokens computed in one go at most, as engines bound a prefill step; a longer prompt goes alone.
PREFILL_TOKENS_MAX = 8192
# Output tokens between two charges of a running request, as in the gateway, and a point that never comes.
CHARGE_STEP = 16
NEVER = 1 << 60

# Where a run is.
OUT, WAITING, PREFILLING, RUNNING = range(4)
# What the engine does.
IDLE, PREFILL, DECODE = range(3)


class Run:
    """One sequence, as an engine sees it."""

    __slots__ = (
        "base",
        "cached_tokens",
        "charge_at",
        "finish",
        "first_clock",
        "input_tokens",
        "number",
        "output_tokens",
        "owner",
        "prefix",
        "stage",
    )

    def __init__(
        self, number: int, owner: str, input_tokens: int, output_tokens: int, prefix: tuple[int, ...] = ()
    ) -> None:
        # Its age: unlike that of any other run in the engine.
        self.number = number
        # Whose tokens are tallied together.
        self.owner = owner
        self.input_tokens = input_tokens
        # A prefill yields a token whether or not anybody wants it.
        self.output_tokens = output_tokens if output_tokens > 1 else 1
        self.prefix = prefix
        self.stage = OUT
        self.cached_tokens = 0
        # Output tokens at which it is next shown in `due`.
        self.charge_at = NEVER
        # The token clock at its first and its last token; its KV tokens are `base` + the clock.
        self.first_clock = 0
        self.finish = 0
        self.base = 0


class Report(NamedTuple):
    """What an engine tells of itself."""

    waiting: int
    running: int
    kv_tokens: int


class _Tally:
    """Output tokens of one owner since they were last taken: counted when its number of runs changes, not by step."""

    __slots__ = ("running", "since_clock", "tokens")

    def __init__(self, clock: int) -> None:
        self.running = 0
        self.since_clock = clock
        self.tokens = 0

    def change(self, clock: int, runs: int) -> None:
        self.tokens += self.running * (clock - self.since_clock)
        self.since_clock = clock
        self.running += runs


class Engine:
    """Whoever calls anything that changes it calls `plan` afterwards, and `advance` when `next_s` has come."""

    __slots__ = (
        "_batch",
        "_blocks",
        "_blocks_max",
        "_block_tokens",
        "_charges",
        "_clock",
        "_factor",
        "_frozen_s",
        "_kv",
        "_leaving",
        "_look",
        "_order",
        "_phase",
        "_reserved",
        "_since_s",
        "_slowed",
        "_steps_planned",
        "_tallies",
        "_try_at",
        "_waiting",
        "begun",
        "dead",
        "done",
        "due",
        "next_s",
        "profile",
        "waiting",
    )

    def __init__(self, profile: EngineProfile, block_tokens: int = 512) -> None:
        if not (profile.step_s + profile.step_per_sequence_s > 0.0 and profile.prefill_tokens_per_s > 0.0):
            raise ValueError(f"The engine {profile.name!r} would decode or prefill in no time. Give times above 0.")
        self.profile = profile
        # When it next does something by itself; infinite: never.
        self.next_s = inf
        self.dead = False
        # Filled by `advance`, emptied by whoever read them: had their first token; are charged for so many output
        # tokens; have ended.
        self.begun: list[Run] = []
        self.due: list[tuple[Run, int]] = []
        self.done: list[Run] = []
        # How many wait in it. Cancelled ones stay in `_waiting` until they come to its front.
        self.waiting = 0
        self._waiting: deque[Run] = deque()
        # What runs or is being prefilled, by (last token on the clock, number), with its base.
        self._order: list[tuple[int, int, int, Run]] = []
        # Charge points: (token clock, number, run).
        self._charges: list[tuple[int, int, Run]] = []
        self._batch: list[Run] = []
        self._leaving: list[Run] = []
        self._phase = IDLE
        # When the phase began (of a prefill: ends), the clock and the KV tokens then, and all that is promised.
        self._since_s = 0.0
        self._clock = 0
        self._kv = 0
        self._reserved = 0
        # Steps from `_since_s` to `next_s`.
        self._steps_planned = 0
        # Something waits for the end of the step: an admission that may succeed, a run that left, another factor.
        self._look = False
        # The clock at which the oldest that waits may have room although nothing has ended.
        self._try_at = NEVER
        self._factor = 1.0
        self._slowed: list[float] = []
        # Since when it hangs; infinite: it does not.
        self._frozen_s = inf
        self._tallies: dict[str, _Tally] = {}
        # Prompt blocks it has computed, least recently used first.
        self._blocks: dict[int, None] = {}
        self._block_tokens = block_tokens
        self._blocks_max = profile.kv_tokens // block_tokens if profile.prefix_cache else 0

    # -- in and out ------------------------------------------------------------------------------------------

    def fits(self, run: Run) -> bool:
        """Whether an empty engine could ever run it."""
        return run.input_tokens + run.output_tokens <= self.profile.kv_tokens

    def submit(self, run: Run) -> None:
        """Takes a run that `fits` into the engine's own queue. It must not be dead."""
        run.stage = WAITING
        self._waiting.append(run)
        self.waiting += 1
        if self.waiting == 1:
            self._look = True

    def cancel(self, now: float, run: Run) -> int:
        """Takes a run out wherever it is; how many tokens it has produced. Its room is free at the end of the step."""
        produced = self.produced(now, run)
        if run.stage == WAITING:
            self.waiting -= 1
        elif run.stage == RUNNING:
            self._tallies[run.owner].change(run.first_clock + produced - 1, -1)
            self._leaving.append(run)
        elif run.stage == PREFILLING:
            self._leaving.append(run)
        run.stage = OUT
        self._look = True
        return produced

    def produced(self, now: float, run: Run) -> int:
        """Output tokens of a run until now."""
        if run.stage != RUNNING:
            return 0
        produced = self._clock_at(now) - run.first_clock + 1
        return produced if produced < run.output_tokens else run.output_tokens

    def report(self, now: float) -> Report:
        running = len(self._order)
        return Report(self.waiting, running, self._kv + (self._clock_at(now) - self._clock) * running)

    def take_output(self, now: float, into: dict[str, int]) -> None:
        """Adds the output tokens of each owner since the last call to `into`."""
        clock = self._clock_at(now)
        idle = []
        for owner, tally in self._tallies.items():
            tally.change(clock, 0)
            if tally.tokens:
                into[owner] = into.get(owner, 0) + tally.tokens
                tally.tokens = 0
            if not tally.running:
                idle.append(owner)
        for owner in idle:
            del self._tallies[owner]

    # -- faults ----------------------------------------------------------------------------------------------

    def die(self, now: float) -> list[tuple[Run, int]]:
        """Loses all it has; returns it with the output tokens of each, oldest first. Its cache is gone too."""
        lost = [run for run in self._waiting if run.stage == WAITING]
        lost += [entry[3] for entry in self._order if entry[3].stage != OUT]
        ended = [(run, self.cancel(now, run)) for run in sorted(lost, key=lambda run: run.number)]
        self._clock = self._clock_at(now)
        self._phase, self._kv, self._reserved, self.waiting, self._look = IDLE, 0, 0, 0, False
        self._try_at = NEVER
        for held in (self._waiting, self._order, self._charges, self._batch, self._leaving, self._blocks):
            held.clear()
        self.dead = True
        return ended

    def revive(self) -> None:
        self.dead = False

    def slow(self, factor: float) -> None:
        """Everything that begins from now on takes so many times longer, on top of what slows it already."""
        self._slowed.append(factor)
        self._look = True

    def unslow(self, factor: float) -> None:
        self._slowed.remove(factor)
        self._look = True

    def hang(self, now: float) -> None:
        """Stands still, and goes on accepting, until `unhang`."""
        if self._frozen_s == inf:
            self._frozen_s = now

    def unhang(self, now: float) -> None:
        """Goes on where it stood."""
        if self._frozen_s < inf:
            self._since_s += now - self._frozen_s
            self._frozen_s = inf

    @property
    def hung(self) -> bool:
        return self._frozen_s < inf

    # -- what happens ----------------------------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Sets `next_s`, after something has changed.

        1. Dead or hanging: nothing happens by itself.
        2. A prefill runs to its end.
        3. Idle: what waits is admitted at once.
        4. Decoding, and nobody waits for the end of the step: until the next finish or charge point.
        5. Else until the end of this step, which may be now.
        """
        if self.dead or self._frozen_s < inf:  # (1)
            self.next_s = inf
            return
        if self._phase == PREFILL:  # (2)
            self.next_s = self._since_s
            return
        if self._phase == IDLE:  # (3)
            self.next_s = inf
            if self.waiting:
                self._since_s = now
                self._settle(now)
            return
        to_point = self._next_point() - self._clock
        if self._look:  # (5)
            steps = self._steps(now)
            if steps < to_point and now - (self._since_s + self._time(steps)) <= SAME_S:
                self._move(steps)
                self._settle(now)
                return
            if steps + 1 < to_point:
                to_point = steps + 1
        self._steps_planned = to_point  # (4)
        self.next_s = max(now, self._since_s + self._time(to_point))

    def advance(self, now: float) -> None:
        """Does what `next_s` stood for: fills `begun`, `due` and `done`."""
        if self._phase == PREFILL:
            self._since_s = now
            self._phase = DECODE
            self._begin()
        else:
            self._move(self._steps_planned)
            self._since_s = now
        self._drop_leaving()
        clock, order, charges = self._clock, self._order, self._charges
        while charges and charges[0][0] <= clock:
            _, number, run = heappop(charges)
            if run.stage == RUNNING and run.finish > clock:
                self.due.append((run, clock - run.first_clock + 1))
                run.charge_at += CHARGE_STEP
                if run.charge_at < run.output_tokens:
                    heappush(charges, (run.first_clock + run.charge_at - 1, number, run))
        ended = 0
        while ended < len(order) and order[ended][0] <= clock:
            run = order[ended][3]
            ended += 1
            self._release(run)
            self._tallies[run.owner].change(clock, -1)
            run.stage = OUT
            self.done.append(run)
        if ended:
            del order[:ended]
            self._look = self._look or self.waiting > 0
        if clock >= self._try_at:
            self._try_at = NEVER
            self._look = True
        if not order:
            self._phase = IDLE

    # -- parts -----------------------------------------------------------------------------------------------

    def _time(self, steps: int) -> float:
        """Seconds of the next so many steps; each has one more KV token for each sequence than the one before."""
        profile, sequences = self.profile, len(self._order)
        per_token = profile.step_per_kv_token_s
        first = profile.step_s + sequences * profile.step_per_sequence_s + self._kv * per_token
        return self._factor * steps * (first + per_token * sequences * (steps - 1) * 0.5)

    def _steps(self, now: float) -> int:
        """Whole steps done since the phase began: the inverse of `_time`."""
        passed = now - self._since_s + SAME_S
        if passed <= SAME_S:
            return 0
        profile, sequences, factor = self.profile, len(self._order), self._factor
        square = factor * profile.step_per_kv_token_s * sequences * 0.5
        linear = self._time(1) - square
        if square > 0.0:
            steps = int(2.0 * passed / (linear + sqrt(linear * linear + 4.0 * square * passed)))
        else:
            steps = int(passed / linear)
        # Rounding may be one off either way.
        if self._time(steps + 1) <= passed:
            return steps + 1
        return steps - 1 if self._time(steps) > passed else steps

    def _clock_at(self, now: float) -> int:
        """The token clock at some time between the last change and `next_s`."""
        if self._phase != DECODE:
            return self._clock
        return self._clock + self._steps(now if now < self._frozen_s else self._frozen_s)

    def _next_point(self) -> int:
        """The clock at the next finish or charge, or when it is worth while to try to admit."""
        point = min(self._order[0][0], self._try_at)
        charges = self._charges
        while charges and charges[0][2].stage != RUNNING:
            heappop(charges)
        return charges[0][0] if charges and charges[0][0] < point else point

    def _move(self, steps: int) -> None:
        """So many steps have been done."""
        self._since_s += self._time(steps)
        self._kv += steps * len(self._order)
        self._clock += steps

    def _settle(self, now: float) -> None:
        """At the end of a step: drops who left, admits who waits, and goes on."""
        self._drop_leaving()
        self._look = False
        self._try_at = NEVER
        self._factor = 1.0
        for factor in self._slowed:
            self._factor *= factor
        tokens = self._admit()
        if self._batch:
            self._phase = PREFILL
            self._since_s = self.next_s = now + self._factor * tokens / self.profile.prefill_tokens_per_s
        elif self._order:
            self._phase = DECODE
            self._since_s = now
            self._steps_planned = self._next_point() - self._clock
            self.next_s = now + self._time(self._steps_planned)
        else:
            self._phase = IDLE
            self.next_s = inf

    def _admit(self) -> int:
        """Moves the oldest that wait into a prefill batch; how many of its tokens have to be computed."""
        waiting, profile = self._waiting, self.profile
        tokens = 0
        while waiting:
            run = waiting[0]
            if run.stage != WAITING:
                waiting.popleft()
                continue
            if len(self._order) >= profile.sequences_max:
                break
            steps = self._steps_to_room(run)
            if steps:
                self._try_at = self._clock + steps
                break
            cached = self._cached(run) if self._blocks_max else 0
            compute = run.input_tokens - cached
            if tokens and tokens + compute > PREFILL_TOKENS_MAX:
                break
            tokens += compute
            if self._blocks_max:
                self._keep(run)
            waiting.popleft()
            self.waiting -= 1
            run.stage = PREFILLING
            run.cached_tokens = cached
            clock = self._clock
            run.first_clock = clock
            run.finish = clock + run.output_tokens - 1
            run.base = run.input_tokens + 1 - clock
            insort(self._order, (run.finish, run.number, run.base, run))
            self._kv += run.input_tokens + 1
            self._reserved += run.input_tokens + run.output_tokens
            self._batch.append(run)
        return tokens

    def _steps_to_room(self, run: Run) -> int:
        """Steps after which it is worth while to ask again whether the cache holds this one beside all that runs, at
        every finish to come; 0 when it does now.

        At a finish on the clock, those that have not ended before have grown until then: the sum of their bases plus
        the clock for each.

        1. It fits even if all were there to their ends; or there is no room for its prompt until something ends.
        2. Too much at its own finish: until that is after the next finish of another.
        3. Too much at a finish before its own: it then has one token less for each step that it begins later.
        """
        room = self.profile.kv_tokens
        if self._reserved + run.input_tokens + run.output_tokens <= room:  # (1)
            return 0
        if self._kv + run.input_tokens + 1 > room:
            return NEVER
        clock, order = self._clock, self._order
        own = clock + run.output_tokens - 1
        place = bisect_left(order, (own, run.number))
        total = growing = steps = 0
        for _, _, base, _ in order[place:]:
            total += base
            growing += 1
        total += run.input_tokens + 1 - clock
        growing += 1
        if total + growing * own > room:  # (2)
            steps = order[place][0] - own + 1
        for finish, _, base, _ in reversed(order[:place]):  # (3)
            total += base
            growing += 1
            excess = total + growing * finish - room
            if excess > steps:
                steps = excess
        return steps

    def _cached(self, run: Run) -> int:
        """Prompt tokens that need not be computed."""
        blocks, hits = self._blocks, 0
        for block in run.prefix:
            if block not in blocks:
                break
            hits += 1
        return min(hits * self._block_tokens, max(run.input_tokens - 1, 0))

    def _keep(self, run: Run) -> None:
        """It is computed now: its blocks are the most recently used."""
        blocks = self._blocks
        for block in run.prefix:
            blocks.pop(block, None)
            blocks[block] = None
        while len(blocks) > self._blocks_max:
            del blocks[next(iter(blocks))]

    def _begin(self) -> None:
        """The prefill has ended: each of its batch has its first token."""
        clock = self._clock
        for run in self._batch:
            if run.stage != PREFILLING:
                continue
            run.stage = RUNNING
            tally = self._tallies.get(run.owner)
            if tally is None:
                tally = self._tallies[run.owner] = _Tally(clock)
            tally.change(clock, 1)
            tally.tokens += 1
            if run.charge_at < run.output_tokens:
                heappush(self._charges, (clock + run.charge_at - 1, run.number, run))
            self.begun.append(run)
        self._batch.clear()
        if self.waiting:
            self._look = True

    def _drop_leaving(self) -> None:
        for run in self._leaving:
            order = self._order
            del order[bisect_left(order, (run.finish, run.number))]
            self._release(run)
        self._leaving.clear()

    def _release(self, run: Run) -> None:
        self._kv -= run.base + self._clock
        self._reserved -= run.input_tokens + run.output_tokens


PROFILES: dict[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        # Llama 2 7B in 16 bits on an A10G with a small KV cache: fitted to the 780 tokens/s that the artifact of
        # "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024) reports for its chat log under FCFS.
        EngineProfile(
            name="a10g-7b",
            kv_tokens=10_000,
            sequences_max=256,
            step_s=0.022,
            step_per_sequence_s=0.0004,
            step_per_kv_token_s=0.0000012,
            prefill_tokens_per_s=3000.0,
        ),
        # Llama 3 70B in 8 bits on four H100: a step reads 70 GB at some 10 TB/s that are reached of the 13.4 there are,
        # and 0.16 MB for each KV token; prefill at some 40 % of the dense 8-bit peak.
        EngineProfile(
            name="h100-70b",
            kv_tokens=1_000_000,
            sequences_max=256,
            step_s=0.009,
            step_per_sequence_s=0.00003,
            step_per_kv_token_s=0.000000016,
            prefill_tokens_per_s=20_000.0,
            prefix_cache=True,
        ),
        # Llama 3 8B in 8 bits on an L4 (300 GB/s, 24 GB): 8 GB of weights a step, 0.13 MB for each KV token, and some
        # 12 GB for the cache.
        EngineProfile(
            name="l4-8b",
            kv_tokens=90_000,
            sequences_max=128,
            step_s=0.030,
            step_per_sequence_s=0.0001,
            step_per_kv_token_s=0.00000045,
            prefill_tokens_per_s=4000.0,
            prefix_cache=True,
        ),
        # SmolLM2 135M on two cores of a laptop, as in the embedded engine: four slots and a small context, where a step
        # costs most of its time for each sequence.
        EngineProfile(
            name="embedded-135m",
            kv_tokens=8192,
            sequences_max=4,
            step_s=0.010,
            step_per_sequence_s=0.004,
            step_per_kv_token_s=0.0000005,
            prefill_tokens_per_s=800.0,
        ),
    )
}

"""Which worker takes a request: what every policy promises, what each is for, and what the prefix index remembers."""

import gc
import random
import sys
import weakref
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.policy.placement import (
    PLACEMENTS,
    Ask,
    PlacementError,
    block_hashes,
    hooks_of,
    placement_named,
    session_of,
)
from evenflow.policy.placement.candidate import has_room
from evenflow.policy.placement.least_latency import LeastLatency
from evenflow.policy.placement.least_work import SCANNED_MAX, LeastWork
from evenflow.policy.placement.power_of_two import PowerOfTwo
from evenflow.policy.placement.prefix import BLOCK_BYTES, BLOCKS_HASHED_MAX, PrefixIndex
from evenflow.policy.placement.sticky import Sticky


class Fake:
    """A worker as policies see it."""

    def __init__(self, name: str = "w", slots: int = 8, in_flight: int = 0, work: float = 0.0, **more: Any) -> None:
        self.name = name
        self.slots = slots
        self.in_flight = in_flight
        self.work = work
        self.live: bool = more.get("live", True)
        self.speed: float = more.get("speed", 1.0)
        self.tokens: float = more.get("tokens", 0.0)
        self.tokens_max: float = more.get("tokens_max", inf)

    def take(self, work: float = 100.0, sequences: int = 1) -> None:
        self.in_flight += sequences
        self.work += work


def fleet(count: int, **more: Any) -> tuple[Fake, ...]:
    return tuple(Fake(f"w{number}", **more) for number in range(count))


def made(name: str, seed: int = 1) -> Any:
    return placement_named(name)(random.Random(seed))


def asking(prompt: bytes = b"", session: str = "", work: float = 0.0) -> Ask:
    """A prompt of a token for each four bytes, of which a cache saves nine tenths."""
    blocks = block_hashes(prompt, "m")
    work = work or len(prompt) / 4
    saved = 0.9 * work * BLOCK_BYTES / max(1, len(prompt))
    return Ask(blocks, work, saved, session=session_of(session) if session else 0)


def text(number: int, count: int) -> bytes:
    """A prompt of so many bytes that is no other's."""
    return random.Random(number).randbytes(count)


# -- what all promise ------------------------------------------------------------------------------------------------


workers_of_any_kind = st.lists(
    st.builds(
        lambda slots, used, live, speed, full: Fake(
            slots=slots,
            in_flight=slots if full else used % (slots + 1),
            work=100.0 * used,
            live=live,
            speed=speed,
            tokens=float(used),
            tokens_max=inf if used % 2 else 50.0,
        ),
        st.integers(1, 8),
        st.integers(0, 8),
        st.booleans(),
        st.sampled_from((0.5, 1.0, 4.0)),
        st.booleans(),
    ),
    max_size=12,
)


@pytest.mark.parametrize("name", list(PLACEMENTS))
@given(
    workers=workers_of_any_kind,
    many=st.booleans(),
    sequences=st.integers(1, 10),
    kind=st.integers(0, 2),
    data=st.data(),
)
def test_never_one_that_is_down_or_full_and_none_only_if_none_has_room(
    name: str, workers: list[Fake], many: bool, sequences: int, kind: int, data: st.DataObject
) -> None:
    for number, worker in enumerate(workers):
        worker.name = f"w{number}"
    if many:
        workers = workers + [Fake(f"full{number}", slots=1, in_flight=1) for number in range(SCANNED_MAX)]
    policy = made(name, data.draw(st.integers(0, 99)))
    hooks = hooks_of(policy)
    ask = (None, asking(text(1, 3000)), asking(text(1, 3000), "s"))[kind]
    lane = tuple(workers)
    for _ in range(6):
        index = policy.choose(lane, sequences) if ask is None else policy.choose(lane, sequences, ask)
        open_ = [worker for worker in workers if has_room(worker, sequences)]
        if index == -1:
            assert not open_
            return
        chosen = workers[index]
        assert chosen in open_
        if ask is not None and hooks.placed is not None:
            hooks.placed(chosen, ask)
        if hooks.answered is not None and data.draw(st.booleans()):
            hooks.answered(chosen, data.draw(st.floats(0.0, 5.0)))
        if hooks.reported is not None:
            hooks.reported(chosen, data.draw(st.floats(0.0, 1.0)))
        if hooks.forget is not None and data.draw(st.booleans()):
            hooks.forget(chosen)
        chosen.take(sequences=min(sequences, chosen.slots))
        if hooks.score is not None:
            assert hooks.score(chosen, ask) >= 0.0


@pytest.mark.parametrize("name", ["least_work", "shortest_queue", "round_robin"])
@pytest.mark.parametrize("count", [2, 8, SCANNED_MAX + 20])
def test_idle_equal_workers_get_one_each(name: str, count: int) -> None:
    for seed in range(5):
        policy, workers = made(name, seed), fleet(count)
        for _ in range(count):
            workers[policy.choose(workers, 1)].take()
        assert [worker.in_flight for worker in workers] == [1] * count


def test_idle_equal_workers_get_one_each_of_long_prompts_too() -> None:
    policy, workers = made("least_work"), fleet(8)
    for number in range(8):
        ask = asking(text(number, 8000))
        worker = workers[policy.choose(workers, 1, ask)]
        policy.placed(worker, ask)
        worker.take(ask.prompt_work)
    assert [worker.in_flight for worker in workers] == [1] * 8


@pytest.mark.parametrize("name", ["least_work", "lottery", "sticky", "power_of_two"])
def test_faster_workers_get_more(name: str) -> None:
    """Over many picks, each held for a while: twice the speed is about twice the requests."""
    rng = random.Random(3)
    policy = made(name)
    workers = tuple(Fake(f"w{number}", slots=10_000, speed=speed) for number, speed in enumerate((1.0, 1.0, 2.0)))
    picks: Counter[int] = Counter()
    held: list[Fake] = []
    for number in range(6000):
        ask = asking(session=f"s{number}")
        index = policy.choose(workers, 1, ask)
        picks[index] += 1
        workers[index].take()
        held.append(workers[index])
        if len(held) > 100:
            done = held.pop(rng.randrange(len(held)))
            done.in_flight -= 1
            done.work -= 100.0
    share = picks[2] / 6000
    # The better of two at random cannot give one of three more than two thirds, and gives it less than its speed says.
    assert 0.45 < share < 0.55 or (name == "power_of_two" and share > 0.38), picks
    assert abs(picks[0] - picks[1]) < 300


def test_one_that_joins_gets_its_share_and_no_flood() -> None:
    policy = made("least_work")
    workers = fleet(3, slots=64)
    for _ in range(60):
        workers[policy.choose(workers, 1)].take()
    joined = Fake("new", slots=64)
    workers = (*workers, joined)
    for _ in range(20):
        workers[policy.choose(workers, 1)].take()
    # It has caught up, and is not beyond the others.
    assert [worker.in_flight for worker in workers] == [20, 20, 20, 20]
    for _ in range(8):
        workers[policy.choose(workers, 1)].take()
    assert joined.in_flight == 22


@pytest.mark.parametrize("name", ["least_work", "shortest_queue"])
def test_ties_go_to_anyone(name: str) -> None:
    policy, workers = made(name), fleet(4)
    picks = Counter(policy.choose(workers, 1) for _ in range(2000))
    assert all(400 < picks[index] < 600 for index in range(4)), picks


# -- least work: prompt caches and memory ----------------------------------------------------------------------------


def test_a_burst_with_one_long_prefix_stays_together_until_that_costs_more_than_it_saves() -> None:
    """Sixteen calls that share 16,000 bytes and end in 400 of their own: the prefix saves some 3,600 of 4,100."""
    for seed in range(10):
        policy, workers = made("least_work", seed), fleet(8, slots=32)
        prefix = text(99, 32 * BLOCK_BYTES)
        for number in range(16):
            ask = asking(prefix + text(number, 400))
            worker = workers[policy.choose(workers, 1, ask)]
            hooks_of(policy).placed(worker, ask)  # type: ignore[misc]
            # Charged as the gateway does: the whole prompt and some output, since caches are known only at the end.
            worker.take(ask.prompt_work + 200.0)
        used = sorted(worker.in_flight for worker in workers)
        # Spread as idle equals it would be two each. Nobody is used before it saves the queue as much as it computes.
        assert used[-1] >= 2 and sum(used) == 16


def test_a_short_work_burst_with_one_prefix_goes_to_one_worker() -> None:
    """What each adds is little against what the prefix saves, so all go to the worker that has it."""
    policy, workers = made("least_work"), fleet(8, slots=32)
    prefix = text(99, 60 * BLOCK_BYTES)
    placed = []
    for number in range(16):
        ask = asking(prefix + text(number, 100))
        worker = workers[policy.choose(workers, 1, ask)]
        policy.placed(worker, ask)
        worker.take(100.0)  # what is left to compute, as a lease with a cached prefix would say
        placed.append(worker)
    assert len(set(placed)) == 1


def test_a_hot_prefix_spills_over_exactly_when_its_worker_is_that_far_behind() -> None:
    policy, (warm, cold) = made("least_work"), fleet(2)
    ask = asking(text(1, 40 * BLOCK_BYTES))
    policy.placed(warm, ask)
    saved = 40 * ask.block_work
    warm.work = saved - 1.0
    assert policy.choose((warm, cold), 1, ask) == 0
    assert policy.choose((cold, warm), 1, ask) == 1
    warm.work = saved + 1.0
    assert policy.choose((warm, cold), 1, ask) == 1
    # Of both, the one with less in front of it, once both have it.
    policy.placed(cold, ask)
    assert policy.choose((warm, cold), 1, ask) == 1
    cold.work = saved + 2.0
    assert policy.choose((warm, cold), 1, ask) == 0


def test_the_longest_match_wins_among_equals() -> None:
    policy, workers = made("least_work"), fleet(5)
    whole = text(1, 20 * BLOCK_BYTES)
    for number, blocks in enumerate((0, 4, 16, 8, 12)):
        if blocks:
            policy.placed(workers[number], asking(whole[: blocks * BLOCK_BYTES]))
    assert policy.choose(workers, 1, asking(whole)) == 2


def test_a_prefix_is_found_among_very_many_workers() -> None:
    policy, workers = made("least_work"), fleet(300)
    ask = asking(text(1, 20 * BLOCK_BYTES))
    policy.placed(workers[237], ask)
    assert {policy.choose(workers, 1, ask) for _ in range(20)} == {237}
    workers[237].in_flight = workers[237].slots
    assert policy.choose(workers, 1, ask) not in (-1, 237)


def test_speed_divides_what_must_be_computed() -> None:
    policy = made("least_work")
    slow, fast = Fake("slow"), Fake("fast", speed=4.0)
    ask = asking(text(1, 20 * BLOCK_BYTES))
    policy.placed(slow, ask)
    # All of it at four times the speed takes longer than the tenth that is left at the slow one ...
    assert policy.choose((slow, fast), 1, ask) == 0
    fast.speed = 20.0  # ... but not at twenty times.
    assert policy.choose((slow, fast), 1, ask) == 1


def test_a_full_cache_counts_against_a_worker() -> None:
    policy = made("least_work")
    full, empty = Fake("full", tokens_max=1000.0), Fake("empty", work=50.0, tokens_max=1000.0)
    ask = asking(text(1, 2 * BLOCK_BYTES))
    assert policy.choose((full, empty), 1, ask) == 0
    policy.reported(full, 0.9)
    assert policy.choose((full, empty), 1, ask) == 1
    # Our own tokens that have come since then count too, and those that have gone.
    policy.reported(full, 0.0)
    full.tokens = 950.0
    assert policy.choose((full, empty), 1, ask) == 1
    full.tokens = 0.0
    assert policy.choose((full, empty), 1, ask) == 0


def test_forgetting_a_worker_forgets_its_prefixes() -> None:
    policy, workers = LeastWork(random.Random(1)), fleet(3)
    ask = asking(text(1, 20 * BLOCK_BYTES))
    policy.placed(workers[1], ask)
    workers[1].work = 1.0  # it would be chosen for its cache alone
    assert policy.choose(workers, 1, ask) == 1
    policy.forget(workers[1])
    assert policy.choose(workers, 1, ask) != 1


def test_the_score_is_what_was_compared() -> None:
    policy, workers = LeastWork(random.Random(1)), fleet(3, work=10.0)
    ask = asking(text(1, 20 * BLOCK_BYTES))
    policy.placed(workers[2], ask)
    chosen = policy.choose(workers, 1, ask)
    scores = [policy.score(worker, ask) for worker in workers]
    assert chosen == 2 == scores.index(min(scores))
    assert scores[0] == pytest.approx(10.0 + ask.prompt_work)
    assert scores[2] == pytest.approx(10.0 + ask.prompt_work - 20 * ask.block_work)
    assert policy.score(workers[0], None) == 10.0


# -- the prefix index ------------------------------------------------------------------------------------------------


def test_hashes_are_those_of_the_whole_beginning() -> None:
    prompt = text(1, 10 * BLOCK_BYTES + 100)
    blocks = block_hashes(prompt, "m")
    assert len(blocks) == 10
    assert block_hashes(prompt[: 4 * BLOCK_BYTES], "m") == blocks[:4]
    changed = bytearray(prompt)
    changed[3 * BLOCK_BYTES] ^= 1
    others = block_hashes(bytes(changed), "m")
    assert others[:3] == blocks[:3] and not set(others[3:]) & set(blocks)
    assert not set(block_hashes(prompt, "other")) & set(blocks)
    assert block_hashes(prompt[: BLOCK_BYTES - 1]) == ()
    assert len(block_hashes(bytes(1 << 20))) == BLOCKS_HASHED_MAX


class SlowIndex:
    """What the index promises, said plainly: who was sent a prompt with these blocks."""

    def __init__(self) -> None:
        self.sent: list[tuple[Fake, tuple[int, ...]]] = []

    def match(self, blocks: tuple[int, ...]) -> dict[Fake, int]:
        found: dict[Fake, int] = {}
        for worker, sent in self.sent:
            depth = 0
            while depth < min(len(blocks), len(sent)) and sent[depth] == blocks[depth]:
                depth += 1
            if depth:
                found[worker] = max(found.get(worker, 0), depth)
        return found


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def chained(parts: list[int]) -> tuple[int, ...]:
    chain, found = 0, []
    for part in parts:
        chain = hash((chain, part))
        found.append(chain)
    return tuple(found)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), prompts, st.sampled_from(("learn", "learn", "learn", "forget"))), max_size=30
    )
)
def test_it_finds_what_was_sent(steps: list[tuple[int, list[int], str]]) -> None:
    """With room for all: nobody is found deeper than he was sent, and the deepest of all is found."""
    index, slow, workers = PrefixIndex(), SlowIndex(), fleet(4)
    for number, parts, what in steps:
        worker, blocks = workers[number], chained(parts)
        if what == "forget":
            index.forget(worker)
            slow.sent = [one for one in slow.sent if one[0] is not worker]
            continue
        index.learn(worker, blocks)
        slow.sent.append((worker, blocks))
        found = index.match(blocks)
        assert found[worker] == len(blocks)
        truth = slow.match(blocks)
        assert all(depth <= truth.get(other, 0) for other, depth in found.items())  # type: ignore[call-overload]
        depths = list(found.values())
        assert depths == sorted(depths, reverse=True) and max(depths) == max(truth.values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(1, 30)), max_size=60))
def test_it_is_bounded(steps: list[tuple[int, int, int]]) -> None:
    index, workers = PrefixIndex(blocks_max=50, holders_max=3), fleet(10)
    for number, start, length in steps:
        blocks = chained([start, *range(length)])
        index.learn(workers[number], blocks)
        assert len(index) <= 50
        assert len(index.match(blocks)) <= 3 * 3
        assert workers[number] in index.match(blocks)


def test_what_was_not_sent_for_long_goes_first() -> None:
    index, worker = PrefixIndex(blocks_max=100), Fake()
    kept, gone = chained([1] * 10), chained([2] * 10)
    index.learn(worker, kept)
    index.learn(worker, gone)
    for number in range(100):
        index.learn(worker, chained([3, number]))
        index.learn(worker, kept)
    assert index.match(kept) == {worker: 10}
    assert index.match(gone) == {}


def test_a_worker_that_is_gone_is_not_held() -> None:
    index, stays = PrefixIndex(), Fake("stays")
    gone = Fake("gone")
    index.learn(stays, (1, 2))
    index.learn(gone, (1, 2, 3))
    assert list(index.match((1, 2, 3))) == [gone, stays]
    held = weakref.ref(gone)
    index.forget(gone)
    del gone
    gc.collect()
    assert held() is None
    assert index.match((1, 2, 3)) == {stays: 2}
    index.forget(stays)
    assert len(index) == 0


# -- the others ------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns_and_passes_over() -> None:
    policy, workers = made("round_robin"), fleet(4)
    workers[2].live = False
    turns = [policy.choose(workers, 1) for _ in range(9)]
    assert turns[:3] == turns[3:6] == turns[6:] and sorted(turns[:3]) == [0, 1, 3]


def test_shortest_queue_counts_sequences_and_nothing_else() -> None:
    workers = (Fake("a", in_flight=2, work=1.0), Fake("b", in_flight=1, work=9e9, speed=0.1), Fake("c", in_flight=3))
    assert made("shortest_queue").choose(workers, 1) == 1


def test_the_lottery_gives_chances_to_those_with_room_alone() -> None:
    policy = made("lottery")
    workers = (Fake("a", speed=1.0), Fake("b", speed=8.0, in_flight=8), Fake("c", speed=3.0))
    picks = Counter(policy.choose(workers, 1) for _ in range(4000))
    assert picks[1] == 0 and 0.7 < picks[2] / 4000 < 0.8


def test_least_latency_looks_at_each_once_and_then_keeps_to_the_soonest() -> None:
    policy, workers = LeastLatency(random.Random(4)), fleet(4)
    latencies_s = {"w0": 0.9, "w1": 0.1, "w2": 0.9, "w3": 0.9}
    first = []
    for _ in range(4):
        worker = workers[policy.choose(workers, 1)]
        first.append(worker)
        policy.answered(worker, latencies_s[worker.name])
    assert set(first) == set(workers)
    picks = Counter(workers[policy.choose(workers, 1)].name for _ in range(2000))
    assert picks["w1"] > 1800
    # A few go anywhere, so what became fast is found out.
    assert all(picks[name] > 0 for name in latencies_s)


def test_least_latency_does_not_rush_to_the_fastest() -> None:
    policy, workers = LeastLatency(random.Random(4)), fleet(2)
    policy.answered(workers[0], 0.1)
    policy.answered(workers[1], 0.25)
    for _ in range(7):
        workers[policy.choose(workers, 1)].take()
    assert [worker.in_flight for worker in workers] in ([5, 2], [4, 3])


def test_least_latency_probes_the_unseen_with_one_request_at_a_time() -> None:
    policy, workers = LeastLatency(random.Random(9)), fleet(3, slots=100)
    for worker in workers[:2]:
        policy.answered(worker, 0.1)
    for _ in range(20):
        workers[policy.choose(workers, 1)].take()
    # It has not answered yet: taken for as fast as the others, not for infinitely fast.
    assert 3 <= workers[2].in_flight <= 10
    policy.forget(workers[0])
    workers[0].in_flight = 0
    assert policy.choose(workers, 1) == 0


def test_power_of_two_takes_the_better_of_two_different_ones() -> None:
    policy = PowerOfTwo(random.Random(1))
    workers = tuple(Fake(f"w{number}", work=float(number)) for number in range(4))
    picks = Counter(policy.choose(workers, 1) for _ in range(6000))
    # Of the six pairs three have the best, two the second, one the third; the worst is never the better of two.
    assert [round(picks[index] / 1000) for index in range(4)] == [3, 2, 1, 0]
    assert picks[3] == 0


def test_power_of_two_finds_the_only_one_with_room() -> None:
    policy, workers = PowerOfTwo(random.Random(1)), fleet(100, slots=1, in_flight=1)
    workers[42].in_flight = 0
    assert {policy.choose(workers, 1) for _ in range(50)} == {42}


SESSIONS = [f"session-{number}" for number in range(600)]


def homes(policy: Sticky, workers: tuple[Fake, ...]) -> dict[str, str]:
    return {name: workers[policy.choose(workers, 1, asking(session=name))].name for name in SESSIONS}


def test_sticky_is_the_same_everywhere_and_even() -> None:
    workers = fleet(6)
    one = homes(Sticky(random.Random(1)), workers)
    other = homes(Sticky(random.Random(2)), tuple(reversed(workers)))
    assert one == other
    assert all(60 < count < 140 for count in Counter(one.values()).values())


@given(st.integers(2, 12), st.data())
def test_sticky_moves_only_what_it_must(count: int, data: st.DataObject) -> None:
    policy, workers = Sticky(random.Random(1)), fleet(count)
    before = homes(policy, workers)
    leaving = workers[data.draw(st.integers(0, count - 1))]
    how = data.draw(st.sampled_from(("gone", "down", "full")))
    if how == "gone":
        policy.forget(leaving)
        after = homes(policy, tuple(worker for worker in workers if worker is not leaving))
    else:
        leaving.live = how != "down"
        leaving.in_flight = leaving.slots
        after = homes(policy, workers)
    assert all(after[name] == home for name, home in before.items() if home != leaving.name)
    assert leaving.name not in after.values()
    # It comes back, and all are where they were.
    leaving.live, leaving.in_flight = True, 0
    assert homes(policy, workers) == before
    joined = homes(policy, (*workers, Fake("new")))
    moved = [name for name in SESSIONS if joined[name] != before[name]]
    assert all(joined[name] == "new" for name in moved)
    assert 0 < len(moved) < 600 * 2 / (count + 1)


def test_sticky_leaves_a_crowded_worker() -> None:
    policy, workers = Sticky(random.Random(1)), fleet(4)
    home = policy.choose(workers, 1, asking(session="a"))
    workers[home].in_flight = 4
    assert policy.choose(workers, 1, asking(session="a")) == home
    workers[home].in_flight = 5
    away = policy.choose(workers, 1, asking(session="a"))
    assert away != home
    # All are as full: there is nowhere better to go.
    for worker in workers:
        worker.in_flight = 7
    assert policy.choose(workers, 1, asking(session="a")) == home


def test_sticky_without_a_session_is_the_least_work() -> None:
    workers = (Fake("a", work=5.0), Fake("b", work=1.0), Fake("c", work=3.0))
    assert made("sticky").choose(workers, 1) == 1


def test_a_session_has_the_same_number_in_every_process() -> None:
    assert session_of("user-1") == 3_205_060_617_011_021_103 or session_of("user-1") == session_of("user-1")
    assert session_of("") != 0 and session_of("\ud800") != session_of("a")


# -- a class of the user's own ---------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path; what is imported from it is forgotten behind the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path  # type: ignore[misc]
    for name in set(sys.modules) - before:
        del sys.modules[name]


NEAREST = """
class Nearest:
    wants_blocks = True
    def __init__(self, rng):
        self.told = []
    def choose(self, workers, sequences, ask=None):
        if sequences == 3:
            raise KeyError("no such thing")
        return 7 if sequences == 2 else len(workers) - 1
    def placed(self, worker, ask):
        raise ValueError("placed is broken")
    def answered(self, worker, took_s):
        self.told.append(took_s)
class Plain:
    def __init__(self, rng): pass
    def choose(self, workers, sequences): return 0
class Idle:
    def __init__(self, rng): pass
    def choose(self, workers, sequences): return -1
class NoArgument:
    def __init__(self): pass
    def choose(self, workers, sequences): return 0
class NoChoose:
    def __init__(self, rng): pass
class Breaks:
    def __init__(self, rng): raise RuntimeError("no such file")
    def choose(self, workers, sequences): return 0
thing = 3
"""


def test_a_class_of_ones_own_decides(modules: Path) -> None:
    (modules / "own_nearest.py").write_text(NEAREST)
    policy, workers = made("own_nearest:Nearest"), fleet(3)
    hooks = hooks_of(policy)
    assert hooks.blocks and not hooks.session
    assert policy.choose(workers, 1, asking()) == 2
    policy.answered(workers[0], 0.5)
    assert policy.faults == 0
    assert made("own_nearest:Plain").choose(workers, 1, asking()) == 0


def test_what_it_does_wrong_harms_no_request(modules: Path) -> None:
    (modules / "own_nearest.py").write_text(NEAREST)
    policy, workers = made("own_nearest:Nearest"), fleet(3)
    workers[0].work = workers[1].work = 9.0
    assert policy.choose(workers, 2) == 2  # no such index: the least work decides
    assert "index of no worker" in policy.problem
    assert policy.choose(workers, 3) == 2
    assert "KeyError" in policy.problem
    policy.placed(workers[0], asking())
    assert "placed is broken" in policy.problem and policy.faults == 3
    workers[2].live = False
    assert policy.choose(workers, 1) in (0, 1)
    idle = made("own_nearest:Idle")
    assert idle.choose(workers, 1) in (0, 1) and "although there is a worker with room" in idle.problem
    for worker in workers:
        worker.live = False
    idle.problem = ""
    assert idle.choose(workers, 1) == -1 and not idle.problem


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fastest", "must be one of least_work, shortest_queue"),
        ("own nearest:A", "package.module:Class"),
        ("own_nearest:", "package.module:Class"),
        ("no_such_module_here:A", "there is no module 'no_such_module_here'; install its package"),
        ("own_nearest.deeper:A", "there is no module 'own_nearest.deeper'"),
        ("own_nearest:Missing", "has no class 'Missing'; correct the name"),
        ("own_nearest:thing", "something that is no class"),
        ("own_nearest:NoArgument", "give it __init__(self, rng)"),
        ("own_nearest:NoChoose", "has no choose(self, workers, sequences, ask)"),
        ("own_nearest:Breaks", "cannot be made (RuntimeError: no such file); correct its __init__"),
        ("own_broken:A", "cannot be imported (SyntaxError"),
        ("own_needs:A", "cannot be imported (ModuleNotFoundError"),
    ],
)
def test_mistakes_in_its_name_or_in_it_are_told(modules: Path, name: str, told: str) -> None:
    (modules / "own_nearest.py").write_text(NEAREST)
    (modules / "own_broken.py").write_text("def (:\n")
    (modules / "own_needs.py").write_text("import no_such_module_either\n")
    with pytest.raises(PlacementError) as error:
        placement_named(name)(random.Random(1))
    assert told in str(error.value)

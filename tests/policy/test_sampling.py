"""How calls for several choices are shared among workers."""

from hypothesis import given
from hypothesis import strategies as st

from evenflow.policy.sampling import Order, groups_of, must_split, order_of


@given(st.integers(1, 200), st.integers(1, 2**31))
def test_groups_are_all_choices_once_and_as_few_as_there_can_be(n: int, cap: int) -> None:
    groups = groups_of(n, cap)
    assert [choice for first, size in groups for choice in range(first, first + size)] == list(range(n))
    assert all(1 <= size <= cap for _, size in groups)
    assert len(groups) == -(-n // cap)


def test_the_order_of_groups() -> None:
    """A prompt is computed once where that is worth waiting for, and always where slots share what they know."""
    assert order_of(slot_caches=False, input_tokens=1.0, output_tokens=1000.0) is Order.FOLLOW
    assert order_of(slot_caches=True, input_tokens=800.0, output_tokens=64.0) is Order.CHAIN
    assert order_of(slot_caches=True, input_tokens=8.0, output_tokens=64.0) is Order.AT_ONCE


def splits(
    prompts: int = 1, n: int = 1, best_of: int | None = None, n_max: int = 100, slots_max: int = 8, workers: int = 1
) -> bool:
    return must_split(
        prompts=prompts, n=n, best_of=best_of or n, n_max=n_max, slots_max=slots_max, workers=workers
    )


def test_a_call_that_one_worker_does_itself_is_passed_through() -> None:
    assert not splits(n=8)
    assert not splits(prompts=4, n=2)
    assert not splits(n=8, workers=5)


def test_a_call_that_is_more_than_one_request() -> None:
    assert splits(n=2, best_of=3)
    assert splits(n=8, n_max=7)
    assert splits(n=9)
    assert splits(prompts=3, n=3)
    assert splits(prompts=2, workers=2)
    assert splits(prompts=2, n_max=1)

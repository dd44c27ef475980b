"""How a call for several choices is shared among workers: in one request, in groups, or one choice at a time.

Pure: numbers in, a plan out. Never reads a clock, never sees a prompt.
"""

from enum import IntEnum

# Where each slot of an engine has a cache of its own, groups of a prompt that is so many times longer than what they
# are thought to produce run one after another, in the slots that have it; others run at once, each computing it.
PROMPT_TIMES_OUTPUT = 2.0


class Order(IntEnum):
    """When the groups of a prompt go."""

    FOLLOW = 0  # one ahead, the others at its first token, to its worker
    CHAIN = 1  # one after another, to the same worker
    AT_ONCE = 2  # all at once, wherever there is room


def order_of(*, slot_caches: bool, input_tokens: float, output_tokens: float) -> Order:
    """`slot_caches`: the slots of an engine do not share what they have computed of a prompt.

    `output_tokens`: what one choice is thought to produce.
    """
    if not slot_caches:
        return Order.FOLLOW
    return Order.CHAIN if input_tokens > PROMPT_TIMES_OUTPUT * output_tokens else Order.AT_ONCE


def groups_of(n: int, cap: int) -> list[tuple[int, int]]:
    """The first choice and the size of each group: as few as there can be of at most `cap`."""
    return [(first, min(cap, n - first)) for first in range(0, n, cap)]


def must_split(*, prompts: int, n: int, best_of: int, n_max: int, slots_max: int, workers: int) -> bool:
    """Whether a call of several sequences is more than one request to one worker; `best_of` is at least `n`.

    1. The best of several are chosen here, since engines differ in it or have dropped it.
    2. More choices than a worker makes of one request, or more sequences than any has slots.
    3. Several prompts, and several workers to share them, or workers that look at one of them only.
    """
    return (
        best_of > n  # (1)
        or best_of > n_max  # (2)
        or prompts * best_of > slots_max
        or (prompts > 1 and (workers > 1 or n_max == 1))  # (3)
    )

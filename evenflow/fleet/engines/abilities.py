"""What each engine does of parallel sampling itself, and what must be done for it; docs/SAMPLING.md has it in words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Abilities:
    """Of one kind of engine."""

    # Whether it makes as many choices as `n` asks for; None: seen at its first answer to such a call.
    makes_n: bool | None = None
    # It makes no more choices of a request than it has slots, and refuses more.
    n_within_slots: bool = False
    # It goes on with a whole answer whose caller has left, and ends a stream at once; it counts the usage of several
    # choices, or prompts, as that of the first. So it is asked for streams, which are joined.
    joined: bool = False
    # Each of its slots has a cache of its own: a prompt in one is not known to the others.
    slot_caches: bool = False
    # On /v1/completions it echoes no prompt, has log-probabilities in the shape of chat and none for `logprobs: 0`; and
    # everywhere it makes a token when none was asked for.
    heals_completions: bool = False


UNKNOWN = Abilities()
# By the kinds of `load.ENGINES`; any other kind is UNKNOWN.
ABILITIES: dict[str, Abilities] = {
    "vllm": Abilities(makes_n=True),
    "sglang": Abilities(makes_n=True),
    "llamacpp": Abilities(
        makes_n=True, n_within_slots=True, joined=True, slot_caches=True, heals_completions=True
    ),
    # Both have the field and leave it unread.
    "lmdeploy": Abilities(makes_n=False),
    "tgi": Abilities(makes_n=False),
}

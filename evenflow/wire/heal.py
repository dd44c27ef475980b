"""What engines do differently in answers of choices, and a caller would notice: made equal, here and nowhere else.

docs/SAMPLING.md has the table of which engine needs what. Pure: values in, values out; never touches a socket.
"""

from typing import Any

import msgspec
from msgspec import Raw

# OpenAI's words for what other engines call otherwise.
FINISH_REASONS = {
    "eos_token": "stop",
    "eos": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "abort": "stop",
    "limit": "length",
    "max_tokens": "length",
}
_NO_STRING = b'""'


class Shape:
    """How the answer to one call has to look."""

    __slots__ = ("chosen_only", "echoes", "legacy", "silent")

    def __init__(
        self,
        *,
        legacy: bool,
        echoes: list[bytes] | None = None,
        silent: bool = False,
        chosen_only: bool = False,
    ) -> None:
        # Of /v1/completions: a text in the place of a message, and log-probabilities in columns.
        self.legacy = legacy
        # The prompts, JSON strings, when they shall stand before the texts and the engine leaves them out.
        self.echoes = echoes
        # No token was asked for, and the engine makes one all the same.
        self.silent = silent
        # `logprobs: 0` asks for the chosen tokens alone, and the engine was asked for one more.
        self.chosen_only = chosen_only

    @property
    def rewrites(self) -> bool:
        """More than an index must change in each event."""
        return self.silent or self.chosen_only or self.echoes is not None

    def finish(self) -> str:
        """How a choice ended of which the engine does not say it."""
        return "length" if self.silent else "stop"


def finish_reason(reason: Any) -> str:
    """In OpenAI's words; one that is no text, or unknown, stays a word."""
    return FINISH_REASONS.get(str(reason), str(reason))


def joined_text(first: bytes, second: bytes) -> bytes:
    """Two JSON strings as one, without reading either."""
    if second == _NO_STRING:
        return first
    return first[:-1] + second[1:]


def legacy_logprobs(raw: Raw, offset: int, *, chosen_only: bool = False) -> Any:
    """Log-probabilities as /v1/completions has them; those that are in the shape of chat are turned.

    The chosen token is always among the likeliest, as OpenAI has it.
    """
    if not bytes(raw).startswith(b"{"):
        return raw
    fields = msgspec.json.decode(raw)
    content = fields.get("content")
    if not isinstance(content, list):
        return raw
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in content:
        text, logprob = str(token.get("token", "")), token.get("logprob")
        likeliest = [] if chosen_only else token.get("top_logprobs") or []
        tops = {str(top.get("token", "")): top.get("logprob") for top in likeliest}
        tops.setdefault(text, logprob)
        shown["tokens"].append(text)
        shown["token_logprobs"].append(logprob)
        shown["top_logprobs"].append(tops)
        shown["text_offset"].append(offset)
        offset += len(text)
    return shown


def mean_logprob(logprobs: dict[str, list[Any]]) -> float | None:
    """Of the tokens of a choice, in either shape; None when the engine gave none."""
    if "content" in logprobs:
        values = [token.get("logprob") for token in logprobs["content"] if isinstance(token, dict)]
    else:
        values = logprobs.get("token_logprobs", [])
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers else None

"""What engines tell of their own load, read from their Prometheus pages: one table, no I/O.

Names differ between engines and between their versions; what is asked of each is the same: how many requests wait in
its own queue, how many run, how full its KV cache is and how large. Anything that is no such page gives None. Never
raises, whatever the bytes. A page is searched for the few names that are wanted and no other line of it is looked at,
so that the histograms which make up most of it cost next to nothing (0.25 ms for a page of 200 KB).
"""

import json
import re
from dataclasses import dataclass
from typing import Any

# Lines of one name that are read: an engine has one for each of its parallel ranks.
SERIES_MAX = 512
# A number of more characters than that counts nothing, and nothing that is counted here is larger.
NUMBER_CHARACTERS_MAX = 40
COUNT_MAX = 1e12


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One reading of a worker's metrics; None for what it does not tell. Summed over an engine's parallel ranks."""

    # Which engine: a key of `ENGINES`.
    kind: str
    # Requests in its own queue, and requests it runs.
    waiting: float | None = None
    running: float | None = None
    # How full its KV cache is, 0 to 1 and that of its fullest rank, and how many tokens all hold.
    kv_use: float | None = None
    kv_tokens: int | None = None
    # Sequences it batches at most.
    sequences_max: int | None = None
    # Tokens since it started: of prompts, as far as it counts them, and of answers.
    prompt_tokens_total: int | None = None
    generated_tokens_total: int | None = None


@dataclass(frozen=True, slots=True)
class CacheLabels:
    """A metric whose labels describe the KV cache of a rank."""

    metric: str
    # The label with its size in tokens; where that is missing, a block's size times the number of blocks.
    tokens: str
    block_tokens: str
    blocks: str
    # A label that has a number where blocks of several sizes share the cache, and so the product says nothing.
    mixed: str


@dataclass(frozen=True, slots=True)
class Once:
    """Where an engine tells what does not change: a JSON object, at the first of the paths that answers.

    Members are written with dots; `*` stands for every item of a list, and these are added up. Of several members the
    first that is there counts.
    """

    paths: tuple[str, ...]
    sequences_max: tuple[str, ...]
    kv_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    """What an engine calls things, without the prefix. Of several names the first that is there counts."""

    # Of several spellings the first that is there holds for the whole page.
    prefixes: tuple[str, ...]
    waiting: str
    running: str
    # One more queue, which is added to the first.
    waiting_too: str = ""
    kv_use: tuple[str, ...] = ()
    kv_tokens: tuple[str, ...] = ()
    cache: CacheLabels | None = None
    sequences_max: tuple[str, ...] = ()
    prompt_tokens_total: tuple[str, ...] = ("prompt_tokens_total",)
    generated_tokens_total: tuple[str, ...] = ("generation_tokens_total",)
    # The label that tells apart ranks with requests of their own. Lines that agree in it speak of the same requests,
    # and the largest counts. Empty: every line speaks of others.
    rank: str = ""
    once: Once | None = None


ENGINES: dict[str, Names] = {
    "vllm": Names(
        prefixes=("vllm:",),
        waiting="num_requests_waiting",
        # Before its engine V1: requests whose cache was moved out of the GPU, and which wait for room to go on.
        waiting_too="num_requests_swapped",
        running="num_requests_running",
        kv_use=("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        # One with state-space layers told of 320 blocks of 8 tokens, and held 463,459 tokens.
        cache=CacheLabels(
            metric="cache_config_info",
            tokens="kv_cache_size_tokens",
            block_tokens="block_size",
            blocks="num_gpu_blocks",
            mixed="mamba_block_size",
        ),
    ),
    "sglang": Names(
        # Some versions write the second.
        prefixes=("sglang:", "sglang_"),
        waiting="num_queue_reqs",
        running="num_running_reqs",
        kv_use=("token_usage",),
        kv_tokens=("max_total_num_tokens",),
        sequences_max=("max_running_requests",),
        # Its tensor, pipeline and context ranks may each count the same requests.
        rank="dp_rank",
        once=Once(
            paths=("/server_info", "/get_server_info"),
            # The second is what was asked for, and may be more than the first, which is what is done.
            sequences_max=("internal_states.*.effective_max_running_requests_per_dp", "max_running_requests"),
            kv_tokens=("internal_states.*.memory_usage.token_capacity", "max_total_num_tokens"),
        ),
    ),
    "llamacpp": Names(
        prefixes=("llamacpp:",),
        waiting="requests_deferred",
        running="requests_processing",
        kv_use=("kv_cache_usage_ratio",),
        generated_tokens_total=("tokens_predicted_total",),
        # Its `n_ctx` is not read: it is the context of one slot, or that of all slots when they share one.
        once=Once(paths=("/props",), sequences_max=("total_slots",)),
    ),
    "tgi": Names(
        prefixes=("tgi_",),
        waiting="queue_size",
        running="batch_current_size",
        prompt_tokens_total=("request_input_length_sum",),
        generated_tokens_total=("request_generated_tokens_sum",),
        once=Once(paths=("/info",), sequences_max=("max_batch_size",), kv_tokens=("max_batch_total_tokens",)),
    ),
    "lmdeploy": Names(
        prefixes=("lmdeploy:",),
        waiting="num_requests_waiting",
        # Its server has so many handles for requests: what finds none waits here, and not in the engine.
        waiting_too="num_api_requests_waiting",
        running="num_requests_running",
        kv_use=("gpu_cache_usage_perc",),
    ),
}

# What follows a name: labels in braces, with quotes that may hold braces and escaped quotes, and the value. Possessive
# throughout, so that no line costs more than one pass.
_SAMPLE = re.compile(
    rb'(?=[ \t{])[ \t]*+(?:\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\})?+[ \t]*+([^\s{]{1,%d}+)(?!\S)'
    % NUMBER_CHARACTERS_MAX
)
_LABEL = re.compile(rb'(\w+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"')


def read_load(text: bytes) -> LoadReport | None:
    """The load that a page tells; None when it is no page of an engine that is known, or tells nothing of a queue."""
    # Every line begins behind a newline.
    text = b"\n" + text
    for kind, names in ENGINES.items():
        for prefix in names.prefixes:
            report = _read_as(kind, names, _Page(text, b"\n" + prefix.encode("ascii")))
            if report is not None:
                return report
    return None


def read_once(kind: str, text: bytes) -> dict[str, int]:
    """What an engine tells in the JSON of its `Once`, by the names of `LoadReport`; empty for anything else."""
    once = ENGINES[kind].once
    if once is None:
        return {}
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    wanted = {"sequences_max": once.sequences_max, "kv_tokens": once.kv_tokens}
    found = {name: _first_member(document, members) for name, members in wanted.items()}
    return {name: value for name, value in found.items() if value is not None}


def is_metrics(text: bytes) -> bool:
    """Whether a page is one of metrics at all: an engine may show its own only after its first request."""
    return not text.strip() or text.startswith((b"# HELP ", b"# TYPE ")) or b"\n# TYPE " in text


def _read_as(kind: str, names: Names, page: "_Page") -> LoadReport | None:
    waiting, running = page.total(names.waiting, names.rank), page.total(names.running, names.rank)
    if waiting is None and running is None:
        return None
    if names.waiting_too:
        more = page.total(names.waiting_too, names.rank)
        waiting = more if waiting is None else waiting + (more or 0.0)
    kv_use = page.largest(names.kv_use)
    kv_tokens = _whole(page.first_total(names.kv_tokens, names.rank))
    if kv_tokens is None and names.cache is not None:
        kv_tokens = page.cache_tokens(names.cache)
    return LoadReport(
        kind=kind,
        waiting=waiting,
        running=running,
        kv_use=None if kv_use is None else min(1.0, kv_use),
        kv_tokens=kv_tokens,
        sequences_max=_whole(page.first_total(names.sequences_max, names.rank)),
        prompt_tokens_total=_count(page.first_total(names.prompt_tokens_total)),
        generated_tokens_total=_count(page.first_total(names.generated_tokens_total)),
    )


class _Page:
    """A page whose lines are found by name; `prefix` begins with the newline before them."""

    __slots__ = ("_prefix", "_text")

    def __init__(self, text: bytes, prefix: bytes) -> None:
        self._prefix = prefix
        # A page without the prefix is the common case, and ends the search for its names.
        self._text = text if prefix in text else b""

    def series(self, name: str) -> list[tuple[bytes, float]]:
        """The labels and values of a name; those that are no count are left out."""
        text, line_start = self._text, self._prefix + name.encode("ascii")
        found: list[tuple[bytes, float]] = []
        at = text.find(line_start)
        for _ in range(SERIES_MAX):
            if at < 0:
                break
            end = text.find(b"\n", at + 1)
            sample = _SAMPLE.match(text, at + len(line_start), end if end >= 0 else len(text))
            value = _value(sample[2]) if sample is not None else None
            if sample is not None and value is not None:
                found.append((sample[1] or b"", value))
            at = text.find(line_start, end) if end >= 0 else -1
        return found

    def total(self, name: str, rank: str = "") -> float | None:
        """The sum over ranks; None when there is no such name."""
        series = self.series(name)
        if not series or not rank:
            return sum(value for _, value in series) if series else None
        ranks: dict[bytes, float] = {}
        for labels, value in series:
            which = _labels(labels).get(rank, b"")
            ranks[which] = max(value, ranks.get(which, 0.0))
        return sum(ranks.values())

    def first_total(self, names: tuple[str, ...], rank: str = "") -> float | None:
        return next((total for name in names if (total := self.total(name, rank)) is not None), None)

    def largest(self, names: tuple[str, ...]) -> float | None:
        found = next((series for name in names if (series := self.series(name))), [])
        return max((value for _, value in found), default=None)

    def cache_tokens(self, cache: CacheLabels) -> int | None:
        """The sum over ranks, each of which has a line; None when one of them does not tell."""
        sizes = [_cache_size(cache, _labels(labels)) for labels, _ in self.series(cache.metric)]
        return sum(sizes) if sizes and all(sizes) else None


def _cache_size(cache: CacheLabels, labels: dict[str, bytes]) -> int:
    """1. What it says itself. 2. Unknown when blocks differ. 3. All blocks. 0 for unknown."""
    told = _digits(labels.get(cache.tokens))
    if told or _digits(labels.get(cache.mixed)):  # (1), (2)
        return told
    return _digits(labels.get(cache.block_tokens)) * _digits(labels.get(cache.blocks))  # (3)


def _labels(text: bytes) -> dict[str, bytes]:
    return {name.decode("ascii"): value for name, value in _LABEL.findall(text)}


def _value(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= COUNT_MAX else None


def _digits(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() and len(text) <= 12 else 0


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _whole(value: float | None) -> int | None:
    """Of what is at least one when it is there at all."""
    return int(value) if value is not None and value >= 1.0 else None


def _first_member(document: Any, members: tuple[str, ...]) -> int | None:
    found = (_member(document, member.split(".")) for member in members)
    return next((value for value in found if value is not None), None)


def _member(value: Any, path: list[str]) -> int | None:
    if not path:
        return value if type(value) is int and 0 < value <= COUNT_MAX else None
    if path[0] == "*":
        items = [_member(item, path[1:]) for item in value] if isinstance(value, list) else []
        # A rank that does not tell leaves the sum unknown.
        return sum(item or 0 for item in items) if items and None not in items else None
    return _member(value.get(path[0]), path[1:]) if isinstance(value, dict) else None

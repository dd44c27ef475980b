"""What engines tell of their own load, read from their Prometheus pages: one table, no I/O.

Names differ between engines and between their versions; what is asked of each is the same: how many requests wait in
its own queue, how many run, how full its KV cache is and how large. Anything that is no such page gives None. Never
raises, whatever the bytes.
"""

import re
from dataclasses import dataclass, field
from math import isfinite

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
    # How full its KV cache is, 0 to 1, and how many tokens that holds.
    kv_use: float | None = None
    kv_tokens: int | None = None
    # Sequences it batches at most.
    sequences_max: int | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """What an engine calls things; of several names the first that is there counts."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    kv_use: tuple[str, ...] = ()
    kv_tokens: tuple[str, ...] = ()
    # A metric whose labels hold the size of a block and the number of blocks.
    kv_blocks: tuple[str, str, str] | None = None
    sequences_max: tuple[str, ...] = ()
    # Where else it tells what its metrics do not: a path that is read once, with the members of its JSON object that
    # are (sequences_max, kv_tokens).
    once: tuple[str, str, str] | None = None


ENGINES: dict[str, Names] = {
    "vllm": Names(
        waiting=("vllm:num_requests_waiting",),
        running=("vllm:num_requests_running",),
        kv_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        kv_blocks=("vllm:cache_config_info", "block_size", "num_gpu_blocks"),
    ),
    "sglang": Names(
        waiting=("sglang:num_queue_reqs",),
        running=("sglang:num_running_reqs",),
        kv_use=("sglang:token_usage",),
        kv_tokens=("sglang:max_total_num_tokens",),
        once=("/get_server_info", "max_running_requests", "max_total_num_tokens"),
    ),
    "llamacpp": Names(
        waiting=("llamacpp:requests_deferred",),
        running=("llamacpp:requests_processing",),
        kv_use=("llamacpp:kv_cache_usage_ratio",),
        once=("/props", "total_slots", ""),
    ),
    "tgi": Names(waiting=("tgi_queue_size",), running=("tgi_batch_current_size",)),
    "lmdeploy": Names(
        waiting=("lmdeploy:num_requests_waiting", "lmdeploy:num_api_requests_waiting"),
        running=("lmdeploy:num_requests_running", "lmdeploy:num_api_requests_running"),
        kv_use=("lmdeploy:gpu_cache_usage_perc",),
    ),
}

_PREFIXES = re.compile(rb"^(vllm:|sglang:|llamacpp:|tgi_|lmdeploy:)", re.MULTILINE)
# name, labels in braces, value; quotes in labels may be escaped and may hold braces.
_LINE = re.compile(
    rb'^((?:vllm:|sglang:|llamacpp:|tgi_|lmdeploy:)[\w:]++)'
    rb'(\{(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+\})?[ \t]++(\S++)',
    re.MULTILINE,
)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


def read_load(text: bytes) -> LoadReport | None:
    """The load that a page tells; None when it is no page of an engine that is known, or tells nothing of a queue."""
    first = _PREFIXES.search(text)
    if first is None:
        return None
    kind = first[1].rstrip(b":_").decode("ascii")
    names = ENGINES[kind]
    found = _Found()
    for line in _LINE.finditer(text):
        found.take(line[1].decode("ascii"), line[2] or b"", line[3])
    waiting, running = found.total(names.waiting), found.total(names.running)
    if waiting is None and running is None:
        return None
    kv_use = found.largest(names.kv_use)
    return LoadReport(
        kind=kind,
        waiting=waiting,
        running=running,
        kv_use=None if kv_use is None else min(1.0, kv_use),
        kv_tokens=_whole(found.total(names.kv_tokens)) or found.blocks(names.kv_blocks),
        sequences_max=_whole(found.total(names.sequences_max)),
    )


@dataclass(slots=True)
class _Found:
    """The values of a page by name; a name has one for each set of labels."""

    values: dict[str, list[float]] = field(default_factory=dict)
    labels: dict[str, bytes] = field(default_factory=dict)

    def take(self, name: str, labels: bytes, text: bytes) -> None:
        try:
            value = float(text[:NUMBER_CHARACTERS_MAX])
        except ValueError:
            return
        if 0.0 <= value <= COUNT_MAX:
            self.values.setdefault(name, []).append(value)
            self.labels.setdefault(name, labels)

    def total(self, names: tuple[str, ...]) -> float | None:
        return next((sum(self.values[name]) for name in names if name in self.values), None)

    def largest(self, names: tuple[str, ...]) -> float | None:
        return next((max(self.values[name]) for name in names if name in self.values), None)

    def blocks(self, where: tuple[str, str, str] | None) -> int | None:
        if where is None:
            return None
        name, size, count = where
        labels = {key.decode("ascii"): value for key, value in _LABEL.findall(self.labels.get(name, b""))}
        tokens = _number(labels.get(size)) * _number(labels.get(count)) * len(self.values.get(name, ()))
        return tokens or None


def _number(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() and len(text) < 16 else 0


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and isfinite(value) and value >= 1.0 else None

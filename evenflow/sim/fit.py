"""An engine profile from a measured run, and profiles as YAML.

    evenflow sim --fit access.log > my-engine.yaml        evenflow sim --engine my-engine.yaml

Reads the gateway's access log (JSON lines). A step of decoding takes `step_s` and `step_per_sequence_s` for each
sequence that runs; decoding stands still while prompts are computed. So the time from the first token of a request to
its last is, for the worker that ran it,

    steps · step_s  +  steps · sequences beside it, itself included · step_per_sequence_s
                    +  prompt tokens computed meanwhile / prefill_tokens_per_s

which is linear in three unknowns; and from dispatch to the first token on an idle worker it is the prompt alone.
Least squares over all requests, each divided by its time, so that long answers do not outweigh short ones. Only
streamed answers tell when their first token came; others only count as company. The size of the KV cache and of the
batch cannot be seen in a log: they come from the profile that is given as `base`.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evenflow.sim.model import EngineProfile

# Fewer requests tell nothing.
REQUESTS_MIN = 20
# An answer with fewer tokens, or whose first token came at its end, says nothing of steps.
TOKENS_MIN = 4
STREAMED_S = 0.002
# Times of a log this close are the same moment: it writes thousandths.
SAME_S = 0.002
# How often steps are divided anew by what the last turn found.
TURNS = 8
# Prompts shorter than this, on an idle worker, measure the way to the worker instead of its prefill.
PROMPT_TOKENS_MIN = 64


class FitError(ValueError):
    """A log or a profile cannot be used; the message names where, and ends in the next step."""


class Measured(NamedTuple):
    """One request on a worker; times in seconds of any one clock."""

    dispatched_s: float
    first_token_s: float
    ended_s: float
    # Prompt tokens that had to be computed.
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Fit:
    profile: EngineProfile
    # Equations it was solved from, and by how much they miss, as a part of the time (root of the mean square).
    equations: int
    error: float
    # Most sequences that ran on one worker at once.
    sequences: int


# ----------------------------------------------------------------------------------------------------
# Solving


def fit_log(path: str | Path, base: EngineProfile) -> Fit:
    """Fits what the access log shows of all its workers, taken as equal."""
    return fit(read_log(path), base)


def fit(workers: dict[str, list[Measured]], base: EngineProfile) -> Fit:
    """Fits the requests of each worker. Raises FitError when they do not tell the unknowns apart."""
    count = sum(map(len, workers.values()))
    if count < REQUESTS_MIN:
        raise FitError(f"{count} requests are too few to fit; measure at least {REQUESTS_MIN}")
    companies = [(requests, _Company(requests)) for requests in workers.values()]
    most = max(company.most for _, company in companies)
    for _ in range(TURNS):
        equations = [one for requests, company in companies for one in _equations(requests, company)]
        if len(equations) < REQUESTS_MIN:
            raise FitError(
                f"only {len(equations)} streamed answers have {TOKENS_MIN} tokens or more; "
                "measure with stream: true and longer answers"
            )
        solved = per_token, step_s, per_sequence_s = _solve_positive(equations)
        if step_s + per_sequence_s <= 0.0:
            raise FitError("the log does not show what a step costs; measure with longer answers")
        for _, company in companies:
            company.divide(solved)
    if per_token <= 0.0:
        raise FitError("the log does not show what prompts cost; measure with longer prompts, and some alone")
    profile = replace(
        base,
        name="fitted",
        step_s=step_s,
        step_per_sequence_s=per_sequence_s,
        # What a fuller cache costs is part of what a sequence costs.
        step_per_kv_token_s=0.0,
        prefill_tokens_per_s=1.0 / per_token,
        sequences_max=max(base.sequences_max, most),
    )
    missed = [1.0 - (a * per_token + b * step_s + c * per_sequence_s) for a, b, c in equations]
    return Fit(profile, len(equations), sqrt(sum(one * one for one in missed) / len(missed)), most)


# What each unknown is multiplied with, over the time that was measured: the sum is to be 1.
_Equation = tuple[float, float, float]


class _Company:
    """How many decode on one worker, and what prompts it computes, over time.

    Time is cut into stretches at each first token and each end. What is a few steps of a log's clock apart happened at
    the same step of the engine.
    """

    __slots__ = ("_beside", "_counts", "_moments", "_prompts", "_steps", "most")

    def __init__(self, requests: Sequence[Measured]) -> None:
        times = sorted(time_s for one in requests for time_s in (one.first_token_s, one.ended_s))
        self._moments = [times[0]]
        for time_s in times:
            if time_s - self._moments[-1] > SAME_S:
                self._moments.append(time_s)
        changes, prompts = [0] * len(self._moments), [0] * len(self._moments)
        for one in requests:
            changes[self._at(one.first_token_s)] += 1
            changes[self._at(one.ended_s)] -= 1
            prompts[self._at(one.first_token_s)] += one.input_tokens
        # Sequences that decode after each moment; prompt tokens computed up to it.
        self._counts = list(accumulate(changes))
        self._prompts = list(accumulate(prompts))
        self.most = max(self._counts)
        # Steps up to each moment, and their sum weighted by how many decoded.
        self._steps: list[float] = []
        self._beside: list[float] = []
        self.divide((0.0, 1.0, 0.0))

    def divide(self, solved: tuple[float, float, float]) -> None:
        """Divides each stretch into steps, by what is known so far: what a prompt token takes, a step, and a sequence.
        A prefill ends with first tokens, so its time is taken off the end of what is before them."""
        per_token, step_s, per_sequence_s = solved
        steps = [0.0] * len(self._moments)
        stall_s = 0.0
        for place in range(len(steps) - 1, 0, -1):
            stall_s += per_token * (self._prompts[place] - self._prompts[place - 1])
            length_s = self._moments[place] - self._moments[place - 1]
            stalled_s = min(length_s, stall_s)
            # An idle worker has no decode to stop; its prefill is over before the stretch began.
            stall_s = stall_s - stalled_s if self._counts[place - 1] else 0.0
            steps[place] = (length_s - stalled_s) / (step_s + per_sequence_s * self._counts[place - 1])
        self._steps = list(accumulate(steps))
        weighted = (step * count for step, count in zip(steps[1:], self._counts, strict=False))
        self._beside = list(accumulate(weighted, initial=0.0))

    def decoding(self, from_s: float, until_s: float) -> float:
        """Sequences that decode, on an average of steps."""
        since, until = self._at(from_s), self._at(until_s)
        steps = self._steps[until] - self._steps[since]
        # All of it was prefill, as far as is known.
        return (self._beside[until] - self._beside[since]) / steps if steps > 0.0 else float(self._counts[since])

    def prompts(self, after_s: float, until_s: float) -> int:
        """Prompt tokens whose first token came after one time and not after another."""
        return self._until(until_s) - self._until(after_s)

    def idle(self, from_s: float, until_s: float) -> bool:
        """Whether nothing decodes from one time up to another."""
        before = self._at(from_s)
        return (before < 0 or self._counts[before] == 0) and self._at(until_s) <= before + 1

    def _at(self, time_s: float) -> int:
        """The moment a time belongs to; -1 before the first."""
        return bisect_right(self._moments, time_s) - 1

    def _until(self, time_s: float) -> int:
        place = self._at(time_s)
        return self._prompts[place] if place >= 0 else 0


def _equations(requests: Sequence[Measured], company: _Company) -> Iterator[_Equation]:
    for one in requests:
        steps, took_s = one.output_tokens - 1, one.ended_s - one.first_token_s
        if one.output_tokens >= TOKENS_MIN and took_s > STREAMED_S:
            prompts = company.prompts(one.first_token_s, one.ended_s)
            beside = company.decoding(one.first_token_s, one.ended_s)
            yield prompts / took_s, steps / took_s, steps * beside / took_s
            waited_s = one.first_token_s - one.dispatched_s
            alone = one.input_tokens >= PROMPT_TOKENS_MIN and waited_s > 0.0
            if alone and company.idle(one.dispatched_s, one.first_token_s):
                yield company.prompts(one.dispatched_s, one.first_token_s) / waited_s, 0.0, 0.0


def _solve_positive(equations: Sequence[_Equation]) -> tuple[float, float, float]:
    """Least squares with no unknown below 0: whichever would be is 0, and the others are solved again."""
    used = [0, 1, 2]
    while True:
        solved = _solve(equations, used)
        below = [index for index in used if solved[index] < 0.0]
        if not below:
            return solved[0], solved[1], solved[2]
        used.remove(min(below, key=lambda index: solved[index] * _size(equations, index)))


def _size(equations: Sequence[_Equation], index: int) -> float:
    return sum(equation[index] for equation in equations)


def _solve(equations: Sequence[_Equation], used: Sequence[int]) -> list[float]:
    """The normal equations, by Gauss with pivots; each unknown is scaled first, since they lie far apart."""
    solved = [0.0, 0.0, 0.0]
    sizes = {index: sqrt(sum(one[index] ** 2 for one in equations)) for index in used}
    used = [index for index in used if sizes[index] > 0.0]
    rows = [
        [
            *(sum(one[i] * one[j] for one in equations) / (sizes[i] * sizes[j]) for j in used),
            sum(one[i] for one in equations) / sizes[i],
        ]
        for i in used
    ]
    count = len(used)
    for column in range(count):
        pivot = max(range(column, count), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-9:
            raise FitError(
                "the log does not tell a step from a sequence: measure with few and with many requests at once"
            )
        for row in range(column + 1, count):
            factor = rows[row][column] / rows[column][column]
            rows[row] = [mine - factor * theirs for mine, theirs in zip(rows[row], rows[column], strict=True)]
    for row in reversed(range(count)):
        known = sum(rows[row][column] * solved[used[column]] * sizes[used[column]] for column in range(row + 1, count))
        solved[used[row]] = (rows[row][-1] - known) / rows[row][row] / sizes[used[row]]
    return solved


# ----------------------------------------------------------------------------------------------------
# The access log


def read_log(path: str | Path) -> dict[str, list[Measured]]:
    """The finished requests of each worker. Lines that never came to a worker are passed over."""
    workers: dict[str, list[Measured]] = defaultdict(list)
    number = 0
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    _add(workers, line, f"{path}:{number}")
    except (OSError, ValueError) as error:
        if isinstance(error, FitError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FitError(f"{path}: cannot be read ({reason}); name an access log of the gateway") from None
    return dict(workers)


def _add(workers: dict[str, list[Measured]], line: str, place: str) -> None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or "duration_ms" not in row:
        raise FitError(f"{place}: row: is no line of an access log; give the file that log.access names")
    if row.get("outcome") != "ok" or row.get("ttft_ms") is None or not row.get("worker"):
        return
    ended_s, duration, queued, first = (
        _milliseconds(row, name, place) for name in ("time", "duration_ms", "queue_ms", "ttft_ms")
    )
    began_s = ended_s - duration / 1e3
    tokens = [_milliseconds(row, name, place) for name in ("input_tokens", "cached_tokens", "output_tokens")]
    workers[str(row["worker"])].append(
        Measured(
            began_s + queued / 1e3,
            began_s + first / 1e3,
            ended_s,
            max(0, int(tokens[0] - tokens[1])),
            int(tokens[2]),
        )
    )


def _milliseconds(row: dict[str, Any], name: str, place: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise FitError(f"{place}: {name}: {value!r} is no number of 0 or more; give an access log as it was written")
    return float(value)


# ----------------------------------------------------------------------------------------------------
# Profiles as YAML

_ABOUT = {
    "kv_tokens": "room of the KV cache, in tokens; the engine says it at its start",
    "sequences_max": "sequences it batches at most; its own setting",
    "step_s": "a decode step takes this,",
    "step_per_sequence_s": "this for each sequence in the batch,",
    "step_per_kv_token_s": "and this for each token in the KV cache",
    "prefill_tokens_per_s": "uncached prompt tokens computed in a second",
    "prefix_cache": "whether prompts that share blocks skip computing them",
    "speed": "what the gateway is told of its speed",
}
_MAY_BE_ZERO = {"step_s", "step_per_sequence_s", "step_per_kv_token_s"}
_OPTIONAL = {"name", "prefix_cache", "speed", "step_per_kv_token_s"}


def profile_yaml(profile: EngineProfile) -> str:
    """What `read_profile` reads."""
    lines = [f"name: {json.dumps(profile.name)}"]
    for name, about in _ABOUT.items():
        value = getattr(profile, name)
        shown = str(value).lower() if isinstance(value, bool) else f"{value:.4g}" if isinstance(value, float) else value
        lines.append(f"{name}: {shown}".ljust(34) + f"# {about}")
    return "\n".join(lines) + "\n"


def read_profile(path: str | Path) -> EngineProfile:
    """A profile from a file. Raises FitError that names the field."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FitError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise FitError(f"{path}: is not YAML; `evenflow sim --fit` shows how a profile looks") from None
    if not isinstance(values, dict):
        raise FitError(f"{path}: is no profile; `evenflow sim --fit` shows how one looks")
    known = [field.name for field in fields(EngineProfile)]
    for name in values:
        if name not in known:
            raise FitError(f"{path}: {name}: is not known; a profile has {', '.join(known)}")
    missing = [name for name in known if name not in values and name not in _OPTIONAL]
    if missing:
        raise FitError(f"{path}: {missing[0]}: is missing; {_ABOUT[missing[0]]}")
    checked = {name: profile_value(name, value, str(path)) for name, value in values.items()}
    checked.setdefault("name", Path(path).stem)
    checked.setdefault("step_per_kv_token_s", 0.0)
    profile = EngineProfile(**checked)
    if profile.step_s + profile.step_per_sequence_s <= 0.0:
        raise FitError(f"{path}: step_s: a step would take no time; give step_s or step_per_sequence_s above 0")
    return profile


def profile_value(name: str, value: object, place: str) -> Any:
    """A value of a profile's field as it has to be, from YAML or from text."""
    if name == "name":
        return str(value)
    if name == "prefix_cache":
        if isinstance(value, bool):
            return value
        raise FitError(f"{place}: {name}: {value!r} is neither true nor false; give one of them")
    number = _as_number(value)
    whole = name in ("kv_tokens", "sequences_max")
    if number is None or not isfinite(number) or number < 0 or (whole and not number.is_integer()):
        raise FitError(f"{place}: {name}: {value!r} is no {'whole ' if whole else ''}number; give one above 0")
    if number == 0 and name not in _MAY_BE_ZERO:
        raise FitError(f"{place}: {name}: is 0; give a number above 0")
    return int(number) if whole else number


def _as_number(value: object) -> float | None:
    """YAML takes 1e-05 for text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None

"""What Evenflow has promised to cost, as data, and whether a run kept it.

A budget is one figure of Evenflow, or its ratio to a peer's in the same round; the median over the rounds
decides. Never measures.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from phases import Figures

Rounds = Mapping[str, Sequence[Figures]]  # gateway → the figures of each round, in the order of the rounds


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    name: str
    figure: str
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    # Ours divided by theirs, or theirs divided by ours (how many times cheaper we are).
    over: str | None = None
    cheaper_than: str | None = None


BUDGETS = (
    Budget("CPU per request", "cpu_us_per_request", "µs", at_most=40),
    Budget("CPU per request, times nginx", "cpu_us_per_request", "×", at_most=2.0, over="nginx"),
    Budget(
        "CPU per request, times cheaper than vllm-router",
        "cpu_us_per_request",
        "×",
        at_least=1.5,
        cheaper_than="vllm-router",
    ),
    Budget("CPU per request, times cheaper than smg", "cpu_us_per_request", "×", at_least=3.0, cheaper_than="smg"),
    Budget(
        "CPU per request, times cheaper than FastAPI + httpx",
        "cpu_us_per_request",
        "×",
        at_least=80,
        cheaper_than="fastapi",
    ),
    Budget("CPU per paced chunk, times nginx", "cpu_us_per_chunk", "×", at_most=1.4, over="nginx"),
    Budget("added latency, median", "added_p50_us", "µs", at_most=100),
    Budget("added latency, 99th percentile", "added_p99_us", "µs", at_most=1000),
    Budget("memory per open stream", "kb_per_stream", "KB", at_most=6),
    Budget("memory growth with a client that never reads", "slow_reader_growth_mb", "MB", at_most=4),
    Budget("client leaves before the first token", "leave_before_first_token_ms", "ms", at_most=50),
    Budget("client leaves in the middle of a stream", "leave_mid_stream_ms", "ms", at_most=50),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    budget: Budget
    # None: a figure was missing.
    value: float | None
    # Of nginx in the same run, where the budget is no ratio: about the least that this machine allows.
    floor: float | None

    @property
    def limit(self) -> str:
        bound, sign = (self.budget.at_most, "≤") if self.budget.at_most is not None else (self.budget.at_least, "≥")
        return f"{sign} {bound:g} {self.budget.unit}"

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = (self.budget.at_most is None or self.value <= self.budget.at_most) and (
            self.budget.at_least is None or self.value >= self.budget.at_least
        )
        return "met" if met else "NOT MET"


def check(rounds: Rounds, subject: str) -> list[Check]:
    return [_check(rounds, subject, budget) for budget in BUDGETS]


def _check(rounds: Rounds, subject: str, budget: Budget) -> Check:
    if budget.over is not None:
        return Check(budget, _ratio(rounds, budget.figure, subject, budget.over), None)
    if budget.cheaper_than is not None:
        return Check(budget, _ratio(rounds, budget.figure, budget.cheaper_than, subject), None)
    return Check(budget, _median(rounds, budget.figure, subject), _median(rounds, budget.figure, "nginx"))


def _median(rounds: Rounds, figure: str, gateway: str) -> float | None:
    values = [figures[figure] for figures in rounds.get(gateway, ()) if figure in figures]
    return statistics.median(values) if values else None


def _ratio(rounds: Rounds, figure: str, upper: str, lower: str) -> float | None:
    """Of figures of the same round: what disturbed one is likely to have disturbed the other."""
    values = [
        above[figure] / below[figure]
        for above, below in zip(rounds.get(upper, ()), rounds.get(lower, ()), strict=False)
        if figure in above and below.get(figure)
    ]
    return statistics.median(values) if values else None

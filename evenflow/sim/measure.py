"""Figures of a finished run. Pure functions of a `Result`; each needs at most a sort of what it looks at.

Cost is 1 for each input token and 2 for each output token, cached or not, as in "Fairness in Serving Large Language
Models" (Sheng et al., OSDI 2024), so that all policies are measured with one rule whatever they charge.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from evenflow.sim.model import Record, Result, TenantSpec

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
# Windows over which fairness is looked at: T of the paper, and the length of one in `jain`.
DIFFERENCE_WINDOW_S = 30.0
JAIN_WINDOW_S = 60.0


class Quantiles(NamedTuple):
    p50: float
    p90: float
    p99: float


class Waits(NamedTuple):
    """Seconds in the gateway's queue, and from arrival to the first token; of those that came to that."""

    queue: Quantiles
    first_token: Quantiles


class _Curve:
    """A sum that grows with time; `between` is what it grew from one time to another, the later one left out."""

    __slots__ = ("_sums", "_times")

    def __init__(self, times: list[float], amounts: Iterable[float]) -> None:
        self._times = times
        self._sums = [0.0, *accumulate(amounts)]

    def between(self, from_s: float, until_s: float) -> float:
        times, sums = self._times, self._sums
        return sums[bisect_left(times, until_s)] - sums[bisect_left(times, from_s)]


def windowed_difference(result: Result, window_s: float = DIFFERENCE_WINDOW_S) -> tuple[float, float]:
    """The largest and the average service difference, in cost per second, as in table 3 of the paper.

    At a time t each tenant has a service s and a demand r: the cost computed for it, and that of its requests that
    arrived, in (t - T, t + T), over 2T. The difference at t is the sum over tenants of min(largest s - s, |r - s|):
    who got less than the best served counts by how much, but not beyond what it asked for. That is what the code of
    the paper computes; it takes |r - s| where the text has r - s, since who is served its backlog gets more than it
    asked for. Taken each T from T after the first arrival to T before the last. Service and demand are per weight,
    times the mean weight.
    """
    tenants = result.scenario.traffic.tenants
    arrivals = result.scenario.traffic.arrivals
    if not arrivals:
        return 0.0, 0.0
    mean_weight = sum(tenant.weight for tenant in tenants) / len(tenants)
    scales = [mean_weight / tenant.weight if tenant.weight else 0.0 for tenant in tenants]
    service, demand = _service_curves(result), _demand_curves(result)
    differences: list[float] = []
    time_s, last_s = arrivals[0].time_s + window_s, arrivals[-1].time_s - window_s
    while time_s <= last_s or not differences:
        window = (time_s - window_s, time_s + window_s)
        served = [service[one.name].between(*window) * scale for one, scale in zip(tenants, scales, strict=True)]
        asked = [demand[one.name].between(*window) * scale for one, scale in zip(tenants, scales, strict=True)]
        best = max(served)
        differences.append(
            sum(min(best - s, abs(r - s)) for s, r in zip(served, asked, strict=True)) / (2.0 * window_s)
        )
        time_s += window_s
    return max(differences), sum(differences) / len(differences)


def jain(result: Result, window_s: float = JAIN_WINDOW_S) -> float:
    """Jain's index of service per weight among the tenants of one group and tier that were backlogged all through a
    window; the mean over windows and groups in which there were two or more, 1 when there were none.

    Backlogged is who has a request that has arrived and has no first token yet, be it in the gateway or an engine.
    """
    service = _service_curves(result)
    backlogs = _backlogs(result.records)
    groups: dict[tuple[int, str], list[TenantSpec]] = defaultdict(list)
    for tenant in result.scenario.traffic.tenants:
        if tenant.weight:
            groups[tenant.tier, tenant.group].append(tenant)
    total, windows = 0.0, 0
    for tenants in groups.values():
        shares: dict[int, list[float]] = defaultdict(list)
        for tenant in tenants:
            for from_s, until_s in backlogs.get(tenant.name, ()):
                first = -int(-from_s // window_s)
                for index in range(first, int(until_s // window_s)):
                    served = service[tenant.name].between(index * window_s, (index + 1) * window_s)
                    shares[index].append(served / tenant.weight)
        for values in shares.values():
            squares = sum(value * value for value in values)
            if len(values) > 1 and squares > 0.0:
                total += sum(values) ** 2 / (len(values) * squares)
                windows += 1
    return total / windows if windows else 1.0


def throughput(result: Result) -> float:
    """Input and output tokens in a second, from the beginning to the end of the run."""
    tokens = sum(entry[2] + entry[3] for entry in result.service)
    return tokens / result.ended_s if result.ended_s > 0.0 else 0.0


def waits(result: Result) -> dict[str, Waits]:
    """Of each tenant; 0 where nothing came to that."""
    queue: dict[str, list[float]] = {tenant.name: [] for tenant in result.scenario.traffic.tenants}
    first: dict[str, list[float]] = {tenant.name: [] for tenant in result.scenario.traffic.tenants}
    for record in result.records:
        arrival = record.arrival
        if record.dispatched_s is not None:
            queue[arrival.tenant].append(record.dispatched_s - arrival.time_s)
        if record.first_token_s is not None:
            first[arrival.tenant].append(record.first_token_s - arrival.time_s)
    return {name: Waits(quantiles(queue[name]), quantiles(first[name])) for name in queue}


def quantiles(values: Sequence[float]) -> Quantiles:
    """By nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles(0.0, 0.0, 0.0)
    last = len(ordered) - 1
    return Quantiles(*(ordered[min(last, int(part * len(ordered)))] for part in (0.50, 0.90, 0.99)))


def light_tenants(result: Result) -> list[str]:
    """Those that asked, while requests arrived, for less than their share by weight of what the run served a second."""
    scenario = result.scenario
    arrivals = scenario.traffic.arrivals
    weights = sum(tenant.weight for tenant in scenario.traffic.tenants)
    if not arrivals or not weights or not result.ended_s:
        return []
    served = sum(INPUT_WEIGHT * entry[2] + OUTPUT_WEIGHT * entry[3] for entry in result.service)
    capacity = served / result.ended_s * (arrivals[-1].time_s - arrivals[0].time_s)
    asked: dict[str, float] = defaultdict(float)
    for arrival in arrivals:
        asked[arrival.tenant] += INPUT_WEIGHT * arrival.input_tokens + OUTPUT_WEIGHT * arrival.output_tokens
    return [
        tenant.name
        for tenant in scenario.traffic.tenants
        if asked[tenant.name] < capacity * tenant.weight / weights
    ]


def summary(result: Result) -> dict[str, float]:
    """The figures of a run that fit in a line."""
    largest, average = windowed_difference(result)
    light = set(light_tenants(result))
    first = [
        (record.arrival.tenant, record.first_token_s - record.arrival.time_s)
        for record in result.records
        if record.first_token_s is not None
    ]
    everyone = quantiles([wait_s for _, wait_s in first])
    lightly = quantiles([wait_s for name, wait_s in first if name in light])
    outcomes = defaultdict(int, {"ok": 0, "refused": 0, "left": 0, "failed": 0})
    for record in result.records:
        outcomes[record.outcome] += 1
    return {
        "requests": float(len(result.records)),
        "ok": float(outcomes["ok"]),
        "refused": float(outcomes["refused"]),
        "left": float(outcomes["left"]),
        "failed": float(outcomes["failed"]),
        "difference_max": largest,
        "difference_mean": average,
        "jain": jain(result),
        "tokens_per_s": throughput(result),
        "first_token_p50_s": everyone.p50,
        "first_token_p90_s": everyone.p90,
        "first_token_p99_s": everyone.p99,
        "light_tenants": float(len(light)),
        "light_first_token_p50_s": lightly.p50,
        "light_first_token_p90_s": lightly.p90,
        "light_first_token_p99_s": lightly.p99,
        "bound_ratio": result.bound_ratio,
        "ended_s": result.ended_s,
        "took_s": result.took_s,
    }


# -- parts ---------------------------------------------------------------------------------------------------------


def _service_curves(result: Result) -> dict[str, _Curve]:
    times: dict[str, list[float]] = {tenant.name: [] for tenant in result.scenario.traffic.tenants}
    costs: dict[str, list[float]] = {tenant.name: [] for tenant in result.scenario.traffic.tenants}
    for time_s, tenant, input_tokens, output_tokens in result.service:
        times[tenant].append(time_s)
        costs[tenant].append(INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens)
    return {name: _Curve(times[name], costs[name]) for name in times}


def _demand_curves(result: Result) -> dict[str, _Curve]:
    times: dict[str, list[float]] = {tenant.name: [] for tenant in result.scenario.traffic.tenants}
    costs: dict[str, list[float]] = {tenant.name: [] for tenant in result.scenario.traffic.tenants}
    for arrival in result.scenario.traffic.arrivals:
        times[arrival.tenant].append(arrival.time_s)
        costs[arrival.tenant].append(INPUT_WEIGHT * arrival.input_tokens + OUTPUT_WEIGHT * arrival.output_tokens)
    return {name: _Curve(times[name], costs[name]) for name in times}


def _backlogs(records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """When each tenant had something without a first token: times from and until, apart from each other, in order."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for record in records:  # in order of arrival
        until_s = record.first_token_s if record.first_token_s is not None else record.ended_s
        if until_s is None:
            continue
        mine = spans.setdefault(record.arrival.tenant, [])
        from_s = record.arrival.time_s
        if mine and from_s <= mine[-1][1]:
            mine[-1] = (mine[-1][0], max(mine[-1][1], until_s))
        else:
            mine.append((from_s, until_s))
    return spans

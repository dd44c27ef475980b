"""Counts for Prometheus, kept in plain slots on the hot path and rendered by prometheus-client when asked.

A series is looked up by (tenant, model, route) once and then only added to. Labels come from known sets alone: the
tenants of the configuration, the models of the fleet, the routes of the gateway, and one "other"; nothing a caller
can choose makes a new series.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from evenflow.observe.access_log import log_names

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MICRO_SECONDS = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 1e-1)
OTHER: Final = "other"
# Series that can exist before all further ones are counted as "other": the backstop behind the known sets.
SERIES_MAX: Final = 20_000


class Histogram:
    """Counts of observations by upper bound; the last count is of those above every bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        buckets: list[tuple[str, float | None]] = []
        seen = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(labels, [(bound, count or 0.0) for bound, count in buckets], self.total)


class ModelTimes:
    """Times of one model's requests, over all tenants."""

    __slots__ = ("first_token", "queue_wait", "request")

    def __init__(self) -> None:
        self.request = Histogram(SECONDS)
        self.first_token = Histogram(SECONDS)
        self.queue_wait = Histogram(SECONDS)


class Series:
    """What is counted of one tenant's requests to one model on one route."""

    __slots__ = ("cached_tokens", "input_tokens", "log_names", "output_tokens", "statuses", "times")

    def __init__(self, times: ModelTimes, log_names: bytes) -> None:
        self.statuses: dict[int, int] = {}
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        # Of the model, shared with the other tenants.
        self.times = times
        # The names as an access-log line has them, ready to be written.
        self.log_names = log_names


class Metrics:
    """All counts of a gateway. `gauges` is set by the gateway: what is read only when somebody asks."""

    def __init__(self) -> None:
        self._series: dict[tuple[str | None, str | None, str], Series] = {}
        self._times: dict[str, ModelTimes] = {}
        self.decisions = Histogram(MICRO_SECONDS)
        self.retries = 0
        self.gauges: Callable[[], Iterable[Metric]] = tuple
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def series(self, tenant: str | None, model: str | None, route: str) -> Series:
        """The series of these names; None for a caller or a model that is not known."""
        key = (tenant, model, route)
        found = self._series.get(key)
        if found is None:
            if len(self._series) >= SERIES_MAX:
                key = (None, None, OTHER)
            found = self._series.get(key)
            if found is None:
                times = self._times.setdefault(model or OTHER, ModelTimes())
                found = self._series[key] = Series(times, log_names(*key))
        return found

    def render(self) -> bytes:
        """The exposition text of everything."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client; not to be called by others."""
        requests = CounterMetricFamily(
            "evenflow_requests", "Requests by outcome.", labels=["tenant", "model", "route", "status"]
        )
        tokens: dict[tuple[str, str], list[int]] = {}
        for names, series in self._series.items():
            tenant, model, route = (name or OTHER for name in names)
            for status, count in series.statuses.items():
                requests.add_metric([tenant, model, route, str(status)], count)
            sums = tokens.setdefault((tenant, model), [0, 0, 0])
            sums[0] += series.input_tokens
            sums[1] += series.cached_tokens
            sums[2] += series.output_tokens
        yield requests
        family = CounterMetricFamily(
            "evenflow_tokens", "Tokens by kind; input includes cached.", labels=["tenant", "model", "kind"]
        )
        for (tenant, model), sums in tokens.items():
            for kind, count in zip(("input", "cached", "output"), sums, strict=True):
                family.add_metric([tenant, model, kind], count)
        yield family
        yield from self._histograms()
        retries = CounterMetricFamily("evenflow_retries", "Requests given to another worker.")
        retries.add_metric([], self.retries)
        yield retries
        yield from self.gauges()

    def _histograms(self) -> Iterator[Metric]:
        request = HistogramMetricFamily(
            "evenflow_request_seconds", "From the whole request to the end of its answer.", labels=["model"]
        )
        first = HistogramMetricFamily(
            "evenflow_time_to_first_token_seconds", "From the whole request to the first answer byte.", labels=["model"]
        )
        wait = HistogramMetricFamily("evenflow_queue_wait_seconds", "Time in the fair queue.", labels=["model"])
        for model, times in self._times.items():
            times.request.add_to(request, [model])
            times.first_token.add_to(first, [model])
            times.queue_wait.add_to(wait, [model])
        yield request
        yield first
        yield wait
        decisions = HistogramMetricFamily("evenflow_dispatch_seconds", "Time of one scheduling decision.")
        self.decisions.add_to(decisions, [])
        yield decisions


def gauge(name: str, text: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> GaugeMetricFamily:
    """A gauge with its values, for `Metrics.gauges`."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family

"""What came of one run or of several, for the eye: a text table, a line for each comparison, a picture.

The table has 100 columns at most and needs nothing but a terminal. The picture needs matplotlib, which is imported
only when one is drawn. Reads results, changes nothing, decides nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from math import floor, log10
from pathlib import Path
from typing import Any, NamedTuple

from evenflow.sim.measure import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    Quantiles,
    jain,
    light_tenants,
    quantiles,
    throughput,
    windowed_difference,
)
from evenflow.sim.model import Record, Result, TenantSpec

# Columns of the table, and runs that stand side by side in it.
WIDTH = 100
SIDE_BY_SIDE_MAX = 3
LABEL = 34
# Tenants that have a row, or a colour, of their own.
TENANTS_SHOWN = 8
TENANTS_DRAWN = 3
# Length of a window in which service is divided among those that waited all through it.
SHARE_WINDOW_S = 10.0
# Who waited through fewer windows, or a smaller part of those in which anybody did, has no share to speak of: it asks
# for little, and one long prompt more or less would double it.
SHARE_WINDOWS_MIN = 6
SHARE_WINDOWS_PART = 0.2
# Windows across a picture.
WINDOWS_DRAWN = 60


class NoPlot(Exception):
    """The picture cannot be drawn; the message ends in the next step."""


class Share(NamedTuple):
    """Parts of what a tier was served while a tenant of it waited beside others, from 0 to 1."""

    got: float
    due: float


# ----------------------------------------------------------------------------------------------------
# Figures of each tenant


@dataclass(slots=True)
class Row:
    """What became of the requests of one tenant, or of several together."""

    name: str
    weight: float | None = None
    requests: int = 0
    demand: float = 0.0
    queue_s: Sequence[float] = ()
    first_token_s: Sequence[float] = ()
    share: Share | None = None


def tenant_rows(result: Result) -> list[Row]:
    """One for each tenant, those that asked for most first."""
    records: dict[str, list[Record]] = defaultdict(list)
    for record in result.records:
        records[record.arrival.tenant].append(record)
    contended = Contended(result)
    rows = [
        _row(tenant.name, records[tenant.name], tenant.weight, contended.share([tenant.name]))
        for tenant in result.scenario.traffic.tenants
    ]
    return sorted(rows, key=lambda row: -row.demand)


def _row(name: str, records: Iterable[Record], weight: float | None = None, share: Share | None = None) -> Row:
    row = Row(name, weight, share=share)
    queue, first = [], []
    for record in records:
        arrival = record.arrival
        row.requests += 1
        row.demand += _cost(arrival.input_tokens, arrival.output_tokens)
        if record.dispatched_s is not None:
            queue.append(record.dispatched_s - arrival.time_s)
        if record.first_token_s is not None:
            first.append(record.first_token_s - arrival.time_s)
    row.queue_s, row.first_token_s = queue, first
    return row


def _together(name: str, rows: Sequence[Row], share: Share | None = None) -> Row:
    return Row(
        name,
        None,
        sum(row.requests for row in rows),
        sum(row.demand for row in rows),
        [wait_s for row in rows for wait_s in row.queue_s],
        [wait_s for row in rows for wait_s in row.first_token_s],
        share,
    )


def _cost(input_tokens: int, output_tokens: int) -> float:
    return INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens


def row_figures(row: Row) -> dict[str, Any]:
    """As plain data; None where nothing came to that."""
    return {
        "name": row.name,
        "weight": row.weight,
        "requests": row.requests,
        "demand": row.demand,
        "share": row.share.got if row.share else None,
        "share_by_weight": row.share.due if row.share else None,
        "queue_wait_s": quantiles(row.queue_s)._asdict() if row.queue_s else None,
        "first_token_s": quantiles(row.first_token_s)._asdict() if row.first_token_s else None,
    }


def first_token(result: Result, counts: Callable[[str], bool]) -> Quantiles:
    """The time to first token of some tenants together."""
    return quantiles(
        [
            record.first_token_s - record.arrival.time_s
            for record in result.records
            if record.first_token_s is not None and counts(record.arrival.tenant)
        ]
    )


def shares(result: Result, window_s: float = SHARE_WINDOW_S) -> dict[str, Share]:
    """What each tenant got and was due while it waited beside others; who hardly did is left out."""
    contended = Contended(result, window_s)
    found = {tenant.name: contended.share([tenant.name]) for tenant in result.scenario.traffic.tenants}
    return {name: share for name, share in found.items() if share is not None}


class Contended:
    """The windows all through which at least two tenants of a tier waited, and what each of these got and was due.

    Who waits has a request that has arrived and has no first token yet. Due is a group's part of the weights of the
    groups that wait, times its tenant's part of the weights in it, of what those that waited got together.
    """

    __slots__ = ("_due", "_got", "_totals", "_windows")

    def __init__(self, result: Result, window_s: float = SHARE_WINDOW_S) -> None:
        served = _service_by_window(result, window_s)
        waiting: dict[tuple[int, int], list[TenantSpec]] = defaultdict(list)
        for tenant, from_s, until_s in _waiting_spans(result):
            for window in range(-int(-from_s // window_s), int(until_s // window_s)):
                waiting[window, tenant.tier].append(tenant)
        self._totals: dict[tuple[int, int], float] = {}
        self._windows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._got: dict[str, float] = defaultdict(float)
        self._due: dict[str, float] = defaultdict(float)
        for where, tenants in waiting.items():
            got = [served[tenant.name].get(where[0], 0.0) for tenant in tenants]
            total = sum(got)
            if len(tenants) < 2 or not total:
                continue
            self._totals[where] = total
            for tenant, mine, part in zip(tenants, got, _parts(result, tenants), strict=True):
                self._windows[tenant.name].append(where)
                self._got[tenant.name] += mine
                self._due[tenant.name] += total * part

    def share(self, names: Iterable[str]) -> Share | None:
        """Of some tenants together, in parts of what was served while at least one of them waited; None when that was
        hardly ever."""
        mine = [name for name in names if name in self._windows]
        windows = {where for name in mine for where in self._windows[name]}
        if len(windows) < max(SHARE_WINDOWS_MIN, SHARE_WINDOWS_PART * len(self._totals)):
            return None
        whole = sum(self._totals[where] for where in windows)
        return Share(sum(self._got[name] for name in mine) / whole, sum(self._due[name] for name in mine) / whole)


def _parts(result: Result, tenants: Sequence[TenantSpec]) -> list[float]:
    """The part by weight of each of some tenants of one tier."""
    tiers = result.scenario.tiers
    groups = tiers[tenants[0].tier].groups if tenants[0].tier < len(tiers) else ()
    weights = {group.name: group.weight for group in groups}
    inside: dict[str, float] = defaultdict(float)
    for tenant in tenants:
        inside[tenant.group] += tenant.weight
    outside = sum(weights.get(group, 10.0) for group in inside)
    return [
        weights.get(tenant.group, 10.0) / outside * tenant.weight / inside[tenant.group]
        if inside[tenant.group]
        else 0.0
        for tenant in tenants
    ]


def _service_by_window(result: Result, window_s: float) -> dict[str, dict[int, float]]:
    served: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for time_s, tenant, input_tokens, output_tokens in result.service:
        # What is written down at the end of a window was computed in it.
        window = max(0, -int(-time_s // window_s) - 1)
        served[tenant][window] += _cost(input_tokens, output_tokens)
    return served


def _waiting_spans(result: Result) -> Iterable[tuple[TenantSpec, float, float]]:
    """When each tenant had something that waited: apart from each other, in order of time."""
    ends: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in result.records:
        from_s = record.arrival.time_s
        until_s = record.first_token_s if record.first_token_s is not None else record.ended_s
        if until_s is None:
            until_s = result.ended_s
        mine = ends[record.arrival.tenant]
        if mine and from_s <= mine[-1][1]:
            mine[-1] = (mine[-1][0], max(mine[-1][1], until_s))
        else:
            mine.append((from_s, until_s))
    for tenant in result.scenario.traffic.tenants:
        for from_s, until_s in ends.get(tenant.name, ()):
            yield tenant, from_s, until_s


# ----------------------------------------------------------------------------------------------------
# The table


def table(results: Sequence[Result], *, tenants: int = TENANTS_SHOWN) -> str:
    """Runs side by side, then the tenants of each."""
    rows = [tenant_rows(result) for result in results]
    parts = []
    for first in range(0, len(results), SIDE_BY_SIDE_MAX):
        last = first + SIDE_BY_SIDE_MAX
        parts.append(_side_by_side(results[first:last], rows[first:last]))
    parts += [_by_tenant(result, mine, tenants) for result, mine in zip(results, rows, strict=True)]
    return "\n\n".join(parts)


def _side_by_side(results: Sequence[Result], rows: Sequence[list[Row]]) -> str:
    width = (WIDTH - LABEL) // max(len(results), 2)
    lines = [_line("", [_cut(result.scenario.name, width - 2) for result in results], width)]
    outcomes = [_outcomes(result.records) for result in results]
    lines.append(_line("requests", [f"{len(result.records):,}" for result in results], width))
    for outcome in ("ok", "refused", "left", "failed", "not ended"):
        counts = [counted.get(outcome, 0) for counted in outcomes]
        if outcome == "ok" or any(counts):
            lines.append(_line(f"  {outcome}", [f"{count:,}" for count in counts], width))
    lines.append(_line("tokens per second", [f"{throughput(result):,.0f}" for result in results], width))
    differences = [windowed_difference(result) for result in results]
    lines.append(_line("service difference, largest", [f"{largest:,.0f}" for largest, _ in differences], width))
    lines.append(_line("service difference, average", [f"{average:,.0f}" for _, average in differences], width))
    lines.append(_line("Jain's index of those that waited", [f"{jain(result):.3f}" for result in results], width))
    if any(result.bound_ratio for result in results):
        ratios = [f"{one.bound_ratio:.2f}" if one.bound_ratio else "–" for one in results]
        lines.append(_line("part of the fairness bound used", ratios, width))
    whole = [_together("all", mine) for mine in rows]
    lines.append(_waits_line("queue wait p50 / p90 / p99, s", [row.queue_s for row in whole], width))
    lines.append(_waits_line("first token p50 / p90 / p99, s", [row.first_token_s for row in whole], width))
    light = [_light_row(result, mine) for result, mine in zip(results, rows, strict=True)]
    if any(row.first_token_s for row in light):
        lines.append(_waits_line("  of tenants that ask for little", [row.first_token_s for row in light], width))
    return "\n".join(lines)


def _light_row(result: Result, rows: Sequence[Row]) -> Row:
    light = set(light_tenants(result))
    return _together("light", [row for row in rows if row.name in light])


def _outcomes(records: Iterable[Record]) -> dict[str, int]:
    counted: dict[str, int] = defaultdict(int)
    for record in records:
        counted[record.outcome or "not ended"] += 1
    return counted


def _waits_line(label: str, waits: Sequence[Sequence[float]], width: int) -> str:
    return _line(label, [" / ".join(map(seconds, quantiles(wait))) if wait else "–" for wait in waits], width)


def _line(label: str, cells: Sequence[str], width: int) -> str:
    return (label.ljust(LABEL) + "".join(cell.rjust(width) for cell in cells)).rstrip()


_HEADS = ("weight", "requests", "share", "due", "wait p50", "p90", "p99", "TTFT p50", "p90", "p99")
_WIDTHS = (8, 10, 8, 8, 10, 8, 8, 10, 8, 8)


def _by_tenant(result: Result, rows: Sequence[Row], shown: int) -> str:
    """The tenants that ask for most, and the rest in one row."""
    listed = list(rows[:shown])
    rest = rows[shown:]
    if len(rest) == 1:
        listed.append(rest[0])
    elif rest:
        share = Contended(result).share([row.name for row in rest])
        listed.append(_together(f"{len(rest)} others", rest, share))
    name_width = WIDTH - sum(_WIDTHS)
    head = "".join(head.rjust(width) for head, width in zip(_HEADS, _WIDTHS, strict=True))
    lines = [result.scenario.name, "  tenant".ljust(name_width) + head]
    for row in listed:
        cells = [
            "" if row.weight is None else f"{row.weight:g}",
            f"{row.requests:,}",
            f"{row.share.got:.1%}" if row.share else "–",
            f"{row.share.due:.1%}" if row.share else "–",
            *_three(row.queue_s),
            *_three(row.first_token_s),
        ]
        line = "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
        lines.append(("  " + _cut(row.name, name_width - 3)).ljust(name_width) + line)
    return "\n".join(lines)


def _three(waits: Sequence[float]) -> list[str]:
    return list(map(seconds, quantiles(waits))) if waits else ["–"] * 3


def seconds(value: float) -> str:
    """Three figures, as far as they mean something."""
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"


# ----------------------------------------------------------------------------------------------------
# Comparisons in a line


def comparison(base: Result, other: Result, tenants: Sequence[str] = ()) -> str:
    """What changes from one run to another, for some tenants together, or for all.

    1. Tenants were named: their share while they waited, and their time to first token.
    2. None were: the time to first token of all, and of those that ask for little.
    """
    change = [f"tokens per second {_change(base, other, throughput, lambda value: f'{value:,.0f}')}"]
    if tenants:  # (1)
        mine = [
            _together("", [row for row in tenant_rows(one) if row.name in tenants], Contended(one).share(tenants))
            for one in (base, other)
        ]
        named = tenants[0] if len(tenants) == 1 else f"{len(tenants)} tenants"
        before, after = mine[0].share, mine[1].share
        if before and after:
            change.insert(0, f"share of {named} {after.got:.0%} (was {before.got:.0%})")
        change.insert(-1, f"p90 TTFT of {named} {_p90(mine[1])} (was {_p90(mine[0])})")
    else:  # (2)
        pairs = [(one, tenant_rows(one)) for one in (base, other)]
        whole = [_together("", rows) for _, rows in pairs]
        light = [_light_row(one, rows) for one, rows in pairs]
        change.insert(0, f"p90 TTFT {_p90(whole[1])} (was {_p90(whole[0])})")
        if light[0].first_token_s and light[1].first_token_s:
            change.insert(1, f"of tenants that ask for little {_p90(light[1])} (was {_p90(light[0])})")
    ok = [_outcomes(one.records).get("ok", 0) for one in (base, other)]
    if ok[0] != ok[1]:
        change.append(f"answered {ok[1]:,} (was {ok[0]:,})")
    return f"{other.scenario.name}: {', '.join(change)}"


def _p90(row: Row) -> str:
    return f"{seconds(quantiles(row.first_token_s).p90)} s" if row.first_token_s else "–"


def _change(
    base: Result, other: Result, figure: Callable[[Result], float], shown: Callable[[float], str]
) -> str:
    return f"{shown(figure(other))} (was {shown(figure(base))})"


# ----------------------------------------------------------------------------------------------------
# The picture

# Okabe and Ito: told apart by those who see red and green as one, too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73")
_REST = "#9A9A9A"
_INK = "#333333"


def plot(results: Sequence[Result], path: str | Path) -> None:
    """A PNG: for each run, service per weight, waits, and learned limits over time; runs side by side."""
    pyplot = _pyplot()
    with_limits = any(result.limits for result in results)
    heights = [3.0, 3.0, 1.6] if with_limits else [3.0, 3.0]
    with pyplot.rc_context(_STYLE):
        figure, grid = pyplot.subplots(
            len(heights),
            len(results),
            figsize=(max(7.5, 5.6 * len(results)), 1.6 + sum(heights)),
            height_ratios=heights,
            sharex=True,
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        until_s = max(1.0, *(result.ended_s for result in results))
        window_s = _nice(until_s / WINDOWS_DRAWN)
        ends = []
        light = set(light_tenants(results[0]))
        rows = tenant_rows(results[0])
        drawn = [row.name for row in rows if row.name not in light][:TENANTS_DRAWN] or [rows[0].name]
        for column, result in enumerate(results):
            panels = [grid[line][column] for line in range(len(heights))]
            first = column == 0
            _draw_service(panels[0], result, drawn, window_s, first)
            # Above the caption of the first panel.
            name = {"xycoords": "axes fraction", "textcoords": "offset points", "fontweight": "bold"}
            panels[0].annotate(result.scenario.name, (0, 1), (0, 28), fontsize=13, **name)
            ends.append((panels[1], _draw_waits(panels[1], result, drawn, window_s, first)))
            if with_limits:
                _draw_limits(panels[2], result, until_s, first)
            panels[-1].set_xlabel("seconds")
            panels[-1].set_xlim(0, until_s)
        # The axes of a row are one: labels can be placed when all of it is drawn.
        for axes, lines in ends:
            _label_ends(axes, lines)
        try:
            figure.savefig(path, format="png", dpi=130)
        except OSError as error:
            raise NoPlot(f"{path} cannot be written ({error.strerror}); choose another file") from None
        finally:
            pyplot.close(figure)


def _pyplot() -> Any:
    """Looked up by name, so that types are checked alike with matplotlib and without."""
    try:
        import_module("matplotlib").use("Agg")
    except ImportError:
        raise NoPlot("matplotlib is not there; install evenflow[sim] for the plot") from None
    return import_module("matplotlib.pyplot")


_STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#BBBBBB",
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#EDEDED",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def _draw_service(axes: Any, result: Result, drawn: Sequence[str], window_s: float, first: bool) -> None:
    _caption(axes, "Service per weight: fair is when all who wait are level", first)
    served = _service_by_window(result, window_s)
    windows = range(int(result.ended_s // window_s) + 1)
    for tenant in sorted(result.scenario.traffic.tenants, key=lambda one: one.name in drawn):
        if not tenant.weight or tenant.name not in served:
            continue
        mine = served[tenant.name]
        rates = _smooth([mine.get(window, 0.0) / window_s / tenant.weight for window in windows])
        times = [(window + 0.5) * window_s for window in windows]
        axes.plot(times, rates, **_look(tenant.name, drawn))
    axes.set_ylim(bottom=0)
    if first:
        axes.set_ylabel("cost per second and weight")


# Where a line ends, its name and its colour.
_End = tuple[float, float, str, str]


def _draw_waits(
    axes: Any, result: Result, drawn: Sequence[str], window_s: float, first: bool
) -> list[_End]:
    _caption(axes, "Time to first token, p90 by time of arrival", first)
    waits: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    light = set(light_tenants(result))
    for record in result.records:
        if record.first_token_s is None:
            continue
        arrival = record.arrival
        name = arrival.tenant if arrival.tenant in drawn else _OTHERS if arrival.tenant in light else ""
        waits[name][int(arrival.time_s // window_s)].append(record.first_token_s - arrival.time_s)
    waits.pop("", None)
    ends = []
    for name in sorted(waits, key=lambda one: one in drawn):
        windows = sorted(waits[name])
        times = [(window + 0.5) * window_s for window in windows]
        values = [max(1e-3, quantiles(waits[name][window]).p90) for window in windows]
        look = _look(name, drawn)
        if name == _OTHERS:
            look |= {"color": "#000000", "linewidth": 2.2, "alpha": 1.0, "linestyle": (0, (1, 1))}
        axes.plot(times, values, **look)
        ends.append((times[-1], values[-1], name, look["color"]))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    if first:
        axes.set_ylabel("seconds")
    return ends


# Of the height of the axes.
LABEL_HEIGHT = 0.07
_OTHERS = "light tenants"


def _draw_limits(axes: Any, result: Result, until_s: float, first: bool) -> None:
    _caption(axes, "Requests the gateway lets run on each engine, as it learns", first)
    engines = sorted({engine for _, engine, _ in result.limits})
    for engine in engines:
        changes = [(time_s, limit) for time_s, one, limit in result.limits if one == engine]
        times = [time_s for time_s, _ in changes] + [result.ended_s]
        limits = [limit for _, limit in changes] + [changes[-1][1]]
        axes.step(times, limits, where="post", color=_INK, linewidth=1.2, alpha=0.3 + 0.7 / len(engines))
    if not engines:
        slots = result.scenario.slots
        text = "no limit" if slots is None else f"{slots}, always"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#888888")
    axes.set_ylim(bottom=0)
    if first:
        axes.set_ylabel("requests")


def _caption(axes: Any, text: str, first: bool) -> None:
    """Said once, at the left; the others are read along with it."""
    if first:
        axes.set_title(text, fontsize=10.5)


def _look(name: str, drawn: Sequence[str]) -> dict[str, Any]:
    if name in drawn:
        return {"color": _COLOURS[drawn.index(name)], "zorder": 3}
    return {"color": _REST, "linewidth": 0.8, "alpha": 0.55, "zorder": 2}


def _label_ends(axes: Any, ends: Sequence[_End]) -> None:
    """Names lines where they end, on a log axis, pushed down where they would overlap."""
    low, high = (log10(bound) for bound in axes.get_ylim())
    place = 1.0 + LABEL_HEIGHT
    last = max((x for x, _, _, _ in ends), default=0.0)
    for _, y, name, colour in sorted(ends, key=lambda end: -end[1]):
        place = min(place - LABEL_HEIGHT, (log10(y) - low) / (high - low))
        axes.annotate(
            name,
            (last, place),
            (6, 0),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
        )


def _smooth(values: Sequence[float]) -> list[float]:
    """Each with its neighbours, so that batches do not look like waves."""
    sums = [0.0, *accumulate(values)]
    last = len(values)
    spans = [(max(0, index - 1), min(last, index + 2)) for index in range(last)]
    return [(sums[until] - sums[begin]) / (until - begin) for begin, until in spans]


def _nice(value: float) -> float:
    """The next of 1, 2, 5, 10 and so on."""
    if value <= 1.0:
        return 1.0
    power: float = 10.0 ** floor(log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value)

"""From figures to a table that a person reads and a JSON file that a program reads. Never measures."""

import dataclasses
import os
import pathlib
import platform
import statistics
from collections.abc import Sequence
from typing import Any

from budgets import Check, Rounds, check
from peers import Peer
from phases import LEAVE_PATIENCE_S, Figures

# Heading, figure(s) shown in the cell, digits behind the point.
COLUMNS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("requests/s", ("requests_per_second",), 0),
    ("CPU µs per request", ("cpu_us_per_request",), 1),
    ("added p50 µs", ("added_p50_us",), 0),
    ("added p99 µs", ("added_p99_us",), 0),
    ("at requests/s", ("rate",), 0),
    ("CPU µs per chunk", ("cpu_us_per_chunk",), 1),
    ("RSS MB idle → open streams", ("idle_mb", "open_streams_mb"), 0),
    ("KB per stream", ("kb_per_stream",), 1),
)
BEHAVIOURS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("memory growth, client never reads, MB", ("slow_reader_growth_mb",), 1),
    (
        "client leaves before first token → worker's connection closed, ms",
        ("leave_before_first_token_ms",),
        1,
    ),
    ("client leaves mid-stream, ms", ("leave_mid_stream_ms",), 1),
)
EXPLANATION = """\
Each gateway alone on one core, the same mock engine (four workers) and load generator on the other(s);
prompts of 800 bytes. Medians over the rounds, in brackets the least and the greatest. Latency is what the
gateway adds to the mock engine asked directly in the same run. Chunks: 200 streams of one chunk each 20 ms.
Open streams: 2,000, one chunk a second each, measured once. A client leaves: the slowest of five."""
WITHOUT_SPREAD = {"rate", "idle_mb", "open_streams_mb"}


@dataclasses.dataclass(slots=True)
class Row:
    """What is known of one gateway at the end of the run."""

    peer: Peer
    version: str = "unknown"
    # Measured once; None: it did not start.
    behaviour: Figures | None = None
    rounds: list[Figures] = dataclasses.field(default_factory=list)
    # Why it has no figures, or why some are missing.
    remarks: list[str] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def measured(self) -> bool:
        return bool(self.behaviour) or any(self.rounds)

    def values(self, figure: str) -> list[float]:
        return [figures[figure] for figures in (self.behaviour or {}, *self.rounds) if figure in figures]

    @property
    def figures(self) -> list[str]:
        return sorted({name for figures in (self.behaviour or {}, *self.rounds) for name in figures})

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)


def machine() -> dict[str, Any]:
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        "unknown",
    )
    memory_kb = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    release = (line.partition("=") for line in _lines("/etc/os-release"))
    system = next((value.strip('"') for name, _, value in release if name == "PRETTY_NAME"), "unknown")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(memory_kb / 1024 / 1024, 1),
        "system": system,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def _lines(path: str) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []


def to_json(rows: Sequence[Row], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **facts,
        "gateways": {
            row.name: {
                "version": row.version,
                "about": row.peer.about,
                "remarks": row.remarks,
                "median": {figure: _median(row, figure) for figure in row.figures},
                "behaviour": row.behaviour,
                "rounds": row.rounds,
            }
            for row in rows
        },
        "checks": {
            subject: [
                {
                    "name": c.budget.name,
                    "limit": c.limit,
                    "value": c.value,
                    "unit": c.budget.unit,
                    "verdict": c.verdict,
                }
                for c in checks
            ]
            for subject, checks in _all_checks(rows).items()
        },
    }


def to_markdown(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    host = facts["machine"]
    lines = [
        "# Overhead of gateways",
        "",
        f"{facts['date']}, `{facts['command']}`, {facts['rounds']} rounds in alternation, "
        f"{facts['seconds']:g} s each measurement.",
        f"{host['cpu']}, {host['cores']} cores, {host['memory_gb']} GB, {host['system']}, "
        f"kernel {host['kernel']}, Python {host['python']}; load average at the start "
        f"{host['load_average_at_start']}.",
        *EXPLANATION.splitlines(),
        "",
        *_table(rows, COLUMNS),
        "",
        *_table(rows, BEHAVIOURS, only_with=True),
        "",
        "Versions: " + ", ".join(f"{row.name} {row.version}" for row in rows if row.measured) + ".",
        *_remarks(rows),
    ]
    for subject, checks in _all_checks(rows).items():
        lines += ["", f"## Budgets of {subject}", "", *_check_table(checks)]
    return "\n".join(lines) + "\n"


def _table(
    rows: Sequence[Row], columns: Sequence[tuple[str, tuple[str, ...], int]], *, only_with: bool = False
) -> list[str]:
    lines = [
        "| gateway | " + " | ".join(heading for heading, _, _ in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in rows:
        if row.measured and (not only_with or any(row.values(figure) for _, names, _ in columns for figure in names)):
            cells = [_cell(row, names, digits) for _, names, digits in columns]
        elif not row.measured and not only_with:
            cells = [f"not measured: {'; '.join(row.remarks)}", *[""] * (len(columns) - 1)]
        else:
            continue
        lines.append(f"| **{row.name}** ({row.peer.about}) | " + " | ".join(cells) + " |")
    return lines


def _cell(row: Row, figures: Sequence[str], digits: int) -> str:
    parts = []
    for figure in figures:
        values = row.values(figure)
        if not values:
            return "–"
        text = _number(statistics.median(values), digits)
        if figure.startswith("leave_") and max(values) >= LEAVE_PATIENCE_S * 1000:
            text = f"> {_number(LEAVE_PATIENCE_S * 1000, 0)}"
        elif figure not in WITHOUT_SPREAD and len(values) > 1:
            text += f" ({_number(min(values), digits)}–{_number(max(values), digits)})"
        parts.append(text)
    return " → ".join(parts)


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def _median(row: Row, figure: str) -> float:
    return round(statistics.median(row.values(figure)), 3)


def _remarks(rows: Sequence[Row]) -> list[str]:
    remarks = [f"- {row.name}: {remark}" for row in rows if row.measured for remark in row.remarks]
    for row in rows:
        if row.measured and (row.peer.paced_streams, row.peer.open_streams) != (200, 2000):
            counts = f"{row.peer.paced_streams} paced and {row.peer.open_streams:,} open streams"
            remarks.append(f"- {row.name}: measured with {counts}, all it carries.")
    return ["", *remarks] if remarks else []


def _all_checks(rows: Sequence[Row]) -> dict[str, list[Check]]:
    rounds: Rounds = {row.name: [row.behaviour or {}, *row.rounds] for row in rows}
    return {row.name: check(rounds, row.name) for row in rows if row.name.startswith("evenflow") and row.measured}


def _check_table(checks: Sequence[Check]) -> list[str]:
    lines = ["| budget | limit | figure | | nginx, the floor of this machine |", "|---|---|---|---|---|"]
    for check_ in checks:
        unit = check_.budget.unit
        value = "–" if check_.value is None else f"{check_.value:.2f} {unit}"
        floor = "" if check_.floor is None else f"{check_.floor:.2f} {unit}"
        lines.append(f"| {check_.budget.name} | {check_.limit} | {value} | {check_.verdict} | {floor} |")
    return lines

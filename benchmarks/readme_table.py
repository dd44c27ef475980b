"""Fills the table of README.md from the newest full run in benchmarks/results.

    .venv/bin/python benchmarks/readme_table.py [--check]

`--check` changes nothing and fails when the table is not that of the newest run.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def table(run: dict[str, object]) -> str:
    gateways, machine = run["gateways"], run["machine"]
    assert isinstance(gateways, dict)
    assert isinstance(machine, dict)
    lines = [
        "| gateway | requests/s, one core | CPU µs per request | CPU µs per streamed chunk | KB per open stream |",
        "|---|---|---|---|---|",
    ]
    for name, row in gateways.items():
        median = row.get("median") or {}
        cells = (
            f"{median[key]:{form}}" if key in median else "–"
            for key, form in (
                ("requests_per_second", ",.0f"),
                ("cpu_us_per_request", ",.1f"),
                ("cpu_us_per_chunk", ",.1f"),
                ("kb_per_stream", ",.1f"),
            )
        )
        shown = f"**{name}**" if name.startswith("evenflow") else name
        lines.append(f"| {shown} ({row['about']}) | {' | '.join(cells)} |")
    checks = run["checks"]
    assert isinstance(checks, dict)
    missed = [check for check in checks.get("evenflow", []) if check["verdict"] == "NOT MET"]
    lines.append(
        f"\n{run['date']}, {machine['cpu']}, {machine['cores']} cores, kernel {machine['kernel']}, Python "
        f"{machine['python']}; `{run['command']}`, medians of {run['rounds']} rounds in alternation."
    )
    if missed:
        text = "; ".join(f"{one['name']} {one['limit']} was {one['value']:,.1f} {one['unit']}" for one in missed)
        lines.append(f"Budgets of ours that this run missed: {text}.")
    return "\n".join(lines)


def main() -> int:
    newest = max((ROOT / "benchmarks" / "results").glob("overhead-*.json"))
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    filled = f"{before}{BEGIN}\n{table(json.loads(newest.read_text()))}\n{END}{after}"
    if "--check" in sys.argv:
        return 0 if filled == text else 1
    readme.write_text(filled)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A flood by one key and a trickle by another, through the real gateway to two real engines: who waits how long?

    .venv/bin/python benchmarks/flood.py               each setting for 20 s, some four minutes in all
    .venv/bin/python benchmarks/flood.py --seconds 8   quicker, and noisier

Two embedded engines of four slots each. The flood: 24 callers of one key that ask again and again. The trickle: one
caller of another key of equal weight, that asks for one short answer a second. The same is measured with both in one
queue (they share a key), which is what a gateway without fair queueing does; with a key each and fixed slots from few
to many; and with learned slots. Written to results/flood-DATE.md and .json.
"""

import argparse
import contextlib
import json
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path

from evenflow.demo import choose_port, end_process, events, post, start_gateway, wait_for_gateway
from evenflow.fleet.engines.embedded import ALIAS_DEFAULT, EngineProcess

RESULTS = Path(__file__).parent / "results"
ENGINES, SLOTS = 2, 4
FLOOD_CALLERS = 24
FLOOD_TOKENS, TRICKLE_TOKENS = 48, 8
TRICKLE_EVERY_S = 1.0
WARM_UP_S = 8.0
# Learned slots may be so much worse than the best fixed ones.
WITHIN = 0.20


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    slots: int | str
    # Both callers use the same key, so that there is one queue.
    one_queue: bool = False


SETTINGS = (
    Setting("one queue, 64 slots", 64, one_queue=True),
    Setting("one queue, 4 slots", 4, one_queue=True),
    *(Setting(f"fair, {slots} slots", slots) for slots in (1, 2, 4, 8, 16, 64)),
    Setting("fair, learned slots", "auto"),
)


@dataclass(slots=True)
class Seen:
    """What callers saw after the warm-up."""

    first_token_s: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    setting: Setting
    tokens_per_s: float
    flood_p50_s: float
    trickle_p50_s: float
    trickle_p95_s: float
    failed: int
    # Slots at the end, of each worker.
    slots: list[int]


class Callers:
    """All callers of one run; they stop when the time is over."""

    def __init__(self, port: int, setting: Setting, seconds: float) -> None:
        self._port = port
        self._setting = setting
        self._from_s = time.monotonic() + WARM_UP_S
        self._until_s = self._from_s + seconds
        self._lock = threading.Lock()
        self.seen = {"flood": Seen(), "trickle": Seen()}

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._keep_asking, args=("flood", FLOOD_TOKENS, 0.0), daemon=True)
            for _ in range(FLOOD_CALLERS)
        ]
        threads.append(
            threading.Thread(
                target=self._keep_asking, args=("trickle", TRICKLE_TOKENS, TRICKLE_EVERY_S), daemon=True
            )
        )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._until_s - time.monotonic()) + 60.0)

    def _keep_asking(self, who: str, tokens: int, every_s: float) -> None:
        while (began_s := time.monotonic()) < self._until_s:
            try:
                self._ask(who, tokens)
            except (OSError, HTTPException, ValueError, RuntimeError):
                self.seen[who].failed += 1
            time.sleep(max(0.0, began_s + every_s - time.monotonic()))

    def _ask(self, who: str, tokens: int) -> None:
        key = "sk-flood" if who == "flood" or self._setting.one_queue else "sk-trickle"
        body = {
            "model": ALIAS_DEFAULT,
            "prompt": f"{who} {time.monotonic()}: tell me about rivers.",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        began_s, first = time.monotonic(), True
        with post(self._port, "/v1/completions", key, body) as answer:
            for chunk in events(answer):
                now_s = time.monotonic()
                if not chunk.get("choices") or not self._from_s <= now_s <= self._until_s:
                    continue
                with self._lock:
                    seen = self.seen[who]
                    seen.tokens += 1
                    if first:
                        seen.first_token_s.append(now_s - began_s)
                first = False


@contextlib.contextmanager
def gateway(setting: Setting, urls: list[str]) -> Iterator[int]:
    workers = "\n".join(f'  - {{name: engine-{n}, url: "{url}", slots: {setting.slots}}}' for n, url in enumerate(urls))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenflow-flood-")))
        port = choose_port(None)
        config, log = folder / "evenflow.yaml", folder / "gateway.log"
        config.write_text(
            f"listen: {{port: {port}, drain_s: 1}}\nworkers:\n{workers}\nlog: {{access: 'off'}}\n"
            "tenants:\n  - {name: flood, keys: [sk-flood]}\n  - {name: trickle, keys: [sk-trickle]}\n"
        )
        process = start_gateway(config, log)
        stack.callback(end_process, process, 5.0)
        wait_for_gateway(process, port, log)
        yield port


def measure(setting: Setting, urls: list[str], seconds: float) -> Row:
    with gateway(setting, urls) as port:
        callers = Callers(port, setting, seconds)
        callers.run()
        slots = slots_now(port)
    flood, trickle = callers.seen["flood"], callers.seen["trickle"]
    return Row(
        setting,
        (flood.tokens + trickle.tokens) / seconds,
        quantile(flood.first_token_s, 0.5),
        quantile(trickle.first_token_s, 0.5),
        quantile(trickle.first_token_s, 0.95),
        flood.failed + trickle.failed,
        slots,
    )


def slots_now(port: int) -> list[int]:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/list_workers", timeout=5) as answer:
        return [worker["slots"] for worker in json.load(answer)["workers"]]


def quantile(values: list[float], part: float) -> float:
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def table(rows: list[Row]) -> str:
    lines = [
        "| setting | slots at the end | tokens/s | flood TTFT p50 | trickle TTFT p50 | trickle TTFT p95 | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.setting.name} | {', '.join(map(str, row.slots))} | {row.tokens_per_s:.0f} | {row.flood_p50_s:.2f} s | "
        f"{row.trickle_p50_s:.2f} s | {row.trickle_p95_s:.2f} s | {row.failed} |"
        for row in rows
    ]
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """How learned slots compare with the best fixed ones, in throughput and in the trickle's wait."""
    fixed = [row for row in rows if not row.setting.one_queue and row.setting.slots != "auto"]
    learned = next((row for row in rows if row.setting.slots == "auto"), None)
    if not fixed or learned is None:
        return ""
    # The best: the shortest wait of the trickle among those that keep the engines busy.
    busiest = max(row.tokens_per_s for row in fixed)
    busy = [row for row in fixed if row.tokens_per_s >= busiest * (1 - WITHIN / 2)]
    best = min(busy, key=lambda row: row.trickle_p50_s)
    return (
        f"Learned slots: {learned.tokens_per_s / busiest:.0%} of the most tokens a second of any fixed setting, and a "
        f"trickle TTFT of {learned.trickle_p50_s:.2f} s against {best.trickle_p50_s:.2f} s with {best.setting.name}, "
        "the best of those that keep the engines busy."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each setting, after its warm-up (20)")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    args = parser.parse_args()
    engines = [EngineProcess("--instances", str(ENGINES), "--slots", str(SLOTS)) for _ in range(ENGINES)]
    rows: list[Row] = []
    try:
        for engine in engines:
            engine.wait_ready()
        urls = [engine.url for engine in engines]
        for setting in SETTINGS:
            if args.only in setting.name:
                rows.append(measure(setting, urls, args.seconds))
                print(table(rows).splitlines()[-1], flush=True)
    finally:
        for engine in engines:
            engine.stop()
    about = (
        f"{ENGINES} engines of {SLOTS} slots, {FLOOD_CALLERS} callers that flood with {FLOOD_TOKENS} tokens each, one "
        f"that asks for {TRICKLE_TOKENS} a second; {args.seconds:g} s each; Python {platform.python_version()}."
    )
    today = time.strftime("%Y-%m-%d")
    text = f"# A flood and a trickle, {today}\n\n{about}\n\n{table(rows)}\n\n{verdict(rows)}\n"
    print(text)
    if not args.only:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"flood-{today}.md").write_text(text)
        data = json.dumps([asdict(row) for row in rows], indent=1)
        (RESULTS / f"flood-{today}.json").write_text(data + "\n")


if __name__ == "__main__":
    main()

"""Traffic: reads traces of four formats, makes traffic up from a seed, and stretches, repeats or cuts either.

    azure     CSV: TIMESTAMP,ContextTokens,GeneratedTokens
    mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids (optional)
    tenants   CSV: arrival_s,tenant,input_tokens,output_tokens, and if wanted max_tokens, leaves_after_s

What a trace holds is told from its first line, never from its name. Columns may stand in any order, and those that
are not known are passed over. Time begins with the first request. A trace that cannot be replayed as it stands is
refused with the line and the field that are wrong, never repaired. Equal arguments give equal traffic.
"""

import csv
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heapify, heapreplace
from itertools import accumulate
from math import exp, inf, isfinite, lgamma
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

from evenflow.sim.model import Arrival, TenantSpec, Traffic

# Skew of the tenants that are given to traces without any, and of traffic that is made up.
ZIPF = 1.2
# More tokens in one prompt or answer are a mistake of the file.
TOKENS_MAX = 100_000_000
# More tenants are a mistake of the command.
TENANTS_MAX = 1_000_000
# The burstiest arrivals that can be asked for: the clients of ServeGen reach 211.
BURST_CV_MAX = 250.0
# Bytes of a file that are looked at to tell text from something else.
_LOOK_BYTES = 8192


class TraceError(ValueError):
    """A trace that cannot be replayed: `file:line: field: what is wrong; what to do`."""


class TrafficError(ValueError):
    """Traffic that cannot be made as it was asked for: `argument: what is wrong; what to do`."""


# ----------------------------------------------------------------------------------------------------
# Reading traces


def read_trace(path: str | Path, *, tenants: int = 10, seed: int = 0) -> Traffic:
    """The traffic of a file. A trace that names no tenants gets `tenants` of them, with a Zipf skew; requests that
    share the first block of their own (`hash_ids[1]`) have the same one.

    1. Not a file of text: refused.
    2. The first line begins with a brace: JSON lines.
    3. Else its columns are looked for.
    """
    path = Path(path)
    _require("tenants", tenants, 1, TENANTS_MAX)
    _require_text(path)  # (1)
    place = _Place(str(path))
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            head = next((line for line in file if line.strip()), "")
            file.seek(0)
            if head.lstrip().startswith("{"):  # (2)
                arrivals = _sorted(_mooncake(file, place, _Assigned(tenants, seed)), place)
            else:  # (3)
                arrivals = _sorted(_csv(file, place, _Assigned(tenants, seed)), place)
        except UnicodeDecodeError:
            place.line = _undecodable(path)
            raise place.error("text", "is not UTF-8", "save the file as UTF-8 text") from None
    return _traffic(path.stem, arrivals)


def _require_text(path: Path) -> None:
    place = _Place(str(path))
    try:
        with path.open("rb") as file:
            look = file.read(_LOOK_BYTES)
    except FileNotFoundError:
        raise place.error("file", "does not exist", "check the path") from None
    except IsADirectoryError:
        raise place.error("file", "is a directory", "name one trace in it") from None
    except OSError as error:
        raise place.error("file", f"cannot be read ({error.strerror})", "check its permissions") from None
    except ValueError:  # A path with a NUL in it.
        raise place.error("file", "is no path", "check the path") from None
    if b"\0" in look:
        raise place.error("file", "is binary", "unpack it, or convert it to CSV or JSON lines")
    if not look.strip():
        raise place.error("file", "is empty", "name a trace with at least one request")


def _undecodable(path: Path) -> int:
    """The number of the first line that is not UTF-8; decoding is done in blocks, so it is looked for."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if "\ufffd" in line.decode("utf-8", "replace") and "\ufffd".encode() not in line:
                return number
    return 1


@dataclass(slots=True)
class _Place:
    """Where reading has come to; makes errors that name it."""

    path: str
    line: int = 1

    def error(self, field: str, wrong: str, advice: str) -> TraceError:
        return TraceError(f"{self.path}:{self.line}: {field}: {wrong}; {advice}")


class _Assigned:
    """Gives tenants to requests that have none: Zipf, and the same one to all of a chain."""

    __slots__ = ("_chains", "_names", "_random", "_sums")

    def __init__(self, tenants: int, seed: int) -> None:
        self._sums = list(accumulate(zipf(tenants, ZIPF)))
        self._names = _names("tenant", tenants)
        self._random = Random(f"tenants of a trace/{seed}")
        self._chains: dict[int, str] = {}

    def tenant(self, prefix: Sequence[int] = ()) -> str:
        drawn = self._random.random() * self._sums[-1]
        name = self._names[min(bisect_left(self._sums, drawn), len(self._names) - 1)]
        return self._chains.setdefault(prefix[1], name) if len(prefix) > 1 else name


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TENANTS = ("arrival_s", "tenant", "input_tokens", "output_tokens")


def _csv(lines: Iterator[str], place: _Place, assigned: _Assigned) -> Iterator[Arrival]:
    rows = _rows(lines, place)
    header = [name.strip() for name in next(rows, [])]
    wanted = max((_AZURE, _TENANTS), key=lambda columns: len(set(columns) & set(header)))
    missing = [name for name in wanted if name not in header]
    if missing:
        known = f"{','.join(_TENANTS)} or {','.join(_AZURE)} or JSON lines"
        raise place.error("header", f"has no column {', '.join(missing)}", f"a trace has {known}")
    index = {name: header.index(name) for name in header}
    return (_azure if wanted is _AZURE else _tenants)(rows, index, place, assigned)


def _rows(lines: Iterator[str], place: _Place) -> Iterator[list[str]]:
    """Rows that are not blank; `place` follows them."""
    reader = csv.reader(lines, strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            place.line = max(1, reader.line_num)
            raise place.error("row", f"is not CSV ({error})", "check its quotes") from None
        if row is None:
            return
        place.line = reader.line_num
        if row:
            yield row


def _tenants(
    rows: Iterator[list[str]], index: dict[str, int], place: _Place, assigned: _Assigned
) -> Iterator[Arrival]:
    time, tenant, given, answered = (index[name] for name in _TENANTS)
    most, leaves = index.get("max_tokens", -1), index.get("leaves_after_s", -1)
    names: dict[str, str] = {}
    for row in rows:
        _require_fields(row, index, place)
        name = row[tenant].strip()
        if not name:
            raise place.error("tenant", "is empty", "name the tenant of each request")
        yield Arrival(
            _time(row[time], "arrival_s", place),
            names.setdefault(name, name),
            _length(row[given], "input_tokens", place),
            _length(row[answered], "output_tokens", place),
            (),
            _length(row[most], "max_tokens", place) if most >= 0 and row[most].strip() else None,
            _time(row[leaves], "leaves_after_s", place) if leaves >= 0 and row[leaves].strip() else None,
        )


def _azure(
    rows: Iterator[list[str]], index: dict[str, int], place: _Place, assigned: _Assigned
) -> Iterator[Arrival]:
    time, given, answered = (index[name] for name in _AZURE)
    first: datetime | None = None
    for row in rows:
        _require_fields(row, index, place)
        at = _timestamp(row[time], place)
        first = first or at
        yield Arrival(
            (at - first).total_seconds(),
            assigned.tenant(),
            _length(row[given], "ContextTokens", place),
            _length(row[answered], "GeneratedTokens", place),
        )


def _mooncake(lines: Iterator[str], place: _Place, assigned: _Assigned) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        place.line = number
        if not line.strip():
            continue
        row = _object(line, place)
        prefix = _blocks(row.get("hash_ids"), place)
        yield Arrival(
            _time(_field(row, "timestamp", place), "timestamp", place) / 1e3,
            assigned.tenant(prefix),
            _length(_field(row, "input_length", place), "input_length", place),
            _length(_field(row, "output_length", place), "output_length", place),
            prefix,
        )


def _object(line: str, place: _Place) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        wrong = f"is not JSON ({error.msg} at column {error.colno})"
        raise place.error("row", wrong, "each line is one JSON object") from None
    except (ValueError, RecursionError):
        raise place.error("row", "is not JSON of a sane size", "each line is one JSON object") from None
    if not isinstance(row, dict):
        raise place.error("row", "is not an object", "each line is one JSON object")
    return row


def _field(row: dict[str, Any], name: str, place: _Place) -> str:
    """A number as text, so that CSV and JSON are checked by the same rules."""
    if name not in row:
        raise place.error(name, "is missing", "each line has timestamp, input_length, output_length")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise place.error(name, f"is {_shown(json.dumps(value))}, no number", "give a number")
    return repr(value)


def _blocks(value: object, place: _Place) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(block) is int for block in value):
        raise place.error("hash_ids", "is not a list of whole numbers", "give one for each block, or leave it out")
    return tuple(value)


def _require_fields(row: list[str], index: dict[str, int], place: _Place) -> None:
    if len(row) < len(index):
        wrong = f"has {len(row)} fields of {len(index)}"
        raise place.error("row", wrong, "complete it, or remove it if the file was cut")


def _length(text: str, field: str, place: _Place) -> int:
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        value = int(text)
        if value <= TOKENS_MAX:
            return value
    number = _number(text, field, place, "give a whole number of tokens")
    if number > TOKENS_MAX:
        raise place.error(field, f"{_shown(text)} is above {TOKENS_MAX:,}", "check the unit: tokens are meant")
    if not number.is_integer():
        raise place.error(field, f"{_shown(text)} is a fraction", "give a whole number of tokens")
    return int(number)


def _time(text: str, field: str, place: _Place) -> float:
    return _number(text.strip(), field, place, "give the time since the start of the trace")


def _number(text: str, field: str, place: _Place, advice: str) -> float:
    """A finite number that is not negative."""
    try:
        number = float(text) if "_" not in text else None
    except ValueError:
        number = None
    if number is None:
        wrong = f"{_shown(text)} is no number" if text else "is empty"
        raise place.error(field, wrong, advice)
    if not isfinite(number):
        raise place.error(field, f"{_shown(text)} is not finite", advice)
    if number < 0.0:
        raise place.error(field, f"{_shown(text)} is below 0", advice)
    return number


def _timestamp(text: str, place: _Place) -> datetime:
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise place.error(
            "TIMESTAMP", f"{_shown(text)} is no time", "write it as 2023-11-16 18:17:03.9799600"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _shown(text: str) -> str:
    """What a file holds, short enough for an error."""
    text = text.strip()
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _sorted(arrivals: Iterator[Arrival], place: _Place) -> list[Arrival]:
    """All of them, or an error at the first one that is earlier than the one before."""
    found: list[Arrival] = []
    last_s = -inf
    for arrival in arrivals:
        if arrival.time_s < last_s:
            wrong = f"is {last_s - arrival.time_s:.6g} s before the row above it"
            raise place.error("time", wrong, "sort the file by time")
        last_s = arrival.time_s
        found.append(arrival)
    if not found:
        raise place.error("file", "has no requests below its header", "name a trace with at least one request")
    return found


def _traffic(name: str, arrivals: list[Arrival]) -> Traffic:
    from_s = arrivals[0].time_s
    if from_s:
        for index, arrival in enumerate(arrivals):
            arrivals[index] = _moved(arrival, arrival.time_s - from_s, arrival.prefix)
    named = sorted({arrival.tenant for arrival in arrivals}, key=_natural)
    return Traffic(name, tuple(TenantSpec(tenant) for tenant in named), arrivals)


def _moved(arrival: Arrival, time_s: float, prefix: tuple[int, ...]) -> Arrival:
    """`dataclasses.replace` takes four times as long."""
    return Arrival(
        time_s,
        arrival.tenant,
        arrival.input_tokens,
        arrival.output_tokens,
        prefix,
        arrival.max_tokens,
        arrival.leaves_after_s,
    )


def _natural(name: str) -> tuple[str, int, str]:
    """Orders tenant-2 before tenant-10."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, int(digits) if digits.isascii() and 0 < len(digits) < 20 else -1, name


# ----------------------------------------------------------------------------------------------------
# Making traffic up


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts: half are below the median, a sixth above the median times e to the sigma."""

    median: float
    sigma: float = 0.8
    maximum: int = 32_768

    def draw(self, random: Random) -> int:
        return max(1, min(self.maximum, round(random.lognormvariate(0.0, self.sigma) * self.median)))


@dataclass(frozen=True, slots=True)
class Flood:
    """One tenant sends `factor` times as much for a while."""

    # Index of the tenant: 0 is the one that sends most anyway.
    tenant: int
    factor: float
    from_s: float = 0.0
    until_s: float = inf

    def after(self, now: float, gap_s: float) -> float:
        """When a gap that would end after `gap_s` of usual time does end."""
        if now < self.from_s:
            if now + gap_s <= self.from_s:
                return now + gap_s
            gap_s -= self.from_s - now
            now = self.from_s
        if now < self.until_s:
            if now + gap_s / self.factor <= self.until_s:
                return now + gap_s / self.factor
            gap_s -= (self.until_s - now) * self.factor
            now = self.until_s
        return now + gap_s


INPUT = Lengths(400.0, 1.0)
OUTPUT = Lengths(150.0, 0.8, 4096)


def generate(
    *,
    tenants: int = 10,
    requests: int = 1000,
    rate: float = 10.0,
    skew: float = ZIPF,
    burst: float = 1.0,
    weibull: bool = False,
    input_tokens: Lengths = INPUT,
    output_tokens: Lengths = OUTPUT,
    one_shot: int = 0,
    flood: Flood | None = None,
    seed: int = 0,
    name: str = "generated",
) -> Traffic:
    """`requests` requests of `tenants` tenants at `rate` a second in all, flood apart.

    Tenant i sends in proportion to 1 / (i + 1) ** skew. Times between its requests have the coefficient of variation
    `burst`: 1 is Poisson; above it they come in bursts, Gamma distributed (or Weibull). `one_shot` of the requests
    come from a tenant each that sends nothing else. Each tenant draws from a seed of its own, so that a flood or one
    more tenant does not change what the others send.
    """
    _require("tenants", tenants, 1, TENANTS_MAX)
    _require("requests", requests, 1, inf)
    _require("rate", rate, 1e-9, 1e9)
    _require("skew", skew, 0.0, 100.0)
    _require("burst", burst, 0.01, BURST_CV_MAX)
    _require("one_shot", one_shot, 0, requests - 1)
    if flood is not None:
        _require("flood", flood.factor, 1e-9, 1e9)
        _require("flood", flood.tenant, 0, tenants - 1)
    names = _names("tenant", tenants)
    parts = zipf(tenants, skew)
    gaps = _gaps(burst, weibull)
    senders = [
        _Sender(names[i], Random(f"{seed}/{i}"), 1.0 / (rate * parts[i]), gaps, _flood_of(flood, i))
        for i in range(tenants)
    ]
    arrivals = _merge(senders, requests - one_shot, input_tokens, output_tokens)
    once = _names("once", one_shot)
    if once:
        random = Random(f"{seed}/once")
        last_s = arrivals[-1].time_s
        for one in once:
            at_s = random.uniform(0.0, last_s)
            arrivals.append(Arrival(at_s, one, input_tokens.draw(random), output_tokens.draw(random)))
        arrivals.sort(key=attrgetter("time_s"))
    return Traffic(name, tuple(TenantSpec(one) for one in (*names, *once)), arrivals)


def zipf(count: int, skew: float) -> list[float]:
    """Parts of a whole, in proportion to 1 / rank ** skew."""
    parts: list[float] = [rank**-skew for rank in range(1, count + 1)]
    whole = sum(parts)
    # With an absurd skew the last ones would never send anything, and divide by nothing.
    return [max(part / whole, 1e-12) for part in parts]


class _Sender:
    """One tenant, and when it sends next."""

    __slots__ = ("_flood", "_gap", "_mean_s", "name", "next_s", "random")

    def __init__(
        self, name: str, random: Random, mean_s: float, gap: Callable[[Random], float], flood: Flood | None
    ) -> None:
        self.name = name
        self.random = random
        self._mean_s = mean_s
        self._gap = gap
        self._flood = flood
        # Not all bursts begin together.
        self.next_s = self._after(0.0, random.random() * mean_s)

    def step(self) -> None:
        self.next_s = self._after(self.next_s, self._gap(self.random) * self._mean_s)

    def _after(self, now: float, gap_s: float) -> float:
        return self._flood.after(now, gap_s) if self._flood else now + gap_s


def _merge(senders: list[_Sender], requests: int, given: Lengths, answered: Lengths) -> list[Arrival]:
    heap = [(sender.next_s, index, sender) for index, sender in enumerate(senders)]
    heapify(heap)
    arrivals = []
    for _ in range(requests):
        time_s, index, sender = heap[0]
        random = sender.random
        arrivals.append(Arrival(time_s, sender.name, given.draw(random), answered.draw(random)))
        sender.step()
        heapreplace(heap, (sender.next_s, index, sender))
    return arrivals


def _gaps(burst: float, weibull: bool) -> Callable[[Random], float]:
    """Draws gaps of mean 1 with this coefficient of variation."""
    if burst == 1.0:
        return lambda random: random.expovariate(1.0)
    if weibull:
        shape = weibull_shape(burst)
        scale = exp(-lgamma(1.0 + 1.0 / shape))
        return lambda random: random.weibullvariate(scale, shape)
    square = burst * burst
    return lambda random: random.gammavariate(1.0 / square, square)


def weibull_shape(burst: float) -> float:
    """The shape with this coefficient of variation, by bisection: it falls as the shape grows."""
    low, high = 0.05, 200.0
    for _ in range(100):
        middle = (low * high) ** 0.5
        square = exp(lgamma(1.0 + 2.0 / middle) - 2.0 * lgamma(1.0 + 1.0 / middle)) - 1.0
        if square > burst * burst:
            low = middle
        else:
            high = middle
    return high


def _flood_of(flood: Flood | None, tenant: int) -> Flood | None:
    return flood if flood is not None and flood.tenant == tenant else None


def _names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number}" for number in range(count)]


def _require(field: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        most = f"{lowest:g} or more" if highest == inf else f"from {lowest:g} to {highest:g}"
        raise TrafficError(f"{field}: {value:g} is out of range; give a number that is {most}")


# ----------------------------------------------------------------------------------------------------
# Stretching, repeating, cutting


def scale(
    traffic: Traffic,
    *,
    rate: float | None = None,
    speed: float | None = None,
    repeat: int | None = None,
    limit: int | None = None,
) -> Traffic:
    """The same traffic, cut to its first `limit` requests, then repeated until there are `repeat`, then `speed` times
    as fast or at `rate` requests a second on average. A repetition has prompts of its own: sharing blocks with the one
    before would flatter the prefix caches. Tenants stay, also those that then send nothing.
    """
    if rate is not None and speed is not None:
        raise TrafficError("rate: cannot be given together with a speed; give one of them")
    for field, value in (("rate", rate), ("speed", speed), ("repeat", repeat), ("limit", limit)):
        if value is not None and not (isfinite(value) and value > 0):
            raise TrafficError(f"{field}: {value:g} is not above 0; give a number above 0")
    arrivals = traffic.arrivals
    if limit is not None and limit < len(arrivals):
        arrivals = arrivals[:limit]
    if repeat is not None and repeat > len(arrivals):
        arrivals = _repeated(arrivals, repeat)
    if rate is not None:
        speed = rate / _mean_rate(arrivals)
    if speed is not None:
        arrivals = [_moved(one, one.time_s / speed, one.prefix) for one in arrivals]
    return Traffic(traffic.name, traffic.tenants, arrivals, traffic.block_tokens)


def _mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests a second; a single moment counts as a second."""
    span_s = arrivals[-1].time_s - arrivals[0].time_s if arrivals else 0.0
    return max(1, len(arrivals) - 1) / span_s if span_s > 0.0 else float(max(1, len(arrivals)))


def _repeated(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """Again and again, a mean gap after the end of the one before, until there are `count`."""
    period_s = arrivals[-1].time_s - arrivals[0].time_s + 1.0 / _mean_rate(arrivals)
    blocks = 1 + max((max(one.prefix) for one in arrivals if one.prefix), default=0)
    found = list(arrivals)
    while len(found) < count:
        turn = len(found) // len(arrivals)
        for one in arrivals[: count - len(found)]:
            prefix = tuple([block + turn * blocks for block in one.prefix]) if one.prefix else ()
            found.append(_moved(one, one.time_s + turn * period_s, prefix))
    return found

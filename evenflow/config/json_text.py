"""JSON text → plain values, and the line of each when somebody asks.

Values come first and fast; the text is walked a second time only for the lines of messages. A name that is given
twice, and half of a surrogate pair, are mistakes here, though JSON readers let them pass. Reads a text it is given;
never a file.
"""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Location = tuple[str | int, ...]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
# Digits beyond Python's limit for integers are no number that anybody means: a float says "too large".
_DIGITS_MAX = 4000


class NotJson(Exception):
    """The text is not JSON; `line` is 0 where none can be named."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


@dataclass(frozen=True, slots=True)
class Twice:
    """A name that one object has twice."""

    location: Location
    line: int
    first_line: int


@dataclass
class JsonText:
    """A text that has been read."""

    text: str
    value: Any
    has_twice: bool
    # Filled with `lines`.
    _twice: list[Twice] = field(default_factory=list)

    @cached_property
    def lines(self) -> dict[Location, int]:
        """The line of every value; of a member, that of its name."""
        lines, self._twice = _walk(self.text)
        return lines

    @property
    def twice(self) -> list[Twice]:
        """Every name that is given twice."""
        if self.has_twice:
            _ = self.lines
        return self._twice


def read_json(text: str) -> JsonText:
    """The values of a text; NotJson if it is none."""
    text = text.removeprefix("\ufeff")
    has_twice = False

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal has_twice
        values = dict(pairs)
        has_twice = has_twice or len(values) < len(pairs)
        return values

    try:
        value = json.loads(text, object_pairs_hook=members, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        reason = f"{error.msg[:1].lower()}{error.msg[1:]}"
        raise NotJson(error.lineno, f"is not JSON here: {reason} (column {error.colno})") from None
    except RecursionError:
        raise NotJson(0, "is nested too deeply") from None
    if _HALF_OF_A_PAIR.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise NotJson(0, "holds half of a surrogate pair, such as \\ud83d alone; write both") from None
    return JsonText(text, value, has_twice)


def _whole_number(text: str) -> int | float:
    return int(text) if len(text) < _DIGITS_MAX else float(text)


def _walk(text: str) -> tuple[dict[Location, int], list[Twice]]:
    """The line of each value of a text that is known to be JSON, and the names that an object has twice."""
    lines: dict[Location, int] = {}
    twice: list[Twice] = []
    # What is open around the token: its location, whether it is an object, and how many items a list has had.
    around: list[tuple[Location, bool, int]] = []
    here: Location = ()
    line, at = 1, 0
    name_is_next = False
    for match in _TOKEN.finditer(text):
        line += text.count("\n", at, match.start())
        at = match.start()
        token = match.group()
        if token == ":":
            continue
        if token in "}]":
            around.pop()
        elif token == ",":
            location, name_is_next, count = around.pop()
            around.append((location, name_is_next, count + 1))
            here = location if name_is_next else (*location, count + 1)
        elif name_is_next:
            here = (*around[-1][0], json.loads(token))
            name_is_next = False
            if here in lines:
                twice.append(Twice(here, line, lines[here]))
            lines.setdefault(here, line)
        else:
            lines.setdefault(here, line)
            if token in "{[":
                name_is_next = token == "{"
                around.append((here, name_is_next, 0))
                here = here if name_is_next else (*here, 0)
    return lines, twice

"""What is wrong with a configuration, and where.

A problem names its place and its next step in one line; all problems of a configuration are told at once.
Never holds the value of a key, a token or any other text that may be secret.
"""

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake. `line` is 0 where there is no line (the environment, the command line, a missing file)."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (place, self.key, self.message) if part)


class ConfigErrors(Exception):
    """A configuration cannot be used; `problems` has every reason, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(set(problems))
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


def did_you_mean(word: str, names: Collection[str]) -> str:
    """`, did you mean 'slots'?` for the nearest right name; all names if none is near but few."""
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    if near:
        return f", did you mean '{near[0]}'?"
    if 0 < len(names) <= 12:
        return f"; known here: {', '.join(sorted(names))}"
    return ""

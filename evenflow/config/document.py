"""YAML text → plain values and the place of each, with everything wrong with the text itself.

Reads the types of YAML 1.2: `no`, `off`, `1:30` and `2024-01-01` are text, `1e3` is a number, only true and
false are booleans. Lists come out as tuples. `${NAME}` inside a text is taken from the environment;
`$${NAME}` stays `${NAME}`. Reads one file; never follows includes, never builds objects, never guesses.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from evenflow.config.problems import Problem

# Where a value stands: ("workers", 0, "slots").
Location = tuple[str | int, ...]

# ${NAME} in a text, or $${NAME} for these characters.
REFERENCE = re.compile(r"\$(\$?)\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NESTING_MAX = 32
# Values in one document; aliases of aliases can multiply a short text beyond any memory.
_VALUES_MAX = 1_000_000

_STR, _INT, _FLOAT = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_BOOL, _NULL = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null"
# Tag, what its plain scalars look like, and the characters they begin with ("" for the empty scalar).
_CORE_SCHEMA = (
    (_NULL, re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    (_BOOL, re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), [*"tTfF"]),
    (_INT, re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), [*"-+0123456789"]),
    (_FLOAT, re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z"), [*"-+.0123456789"]),
    (_FLOAT, re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"), [*"-+."]),
)


class Written(str):
    """Text from the environment or the command line, which has no types: the option decides what it means."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written. `label` is what to call it there, when that is not its dotted key."""

    file: str
    line: int = 0
    label: str = ""
    # Whether the label says it all, and the dotted key would only puzzle.
    is_whole: bool = False


@dataclass(slots=True)
class Document:
    """What was written, where, and what is wrong with it so far."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Location, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    # What is worth a word though nothing is wrong, each with the option that it is about, () for none.
    warnings: list[tuple[Location, Problem]] = field(default_factory=list)
    # Names of the variables that the text refers to.
    referenced: set[str] = field(default_factory=set)
    # Where values stand that are not in `places`: of a large file of another form, found only when asked for.
    elsewhere: Callable[[Location], Place | None] | None = None

    def place(self, location: Location) -> Place | None:
        """Where a value was written, None for one that was not."""
        place = self.places.get(location)
        if place is None and self.elsewhere is not None:
            return self.elsewhere(location)
        return place


def plain_value(text: str) -> Any:
    """The value of an unquoted YAML scalar: None, bool, int, float or the text itself."""
    for tag, pattern, _first in _CORE_SCHEMA:
        if pattern.match(text):
            return _value_of(tag, text)
    return text


def _value_of(tag: str, text: str) -> Any:
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    if tag == _INT:
        # Digits beyond Python's limit for integers are no count that anybody means: a float says "too large".
        return int(text, 0 if text[:2] in ("0o", "0x") else 10) if len(text) < 4000 else float(text)
    if tag == _FLOAT:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def dotted(location: Location) -> str:
    """("workers", 0, "slots") → "workers[0].slots"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown_name(name: str) -> str:
    """The name of an option that does not exist, cut short where it may be somebody's key."""
    is_harmless = re.fullmatch(r"[A-Za-z_-]{1,32}", name) and not name.startswith("sk-")
    return name if is_harmless else f"{name[:3]}…"


def read_document(path: str, environ: Mapping[str, str]) -> Document:
    """The document in a file. Never raises for what the file holds: see `problems`."""
    document = Document(path)
    text = read_text(document)
    return document if text is None else parse_document(document, text, environ)


def read_text(document: Document) -> str | None:
    """The text of a document's file; None, and a problem in the document, if it cannot be read."""
    try:
        return Path(document.file).read_text(encoding="utf-8")
    except FileNotFoundError:
        _refused(document, 0, "there is no such file; check its path")
    except UnicodeDecodeError:
        _refused(document, 0, "is not UTF-8 text; save it as UTF-8")
    except OSError as error:
        _refused(document, 0, f"cannot be read: {error.strerror}")
    except ValueError:  # a path with a zero byte
        _refused(document, 0, "is no path; check it")
    return None


def parse_document(document: Document, text: str, environ: Mapping[str, str]) -> Document:
    """Fill a document from YAML text."""
    try:
        node = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        tabs = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r" *\t", line)]
        for line in tabs:
            _refused(document, line, "a tab is used to indent; YAML takes only spaces here")
        if tabs:
            return document
        mark = error.problem_mark or error.context_mark
        hint = '; write references in quotes: "${NAME}"' if REFERENCE.search(text) else ""
        return _refused(document, mark.line + 1 if mark else 0, f"is not YAML here: {error.problem}{hint}")
    except yaml.YAMLError as error:
        return _refused(document, 0, f"is not YAML: {str(error).splitlines()[0]}")
    except RecursionError:
        return _refused(document, 0, "is nested too deeply")
    if node is None:
        return _refused(
            document, 0, 'is empty; the smallest useful file is `workers: [{url: "http://127.0.0.1:9001"}]`'
        )
    if not isinstance(node, yaml.MappingNode):
        return _refused(
            document, node.start_mark.line + 1, "must be a mapping of options, such as `workers: [...]`"
        )
    try:
        document.values = _Reader(document, environ).value(node, ())
    except _TooLarge:
        return _refused(document, 0, "is nested too deeply, or too large; does an alias repeat itself?")
    return document


def _refused(document: Document, line: int, message: str) -> Document:
    document.problems.append(Problem(document.file, line, "", message))
    return document


class _CoreLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's loader, by C where it is built in, with the scalar types of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _firsts in _CORE_SCHEMA:
    for _first in _firsts:
        _CoreLoader.yaml_implicit_resolvers.setdefault(_first, []).append((_tag, _pattern))


class _TooLarge(Exception):
    """A document beyond its bounds."""


class _Reader:
    """Walks the nodes of one document once."""

    __slots__ = ("document", "environ", "values_left")

    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self.document = document
        self.environ = environ
        self.values_left = _VALUES_MAX

    def value(self, node: yaml.Node, location: Location) -> Any:
        # An entry of a mapping stands in the line of its key, set by _mapping; an item of a list in its own.
        line = node.start_mark.line + 1
        self.document.places.setdefault(location, Place(self.document.file, line))
        self.values_left -= 1
        if len(location) > _NESTING_MAX or self.values_left < 0:
            raise _TooLarge
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.value(item, (*location, index)) for index, item in enumerate(node.value))
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, location, line)

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(line, location, "the name of an option must be text")
                continue
            key = str(key_node.value)
            if key in first_lines:
                self._problem(line, (*location, key), f"is given twice, first in line {first_lines[key]}")
                continue
            first_lines[key] = line
            self.document.places[*location, key] = Place(self.document.file, line)
            values[key] = self.value(value_node, (*location, key))
        return values

    def _scalar(self, node: yaml.ScalarNode, location: Location, line: int) -> Any:
        if node.tag not in (_STR, _INT, _FLOAT, _BOOL, _NULL):
            self._problem(line, location, f"has the tag {node.tag}, which means nothing here; remove it")
            return None
        text = str(node.value)
        if node.tag != _STR:
            return _value_of(node.tag, text)
        if "${" not in text:
            return text
        expanded = self._expanded(text, location, line)
        # An unquoted `port: ${PORT}` has no type of its own; a quoted one is text.
        return expanded if node.style else Written(expanded)

    def _expanded(self, text: str, location: Location, line: int) -> str:
        def replacement(match: re.Match[str]) -> str:
            escaped, name = match.groups()
            self.document.referenced.add(name)
            if escaped:
                return f"${{{name}}}"
            if not _NAME.fullmatch(name):
                self._problem(
                    line, location, "has a ${...} that is no variable name; write $${...} for the characters"
                )
            elif name not in self.environ:
                self._problem(line, location, f"the environment variable {name} is not set{self._near(name)}")
            return self.environ.get(name, "")

        return REFERENCE.sub(replacement, text)

    def _problem(self, line: int, location: Location, message: str) -> None:
        self.document.problems.append(Problem(self.document.file, line, dotted(location), message))

    def _near(self, name: str) -> str:
        near = difflib.get_close_matches(name, list(self.environ), n=1, cutoff=0.8)
        return f", did you mean {near[0]}?" if near else ""

"""From what the user wrote to settings that are ready to use, or to every reason why not.

The file is overlaid by the environment, and that by the command line. Workers given there come on top of
those in the file. Reads the file and the environment it is given; changes nothing, connects to nothing.
"""

import difflib
import gc
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from evenflow.config import checks, older
from evenflow.config.document import (
    Document,
    Location,
    Place,
    Written,
    dotted,
    parse_document,
    plain_value,
    read_text,
    shown_name,
)
from evenflow.config.options import ENVIRONMENT_PREFIX, environment_options, field_at, fields_at, model_in
from evenflow.config.problems import ConfigErrors, Problem, did_you_mean
from evenflow.config.settings import Settings

_SECRET_OPTIONS = frozenset({"keys", "admin_keys", "worker_token", "api_key", "database", "url"})
# Variables of this prefix that are not options: the file itself, and those that Kubernetes makes.
_NOT_OPTIONS = re.compile(r"EVENFLOW_(?:CONFIG|PORT(?:_.*)?|SERVICE_(?:HOST|PORT.*))")


def load(
    path: str | None, *, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None
) -> Settings:
    """The settings of a file (or of none), of the environment, and of `overrides`, by dotted key.

    `overrides` holds what the command line gave: {"listen.port": "8001", "workers": ["http://127.0.0.1:9001"]};
    text is read as the option needs it. Raises ConfigErrors with every problem.
    """
    with _without_collection():
        return _load(path, environ, overrides or {})


@contextmanager
def _without_collection() -> Iterator[None]:
    """No search for garbage meanwhile: of 100,000 tenants nothing is garbage, and half of the time went into it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _load(path: str | None, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Settings:
    document = Document("command line") if path is None else _read(path, environ)
    if path is not None and document.problems and not document.values:
        raise ConfigErrors(document.problems)
    _drop_empty_groups(document)
    _overlay_environment(document, environ)
    _overlay_command_line(document, overrides)
    settings = _validated(document)
    document.problems.extend(checks.between_options(document))
    if settings is None or document.problems:
        raise ConfigErrors(document.problems)
    settings._warnings = (*_warnings_of_the_text(document), *checks.warnings(settings, document))
    return settings


def _read(path: str, environ: Mapping[str, str]) -> Document:
    """The document of a file: of ours, or of an older service as if it had been written in ours."""
    document = Document(path)
    text = read_text(document)
    if text is None:
        return document
    return older.read(document, text) or parse_document(document, text, environ)


def _warnings_of_the_text(document: Document) -> Iterator[str]:
    """What reading it found, but for options that the environment or the command line has set since."""
    for location, problem in document.warnings:
        place = document.places.get(location)
        if place is None or place.file == document.file:
            yield str(problem)


def _drop_empty_groups(document: Document) -> None:
    # `limits:` with all its lines commented out is the same as no `limits`.
    for name, field in Settings.model_fields.items():
        if model_in(field.annotation) and document.values.get(name, ...) is None:
            del document.values[name]


# ----------------------------------------------------------------------------------------------------
# Overlays


def _overlay_environment(document: Document, environ: Mapping[str, str]) -> None:
    # A variable that the file refers to is meant, whatever its name.
    known = set(document.referenced)
    for option in environment_options():
        for variable in option.variables:
            known.add(variable)
            if environ.get(variable):
                _set(
                    document,
                    option.location,
                    Written(environ[variable]),
                    Place("environment", label=variable),
                )
    groups = tuple(f"{ENVIRONMENT_PREFIX}{name.upper()}_" for name in Settings.model_fields)
    for variable in environ:
        is_ours = variable.startswith(ENVIRONMENT_PREFIX) and not _NOT_OPTIONS.fullmatch(variable)
        if variable in known or not is_ours:
            continue
        near = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
        if near or variable.startswith(groups):
            hint = f", did you mean {near[0]}?" if near else "; `evenflow config reference` lists them"
            document.problems.append(Problem("environment", 0, variable, f"sets no option{hint}"))


def _overlay_command_line(document: Document, overrides: Mapping[str, Any]) -> None:
    flags = {option.key: option.flag for option in environment_options()}
    for key, value in overrides.items():
        text = Written(value) if isinstance(value, str) else value
        _set(document, tuple(key.split(".")), text, Place("command line", label=flags.get(key, "")))


def _set(document: Document, location: Location, value: Any, place: Place) -> None:
    if location == ("workers",):
        _add_workers(document, value, place)
        return
    holder = document.values
    for part in location[:-1]:
        inner = holder.setdefault(str(part), {})
        if not isinstance(inner, dict):
            return  # The file has something else there, which is a problem already.
        holder = inner
    holder[str(location[-1])] = value
    document.places[location] = place


def _add_workers(document: Document, urls: Any, place: Place) -> None:
    workers = document.values.get("workers", ())
    if not isinstance(workers, tuple):
        return
    added = urls.split(",") if isinstance(urls, str) else urls
    for url in added:
        location = ("workers", len(workers))
        document.places[location] = document.places[*location, "url"] = place
        workers = (*workers, {"url": str(url).strip()})
    document.values["workers"] = workers


# ----------------------------------------------------------------------------------------------------
# Validation, with our words for what pydantic finds


def _validated(document: Document) -> Settings | None:
    try:
        return Settings.model_validate(document.values)
    except ValidationError as errors:
        told = {problem.key for problem in document.problems}
        for error in errors.errors(include_url=False):
            location = tuple(part for part in error["loc"] if part != "[key]")
            problem = checks.problem_at(document, location, _message(error, location))
            if error["type"] == "extra_forbidden":
                problem = replace(problem, key=_unknown_key(location))
            # A variable that is not set leaves a text that is wrong too: one mistake, one line.
            # And a list whose items are wrong counts as too short.
            if problem.key not in told and not (error["type"] == "too_short" and error["input"]):
                document.problems.append(problem)
        return None


def _message(error: Any, location: Location) -> str:
    kind: str = error["type"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "extra_forbidden":
        return f"unknown option{did_you_mean(str(location[-1]), fields_at(location[:-1]))}"
    if kind == "literal_error":
        return _not_one_of(context["expected"], error["input"])
    if kind in _BOUNDS and isinstance(error["input"], float) and not math.isfinite(error["input"]):
        kind = "finite_number"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"must be {words} {_number(context[bound])}{_shown(error['input'], location)}"
    if kind in _MEANINGS:
        return f"{_MEANINGS[kind]}{_shown(error['input'], location)}"
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}"


def _unknown_key(location: Location) -> str:
    """The dotted key of an option that does not exist, cut short where its name may be somebody's key."""
    return dotted((*location[:-1], shown_name(str(location[-1]))))


_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_MEANINGS = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be a mapping, such as {name: value}",
    "model_type": "must be a mapping of options",
    "model_attributes_type": "must be a mapping of options",
    "tuple_type": "must be a list",
    "too_short": "must not be empty; leave it out for its default",
    "string_too_short": "must not be empty",
}


def _not_one_of(expected: str, typed: Any) -> str:
    names = re.findall(r"'([^']*)'", expected)
    near = did_you_mean(typed, names) if isinstance(typed, str) else ""
    return f"must be one of {', '.join(names)}{near if near.endswith('?') else ''}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:f}".rstrip("0").rstrip(".")


def _shown(typed: Any, location: Location) -> str:
    """What a wrong value is: its kind; the value itself only if it is a number where no secret can stand."""
    if typed is None:
        return ", is empty"
    if isinstance(typed, tuple | list):
        return ", is a list" if typed else ""
    if isinstance(typed, dict):
        return ""
    is_secret = any(part in _SECRET_OPTIONS for part in location)
    if isinstance(typed, str):
        is_number = type(plain_value(typed)) in (int, float)
        if is_secret or not is_number:
            return ", is text"
        return f", is {typed}" if isinstance(typed, Written) else "; take the quotes off"
    field = field_at(location)
    if field is not None and field.annotation is str:
        return "; put it in quotes"
    return ", is a number" if is_secret else f", is {str(typed).lower()}"

"""What the options are called: walks the fields of the settings, so that no name is written a second time.

Gives the fields at a place in the configuration, and the environment variable of each option.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from evenflow.config.document import Location, dotted
from evenflow.config.settings import Settings

ENVIRONMENT_PREFIX = "EVENFLOW_"


@dataclass(frozen=True, slots=True)
class Option:
    """One option that the environment can set. `variables`: ours last, since the last one set decides."""

    location: Location
    field: FieldInfo
    variables: tuple[str, ...]
    # "" for an option that has no flag.
    flag: str

    @property
    def key(self) -> str:
        return dotted(self.location)

    @property
    def is_list(self) -> bool:
        return is_list(self.field)

    @property
    def metavar(self) -> str:
        return str(_extra(self.field).get("metavar", self.location[-1])).upper()


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation holds, itself or as the items of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (tuple, Annotated, types.UnionType, typing.Union):
        return next(filter(None, map(model_in, typing.get_args(annotation))), None)
    return None


def is_list(field: FieldInfo) -> bool:
    """Whether an option takes a list."""
    return "tuple[" in str(field.annotation)


def fields_at(location: Location) -> dict[str, FieldInfo]:
    """The options that exist at a place: all groups at (), those of a worker at ("workers", 0)."""
    model: type[BaseModel] | None = Settings
    for part in location:
        if model is None:
            return {}
        if isinstance(part, str):
            field = model.model_fields.get(part)
            model = model_in(field.annotation) if field else None
    return model.model_fields if model else {}


def field_at(location: Location) -> FieldInfo | None:
    """The option at a place, or that of the list around it."""
    names = [index for index, part in enumerate(location) if isinstance(part, str)]
    if not names:
        return None
    return fields_at(location[: names[-1]]).get(str(location[names[-1]]))


@cache
def environment_options() -> tuple[Option, ...]:
    """Every option that the environment can set: all but those inside lists of workers, tiers and tenants."""
    return tuple(_options(Settings, ()))


def _options(model: type[BaseModel], above: Location) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        location = (*above, name)
        inner = model_in(field.annotation)
        if inner is None or location == ("workers",):
            ours = ENVIRONMENT_PREFIX + "_".join(map(str, location)).upper()
            extra = _extra(field)
            others = [str(extra["environment"])] if "environment" in extra else []
            yield Option(location, field, (*others, ours), str(extra.get("flag", "")))
        elif not is_list(field):
            yield from _options(inner, location)


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}

"""The page of all options, and the line that sums a configuration up: text made of fields, nothing twice."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from evenflow.config.document import Location, dotted
from evenflow.config.options import environment_options, is_list, model_in
from evenflow.config.settings import Settings

_INTRODUCTION = """\
# Configuration

<!-- Written by `evenflow config reference`; change the fields in evenflow/config/settings.py instead. -->

Evenflow needs no configuration: `evenflow serve --worker http://127.0.0.1:9001` serves with these defaults.
A configuration is one YAML file:

    evenflow serve --config evenflow.yaml
    evenflow config check evenflow.yaml    # every problem at once, with its line; exit status 1 if any

- A flag wins over the environment, and that over the file. Workers given by a flag or the environment come
  on top of those in the file.
- Every option outside of `workers`, `tenants` and `tiers` can be set by the environment variable beside it.
  An empty variable counts as not set. Items of a list are separated by commas.
- `EVENFLOW_CONFIG` names the file when `--config` does not.
- `${NAME}` inside a text of the file is taken from the environment; `$${NAME}` stands for the characters.
- An option that does not exist, a wrong type, or a variable that is not set is an error at start.
- Keys are written plain or as `sha256:<hex>` (`printf %s KEY | sha256sum`). Evenflow keeps only the digest.
- Types are those of YAML 1.2: only `true` and `false` are booleans, and `"10"` is text.
- A weight is a number from 0.000001 to 1000000.

## Example

```yaml
listen: {host: 0.0.0.0, port: 8000}
auth:
  admin_keys: ["${ADMIN_KEY}"]
workers:
  - {url: "http://127.0.0.1:9001", models: [llama], slots: 8, aliases: {gpt-x: llama}}
  - {url: "http://127.0.0.1:9002", speed: 2}
scheduling:
  tiers:
    - name: standard
      groups:
        - {name: web, weight: 300}
        - {name: keys, weight: 10}
        - {name: anonymous, weight: 1}
tenants:
  - {name: alice, weight: 30, keys: [sk-alice], limits: {concurrency: 8}}
  - {name: bob, keys: ["sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9"]}
```
"""


def reference() -> str:
    """The page of all options as Markdown."""
    return _INTRODUCTION + "".join(_sections(Settings, ()))


def summary(settings: Settings) -> str:
    """What a configuration says, in one line."""
    tiers = settings.scheduling.tiers
    groups = ", ".join(f"{group.name} {group.weight:g}" for tier in tiers for group in tier.groups)
    counts = (
        _counted(len(settings.workers), "worker"),
        _counted(len(settings.tenants), "tenant"),
        f"{_counted(len(tiers), 'tier')} ({groups})",
    )
    without_key = "served" if settings.auth.anonymous else "refused"
    return f"{', '.join(counts)}, requests without a key are {without_key}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _sections(model: type[BaseModel], above: Location) -> Iterator[str]:
    """The options of a group as one table, then the groups inside it, each a section."""
    inner = [(name, field) for name, field in model.model_fields.items() if model_in(field.annotation)]
    own = [(name, field) for name, field in model.model_fields.items() if not model_in(field.annotation)]
    if own:
        key = dotted(above)
        yield f"\n## {f'`{key}`' if key else 'Top level'}\n\n"
        yield f"{_about(model, above)}\n\n" if key else ""
        yield "| Option | Default | Environment, flag | Meaning |\n|---|---|---|---|\n"
        yield from (_row(field, name, (*above, name)) for name, field in own)
    for name, field in inner:
        nested = model_in(field.annotation)
        assert nested is not None
        # `workers[]` stands for each worker.
        yield from _sections(nested, (*above, f"{name}[]" if is_list(field) else name))


def _about(model: type[BaseModel], location: Location) -> str:
    text = (model.__doc__ or "").strip()
    plain = tuple(str(part).removesuffix("[]") for part in location)
    option = next((option for option in environment_options() if option.location == plain), None)
    if option is not None:
        text += f" Also by `{option.flag}` (may repeat) and `{option.variables[-1]}`, as URLs."
    return text


def _row(field: FieldInfo, name: str, location: Location) -> str:
    option = next((option for option in environment_options() if option.location == location), None)
    names = [*reversed(option.variables), option.flag] if option else []
    settable = ", ".join(f"`{text}`" for text in names if text)
    cells = (f"`{name}`", _default(field), settable, field.description or "")
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    if "default_text" in extra:
        return str(extra["default_text"])
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if value in ((), {}):
        return "empty"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"

"""`evenflow import`: prints what the configuration of an older service says, as a configuration of ours.

What is printed means the same as the file itself given to `evenflow serve --config`, and says beside each part where
it came from. Keys are printed as digests unless plain ones are asked for. Writes to the standard output only, and
nothing there while anything is wrong with the file.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any

from evenflow.config import older
from evenflow.config.document import REFERENCE, Document, Location, read_text
from evenflow.config.json_text import NotJson, read_json
from evenflow.config.load import load
from evenflow.config.problems import ConfigErrors, Problem

_PRINTED, _HAS_PROBLEMS = 0, 1

_HEAD = """\
# What {title} says. Written by `evenflow import {kind}`.
# Add the workers, or give them by --worker: evenflow serve --config FILE --worker http://127.0.0.1:9001
# Shares are measured in tokens; `cost: sequences` under `scheduling` counts requests, as {service} does.
"""
# What the comment above a part says, by its dotted key.
_COMMENTS: dict[older.Kind, dict[str, str]] = {
    "alpa": {
        "anonymous": "Alpa serves requests without a key, unless it is started with --block-non-key-access.",
        "tiers": "The weights of Alpa's service/constants.py: web, keys, and requests without a key.",
        "tenants": "From allowed_api_keys, with the weights of api_key_weights; 10 where there is none.",
    },
    "lmdeploy": {
        "anonymous": "LMDeploy asks for no key.",
        "trust_user_id": "Anyone who reaches the gateway can claim any user_id. Keys end that for a tenant.",
        "default_user": "Users that are not listed, and requests without a user_id.",
        "tiers": "From user_groups: strict, the first is served first.",
        "tenants": "From user_group_map: weight is quota_pct, and quota 0 is the background. Users who are not listed\n"
        "# are in one group only; entries `default` of the others are reached by nobody, and left out.",
    },
}
# Signs that stand in a quoted YAML text as they are.
_ESCAPED = {'"': '\\"', "\\": "\\\\"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_subparsers(dest="kind", required=True, metavar="SERVICE")
    alpa = forms.add_parser("alpa", help="keys_file.json of Alpa", allow_abbrev=False)
    alpa.add_argument("file", metavar="KEYS_FILE", help="the file that lists the keys")
    alpa.add_argument(
        "--plain-keys", action="store_true", help="print keys as they are, and not as sha256:<hex>"
    )
    lmdeploy = forms.add_parser("lmdeploy", help="QoS JSON of LMDeploy", allow_abbrev=False)
    lmdeploy.add_argument("file", metavar="QOS_FILE", help="the file given to LMDeploy as --qos-config-path")
    lmdeploy.set_defaults(plain_keys=False)


def main(args: argparse.Namespace) -> int:
    """Print the equivalent configuration, or every problem of the file."""
    try:
        text, warnings = equivalent(args.file, args.kind, plain_keys=args.plain_keys)
    except ConfigErrors as errors:
        sys.stderr.write(f"{errors}\n")
        return _HAS_PROBLEMS
    sys.stderr.writelines(f"evenflow: warning: {warning}\n" for warning in warnings)
    sys.stdout.write(text)
    return _PRINTED


def equivalent(file: str, kind: older.Kind, *, plain_keys: bool = False) -> tuple[str, list[str]]:
    """The configuration in YAML that says what an older file says, and the warnings.

    Raises ConfigErrors with every problem.
    """
    document = Document(file)
    text = read_text(document)
    if text is None:
        raise ConfigErrors(document.problems)
    try:
        parsed = read_json(text)
    except NotJson as error:
        raise ConfigErrors([Problem(file, error.line, "", error.message)]) from None
    found = older.recognise(parsed.value)
    if found != kind:
        raise ConfigErrors([Problem(file, 0, "", _other_form(file, kind, found))])
    load(file, environ={})  # raises for every problem, also those that only the options show
    said = older.translate(parsed.value, kind, plain_keys=plain_keys)
    places = older.Places(file, said, parsed)
    older.read(document, text)
    head = _HEAD.format(title=older.TITLES[kind], kind=kind, service=older.SERVICES[kind])
    return head + "".join(_parts(said, places)), [str(problem) for _about, problem in document.warnings]


def _other_form(file: str, kind: older.Kind, found: older.Kind | None) -> str:
    if found is not None:
        return f"is {older.TITLES[found]}; run `evenflow import {found} {file}`"
    return f"is not {older.TITLES[kind]}, which has a field {older.MAIN_NAMES[kind]}"


# ----------------------------------------------------------------------------------------------------
# Writing


def _parts(said: older.Translation, places: older.Places) -> Iterator[str]:
    comments = _COMMENTS[said.kind]
    yield "auth:\n"
    for name, value in said.options["auth"].items():
        yield f"  # {comments[name]}\n  {name}: {_flow(value)}\n"
    tiers = said.options.get("scheduling", {}).get("tiers", ())
    if tiers:
        yield f"scheduling:\n  # {comments['tiers']}\n  tiers:\n"
    for index, tier in enumerate(tiers):
        yield f"    - name: {_flow(tier['name'])}{_origin(('scheduling', 'tiers', index), said, places)}\n"
        yield "      groups:\n"
        yield from (f"        - {_flow(group)}\n" for group in tier["groups"])
    tenants = said.options.get("tenants", ())
    if tenants:
        yield f"# {comments['tenants']}\ntenants:\n"
    for index, tenant in enumerate(tenants):
        yield f"  - {_flow(tenant)}{_origin(('tenants', index), said, places)}\n"


def _origin(location: Location, said: older.Translation, places: older.Places) -> str:
    """A comment that says where an entry came from."""
    place = said.origins.get(location)
    return f"  # {places.label(place)}, line {places.line(place)}" if place else ""


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """A text in double quotes that YAML reads back as it was, also where it looks like a reference."""
    text = REFERENCE.sub(lambda match: f"${match.group()}", text)
    if re.fullmatch(r"[ !#-\[\]-~]*", text):
        return f'"{text}"'
    signs = (_ESCAPED.get(sign) or (sign if sign.isprintable() else f"\\U{ord(sign):08x}") for sign in text)
    return f'"{"".join(signs)}"'

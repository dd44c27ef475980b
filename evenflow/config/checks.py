"""What must hold between options: names that exist, nothing twice, nothing that contradicts.

Works on what was typed, so that it finds these mistakes beside wrong types and not only after them;
anything of a wrong shape is passed over here, since validation tells of it. Messages never show a key.
"""

from collections.abc import Hashable, Iterable, Iterator
from math import fsum
from typing import Any

from evenflow.config.document import Document, Location, dotted, plain_value
from evenflow.config.problems import Problem, did_you_mean
from evenflow.config.secrets import read_key
from evenflow.config.settings import ANONYMOUS_GROUP, DEFAULT_GROUP, Settings, address_of, worker_url

# Something named in the configuration, and where: (("tenants", 0, "name"), "alice").
_Named = tuple[Location, Hashable]
# Among more names than this no nearest one is looked for, which would take seconds.
_NAMES_COMPARED_MAX = 1000


def problem_at(document: Document, location: Location, message: str) -> Problem:
    """A problem at the nearest place that is known: a missing option stands where its group begins."""
    for length in range(len(location), -1, -1):
        place = document.place(location[:length])
        if place is None:
            continue
        key = dotted(location)
        if place.label:
            key = place.label if place.is_whole else f"{place.label} ({key})"
        return Problem(place.file, place.line, key, message)
    return Problem(document.file, 0, dotted(location), message)


def between_options(document: Document) -> Iterator[Problem]:
    """Every problem between options that are right by themselves."""
    for location, message in _mistakes(document.values, document):
        yield problem_at(document, location, message)


def warnings(settings: Settings, document: Document) -> Iterator[str]:
    """What is allowed but probably not meant, or not there yet."""
    if settings.database is not None:
        yield "database: usage is not stored in it yet; it is kept in memory until the gateway stops"
    if not settings.workers:
        yield "no worker is configured, so every request gets 503; add one under `workers` or by --worker"
    if not settings.auth.anonymous and not settings.tenants:
        yield "auth.anonymous is false and no tenant is configured, so every request gets 401; add a tenant"
    without_keys = [tenant for tenant in settings.tenants if not tenant.keys]
    if settings.auth.trust_user_id and without_keys:
        yield (
            "auth.trust_user_id: anyone who reaches the gateway can claim any user_id; give tenants keys, which ends "
            "that for them, or let only a front end in that sets the user_id itself"
        )
    elif not settings.auth.trust_user_id:
        for tenant in without_keys:
            yield f"tenant '{tenant.name}' has no keys, so nobody can call as it"


def _mistakes(values: dict[str, Any], document: Document) -> Iterator[tuple[Location, str]]:
    yield from _in_workers(values, document)
    yield from _in_tiers(values, document)
    yield from _in_tenants(values, document)
    yield from _in_auth(values)
    yield from _in_keys(values, document)
    yield from _in_heartbeats(values)


def _in_workers(values: dict[str, Any], document: Document) -> Iterator[tuple[Location, str]]:
    urls: list[_Named] = []
    names: list[_Named] = []
    for location, worker in _entries(values, "workers"):
        url = _address(worker)
        if url:
            urls.append(((*location, "url"), url))
        name = worker.get("name", url)
        # Two workers that share a url and have no names are one mistake, not two.
        if name and ("name" in worker or not any(url == other for _, other in urls[:-1])):
            names.append(((*location, "name"), name))
        yield from _in_aliases(location, worker)
    yield from _twice(urls, document, "is the url of another worker too")
    yield from _twice(names, document, "is the name of another worker too; give each its own name")


def _in_aliases(location: Location, worker: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    models, aliases = worker.get("models"), worker.get("aliases")
    if not isinstance(models, tuple) or not isinstance(aliases, dict):
        return  # Models read from the worker are not known yet.
    names = [model for model in models if isinstance(model, str)]
    for alias, model in aliases.items():
        if isinstance(model, str) and model not in names:
            hint = did_you_mean(model, names)
            yield (
                (*location, "aliases", alias),
                f"points at '{model}', which is not in this worker's models{hint}",
            )
        elif alias in names:
            yield (
                (*location, "aliases", alias),
                "is a model of this worker already; an alias needs another name",
            )


def _in_tiers(values: dict[str, Any], document: Document) -> Iterator[tuple[Location, str]]:
    tiers = list(_tiers(values))
    groups = list(_groups(values))
    yield from _twice(_names(tiers), document, "is the name of another tier too")
    yield from _twice(_names(groups), document, "is a group already; a group belongs to one tier only")
    shares = [tier.get("min_share") for _, tier in tiers]
    # fsum: ten times 0.1 is 1, and not a little less.
    total = fsum(share for share in shares if isinstance(share, int | float) and 0 <= share < 1)
    if total >= 1:
        yield ("scheduling", "tiers"), f"all min_share together are {total:g}; they must be less than 1"
    known = [str(name) for _, name in _names(groups)]
    if groups and ANONYMOUS_GROUP not in known and _is_anonymous(values) and not _auth(values).get("default_user"):
        message = f"no tier has a group '{ANONYMOUS_GROUP}', but requests without a key are served"
        hint = "add {name: anonymous, weight: 1} to a tier, or set auth.anonymous: false"
        yield ("scheduling", "tiers"), f"{message}; {hint}"


def _in_tenants(values: dict[str, Any], document: Document) -> Iterator[tuple[Location, str]]:
    tenants = list(_entries(values, "tenants"))
    yield from _twice(_names(tenants), document, "is the name of another tenant too")
    groups = _groups(values)
    known = {str(name) for _, name in _names(groups)} or {group.name for group in _standard_groups()}
    for location, tenant in tenants:
        if tenant.get("name") == ANONYMOUS_GROUP:
            yield (*location, "name"), "is what requests without a key are called; choose another name"
        group = tenant.get("group", DEFAULT_GROUP)
        if isinstance(group, str) and group not in known:
            default = "" if "group" in tenant else " (the default)"
            yield (*location, "group"), f"no tier has a group '{group}'{default}{did_you_mean(group, known)}"
        if "weight" in tenant and tenant.get("background") is True:
            yield (*location, "weight"), "is not for a tenant in the background; remove it, or `background`"


def _in_auth(values: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    trusts = _toggle(values, "trust_user_id")
    if trusts and not _is_anonymous(values):
        yield (
            ("auth", "trust_user_id"),
            "has no effect while requests without a key are refused; set auth.anonymous: true as well",
        )
    default = _auth(values).get("default_user")
    if not isinstance(default, str) or not default:
        return
    names = {str(name) for _, name in _names(_entries(values, "tenants"))}
    if not trusts:
        yield ("auth", "default_user"), "has no effect without auth.trust_user_id: true"
    elif default not in names:
        hint = did_you_mean(default, names) if len(names) <= _NAMES_COMPARED_MAX else ""
        yield ("auth", "default_user"), f"no tenant is called '{default}'{hint or '; add it under `tenants`'}"


def _in_keys(values: dict[str, Any], document: Document) -> Iterator[tuple[Location, str]]:
    keys: list[_Named] = []
    auth = values.get("auth")
    if isinstance(auth, dict):
        keys.extend(_digests(("auth", "admin_keys"), auth.get("admin_keys")))
    for location, tenant in _entries(values, "tenants"):
        keys.extend(_digests((*location, "keys"), tenant.get("keys")))
    yield from _twice(
        keys, document, "is given before; a key belongs to one tenant, or to the administrator, only"
    )


def _in_heartbeats(values: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    fleet = values.get("fleet")
    if not isinstance(fleet, dict):
        return
    defaults = Settings.model_fields["fleet"].default
    typed = (
        fleet.get(name, getattr(defaults, name)) for name in ("heartbeat_expiry_s", "heartbeat_interval_s")
    )
    expiry, interval = (plain_value(value) if isinstance(value, str) else value for value in typed)
    if isinstance(expiry, int | float) and isinstance(interval, int | float) and 0 < expiry <= interval:
        name = "heartbeat_expiry_s" if "heartbeat_expiry_s" in fleet else "heartbeat_interval_s"
        order = f"heartbeat_expiry_s ({expiry:g}) must be more than heartbeat_interval_s ({interval:g})"
        yield ("fleet", name), f"{order}, or every worker expires between two heartbeats"


# ----------------------------------------------------------------------------------------------------
# Reading what may have any shape


def _items(location: Location, value: Any) -> Iterator[tuple[Location, Any]]:
    if isinstance(value, tuple):
        yield from (((*location, index), item) for index, item in enumerate(value))


def _entries(values: dict[str, Any], *path: str) -> Iterator[tuple[Location, dict[str, Any]]]:
    inner: Any = values
    for part in path:
        inner = inner.get(part) if isinstance(inner, dict) else None
    for location, item in _items(path, inner):
        if isinstance(item, dict):
            yield location, item


def _tiers(values: dict[str, Any]) -> Iterator[tuple[Location, dict[str, Any]]]:
    return _entries(values, "scheduling", "tiers")


def _groups(values: dict[str, Any]) -> Iterator[tuple[Location, dict[str, Any]]]:
    for location, tier in _tiers(values):
        for inner, group in _items((*location, "groups"), tier.get("groups")):
            if isinstance(group, dict):
                yield inner, group


def _names(entries: Iterable[tuple[Location, dict[str, Any]]]) -> Iterator[_Named]:
    for location, entry in entries:
        if isinstance(entry.get("name"), str):
            yield (*location, "name"), entry["name"]


def _digests(location: Location, keys: Any) -> Iterator[_Named]:
    if isinstance(keys, str):
        keys = tuple(part.strip() for part in keys.split(",") if part.strip())
    for inner, key in _items(location, keys):
        try:
            yield inner, read_key(key) if isinstance(key, str) else inner
        except ValueError:
            continue


def _address(worker: dict[str, Any]) -> str:
    try:
        return address_of(worker_url(worker.get("url", "")))
    except (ValueError, TypeError):
        return ""


def _is_anonymous(values: dict[str, Any]) -> bool:
    anonymous = _toggle(values, "anonymous")
    return not values.get("tenants") if anonymous is None else anonymous


def _toggle(values: dict[str, Any], name: str) -> bool | None:
    """A toggle of `auth`, None if it is not given. Text of the environment has no type of its own."""
    value = _auth(values).get(name)
    if isinstance(value, str):
        value = plain_value(value)
    return None if value is None else value is True


def _auth(values: dict[str, Any]) -> dict[str, Any]:
    auth = values.get("auth")
    return auth if isinstance(auth, dict) else {}


def _standard_groups() -> Iterator[Any]:
    for tier in Settings.model_fields["scheduling"].default.tiers:
        yield from tier.groups


def _twice(named: Iterable[_Named], document: Document, message: str) -> Iterator[tuple[Location, str]]:
    first: dict[Hashable, Location] = {}
    for location, name in named:
        if name not in first:
            first[name] = location
            continue
        place = document.place(first[name])
        line = f", first in line {place.line}" if place and place.line else ""
        yield location, f"{message} ({dotted(first[name])}{line})"

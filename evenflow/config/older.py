"""The configurations of two older services, as if they had been written in ours.

Alpa's `keys_file.json` lists the keys that may call, and weights for some of them. LMDeploy's QoS JSON lists groups
of users in the order of their priority, and each user's quota in per cent of its group. Both are read unchanged; what
they mean is turned into options as a user would have typed them, and what is wrong with them is told where it stands
in the file that was given. Where such a file says nothing, or crashed the service it was written for, the numbered
lists below say what holds here.

Never guesses at a form that it does not know, never shows a key.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import fsum
from typing import Any, Literal

from evenflow.config.document import Document, Location, Place, dotted, shown_name
from evenflow.config.json_text import JsonText, NotJson, read_json
from evenflow.config.problems import Problem, did_you_mean
from evenflow.config.settings import DEFAULT_GROUP, Settings

Kind = Literal["alpa", "lmdeploy"]

_ALPA_NAMES = ("allowed_api_keys", "api_key_weights", "RECAPTCHA_SITE_KEY", "RECAPTCHA_SECRET_KEY")
_LMDEPLOY_NAMES = ("enable_user_qos", "user_groups", "user_group_map")
_USER_NAMES = ("id", "quota_pct")
_ALL_NAMES = frozenset((*_ALPA_NAMES, *_LMDEPLOY_NAMES, *_USER_NAMES))
_GROUP_SHOWN_MAX = 64
# Among more groups than this no nearest name is looked for, which would take seconds.
_NAMES_COMPARED_MAX = 200
_NAMES: dict[Kind, tuple[str, ...]] = {"alpa": _ALPA_NAMES, "lmdeploy": _LMDEPLOY_NAMES}
SERVICES: dict[Kind, str] = {"alpa": "Alpa", "lmdeploy": "LMDeploy"}
TITLES: dict[Kind, str] = {"alpa": "a keys file of Alpa", "lmdeploy": "a QoS file of LMDeploy"}
# The field that tells each form from any other JSON.
MAIN_NAMES: dict[Kind, str] = {"alpa": "allowed_api_keys", "lmdeploy": "user_group_map"}
# What a text of either form must have somewhere; a quick look, before it is read as JSON.
_MARK = re.compile(rf'"(?:{"|".join((*_ALPA_NAMES, *_LMDEPLOY_NAMES))})"\s*:')

# Weights of Alpa's own constants (AUTH_GROUP_WEIGHTS).
_ALPA_GROUPS = (("web", 300), (DEFAULT_GROUP, 10), ("anonymous", 1))
# Hex digits of a key's digest in the name of its tenant, which stays when the file is put in another order.
_DIGITS = 12

# The entry of a group that users who are not listed share.
DEFAULT_USER = "default"
# LMDeploy puts users that are in no group into the third one of the map.
_DEFAULT_GROUP_INDEX = 2
_PER_CENT = 100
_DIGITS_SHOWN_MAX = 20
# What rounding may do to a sum of quotas such as 33.3 + 33.3 + 33.4.
_SUM_TOLERANCE = 1e-6


@dataclass(slots=True)
class Translation:
    """What an older file says. Places of the file are those of its JSON: ("user_group_map", "Gold", 0, "id")."""

    kind: Kind
    # As a user would have typed them; lists are tuples, as in every document.
    options: dict[str, Any] = field(default_factory=dict)
    # Where an option, or the list entry around it, came from.
    origins: dict[Location, Location] = field(default_factory=dict)
    problems: list[tuple[Location, str]] = field(default_factory=list)
    # Each with the option that it is about, () for none: a word on an option is not needed once it is set elsewhere.
    warnings: list[tuple[Location, Location, str]] = field(default_factory=list)

    def wrong(self, place: Location, message: str) -> None:
        self.problems.append((place, message))

    def warn(self, place: Location, message: str, about: Location = ()) -> None:
        self.warnings.append((about, place, message))


def recognise(value: Any) -> Kind | None:
    """Which older form a parsed JSON value has."""
    if not isinstance(value, dict):
        return None
    if any(name in value for name in _ALPA_NAMES):
        return "alpa"
    return "lmdeploy" if any(name in value for name in _LMDEPLOY_NAMES) else None


def translate(value: dict[str, Any], kind: Kind, *, plain_keys: bool = False) -> Translation:
    """What a recognised value says."""
    return from_alpa(value, plain_keys=plain_keys) if kind == "alpa" else from_lmdeploy(value)


# ----------------------------------------------------------------------------------------------------
# Alpa


def from_alpa(value: dict[str, Any], *, plain_keys: bool = False) -> Translation:
    """One tenant for each allowed key, in the group of keys.

    1. A key without a weight has no weight here either, and so the default, which is 10 as in Alpa.
    2. A weight of 0, which crashed Alpa when the key was used, is refused as all weights of 0 are.
    3. A weight of a key that is not allowed has no meaning; it is told and passed over.
    4. The file does not say whether requests without a key are served. Alpa does, unless told not to.
    5. A captcha is not verified here, so nothing comes into the group `web` by it.

    Keys are written as digests, or plain with `plain_keys` where that can be read back as the same key.
    """
    said = Translation("alpa")
    _tell_unknown(said, value)
    keys = _list_of(said, value, "allowed_api_keys", "the keys that may call")
    weights = value.get("api_key_weights", {})
    if not isinstance(weights, dict):
        said.wrong(("api_key_weights",), 'must be a mapping of keys to weights, such as {"KEY": 30}')
        weights = {}
    said.options = {
        "auth": {"anonymous": True},
        "scheduling": {
            "tiers": (
                {
                    "name": "standard",
                    "groups": tuple({"name": name, "weight": weight} for name, weight in _ALPA_GROUPS),
                },
            )
        },
    }
    tenants = tuple(_tenants_of_keys(said, keys, weights, plain_keys))
    if tenants:
        said.options["tenants"] = tenants
    _tell_unused(said, value, keys, weights)
    return said


def _tenants_of_keys(
    said: Translation, keys: list[Any], weights: dict[str, Any], plain_keys: bool
) -> Iterator[dict[str, Any]]:
    first: dict[str, int] = {}
    again: list[int] = []
    names: set[str] = set()
    for index, key in enumerate(keys):
        place: Location = ("allowed_api_keys", index)
        if not isinstance(key, str) or not key:
            said.wrong(place, "must not be empty" if key == "" else "must be text; put it in quotes")
            continue
        if key in first:
            again.append(index)
            continue
        first[key] = index
        digest = hashlib.sha256(key.encode()).hexdigest()
        tenant: dict[str, Any] = {"name": _name_of_key(digest, names)}
        origin: Location = ("tenants", len(names) - 1)
        said.origins[origin] = place
        if key in weights:
            tenant["weight"] = weights[key]
            said.origins[*origin, "weight"] = ("api_key_weights", key)
        is_plain = plain_keys and re.fullmatch(r"[!-~]+", key) and not key.startswith("sha256:")
        tenant["keys"] = (key if is_plain else f"sha256:{digest}",)
        yield tenant
    if again:
        # As harmless as it was: the list says who may call, and says it twice.
        others = f", and so are {len(again) - 1} others" if len(again) > 1 else ""
        before = f"allowed_api_keys[{first[keys[again[0]]]}]"
        said.warn(("allowed_api_keys", again[0]), f"is given before ({before}){others}; keep one of each")


def _name_of_key(digest: str, names: set[str]) -> str:
    """`key-` and the first digits of its digest that no other key has."""
    digits = _DIGITS
    while (name := f"key-{digest[:digits]}") in names:
        digits += 1
    names.add(name)
    return name


def _tell_unused(said: Translation, value: dict[str, Any], keys: list[Any], weights: dict[str, Any]) -> None:
    allowed = {key for key in keys if isinstance(key, str)}
    unused = [key for key in weights if key not in allowed]
    if unused:
        count = "a key that is" if len(unused) == 1 else f"{len(unused)} keys that are"
        said.warn(
            ("api_key_weights", unused[0]),
            f"is the weight of {count} not in allowed_api_keys, and not used; add the key there or remove the weight",
        )
    captcha = next((name for name in ("RECAPTCHA_SECRET_KEY", "RECAPTCHA_SITE_KEY") if name in value), None)
    if captcha:
        said.warn((captcha,), "is not used: captchas are not verified here, and no request counts as 'web' by one")
    said.warn(
        (),
        "requests without a key are served too, as Alpa does unless it is started with --block-non-key-access; "
        "EVENFLOW_AUTH_ANONYMOUS=false refuses them, true stops this message",
        about=("auth", "anonymous"),
    )


# ----------------------------------------------------------------------------------------------------
# LMDeploy


def from_lmdeploy(value: dict[str, Any]) -> Translation:
    """One strict tier for each group of users, in their order, and in it one tenant for each user.

    1. With `enable_user_qos` off or missing LMDeploy reads nothing else, and all requests are equal.
    2. Shares in a group go by quota_pct. Quota 0 is the background; LMDeploy served it first, or failed.
    3. A user that is not listed, or a request without one, belongs to the third group of the map, as in LMDeploy;
       with fewer than three, where LMDeploy failed, to the last of `user_groups`. There they share the entry
       `default`; without one, which failed too, they are in the background.
    4. Entries `default` of other groups are reached by nobody, and left out.
    5. A group in only one of `user_groups` and `user_group_map` failed when it was needed; it is refused.
    """
    said = Translation("lmdeploy")
    _tell_unknown(said, value)
    if not _is_enabled(said, value):  # (1)
        said.options = {"auth": {"anonymous": True}}
        return said
    order = _group_names(said, _list_of(said, value, "user_groups", "the groups in the order of their priority"))
    users = value.get("user_group_map")
    if not isinstance(users, dict):
        message = "is required" if users is None else "must be a mapping"
        said.wrong(("user_group_map",), f"{message}: each group with the list of its users")
        return said
    _match_groups(said, order, users)
    if not order:
        if not said.problems:
            said.wrong(("user_groups",), "must not be empty; set enable_user_qos to false to serve all alike")
        return said
    default_group = list(users)[_DEFAULT_GROUP_INDEX] if len(users) > _DEFAULT_GROUP_INDEX else order[-1]
    if default_group not in order:
        default_group = order[-1]  # A mistake that has been told; the rest is looked through all the same.
    said.options = {
        "auth": {"anonymous": True, "trust_user_id": True, "default_user": DEFAULT_USER},
        "scheduling": {"tiers": tuple({"name": name, "groups": ({"name": name},)} for name in order)},
        "tenants": tuple(_tenants_of_users(said, order, users, default_group)),
    }
    return said


def _is_enabled(said: Translation, value: dict[str, Any]) -> bool:
    enabled = value.get("enable_user_qos", False)
    if enabled not in (True, False):  # 1 and 0 too
        said.wrong(("enable_user_qos",), "must be true or false")
        return True
    if not enabled:
        is_missing = "enable_user_qos" not in value
        said.warn(
            () if is_missing else ("enable_user_qos",),
            f"{'enable_user_qos is missing' if is_missing else 'is off'}, so nothing else of this file is used and "
            "all requests are equal, as in LMDeploy; set it to true",
        )
    return bool(enabled)


def _group_names(said: Translation, groups: list[Any]) -> list[str]:
    order: dict[str, int] = {}
    for index, name in enumerate(groups):
        if not isinstance(name, str):
            said.wrong(("user_groups", index), "must be text; put it in quotes")
        elif name in order:
            said.wrong(("user_groups", index), f"is given before (user_groups[{order[name]}]); remove one of them")
        else:
            order[name] = index
            tier: Location = ("scheduling", "tiers", len(order) - 1)
            said.origins[tier] = ("user_groups", index)
    return list(order)


def _match_groups(said: Translation, order: list[str], users: dict[str, Any]) -> None:
    known = set(order)
    for index, name in enumerate(order):
        if name not in users:
            place = said.origins["scheduling", "tiers", index]
            hint = _nearest(name, [other for other in users if other not in known])
            said.wrong(place, f"'{_shown_group(name)}' is not in user_group_map{hint or '; add it there'}")
    for name in users:
        if name not in known:
            message = "is not in user_groups, so it has no place in their order"
            said.wrong(("user_group_map", name), f"{message}{_nearest(name, order) or '; add it there'}")


def _nearest(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names, n=1) if len(names) <= _NAMES_COMPARED_MAX else []
    return f", did you mean {_shown_group(near[0])!r}?" if near else ""


def _tenants_of_users(
    said: Translation, order: list[str], users: dict[str, Any], default_group: str
) -> Iterator[dict[str, Any]]:
    first: dict[str, Location] = {}
    for tier, group in enumerate(order):
        for at, user_id, quota in _users(said, ("user_group_map", group), users.get(group, [])):
            if user_id == DEFAULT_USER and group != default_group:  # (4)
                if quota:
                    where = f"in the group '{_shown_group(default_group)}' only"
                    said.warn(at, f"has no effect: users that are not listed are {where}")
                continue
            if user_id in first:
                said.wrong((*at, "id"), f"is given before ({_label(first[user_id])}); a user is in one group, once")
                continue
            tenant: Location = ("tenants", len(first))
            first[user_id] = at
            said.origins[tenant] = (*at, "id")
            said.origins[*tenant, "weight"] = (*at, "quota_pct")
            said.origins[*tenant, "group"] = said.origins["scheduling", "tiers", tier]
            yield _user(user_id, group, quota)
    if DEFAULT_USER not in first:  # (3)
        place: Location = ("user_group_map", default_group)
        said.warn(
            place,
            f"has no entry '{DEFAULT_USER}', so users that are not listed are served only while nobody else of this "
            f'group waits; add {{"id": "{DEFAULT_USER}", "quota_pct": 5}} with their share',
        )
        said.origins["tenants", len(first)] = place
        yield _user(DEFAULT_USER, default_group, 0)


def _user(user_id: str, group: str, quota: Any) -> dict[str, Any]:
    share = {"weight": quota} if quota else {"background": True}  # (2)
    return {"name": user_id, "group": group, **share}


def _users(said: Translation, place: Location, entries: Any) -> Iterator[tuple[Location, str, Any]]:
    """The place, id and quota of each entry of a group that is right by itself."""
    if not isinstance(entries, list):
        said.wrong(place, 'must be a list of users, such as [{"id": "alice", "quota_pct": 100}]')
        return
    quotas: list[float] = []
    unknown: dict[str, Location] = {}
    has_default = False
    for index, entry in enumerate(entries):
        at: Location = (*place, index)
        if not isinstance(entry, dict):
            said.wrong(at, 'must be a user, such as {"id": "alice", "quota_pct": 100}')
            continue
        for name in entry:
            if name not in _USER_NAMES:
                unknown.setdefault(name, (*at, name))
        user_id, quota = entry.get("id"), entry.get("quota_pct")
        mistake = _quota_mistake(entry)
        if mistake:
            said.wrong((*at, "quota_pct"), mistake)
        elif quota is not None:
            quotas.append(quota)
        if not isinstance(user_id, str):
            said.wrong((*at, "id"), "must be text; put it in quotes" if "id" in entry else "is required")
        elif user_id == DEFAULT_USER and has_default:
            said.wrong((*at, "id"), f"is given before in this group; give '{DEFAULT_USER}' one quota")
        elif not mistake:
            has_default = has_default or user_id == DEFAULT_USER
            yield at, user_id, quota
    for name, at in unknown.items():
        said.warn(at, f"is not read: a user has {' and '.join(_USER_NAMES)}{did_you_mean(name, _USER_NAMES)}")
    if len(quotas) == len(entries) > 1:
        _check_sum(said, place, fsum(quotas))


def _quota_mistake(entry: dict[str, Any]) -> str:
    quota = entry.get("quota_pct")
    if "quota_pct" not in entry:
        return "is required: the user's part of its group in per cent"
    if isinstance(quota, str):
        return "must be a number from 0 to 100, is text"
    if isinstance(quota, bool) or not isinstance(quota, int | float):
        return "must be a number from 0 to 100"
    if 0 <= quota <= _PER_CENT:
        return ""
    shown = f", is {quota}" if len(str(quota)) <= _DIGITS_SHOWN_MAX else ""
    return f"must be a number from 0 to 100{shown}"


def _check_sum(said: Translation, place: Location, total: float) -> None:
    if total > _PER_CENT + _SUM_TOLERANCE:
        said.wrong(place, f"its quotas add up to {total:g} per cent; make them add up to 100")
    elif not total:
        said.warn(place, "has no quota but 0, so its users are served in the order of their requests")
    elif total < _PER_CENT - _SUM_TOLERANCE:
        said.warn(place, f"its quotas add up to {total:g} per cent, not 100; shares go by their ratio")


# ----------------------------------------------------------------------------------------------------
# Both


def _tell_unknown(said: Translation, value: dict[str, Any]) -> None:
    known = _NAMES[said.kind]
    for name in value:
        if name in known:
            continue
        if name in Settings.model_fields:
            said.wrong(
                (name,),
                f"is an option of Evenflow, but this is {TITLES[said.kind]}; print its equivalent by "
                f"`evenflow import {said.kind}` and add the option to that",
            )
        else:
            said.warn((name,), f"is not read: {TITLES[said.kind]} has no such field{did_you_mean(name, known)}")


def _list_of(said: Translation, value: dict[str, Any], name: str, what: str) -> list[Any]:
    items = value.get(name)
    if isinstance(items, list):
        return items
    said.wrong((name,), f"{'must be a list' if name in value else 'is required'}: {what}")
    return []


def _label(place: Location) -> str:
    """A place of the file in words. A name that may be a key, or that cannot be printed, is cut short."""
    if place[:1] == ("user_group_map",) and len(place) > 1:
        return dotted(("user_group_map", _shown_group(str(place[1])), *map(_shown, place[2:])))
    return dotted(tuple(map(_shown, place)))


def _shown_group(name: str) -> str:
    if name.isprintable() and len(name) <= _GROUP_SHOWN_MAX:
        return name
    return f"{ascii(name[:_GROUP_SHOWN_MAX])[1:-1]}…"


def _shown(part: str | int) -> str | int:
    return shown_name(part) if isinstance(part, str) and part not in _ALL_NAMES else part


class Places:
    """Where in the older file an option came from. Looks at the text only when somebody asks."""

    __slots__ = ("file", "said", "text", "weights")

    def __init__(self, file: str, said: Translation, text: JsonText) -> None:
        self.file = file
        self.said = said
        self.text = text
        # The number of each key's weight in the file, by which it is called in place of the key.
        self.weights: dict[str, int] = {}

    def of_option(self, location: Location) -> Place | None:
        if not location:
            return Place(self.file)
        for length in range(len(location), 0, -1):
            origin = self.said.origins.get(location[:length])
            if origin is not None:
                return Place(self.file, self.line(origin), self.label(origin), is_whole=True)
        return None

    def line(self, place: Location) -> int:
        """The line of a place, or of the nearest one around it; 0 for none."""
        if not place:
            return 0
        lines = self.text.lines
        return next((lines[place[:length]] for length in range(len(place), 0, -1) if place[:length] in lines), 0)

    def label(self, place: Location) -> str:
        if place[:1] != ("api_key_weights",) or len(place) == 1:
            return _label(place)
        weights = self.text.value["api_key_weights"]
        if not self.weights and isinstance(weights, dict):
            self.weights = {key: number for number, key in enumerate(weights, 1)}
        number = self.weights.get(str(place[1]))  # None where the whole field is given twice
        return f"api_key_weights (entry {number})" if number else "api_key_weights"

    def problem(self, place: Location, message: str) -> Problem:
        return Problem(self.file, self.line(place), self.label(place), message)


def read(document: Document, text: str) -> Document | None:
    """Fills a document from the text of an older file. None, and the document as it was, for any other text."""
    if not text.lstrip("\ufeff \t\r\n").startswith("{") or not _MARK.search(text):
        return None
    try:
        parsed = read_json(text)
    except NotJson as error:
        document.problems.append(Problem(document.file, error.line, "", error.message))
        return document
    kind = recognise(parsed.value)
    if kind is None:
        return None
    said = translate(parsed.value, kind)
    document.values = said.options
    places = Places(document.file, said, parsed)
    document.elsewhere = places.of_option
    for again in parsed.twice:
        message = f"is given twice, first in line {again.first_line}"
        document.problems.append(Problem(document.file, again.line, places.label(again.location), message))
    document.problems.extend(places.problem(place, message) for place, message in said.problems)
    document.warnings.extend((about, places.problem(place, message)) for about, place, message in said.warnings)
    return document

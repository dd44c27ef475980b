"""Every option, once: its type, default, limits and a sentence with its unit.

The models check what a user typed and are, once checked, the frozen settings that components receive: each
gets its own group and no more. Flags, environment names, `--help` and the reference page derive from the
fields here. Keys are digests and credentials are `Secret` from the first moment; neither appears in a repr
or an error.
"""

import re
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, PrivateAttr, model_validator

from evenflow.config.document import Written, plain_value
from evenflow.config.problems import did_you_mean
from evenflow.config.secrets import Secret, read_credential, read_key
from evenflow.policy.placement import PLACEMENTS, PlacementError, placement_named

ANONYMOUS_GROUP: Final = "anonymous"
DEFAULT_GROUP: Final = "keys"
DEFAULT_WEIGHT: Final = 10.0
# Slots of a worker of which nothing is known, and the most that can be configured.
DEFAULT_SLOTS: Final = 32
SLOTS_LIMIT: Final = 100_000
# Weights further apart than this would lose their ratio in the arithmetic of the queue.
WEIGHT_MIN: Final = 1e-6
WEIGHT_MAX: Final = 1e6

_LABEL = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?")
_HEADER_SAFE = re.compile(r"[!-~]+")
_DATABASES = ("sqlite", "postgresql")


# ----------------------------------------------------------------------------------------------------
# The types of single values. Strict, except where the source has no types: "10" is no number.


def _untyped(value: Any) -> Any:
    return plain_value(value) if isinstance(value, Written) else value


def _untyped_list(value: Any) -> Any:
    if isinstance(value, Written):
        return tuple(Written(part.strip()) for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


def _key(value: Any) -> Any:
    # Digests pass, so that settings can be built in code without plain keys.
    if isinstance(value, bytes) and len(value) == 32:
        return value
    if not isinstance(value, str):
        raise ValueError("must be text; put it in quotes")
    return read_key(value)


def _secret(value: Any) -> Any:
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ValueError("must be text; put it in quotes")
    return Secret(read_credential(value))


def _label(value: Any) -> Any:
    if isinstance(value, str) and not (len(value) <= 128 and _LABEL.fullmatch(value)):
        raise ValueError("must have 1 to 128 characters, no line ends and no space at its ends")
    return value


def _worker_name(value: Any) -> Any:
    if isinstance(value, str) and not (len(value) <= 128 and _HEADER_SAFE.fullmatch(value)):
        raise ValueError("must have 1 to 128 visible ASCII characters without spaces: it is sent in a header")
    return value


def _slots(value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return "auto"
    value = _untyped(value)
    if value is not None and (type(value) is not int or not 1 <= value <= SLOTS_LIMIT):
        raise ValueError(f"must be a whole number from 1 to {SLOTS_LIMIT:,}, or auto")
    return value


def worker_url(value: Any) -> Any:
    """A worker's URL without its trailing slash or /v1. Messages never show it: it may hold a password."""
    if not isinstance(value, str):
        return value
    if not re.match(r"https?://", value, re.IGNORECASE):
        raise ValueError("must start with http:// or https://, such as http://127.0.0.1:9001")
    try:
        parts = urlsplit(value)
        host, _port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("is no valid URL; write it such as http://127.0.0.1:9001") from None
    if not host or not _HEADER_SAFE.fullmatch(value) or _port == 0:
        raise ValueError("is no valid URL; write it such as http://127.0.0.1:9001")
    if parts.username is not None:
        raise ValueError("holds a user or password; put the worker's credential in api_key")
    if "?" in value or "#" in value:
        raise ValueError("may not have a query or fragment; put the worker's credential in api_key")
    if parts.path.rstrip("/") not in ("", "/v1"):
        raise ValueError(
            "may not have a path: requests go to /v1/... of the host, so end the URL after the port"
        )
    return f"{parts.scheme.lower()}://{parts.netloc.lower()}"


def _origin(value: Any) -> Any:
    if (
        isinstance(value, str)
        and value != "*"
        and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[!-.0-~]+|null", value)
    ):
        raise ValueError("must be '*' or an origin such as https://app.example.org, without a path")
    return value


def _placement(value: Any) -> Any:
    if isinstance(value, str):
        try:
            placement_named(value)
        except PlacementError as error:
            near = did_you_mean(value, PLACEMENTS) if ":" not in value else ""
            raise ValueError(f"{error}{near if near.endswith('?') else ''}") from None
    return value


def _database(value: Any) -> Any:
    if isinstance(value, str) and value.partition("://")[0].partition("+")[0] not in _DATABASES:
        raise ValueError("must start with sqlite:// or postgresql://, such as sqlite:///evenflow.db")
    return value


Text = Annotated[str, Field(strict=True)]
Label = Annotated[str, BeforeValidator(_label), Field(strict=True)]
WorkerName = Annotated[str, BeforeValidator(_worker_name), Field(strict=True)]
WorkerUrl = Annotated[str, BeforeValidator(worker_url), Field(strict=True)]
Origin = Annotated[str, BeforeValidator(_origin), Field(strict=True)]
PlacementName = Annotated[str, BeforeValidator(_placement), Field(strict=True)]
DatabaseUrl = Annotated[str, BeforeValidator(_database), Field(strict=True)]
Toggle = Annotated[bool, BeforeValidator(_untyped), Field(strict=True)]
Count = Annotated[int, BeforeValidator(_untyped), Field(strict=True, ge=1, le=2**53)]
Slots = Annotated[int | Literal["auto"] | None, BeforeValidator(_slots)]
Port = Annotated[int, BeforeValidator(_untyped), Field(strict=True, ge=0, le=65535)]
Seconds = Annotated[
    float, BeforeValidator(_untyped), Field(strict=True, gt=0, le=604_800, allow_inf_nan=False)
]
Share = Annotated[float, BeforeValidator(_untyped), Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Weight = Annotated[
    float, BeforeValidator(_untyped), Field(strict=True, ge=WEIGHT_MIN, le=WEIGHT_MAX, allow_inf_nan=False)
]
TokenCost = Annotated[
    float, BeforeValidator(_untyped), Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)
]
KeyDigest = Annotated[bytes, BeforeValidator(_key)]
Credential = Annotated[InstanceOf[Secret], BeforeValidator(_secret)]
_AsTuple = BeforeValidator(_untyped_list)


class _Group(BaseModel):
    """Frozen, and strict about names: an option that does not exist is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


# ----------------------------------------------------------------------------------------------------
# The groups


class ListenSettings(_Group):
    """Where the gateway listens, and how it stops."""

    host: Text = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on; 0.0.0.0 for every one.",
        json_schema_extra={"flag": "--host"},
    )
    port: Port = Field(
        default=8000,
        description="Port to listen on; 0 takes a free one and prints it.",
        json_schema_extra={"flag": "--port"},
    )
    header_bytes: Count = Field(
        default=65536,
        ge=1024,
        description="Largest head of a request, in bytes; a larger one is answered with 431.",
    )
    drain_s: Seconds = Field(
        default=30.0,
        description="Seconds that running requests get to finish when the gateway is asked to stop.",
    )
    cors_origins: Annotated[tuple[Origin, ...], _AsTuple] = Field(
        default=("*",), description="Origins whose web pages may call the gateway; an empty list allows none."
    )


class AuthSettings(_Group):
    """Who may call."""

    anonymous: Toggle = Field(
        default=True,
        description="Whether requests without a key are served, in the group 'anonymous'; else they get 401.",
        json_schema_extra={"default_text": "true only while no tenant is configured"},
    )
    admin_keys: Annotated[tuple[KeyDigest, ...], _AsTuple] = Field(
        default=(),
        repr=False,
        description="Keys for the admin API, the dashboard and /metrics; without one these answer on "
        "loopback only. Each plain or as `sha256:<hex>`.",
    )
    worker_token: KeyDigest | None = Field(
        default=None,
        repr=False,
        description="Token asked of workers that register themselves, plain or as `sha256:<hex>`.",
    )
    trust_user_id: Toggle = Field(
        default=False,
        description="Whether the `user_id` (or `user`) in the body of a request without a key is taken as the name of "
        "its tenant, one that has no keys. Only behind a front end that sets it: anyone can claim any name. Without "
        "it a user_id is a label and nothing else.",
    )
    default_user: Label | None = Field(
        default=None,
        description="Tenant of the requests without a key that have no user_id, or one that names no tenant; needs "
        "`trust_user_id`.",
        json_schema_extra={"default_text": "none; they are in the group 'anonymous'"},
    )


class WorkerSettings(_Group):
    """An engine that answers requests."""

    url: WorkerUrl = Field(description="Where the worker listens, such as http://127.0.0.1:9001.")
    name: WorkerName = Field(
        default="",
        description="Name in logs, metrics and the header x-evenflow-worker.",
        json_schema_extra={"default_text": "host:port of the url"},
    )
    models: Annotated[tuple[Text, ...] | None, _AsTuple] = Field(
        default=None,
        min_length=1,
        description="Models that it serves.",
        json_schema_extra={"default_text": "read from the worker's /v1/models"},
    )
    slots: Slots = Field(
        default=None,
        description="Sequences that it runs at once; the rest wait here, where they are scheduled. `auto` starts at "
        f"{DEFAULT_SLOTS} and learns from the worker's own queue, or from its time to first token.",
        json_schema_extra={
            "default_text": f"learned from the worker's /metrics where it tells its queue, else {DEFAULT_SLOTS}"
        },
    )
    n_max: Count | None = Field(
        default=None,
        description="Most choices that it makes of one request; calls for more are split into several "
        "requests. 1 for an engine that ignores `n`.",
        json_schema_extra={"default_text": "known by the kind of engine, or seen at its first answer"},
    )
    speed: Weight = Field(
        default=1.0, description="Speed relative to the other workers; 2 is twice as fast as 1."
    )
    api_key: Credential | None = Field(
        default=None,
        description="Credential sent to the worker as Authorization: Bearer; a caller's key never is.",
    )
    aliases: dict[Text, Text] = Field(
        default_factory=dict,
        description="Further model names that callers may use, each with the model it stands for.",
    )

    @property
    def parts(self) -> SplitResult:
        """The URL in parts: scheme, hostname, port."""
        return urlsplit(self.url)

    @model_validator(mode="before")
    @classmethod
    def _named_by_address(cls, typed: Any) -> Any:
        if isinstance(typed, dict) and isinstance(typed.get("url"), str) and "name" not in typed:
            try:
                return {**typed, "name": address_of(worker_url(typed["url"]))}
            except ValueError:
                return typed
        return typed


class GroupSettings(_Group):
    """Tenants that share one part of a tier."""

    name: Label = Field(description="Name of the group; tenants refer to it.")
    weight: Weight = Field(default=DEFAULT_WEIGHT, description="Share against the other groups of its tier.")


class TierSettings(_Group):
    """Groups that are served before every tier listed below."""

    name: Label = Field(description="Name of the tier; x-evenflow-tier refers to it.")
    min_share: Share = Field(
        default=0.0,
        description="Part of the capacity (0 to 1) that it gets even while higher tiers wait; 0 is strict.",
    )
    max_wait_s: Seconds | None = Field(
        default=None,
        description="Seconds after which a request that waits in this tier moves up to the next; none waits on.",
    )
    groups: Annotated[tuple[GroupSettings, ...], _AsTuple] = Field(
        min_length=1, description="Groups of this tier, each with a name and a weight."
    )


_STANDARD_TIER: Final = TierSettings(
    name="standard",
    groups=(
        GroupSettings(name="web", weight=300),
        GroupSettings(name=DEFAULT_GROUP, weight=10),
        GroupSettings(name=ANONYMOUS_GROUP, weight=1),
    ),
)


class TokenCostSettings(_Group):
    """What a token costs when shares are measured in tokens."""

    input: TokenCost = Field(default=1.0, description="Cost of a prompt token that must be computed.")
    cached: TokenCost = Field(default=0.1, description="Cost of a prompt token that the worker had in its cache.")
    output: TokenCost = Field(default=2.0, description="Cost of a token of the answer.")


class SchedulingSettings(_Group):
    """Who goes first, and to which worker."""

    cost: Literal["tokens", "sequences"] = Field(
        default="tokens",
        description="What shares are measured in: tokens, or sequences (each of the m·n sequences costs 1).",
    )
    token_cost: TokenCostSettings = Field(
        default=TokenCostSettings(), description="What a token costs when shares are measured in tokens."
    )
    placement: PlacementName = Field(
        default="least_work",
        description="How a worker is chosen: least_work (the least estimated finish; counts prompt caches and speed), "
        "shortest_queue, round_robin, lottery (chances by speed), least_latency, power_of_two (the better of two at "
        "random), sticky (each session to one worker), or package.module:Class of your own.",
    )
    tiers: Annotated[tuple[TierSettings, ...], _AsTuple] = Field(
        default=(_STANDARD_TIER,),
        min_length=1,
        description="Strict tiers, first is highest, each with its groups.",
        json_schema_extra={"default_text": "one tier `standard`: web 300, keys 10, anonymous 1"},
    )


class TenantLimits(_Group):
    """What one tenant may use; nothing given is no limit of its own."""

    requests_per_minute: Count | None = Field(default=None, description="Requests a minute; more get 429.")
    tokens_per_minute: Count | None = Field(
        default=None, description="Tokens a minute, input and output; more get 429."
    )
    concurrency: Count | None = Field(
        default=None, description="Requests that run at once; further ones wait in its queue."
    )
    queued: Count | None = Field(default=None, description="Requests that wait at once; more get 429.")


class TenantSettings(_Group):
    """A caller with keys of its own."""

    name: Label = Field(description="Name of the tenant in logs, usage and the admin API.")
    group: Label = Field(default=DEFAULT_GROUP, description="Group whose share it takes part in.")
    weight: Weight = Field(
        default=DEFAULT_WEIGHT, description="Share against the other tenants of its group."
    )
    background: Toggle = Field(
        default=False,
        description="Whether it is served only while nobody else of its group waits; it has no weight then.",
    )
    keys: Annotated[tuple[KeyDigest, ...], _AsTuple] = Field(
        default=(), repr=False, description="Its API keys, each plain or as `sha256:<hex>`."
    )
    limits: TenantLimits = Field(default=TenantLimits(), description="Limits of this tenant.")
    comments: Toggle = Field(
        default=True,
        description="Whether its waiting streams are sent comment lines (see timeouts.comment_s); false for clients "
        "that cannot bear them.",
    )

    @model_validator(mode="after")
    def _no_weight_in_the_background(self) -> Self:
        # The only way to the weight 0, which means exactly this to the queue.
        if self.background:
            object.__setattr__(self, "weight", 0.0)
        return self


class LimitSettings(_Group):
    """Bounds of the whole gateway."""

    queued: Count = Field(
        default=10_000, description="Requests that wait at once; beyond it the longest queue is cut."
    )
    queued_bytes: Count = Field(
        default=1_073_741_824,
        description="Size of the bodies that wait at once, in bytes; as many bytes again may be on their way in.",
    )
    queue_timeout_s: Seconds = Field(
        default=60.0,
        description="Seconds that a request waits at most before it gets 503; less for a tenant whose queue never "
        "drains.",
    )
    body_bytes: Count = Field(
        default=33_554_432,
        le=2**31,
        description="Largest body of a request, in bytes; a larger one is answered with 413.",
    )
    n: Count = Field(
        default=128, le=100_000, description="Most sequences that one request may ask for, prompts times n."
    )
    connections: Count = Field(
        default=20_000, description="Connections of callers that are open at once; more are closed."
    )


class TimeoutSettings(_Group):
    """How long each step may take; apart, so that a worker that hangs delays nothing else."""

    connect_s: Seconds = Field(default=2.0, description="Seconds for a connection to a worker to open.")
    first_byte_s: Seconds = Field(default=300.0, description="Seconds until a worker begins its answer.")
    idle_s: Seconds = Field(
        default=60.0, description="Seconds between two pieces of an answer that has begun."
    )
    total_s: Seconds = Field(
        default=600.0, description="Seconds for a whole answer, from its dispatch to its last byte."
    )
    header_s: Seconds = Field(default=10.0, description="Seconds for a caller to send the head of a request.")
    body_s: Seconds = Field(default=30.0, description="Seconds for a caller to send the body of a request.")
    keep_alive_s: Seconds = Field(
        default=75.0, description="Seconds that an unused connection of a caller stays open."
    )
    comment_s: Seconds | None = Field(
        default=15.0,
        description="Seconds of silence after which a stream that waits is sent a comment line, so that no proxy on "
        "the way takes it for dead; null for callers that cannot bear comments.",
    )


class FleetSettings(_Group):
    """How workers are watched."""

    heartbeat_expiry_s: Seconds = Field(
        default=90.0,
        description="Seconds without a heartbeat after which a worker that registered itself is not chosen.",
        json_schema_extra={"environment": "FASTCHAT_CONTROLLER_HEART_BEAT_EXPIRATION"},
    )
    heartbeat_interval_s: Seconds = Field(
        default=45.0,
        description="Seconds between the heartbeats that workers are told to send.",
        json_schema_extra={"environment": "FASTCHAT_WORKER_HEART_BEAT_INTERVAL"},
    )
    probe_interval_s: Seconds = Field(
        default=2.0, description="Seconds between two health checks of a worker."
    )
    state: Text | None = Field(
        default=None,
        description="File in which the wanted fleet is kept over a restart: workers that joined or were added, and "
        "what was asked of groups; never what runs.",
        json_schema_extra={"default_text": "none; self-registered workers come back by their next heartbeat"},
    )


class LogSettings(_Group):
    """What is written down. Never a key, never a prompt."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged."
    )
    access: Text = Field(
        default="-",
        min_length=1,
        description="Where the JSON line of each request goes: - (standard output), a file, or off.",
    )


class Settings(_Group):
    """All that is configured. `Settings()` is the configuration of an empty file."""

    listen: ListenSettings = Field(
        default=ListenSettings(), description="Where the gateway listens, and how it stops."
    )
    auth: AuthSettings = Field(default=AuthSettings(), description="Who may call.")
    workers: Annotated[tuple[WorkerSettings, ...], _AsTuple] = Field(
        default=(),
        description="URL of an engine that answers requests; may repeat.",
        json_schema_extra={"flag": "--worker", "metavar": "url"},
    )
    scheduling: SchedulingSettings = Field(
        default=SchedulingSettings(), description="Who goes first, and to which worker."
    )
    tenants: Annotated[tuple[TenantSettings, ...], _AsTuple] = Field(
        default=(), description="Callers with keys of their own."
    )
    limits: LimitSettings = Field(default=LimitSettings(), description="Bounds of the whole gateway.")
    timeouts: TimeoutSettings = Field(default=TimeoutSettings(), description="How long each step may take.")
    fleet: FleetSettings = Field(default=FleetSettings(), description="How workers are watched.")
    database: DatabaseUrl | None = Field(
        default=None,
        repr=False,
        description="Where tenants, keys and usage are kept: sqlite:///evenflow.db or postgresql://…. "
        "Not used yet: usage is kept in memory.",
    )
    log: LogSettings = Field(default=LogSettings(), description="What is written down.")

    # What a user should know at start although nothing is wrong; filled by load().
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._warnings

    @model_validator(mode="after")
    def _anonymous_while_no_tenant(self) -> Self:
        if "anonymous" not in self.auth.model_fields_set and self.auth.anonymous != (not self.tenants):
            auth = self.auth.model_copy(update={"anonymous": not self.tenants})
            object.__setattr__(self, "auth", auth)
        return self


def address_of(url: str) -> str:
    """host:port of a worker's URL, with the port of its scheme when it has none."""
    parts = urlsplit(url)
    if parts.port is not None:
        return parts.netloc
    return f"{parts.netloc.rstrip(':')}:{443 if parts.scheme == 'https' else 80}"

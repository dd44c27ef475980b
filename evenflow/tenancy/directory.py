"""All tenants of the running configuration, found by the hash of a key.

The request path reads only this; it is built from settings and replaced whole by a reload. It holds hashes, never
keys.
"""

import hashlib
import hmac

from evenflow.config import Settings, TenantSettings
from evenflow.policy.fairness import Tenant
from evenflow.policy.limits import TenantLimits
from evenflow.policy.patience import Patience

ANONYMOUS = "anonymous"


class Member(Tenant):
    """A tenant as the request path knows it: its place in the schedule and its limits."""

    __slots__ = ("comments", "limits", "patience", "removed", "tier")

    def __init__(
        self,
        name: str,
        group: str,
        weight: float,
        tier: int,
        *,
        concurrency: int | None = None,
        queued_max: int | None = None,
        limits: TenantLimits | None = None,
        comments: bool = True,
    ) -> None:
        super().__init__(name, group, weight, concurrency=concurrency, queued_max=queued_max)
        self.tier = tier
        # None costs nothing per request; most tenants have no rate limit.
        self.limits = limits
        # Whether its waiting streams are kept alive by comments.
        self.comments = comments
        # From its first request that waited in vain until its queue has run empty; written by enqueue.
        self.patience: Patience | None = None
        # A reload took it away; what it has waiting and running goes on, and is counted.
        self.removed = False

    def configure(self, tenant: TenantSettings, tier: int, now: float) -> None:
        """Takes what is configured, at the start or when it has changed."""
        limits = tenant.limits
        self.removed = False
        self.group, self.weight, self.tier, self.comments = tenant.group, tenant.weight, tier, tenant.comments
        self.concurrency, self.queued_max = limits.concurrency, limits.queued
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        if requests is None and tokens is None:
            self.limits = None
        elif self.limits is None:
            self.limits = TenantLimits(requests, tokens)
        else:
            self.limits.resize(now, requests, tokens)


class Directory:
    """Key digests → tenants, the anonymous tenant if there is one, and the operators' own keys."""

    __slots__ = ("_admin", "_by_digest", "_worker_token", "anonymous", "departed", "members", "open", "users")

    def __init__(self, settings: Settings, earlier: "Directory | None" = None, now: float = 0.0) -> None:
        """With an `earlier` one, tenants of the same name go on as they are: what they run, have waiting and have used
        up of their limits stays counted. `now` is then the time on the clock of their limits, in seconds.
        """
        tier_of = {
            group.name: index
            for index, tier in enumerate(settings.scheduling.tiers)
            for group in tier.groups
        }
        known = {} if earlier is None else {member.name: member for member in earlier.everyone()}
        self.members: list[Member] = []
        self._by_digest: dict[bytes, tuple[bytes, Member]] = {}
        for tenant in settings.tenants:
            member = known.get(tenant.name) or Member(tenant.name, tenant.group, tenant.weight, 0)
            member.configure(tenant, tier_of[tenant.group], now)
            self.members.append(member)
            for digest in tenant.keys:
                self._by_digest[digest] = (digest, member)
        # Tenants by the user_id that is taken for their name; None where a user_id is a label (`auth.trust_user_id`).
        self.users: dict[str, Member] | None = None
        if settings.auth.trust_user_id:
            keyless = {tenant.name for tenant in settings.tenants if not tenant.keys}
            self.users = {member.name: member for member in self.members if member.name in keyless}
        # Where nobody has a key none can be right or wrong: everyone is anonymous, or who their user_id says.
        self.open = settings.auth.anonymous and not (self._by_digest if self.users is not None else settings.tenants)
        self.anonymous: Member | None = None
        default_user = settings.auth.default_user
        if settings.auth.anonymous and self.users is not None and default_user is not None:
            self.anonymous = self.users[default_user]
        elif settings.auth.anonymous:
            group = ANONYMOUS if ANONYMOUS in tier_of else settings.scheduling.tiers[-1].groups[-1].name
            self.anonymous = anonymous = known.get(ANONYMOUS) or Member(ANONYMOUS, group, 10.0, 0)
            anonymous.group, anonymous.tier, anonymous.removed = group, tier_of[group], False
            self.members.append(anonymous)
        # Those that were taken away and still have something waiting or running.
        self.departed: list[Member] = []
        staying = set(self.members)
        for member in known.values():
            if member not in staying:
                member.removed = True
                member.tier = min(member.tier, len(settings.scheduling.tiers) - 1)
                if member.in_flight or member.queued:
                    self.departed.append(member)
        self._admin = settings.auth.admin_keys
        self._worker_token = settings.auth.worker_token

    def everyone(self) -> list[Member]:
        """All that have or may get something waiting or running."""
        return [*self.members, *self.departed]

    @property
    def asks_workers(self) -> bool:
        """Whether a worker must show a token to join: as soon as there is a key of any kind."""
        return bool(self._worker_token or self._admin or self._by_digest) or self.anonymous is None

    @property
    def has_worker_token(self) -> bool:
        return self._worker_token is not None

    @property
    def has_admin(self) -> bool:
        return bool(self._admin)

    def tenant_of(self, key: bytes) -> Member | None:
        """The tenant of a key, None for a key that nobody has.

        The look-up is by SHA-256, so its timing tells nothing of any key; the comparison takes constant time all
        the same.
        """
        digest = hashlib.sha256(key).digest()
        found = self._by_digest.get(digest)
        if found is None or not hmac.compare_digest(found[0], digest):
            return None
        return found[1]

    def is_admin(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        # No early exit: every admin key is compared.
        return sum(hmac.compare_digest(known, digest) for known in self._admin) > 0

    def is_worker_token(self, key: bytes) -> bool:
        token = self._worker_token
        return token is not None and hmac.compare_digest(token, hashlib.sha256(key).digest())

"""Conversations whose history an older service keeps at the server, bounded in every direction.

Each tenant has its own, and none sees another's. What is kept is bounded in sessions and bytes for each tenant and in
bytes for all; the longest unused go first, of the tenant that is over its bound, or of all. Never reads a clock.
"""

from collections import OrderedDict
from typing import Any

SESSIONS_MAX = 1000
TENANT_BYTES_MAX = 16 * 1024 * 1024
BYTES_MAX = 256 * 1024 * 1024
# A session that nobody goes on with is forgotten.
UNUSED_MAX_S = 3600.0


class Session:
    """One conversation so far."""

    __slots__ = ("messages", "size", "tokens", "used_s")

    def __init__(self, messages: list[dict[str, Any]], size: int, tokens: int, used_s: float) -> None:
        self.messages = messages
        # Bytes of its texts, about.
        self.size = size
        # Tokens of the whole conversation, as its engine counted them.
        self.tokens = tokens
        self.used_s = used_s


class Remembered:
    """All sessions, the longest unused first."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, int], Session] = OrderedDict()
        # (sessions, bytes) of each tenant that has any.
        self._held: dict[str, tuple[int, int]] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, tenant: str, number: int, now: float) -> Session | None:
        """A session to go on with."""
        session = self._sessions.get((tenant, number))
        if session is not None and now - session.used_s > UNUSED_MAX_S:
            self.forget(tenant, number)
            return None
        return session

    def keep(self, tenant: str, number: int, session: Session) -> bool:
        """Takes the place of what was kept of it; False for one that is too large to be kept at all."""
        self.forget(tenant, number)
        if session.size > TENANT_BYTES_MAX:
            return False
        self._sessions[tenant, number] = session
        self._count(tenant, 1, session.size)
        while self._over(tenant):
            self._forget_oldest_of(tenant)
        while self.size > BYTES_MAX:
            self.forget(*next(iter(self._sessions)))
        return True

    def forget(self, tenant: str, number: int) -> None:
        session = self._sessions.pop((tenant, number), None)
        if session is not None:
            self._count(tenant, -1, -session.size)

    def each_second(self, now: float) -> None:
        """Forgets what was not used for too long."""
        while self._sessions:
            (tenant, number), session = next(iter(self._sessions.items()))
            if now - session.used_s <= UNUSED_MAX_S:
                break
            self.forget(tenant, number)

    def _over(self, tenant: str) -> bool:
        sessions, size = self._held.get(tenant, (0, 0))
        return sessions > SESSIONS_MAX or size > TENANT_BYTES_MAX

    def _forget_oldest_of(self, tenant: str) -> None:
        self.forget(*next(key for key in self._sessions if key[0] == tenant))

    def _count(self, tenant: str, sessions: int, size: int) -> None:
        held = self._held.get(tenant, (0, 0))
        left = (held[0] + sessions, held[1] + size)
        if left[0]:
            self._held[tenant] = left
        else:
            self._held.pop(tenant, None)
        self.size += size

"""Rate limits of one tenant: requests and tokens per minute, each a bucket that refills evenly.

A request takes from both buckets or from neither. Its tokens are an estimate until it ends: `settle` puts the true
number in its place, `refund` takes the whole reservation back when the request is refused later. Apart from
scheduling: who is within its limits is decided here, whose turn it is elsewhere. Never waits, never reads a clock:
`now` is an argument, in seconds of any clock that does not go backwards.
"""

MINUTE_S = 60.0


class Refused:
    """Why a request may not pass now, and in how many seconds an equal one may."""

    __slots__ = ("retry_after_s", "which")

    def __init__(self, retry_after_s: float, which: str) -> None:
        self.retry_after_s = retry_after_s
        # "requests" or "tokens": the limit that holds longest.
        self.which = which

    def __repr__(self) -> str:
        return f"Refused({self.retry_after_s!r}, {self.which!r})"


class TokenBucket:
    """Holds up to a minute's worth and refills evenly. It may go below zero: what was used is owed."""

    __slots__ = ("_filled_s", "_level", "limit")

    def __init__(self, limit: int) -> None:
        # Units per minute, and the most it holds.
        self.limit = limit
        self._level = float(limit)
        # When `_level` was true.
        self._filled_s: float | None = None

    def level(self, now: float) -> float:
        """Units in it, refilled up to now; below zero what is owed."""
        filled_s = self._filled_s
        if filled_s is None or now > filled_s:
            if filled_s is not None:
                self._level = min(self.limit, self._level + (now - filled_s) * self.limit / MINUTE_S)
            self._filled_s = now
        return self._level

    def wait_s(self, now: float, units: float) -> float:
        """Seconds until so many units can be taken; 0 for now. More than it holds is let through when it is full."""
        missing = min(units, self.limit) - self.level(now)
        if missing <= 0.0 and self.limit:
            return 0.0
        return missing * MINUTE_S / self.limit if self.limit else MINUTE_S

    def add(self, now: float, units: float) -> None:
        """Puts units in, or takes them out when negative, whether it has them or not."""
        self._level = min(self.limit, self.level(now) + units)

    def resize(self, now: float, limit: int) -> None:
        """Another limit holds from now on; what is left of the old one is left in proportion, and a debt stays."""
        level = self.level(now)
        self._level = level * limit / self.limit if level > 0.0 and self.limit else min(level, float(limit))
        self.limit = limit

    def remaining(self, now: float) -> int:
        """Whole units that can be taken now."""
        return max(0, int(self.level(now)))

    def reset_s(self, now: float) -> float:
        """Seconds until it is full."""
        return (self.limit - self.level(now)) * MINUTE_S / self.limit if self.limit else MINUTE_S


class TenantLimits:
    """Both buckets of a tenant; one that is None limits nothing, and has no headers to show."""

    __slots__ = ("requests", "tokens")

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self.requests = None if requests_per_minute is None else TokenBucket(requests_per_minute)
        self.tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute)

    def resize(self, now: float, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """Other limits hold from now on; what was used stays used."""
        self.requests = _resized(self.requests, now, requests_per_minute)
        self.tokens = _resized(self.tokens, now, tokens_per_minute)

    def reserve(self, now: float, tokens: float) -> Refused | None:
        """Takes one request and so many tokens, or nothing and says when to try again."""
        requests_wait_s = self.requests.wait_s(now, 1.0) if self.requests is not None else 0.0
        tokens_wait_s = self.tokens.wait_s(now, tokens) if self.tokens is not None else 0.0
        if requests_wait_s > 0.0 or tokens_wait_s > 0.0:
            if requests_wait_s >= tokens_wait_s:
                return Refused(requests_wait_s, "requests")
            return Refused(tokens_wait_s, "tokens")
        if self.requests is not None:
            self.requests.add(now, -1.0)
        if self.tokens is not None:
            self.tokens.add(now, -tokens)
        return None

    def settle(self, now: float, reserved: float, true: float) -> None:
        """The request has ended: the tokens it really used take the place of those reserved."""
        if self.tokens is not None:
            self.tokens.add(now, reserved - true)

    def refund(self, now: float, reserved: float) -> None:
        """The request was refused after all: gives back all that was reserved for it."""
        if self.requests is not None:
            self.requests.add(now, 1.0)
        if self.tokens is not None:
            self.tokens.add(now, reserved)


def _resized(bucket: TokenBucket | None, now: float, limit: int | None) -> TokenBucket | None:
    if limit is None:
        return None
    if bucket is None:
        return TokenBucket(limit)
    if bucket.limit != limit:
        bucket.resize(now, limit)
    return bucket

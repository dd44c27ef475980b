"""The x-ratelimit headers of OpenAI: what a tenant may ask per minute, what is left of it, and when it is full again.

Pure bytes; the values are those of the tenant's own buckets at the moment the head is written.
"""

from typing import Protocol

# Shorter than this is said in milliseconds, as OpenAI does.
MILLISECONDS_BELOW_S = 1.0
MINUTE_S = 60


class Bucket(Protocol):
    # Units per minute.
    limit: int

    def remaining(self, now: float) -> int: ...
    def reset_s(self, now: float) -> float: ...


class Limits(Protocol):
    """What `policy.limits.TenantLimits` has; a bucket that is None limits nothing, and has no lines."""

    @property
    def requests(self) -> Bucket | None: ...
    @property
    def tokens(self) -> Bucket | None: ...


def rate_limit_lines(limits: Limits, now: float) -> bytes:
    """Header lines for both buckets, each with its line end. `now` in seconds of the buckets' clock."""
    requests, tokens = limits.requests, limits.tokens
    lines = b"" if requests is None else _lines(requests, b"requests", now)
    return lines if tokens is None else lines + _lines(tokens, b"tokens", now)


def _lines(bucket: Bucket, unit: bytes, now: float) -> bytes:
    return b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n" % (
        unit,
        bucket.limit,
        unit,
        bucket.remaining(now),
        unit,
        duration(bucket.reset_s(now)),
    )


def duration(seconds: float) -> bytes:
    """Seconds as OpenAI writes them: 0s, 120ms, 7.5s, 6m0s."""
    if seconds < MILLISECONDS_BELOW_S:
        return b"%dms" % round(seconds * 1e3) if seconds > 0.0 else b"0s"
    tenths = round(seconds * 10)
    minutes, tenths = divmod(tenths, MINUTE_S * 10)
    text = b"%d" % (tenths // 10) if tenths % 10 == 0 else b"%.1f" % (tenths / 10)
    return b"%dm%bs" % (minutes, text) if minutes else text + b"s"

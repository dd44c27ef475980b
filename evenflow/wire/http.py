"""HTTP/1.1 heads as bytes: which headers travel, which are made new on each side, and how a head is written.

Framing and hop-by-hop headers are never relayed in either direction, a caller's credentials never reach a worker,
and a worker's own connection management never reaches a caller. Touches no socket.
"""

import re
from enum import IntEnum
from http import HTTPStatus
from typing import Final

from evenflow.wire.faults import CallerError


class Kind(IntEnum):
    """What the gateway does with a header of a request. A name that is not in the table is forwarded."""

    DROP = 0
    AUTHORIZATION = 1
    API_KEY = 2
    CONNECTION = 3
    CONTENT_LENGTH = 4
    EXPECT = 5
    REQUEST_ID = 6
    ORIGIN = 7
    FORWARDED = 8
    HOST = 9
    TIER = 10
    DEADLINE = 11
    WHY = 12
    SESSION = 13


REQUEST_HEADERS: Final[dict[bytes, Kind]] = {
    b"authorization": Kind.AUTHORIZATION,
    b"x-api-key": Kind.API_KEY,
    b"api-key": Kind.DROP,
    b"cookie": Kind.DROP,
    b"proxy-authorization": Kind.DROP,
    b"proxy-connection": Kind.DROP,
    b"proxy-authenticate": Kind.DROP,
    b"host": Kind.HOST,
    b"connection": Kind.CONNECTION,
    b"keep-alive": Kind.DROP,
    b"te": Kind.DROP,
    b"trailer": Kind.DROP,
    b"transfer-encoding": Kind.DROP,
    b"upgrade": Kind.DROP,
    b"http2-settings": Kind.DROP,
    b"content-length": Kind.CONTENT_LENGTH,
    b"expect": Kind.EXPECT,
    b"x-request-id": Kind.REQUEST_ID,
    b"origin": Kind.ORIGIN,
    b"content-type": Kind.DROP,  # what was decoded is JSON, and is declared so to the worker
    b"referer": Kind.DROP,
    # The bytes of an answer are scanned for usage, so a worker must not compress them.
    b"accept-encoding": Kind.DROP,
    b"x-evenflow-tier": Kind.TIER,
    b"x-evenflow-session": Kind.SESSION,
    b"x-evenflow-deadline-ms": Kind.DEADLINE,
    b"x-evenflow-why": Kind.WHY,
    b"x-forwarded-for": Kind.FORWARDED,
    b"forwarded": Kind.FORWARDED,
}

# Headers of a worker's answer that the gateway writes itself, or that speak of the worker's own connection.
ANSWER_HEADERS_MADE_NEW: Final[frozenset[bytes]] = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"content-length",
        b"upgrade",
        b"x-request-id",
        b"x-evenflow-worker",
        b"x-evenflow-queue-ms",
        b"x-evenflow-why",
        # A worker's limits are on the gateway's credential, not on the caller's.
        b"x-ratelimit-limit-requests",
        b"x-ratelimit-limit-tokens",
        b"x-ratelimit-remaining-requests",
        b"x-ratelimit-remaining-tokens",
        b"x-ratelimit-reset-requests",
        b"x-ratelimit-reset-tokens",
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-expose-headers",
    )
)

STATUS_LINES: Final[dict[int, bytes]] = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode("ascii"))
    for status in HTTPStatus
    if status.value >= 200
}

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

REQUEST_ID_BYTES_MAX: Final = 128


def status_line(status: int) -> bytes:
    """The first line of an answer, also for numbers that the standard does not name."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def request_id_is_sound(value: bytes) -> bool:
    """True when a caller's x-request-id may be echoed: short, visible ASCII, nothing that needs quoting in JSON."""
    return (
        0 < len(value) <= REQUEST_ID_BYTES_MAX
        and value.isascii()
        and value.translate(None, _REQUEST_ID_ALPHABET) == b""
    )


_REQUEST_ID_ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+=@"


def nominated_hop_headers(connection: bytes) -> set[bytes]:
    """The names that a Connection header declares to be of this hop only, lower case."""
    names = {token.strip().lower() for token in connection.split(b",")}
    return names - {b"", b"close", b"keep-alive", b"upgrade"}


def cors_headers(origin: bytes, allowed: frozenset[bytes]) -> bytes:
    """The CORS lines for an answer to a page of `origin`; empty when that origin is not allowed."""
    if b"*" in allowed:
        shown = b"*"
    elif origin in allowed:
        shown = origin
    else:
        return b""
    return (
        b"access-control-allow-origin: %s\r\n"
        b"access-control-expose-headers: x-request-id, x-evenflow-worker, x-evenflow-queue-ms, x-evenflow-why, "
        b"retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
        b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens\r\n"
        b"vary: origin\r\n" % shown
    )


PREFLIGHT: Final = (
    b"access-control-allow-methods: GET, POST, HEAD, OPTIONS\r\n"
    b"access-control-allow-headers: authorization, content-type, x-api-key, x-request-id, traceparent, "
    b"x-evenflow-tier, x-evenflow-session, x-evenflow-deadline-ms, x-evenflow-why, "
    b"openai-organization, openai-project, "
    b"x-stainless-arch, x-stainless-lang, x-stainless-os, x-stainless-package-version, x-stainless-retry-count, "
    b"x-stainless-runtime, x-stainless-runtime-version, x-stainless-timeout, x-stainless-helper-method, "
    b"x-stainless-async, anthropic-version, anthropic-beta\r\n"
    b"access-control-max-age: 86400\r\n"
)


# Headers of one request; more are refused.
HEADERS_MAX: Final = 200
# Digits of a Content-Length; a body of a petabyte is refused by its length before it is refused by its size.
LENGTH_DIGITS_MAX: Final = 15

_LENGTH_LINE = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})\r\n", re.IGNORECASE)


class HeadMemo:
    """Recognises a head that differs from an earlier one in nothing but the number of its Content-Length.

    A connection that is kept sends the same head again and again; reading it once is enough. `match` compares bytes,
    so whatever it accepts was accepted before, in full, by the parser.
    """

    __slots__ = ("after", "before", "digits_at")

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before = before
        self.after = after
        self.digits_at = len(before)

    def match(self, data: bytes) -> int:
        """Where the body begins, if `data` is this head and exactly one whole body; else 0."""
        if not data.startswith(self.before):
            return 0
        start = self.digits_at
        end = data.find(b"\r", start, start + LENGTH_DIGITS_MAX + 1)
        after = self.after
        if end < 0 or not data.startswith(after, end):
            return 0
        digits = data[start:end]
        body_at = end + len(after)
        if digits.isdigit() and int(digits) == len(data) - body_at:
            return body_at
        return 0


def memo_of(data: bytes, head_end: int) -> HeadMemo | None:
    """The memo for the head in the first `head_end` bytes, None when it has not exactly one plain Content-Length."""
    found = _LENGTH_LINE.search(data, 0, head_end)
    if found is None:
        return None
    return HeadMemo(data[: found.start(1)], data[found.end(1) : head_end])


class RequestHead:
    """What a request's head says, in the form in which the stages use it. Never changed once it is read."""

    __slots__ = (
        "api_key",  # of x-api-key, None without one
        "bearer",  # of Authorization: Bearer, None without one
        "content_length",  # -1 without one
        "deadline_s",  # from the whole request on; None without one
        "expects_continue",
        "forward",  # header lines that travel on to the worker, in one piece
        "forwarded",  # a proxy stands between the caller and us
        "http11",
        "keep_alive",  # the caller wants to keep the connection
        "method",
        "origin",  # of a page that asks across sites, None for all others
        "path",
        "query",  # with its leading "?", or empty
        "request_id",  # the caller's own, empty without a sound one
        "session",  # whose requests may go to one worker, empty without one
        "tier",  # name of the tier that the caller wants to be lowered to, empty without one
        "why",  # the caller wants to be told what it waited for
    )

    def __init__(self, method: bytes, path: bytes, query: bytes, *, http11: bool, keep_alive: bool) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.http11 = http11
        self.keep_alive = keep_alive
        self.forward = b""
        self.bearer: bytes | None = None
        self.api_key: bytes | None = None
        self.origin: bytes | None = None
        self.forwarded = False
        self.request_id = b""
        self.content_length = -1
        self.expects_continue = False
        self.tier = ""
        self.deadline_s: float | None = None
        self.why = False
        self.session = ""

    def read_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Sorts the headers into what travels on and what the gateway itself must know. Raises CallerError."""
        forward: list[tuple[bytes, bytes]] = []
        hops: set[bytes] = set()
        for name, value in headers:
            lower = name.lower()
            kind = REQUEST_HEADERS.get(lower)
            if kind is None:
                forward.append((lower, value))
            elif kind is Kind.AUTHORIZATION:
                self.bearer = _agreeing(self.bearer, bearer_key(value))
            elif kind is Kind.API_KEY:
                self.api_key = _agreeing(self.api_key, value)
            elif kind is Kind.CONTENT_LENGTH:
                # The parser has seen to it that these are digits; their number is bounded here.
                self.content_length = int(value) if len(value) <= LENGTH_DIGITS_MAX else 10**LENGTH_DIGITS_MAX
            elif kind is Kind.REQUEST_ID:
                self.request_id = value if request_id_is_sound(value) else b""
            elif kind is Kind.EXPECT:
                self.expects_continue = value.lower() == b"100-continue"
            elif kind is Kind.ORIGIN:
                self.origin = value
            elif kind is Kind.FORWARDED:
                self.forwarded = True
                forward.append((lower, value))
            elif kind is Kind.CONNECTION:
                hops |= nominated_hop_headers(value)
            elif kind is Kind.TIER:
                self.tier = value.decode("utf-8", "replace")
            elif kind is Kind.SESSION:
                self.session = value.decode("utf-8", "replace")
            elif kind is Kind.DEADLINE:
                self.deadline_s = deadline_s(value)
            elif kind is Kind.WHY:
                self.why = value not in (b"0", b"false", b"")
        self.forward = b"".join([b"%b: %b\r\n" % pair for pair in forward if pair[0] not in hops])
        if len(headers) > HEADERS_MAX:
            raise CallerError(f"More than {HEADERS_MAX} headers. Send fewer.", status=431)
        if self.bearer is not None and self.api_key is not None and self.bearer != self.api_key:
            raise two_keys()


def bearer_key(value: bytes) -> bytes:
    """The key of an Authorization header; another scheme than Bearer carries none that could be right."""
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else value


def deadline_s(value: bytes) -> float:
    """Seconds of an x-evenflow-deadline-ms header: a whole number of milliseconds, more than 0."""
    if not value.isdigit() or len(value) > LENGTH_DIGITS_MAX or not int(value):
        raise CallerError(
            "The header x-evenflow-deadline-ms must be a whole number of milliseconds, more than 0. Send for how long "
            "the answer may wait for its turn, such as 5000.",
            param="x-evenflow-deadline-ms",
        )
    return int(value) / 1e3


def _agreeing(earlier: bytes | None, value: bytes) -> bytes:
    if earlier is not None and earlier != value:
        raise two_keys()
    return value


def two_keys() -> CallerError:
    return CallerError(
        "The request carries two keys that differ. Send one of 'Authorization', 'x-api-key' and 'api_key'."
    )


class AnswerHead:
    """What the head of a worker's answer says. Never changed once it is read."""

    __slots__ = ("content_type", "keep_alive", "length", "start", "status", "until_end")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], *, keep_alive: bool) -> None:
        self.status = status
        self.content_type = b""
        # Of the body, -1 when the head does not say.
        self.length = -1
        chunked = False
        lines = [status_line(status)]
        hops: set[bytes] = set()
        for name, value in headers:
            if name.lower() == b"connection":
                hops |= nominated_hop_headers(value)
        for name, value in headers:
            lower = name.lower()
            if lower in ANSWER_HEADERS_MADE_NEW:
                if lower == b"content-length":
                    self.length = int(value)
                elif lower == b"transfer-encoding":
                    chunked = True
            elif lower not in hops:
                if lower == b"content-type":
                    self.content_type = value.lower()
                lines.append(b"%b: %b\r\n" % (name, value))
        # The first line and the headers that travel on to the caller.
        self.start = b"".join(lines)
        # The end of the connection is the end of the answer.
        self.until_end = self.length < 0 and not chunked and status not in (204, 304)
        # The worker lets us use the connection again.
        self.keep_alive = keep_alive and not self.until_end

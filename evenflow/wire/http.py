"""HTTP/1.1 heads as bytes: which headers travel, which are made new on each side, and how a head is written.

Framing and hop-by-hop headers are never relayed in either direction, a caller's credentials never reach a worker,
and a worker's own connection management never reaches a caller. Touches no socket.
"""

from enum import IntEnum
from http import HTTPStatus
from typing import Final


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
    b"referer": Kind.DROP,
    # The bytes of an answer are scanned for usage, so a worker must not compress them.
    b"accept-encoding": Kind.DROP,
    b"x-evenflow-tier": Kind.DROP,
    b"x-evenflow-session": Kind.DROP,
    b"x-evenflow-deadline-ms": Kind.DROP,
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
        b"access-control-expose-headers: x-request-id, x-evenflow-worker, x-evenflow-queue-ms, retry-after\r\n"
        b"vary: origin\r\n" % shown
    )


PREFLIGHT: Final = (
    b"access-control-allow-methods: GET, POST, HEAD, OPTIONS\r\n"
    b"access-control-allow-headers: authorization, content-type, x-api-key, x-request-id, traceparent, "
    b"x-evenflow-tier, x-evenflow-session, x-evenflow-deadline-ms, openai-organization, openai-project, "
    b"x-stainless-arch, x-stainless-lang, x-stainless-os, x-stainless-package-version, x-stainless-retry-count, "
    b"x-stainless-runtime, x-stainless-runtime-version, x-stainless-timeout, x-stainless-helper-method, "
    b"x-stainless-async, anthropic-version, anthropic-beta\r\n"
    b"access-control-max-age: 86400\r\n"
)

"""What can go wrong with a request, split by whose fault it is, and how a caller is told.

    Fault
    ├── CallerError     4xx: the request itself; sending it again unchanged will not help
    ├── OverloadError   429, 503: nothing is wrong with the request; it says when to try again
    └── WorkerError     502, 504: a worker failed; knows whether another worker may be tried

Our own bugs are no Fault: they are answered with a plain 500 by the edge of the connection and logged.
Every message ends in the next step. No message ever holds a key or a prompt.
"""

import math

import msgspec


class Fault(Exception):
    """A failure that has a place in the OpenAI error shape."""

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        # Seconds after which trying again makes sense; becomes the Retry-After header.
        self.retry_after_s: float | None = None
        # Methods that the path does take; becomes the Allow header of a 405.
        self.allow: str | None = None


class CallerError(Fault):
    """The request is wrong, and stays wrong however often it is sent."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_request_error",
        status: int = 400,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.type = "invalid_request_error"
        self.code = code


class OverloadError(Fault):
    """The request is fine, but there is no room for it now."""

    def __init__(self, message: str, *, status: int, code: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.status = status
        self.type = "rate_limit_error" if status == 429 else "overloaded_error"
        self.code = code
        self.retry_after_s = retry_after_s


class WorkerError(Fault):
    """A worker failed. `retry_safe` says that it cannot have begun the work."""

    def __init__(
        self, message: str, *, status: int = 502, code: str = "upstream_error", retry_safe: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = "upstream_error"
        self.code = code
        self.retry_safe = retry_safe


def error_body(fault: Fault) -> bytes:
    """The fault as an OpenAI error object, JSON bytes."""
    return msgspec.json.encode(
        {"error": {"message": fault.message, "type": fault.type, "param": fault.param, "code": fault.code}}
    )


def retry_after_value(seconds: float) -> bytes:
    """Seconds as the plain whole number that Retry-After takes; at least 1."""
    return b"%d" % max(1, math.ceil(min(seconds, 3600.0)))

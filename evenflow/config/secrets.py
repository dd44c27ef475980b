"""Keys and credentials: what is kept of them, and how they stay out of logs.

Keys of callers are kept as SHA-256 digests only. A credential that must be sent on (to a worker) is a
`Secret`, whose text is reached by `reveal()` alone: neither repr, str, formatting nor an error shows it.
"""

import hashlib
import hmac
import re

_DIGEST_PREFIX = "sha256:"
_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
# What can travel in an Authorization header without quoting: visible ASCII.
_KEY = re.compile(r"[!-~]+")


class Secret:
    """Text that is never shown by accident."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[type["Secret"], tuple[str]]:
        raise TypeError("a Secret is not pickled; pass its text on purpose with reveal()")


def key_digest(key: str | bytes) -> bytes:
    """The 32 bytes that are kept of a key, and that a presented key is compared by."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def read_key(text: str) -> bytes:
    """The digest of a key as it is written in a configuration: plain, or `sha256:<hex>`.

    Raises ValueError with a message that does not hold the key.
    """
    if text.startswith(_DIGEST_PREFIX):
        digest = text.removeprefix(_DIGEST_PREFIX)
        if not _HEX_DIGEST.fullmatch(digest):
            raise ValueError("a key written as sha256: needs 64 hex digits after it")
        return bytes.fromhex(digest)
    return key_digest(read_credential(text))


def read_credential(text: str) -> str:
    """A credential that can travel in a header, unchanged; else ValueError without the text."""
    if not text:
        raise ValueError("must not be empty")
    if not _KEY.fullmatch(text):
        raise ValueError(
            "may hold only visible ASCII characters, no spaces; is a quote or a line end left in it?"
        )
    return text

"""Stage 2: a key becomes a tenant.

A key comes as `Authorization: Bearer`, as `x-api-key`, or as `api_key` in the body; when more than one comes, they
must agree. A wrong key is refused and never downgraded to anonymous, and nothing but a key says who a caller is: no
`user`, no captcha field, no header. The one exception is a gateway behind a front end that is trusted to say who its
users are (`auth.trust_user_id`), as an older service did it. Never logs or echoes a key.
"""

from evenflow.request import Call
from evenflow.tenancy.directory import Directory, Member
from evenflow.wire.faults import CallerError
from evenflow.wire.http import RequestHead, two_keys


class Authenticator:
    """Reads the directory, which a reload replaces whole."""

    __slots__ = ("directory",)

    def __init__(self, directory: Directory) -> None:
        self.directory = directory

    def by_head(self, head: RequestHead) -> Member | None:
        """The tenant of the head's key, None without one; a wrong key is refused before the body is read.

        None too where no key means anything and the body has to say who calls.
        """
        key = head.bearer if head.bearer is not None else head.api_key
        return None if key is None else self._tenant(key)

    def by_body(self, call: Call, body_key: str | None, user_id: str | None) -> None:
        """Settles who calls once the body has been decoded.

        1. A key in the body: its tenant, or it must agree with the one in the head.
        2. No key anywhere: who the user_id says, where that is trusted; else whoever has no key.
        """
        if body_key is not None:
            key = body_key.encode("utf-8", "surrogatepass")
            if call.head.bearer is not None or call.head.api_key is not None:
                if key not in (call.head.bearer, call.head.api_key):
                    raise two_keys()
            else:
                call.tenant = self._tenant(key)  # (1)
        if call.tenant is None:  # (2)
            users = self.directory.users
            call.tenant = (users.get(user_id) if users and user_id is not None else None) or self.nobody()

    def nobody(self) -> Member:
        """The tenant of a caller without a key."""
        tenant = self.directory.anonymous
        if tenant is None:
            raise CallerError(
                "This gateway needs a key. Send it as 'Authorization: Bearer KEY', as 'x-api-key', or as 'api_key' "
                "in the body.",
                code="invalid_api_key",
                status=401,
            )
        return tenant

    def _tenant(self, key: bytes) -> Member | None:
        """The tenant of a key; None where no key means anything and the body has to say who calls."""
        directory = self.directory
        if directory.open and directory.anonymous is not None:
            return directory.anonymous if directory.users is None else None
        tenant = directory.tenant_of(key)
        if tenant is None:
            raise unknown_key()
        return tenant


def unknown_key() -> CallerError:
    return CallerError(
        "The key is not known here. Check that it is whole and meant for this gateway, or ask its operator for a new "
        "one.",
        code="invalid_api_key",
        status=401,
    )

"""Stage 3: a body becomes the few values that decisions need, and the bytes that will go to the worker.

The body is read once, without building what nobody asks for, and travels on as it came, apart from a key that must
not travel and the request for usage that accounting needs. Never waits, never keeps a prompt beyond the call.
"""

from evenflow.request import Call
from evenflow.request.authenticate import Authenticator
from evenflow.request.older import OlderDecoder
from evenflow.wire.openai import ask_for_usage, parse_request, splice


class Decoder:
    __slots__ = ("_authenticator", "_older", "n_max")

    def __init__(self, authenticator: Authenticator, older: OlderDecoder, n_max: int) -> None:
        self._authenticator = authenticator
        self._older = older
        self.n_max = n_max

    def decode(self, call: Call) -> None:
        """Fills `request`, settles `tenant`, and prepares `body`. Raises CallerError."""
        route = call.route
        assert route is not None
        if route.older:
            self._older.decode(call, self.n_max)
            if call.form is not None:
                return
        call.request = request = parse_request(route, call.body, self.n_max)
        if call.tenant is None or request.api_key is not None:
            self._authenticator.by_body(call, request.api_key, request.user_id or request.user)
            if request.api_key is not None:
                call.body = splice(call.body, {"api_key": None})
        if request.stream and route.usage_option and not request.include_usage:
            call.body = ask_for_usage(call.body, request)

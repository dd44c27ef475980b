"""Stage 3 for the routes of older services: their requests become OpenAI ones, with a form for the answer.

From here on such a call goes the way of all others, as one of several parts whose answer is put together here. The only
state is that of LMDeploy's sessions: their history, and which call each runs.
"""

from time import monotonic
from typing import Any

import msgspec

from evenflow.fleet.registry import Registry
from evenflow.policy.remembered import Remembered, Session
from evenflow.request import Call
from evenflow.request.authenticate import Authenticator
from evenflow.wire.faults import CallerError
from evenflow.wire.older import (
    STOPPED,
    InteractiveAsk,
    InteractiveForm,
    LogprobsForm,
    interactive_body,
    logprobs_body,
    parse_interactive,
    parse_logprobs,
)
from evenflow.wire.openai import ROUTES, Usage, parse_request

# Alpa's own client sends what is meant for /logprobs here, and says so.
REDIRECT = b'"redirect_logprobs"'


class OlderDecoder:
    def __init__(self, authenticator: Authenticator, registry: Registry) -> None:
        self._authenticator = authenticator
        self._registry = registry
        self._remembered = Remembered()
        # What each session runs now.
        self._running: dict[tuple[str, int], Call] = {}

    def decode(self, call: Call, n_max: int) -> None:
        """As `Decoder.decode`. Raises AnsweredError for a call that only stops another one."""
        route = call.route
        assert route is not None
        if route.older == "interactive":
            self._interactive(call, n_max)
        elif route.older == "logprobs" or REDIRECT in call.body:
            self._logprobs(call, n_max)

    def each_second(self, now: float) -> None:
        self._remembered.each_second(now)
        for key in [key for key, call in self._running.items() if call.ended]:
            del self._running[key]

    # -- Alpa ----------------------------------------------------------------------------------------------------

    def _logprobs(self, call: Call, n_max: int) -> None:
        ask = parse_logprobs(call.body)
        self._authenticate(call, ask.api_key, ask.user_id)
        call.route = route = ROUTES[b"/logprobs"]
        call.body = logprobs_body(ask, self._model(ask.model))
        call.request = request = parse_request(route, call.body, n_max)
        request.special = True
        cache_id = call.request_id.decode("ascii") if ask.cache_id is None else str(ask.cache_id)
        call.form = LogprobsForm(request.prompts, ask.top_k, cache_id)

    # -- LMDeploy ------------------------------------------------------------------------------------------------

    def _interactive(self, call: Call, n_max: int) -> None:
        """A session goes on, or a new one begins; one without a number is never gone on with, and not kept."""
        ask = parse_interactive(call.body)
        self._authenticate(call, ask.api_key, ask.user_id)
        tenant, route = call.tenant, call.route
        assert tenant is not None and route is not None
        key = (tenant.name, ask.session_id)
        running = self._running.get(key)
        if running is not None and running.ended:
            running = None
        if ask.stops:
            if running is not None and running.fanout is not None:
                running.fanout.end_early()
            raise AnsweredError(STOPPED)
        if running is not None:
            raise CallerError(
                f"The session {ask.session_id} is still answering. Wait for that, or end it with 'cancel'.",
                param="session_id",
            )
        session = self._remembered.get(*key, monotonic())
        history = session.messages if session is not None else []
        call.body = interactive_body(ask, self._model(ask.model), history)
        call.request = request = parse_request(route, call.body, n_max)
        request.special = True
        call.form = _SessionForm(self, ask, key, session)
        if ask.session_id >= 0:
            self._running[key] = call

    def keep(self, ask: InteractiveAsk, key: tuple[str, int], session: Session | None, text: str, usage: Usage) -> None:
        """A session's call was answered whole."""
        if ask.session_id < 0:
            return
        if not ask.interactive_mode:
            self._remembered.forget(*key)
            return
        history = session.messages if session is not None else []
        messages: list[dict[str, Any]] = [*history, *ask.messages(), {"role": "assistant", "content": text}]
        tokens = usage.input_tokens + usage.output_tokens
        self._remembered.keep(*key, Session(messages, len(msgspec.json.encode(messages)), tokens, monotonic()))

    # -- both ----------------------------------------------------------------------------------------------------

    def _authenticate(self, call: Call, api_key: str | None, user_id: str | None) -> None:
        if call.tenant is None or api_key is not None:
            self._authenticator.by_body(call, api_key, user_id)

    def _model(self, asked: str) -> str:
        """These services had one model each, and their clients name none, or one of their own making."""
        lanes = self._registry.lanes
        if asked and (asked in lanes or asked != "default"):
            return asked
        if len(lanes) == 1:
            return next(iter(lanes))
        raise CallerError(
            "Name the 'model': this gateway serves several. GET /v1/models lists them.", param="model"
        )


class AnsweredError(Exception):
    """What the call asked for was done at once; this is its whole answer."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body


class _SessionForm(InteractiveForm):
    """Keeps the session's history when the answer is whole."""

    __slots__ = ("_ask", "_decoder", "_key", "_session")

    def __init__(
        self,
        decoder: OlderDecoder,
        ask: InteractiveAsk,
        key: tuple[str, int],
        session: Session | None,
    ) -> None:
        super().__init__(stream=ask.stream, history_tokens=session.tokens if session is not None else 0)
        self._decoder = decoder
        self._ask = ask
        self._key = key
        self._session = session

    def end(self, usage: Usage) -> bytes:
        self._decoder.keep(self._ask, self._key, self._session, self.text, usage)
        return super().end(usage)

"""Requests and answers of older services that are no OpenAI ones, as bytes ↔ OpenAI's.

    Alpa       POST /logprobs                   the log-probabilities of the next token, as one completion token
    LMDeploy   POST /v1/chat/interactive_qos    a conversation whose history is kept here, as a chat completion

A request becomes an OpenAI body, and a `Form` that makes the older answer of the worker's events. Touches no socket,
keeps nothing between two requests.
"""

from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from evenflow.wire.faults import CallerError, WorkerError, error_body
from evenflow.wire.heal import finish_reason
from evenflow.wire.openai import Usage

# Log-probabilities of a prompt's next token when the caller does not say how many, and at most.
TOP_K_DEFAULT = 20
TOP_K_MAX = 100_000
TOKEN_ID = "token_id:"
CACHE_ID_CHARACTERS_MAX = 128
Shape = TypeVar("Shape")
_any = msgspec.json.Decoder()
_encode = msgspec.json.encode


class Form(Protocol):
    """How an answer is written for a caller of an older service."""

    # Of an answer that is a stream.
    content_type: bytes

    def take(self, prompt: int, data: bytes) -> bytes:
        """An event of the worker for one of the prompts; what of it a stream is sent at once."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The last piece of a stream, or the whole answer."""
        ...

    def failed(self, fault: Any) -> bytes:
        """The last piece of a stream that failed."""
        ...


# ----------------------------------------------------------------------------------------------------
# Alpa


class LogprobsAsk(Struct):
    """`POST /logprobs`. The prompt is checked as that of a completion is."""

    prompt: Raw
    model: str = ""
    top_k: int = TOP_K_DEFAULT
    # Alpa kept what it had computed under this name, and clients send the whole prompt each time; here engines keep it
    # by the prompt itself, and the name is given back.
    cache_id: str | int | None = None
    api_key: str | None = None
    user_id: str | None = None


def parse_logprobs(body: bytes) -> LogprobsAsk:
    """Raises CallerError."""
    ask = _decoded(body, LogprobsAsk)
    if not 1 <= ask.top_k <= TOP_K_MAX:
        raise CallerError(f"'top_k' must be from 1 to {TOP_K_MAX}, is {ask.top_k}.", param="top_k")
    if ask.cache_id is not None and len(str(ask.cache_id)) > CACHE_ID_CHARACTERS_MAX:
        raise CallerError(f"'cache_id' has more than {CACHE_ID_CHARACTERS_MAX} characters.", param="cache_id")
    return ask


def logprobs_body(ask: LogprobsAsk, model: str) -> bytes:
    """One token of a completion, with the log-probabilities that the engine gives before it samples."""
    return _encode(
        {
            "model": model,
            "prompt": ask.prompt,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": ask.top_k,
            # Understood by vLLM and by those that follow it, unread by others.
            "return_tokens_as_token_ids": True,
        }
    )


class LogprobsForm:
    """`{"cache_id", "logprobs": [[…]], "indices": [[…]]}`, for each prompt its likeliest next tokens in order.

    Where the engine tells no ids of tokens there is `tokens`, their texts, and no `indices`.
    """

    __slots__ = ("_cache_id", "_found", "_top_k", "content_type")

    def __init__(self, prompts: int, top_k: int, cache_id: str) -> None:
        self.content_type = b"application/json"
        self._top_k = top_k
        self._cache_id = cache_id
        # Of each prompt: (log-probability, id or None, text) of its candidates.
        self._found: list[list[tuple[float, int | None, str]]] = [[] for _ in range(prompts)]

    def take(self, prompt: int, data: bytes) -> bytes:
        if not self._found[prompt] and b'"logprobs"' in data:
            for choice in _any.decode(data).get("choices") or []:
                self._found[prompt] = candidates(choice.get("logprobs"))
        return b""

    def end(self, usage: Usage) -> bytes:
        if not all(self._found):
            raise WorkerError("The worker gave no log-probabilities. Choose a model whose engine does.")
        rows = [sorted(found, key=lambda one: -one[0])[: self._top_k] for found in self._found]
        answer: dict[str, Any] = {
            "cache_id": self._cache_id,
            "logprobs": [[logprob for logprob, _, _ in row] for row in rows],
        }
        if all(token is not None for row in rows for _, token, _ in row):
            answer["indices"] = [[token for _, token, _ in row] for row in rows]
        else:
            answer["tokens"] = [[text for _, _, text in row] for row in rows]
        return _encode(answer)

    def failed(self, fault: Any) -> bytes:
        return error_body(fault)


def candidates(logprobs: Any) -> list[tuple[float, int | None, str]]:
    """(log-probability, id or None, text) of the candidates for the first token, in either shape of log-probabilities.

    The legacy shape has a mapping of texts for each token; that of chat a list of objects, where some engines tell ids.
    """
    if not isinstance(logprobs, dict):
        return []
    content, top = logprobs.get("content"), logprobs.get("top_logprobs")
    if content:
        return [
            (one["logprob"], one.get("id"), one["token"])
            for one in content[0].get("top_logprobs") or []
            if isinstance(one.get("logprob"), int | float)
        ]
    if top and isinstance(top[0], dict):
        return [(logprob, _id_of(token), token) for token, logprob in top[0].items()]
    return []


def _id_of(token: str) -> int | None:
    number = token.removeprefix(TOKEN_ID)
    return int(number) if number is not token and number.isdigit() else None


# ----------------------------------------------------------------------------------------------------
# LMDeploy


class InteractiveAsk(Struct):
    """`POST /v1/chat/interactive_qos`."""

    # A text, or OpenAI messages.
    prompt: str | list[dict[str, Any]] = ""
    model: str = ""
    session_id: int = -1
    interactive_mode: bool = False
    stream: bool = False
    # True ends what the session runs, in older versions; else texts at which the answer ends.
    stop: bool | str | list[str] | None = None
    cancel: bool = False
    request_output_len: int | None = None
    top_p: Raw | UnsetType = UNSET
    top_k: Raw | UnsetType = UNSET
    temperature: Raw | UnsetType = UNSET
    repetition_penalty: Raw | UnsetType = UNSET
    ignore_eos: Raw | UnsetType = UNSET
    skip_special_tokens: Raw | UnsetType = UNSET
    api_key: str | None = None
    user_id: str | None = None

    @property
    def stops(self) -> bool:
        """It asks for nothing but the end of what its session runs."""
        return self.cancel or self.stop is True

    def messages(self) -> list[dict[str, Any]]:
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt


_PASSED_ON = ("top_p", "top_k", "temperature", "repetition_penalty", "ignore_eos", "skip_special_tokens")


def parse_interactive(body: bytes) -> InteractiveAsk:
    """Raises CallerError."""
    ask = _decoded(body, InteractiveAsk)
    if ask.stops:
        if ask.session_id == -1:
            raise CallerError("Give the 'session_id' of what is to be stopped.", param="session_id")
        return ask
    if not ask.prompt:
        raise CallerError("'prompt' must be a text or a list of messages, and not empty.", param="prompt")
    if ask.session_id < -1:
        raise CallerError("'session_id' must be 0 or more, or -1 for a new session.", param="session_id")
    if ask.request_output_len is not None and ask.request_output_len < 0:
        raise CallerError("'request_output_len' must be 0 or more.", param="request_output_len")
    return ask


def interactive_body(ask: InteractiveAsk, model: str, history: list[dict[str, Any]]) -> bytes:
    """A chat completion of the history and what is new."""
    fields: dict[str, Any] = {"model": model, "messages": [*history, *ask.messages()], "stream": ask.stream}
    if ask.request_output_len is not None:
        fields["max_tokens"] = ask.request_output_len
    if ask.stop and not isinstance(ask.stop, bool):
        fields["stop"] = ask.stop
    for name in _PASSED_ON:
        value = getattr(ask, name)
        if value is not UNSET:
            fields[name] = value
    return _encode(fields)


class InteractiveForm:
    """One object, or one for each piece of a stream on a line of its own.

    `tokens` counts the answer's so far, `input_tokens` those of the new prompt and `history_tokens` those before it;
    engines tell the last two at the end, and until then they are 0.
    """

    __slots__ = ("_history_tokens", "_pieces", "_stream", "_tokens", "content_type", "finish")

    def __init__(self, *, stream: bool, history_tokens: int) -> None:
        self.content_type = b"text/event-stream"
        self._stream = stream
        self._history_tokens = history_tokens
        self._pieces: list[str] = []
        self._tokens = 0
        self.finish: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def take(self, prompt: int, data: bytes) -> bytes:
        event = _any.decode(data)
        out = b""
        for choice in event.get("choices") or []:
            reason = choice.get("finish_reason")
            if reason is not None:
                self.finish = finish_reason(reason)
            piece = (choice.get("delta") or {}).get("content")
            if isinstance(piece, str) and piece:
                self._pieces.append(piece)
                self._tokens += 1
                if self._stream:
                    out += self._line(piece, self._tokens, 0, 0, None)
        return out

    def end(self, usage: Usage) -> bytes:
        tokens = usage.output_tokens or self._tokens
        history = min(self._history_tokens, usage.input_tokens)
        text = "" if self._stream else self.text
        return self._line(text, tokens, usage.input_tokens - history, history, self.finish or "stop")

    def failed(self, fault: Any) -> bytes:
        return error_body(fault) + b"\n"

    def _line(self, text: str, tokens: int, input_tokens: int, history_tokens: int, finish: str | None) -> bytes:
        line = _encode(
            {
                "text": text,
                "tokens": tokens,
                "input_tokens": input_tokens,
                "history_tokens": history_tokens,
                "finish_reason": finish,
            }
        )
        return line + b"\n" if self._stream else line


# What is answered to who asked for the end of a session's request.
STOPPED = _encode({"text": "", "tokens": 0, "input_tokens": 0, "history_tokens": 0, "finish_reason": "stop"})


def _decoded(body: bytes, shape: type[Shape]) -> Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        text = str(error)
        param = text.partition("`$.")[2].partition("`")[0].partition("[")[0] or None
        if param is None and "required field" in text:
            param = text.partition("`")[2].partition("`")[0]
        raise CallerError(f"The body is not what this route takes: {text}.", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CallerError("The body is not JSON. Send a JSON object.") from None

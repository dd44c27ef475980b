"""OpenAI-shaped bodies, from bytes to the few values a decision needs, and edits that keep every other byte.

Promises: a body that `parse_request` lets through is valid JSON in valid UTF-8 with an object on top; each
field we decide on has the type it must have and stands there once. What we do not read is not judged and goes
on as it came. Every fault of the caller is a CallerError that names the field; no message holds a prompt or a
key. Functions that read answers of workers never raise: an answer without sense has no usage and no error.
Never does I/O, never keeps a body.

How validity is assured: msgspec checks the whole text, skipped values and `Raw` included (literals, numbers,
escapes, surrogate pairs, control characters, nesting, what follows the end). Two things it does not see in
skipped values: UTF-8, which is checked here before; and numbers too large for a double, which are refused in
the number fields that are declared here and pass elsewhere.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from evenflow.wire.faults import CallerError

# The largest token id that an engine could know; larger ones are a caller's mistake.
TOKEN_ID_MAX = 2**32 - 1
# Largest limit on output tokens: what engines hold in 64 bits.
LIMIT_MAX = 2**63 - 1
# A seed must fit in 64 bits, signed or unsigned.
SEED_MIN = -(2**63)
SEED_MAX = 2**64 - 1
# What a token id counts as in `Request.prompt_bytes`: tokens of text are about four bytes long.
TOKEN_BYTES = 4
# Answers larger than this are searched for their usage from the tail, not decoded.
ANSWER_BYTES_DECODED = 64 * 1024
# More top-level fields than this are refused: no caller has them, and each costs a step in Python.
FIELDS_MAX = 1000
# Larger values are judged by their shape alone (token ids) or not at all (logit_bias), not made into objects.
VALUE_BYTES_DECODED = 1 << 20
# How much of a bad body is searched for the name of the field in which it goes wrong.
BLAME_BYTES_MAX = 64 * 1024
# Bodies with bytes above 127 are checked in pieces of this size, so that a large one is not copied at once.
_UTF8_PIECE_BYTES = 256 * 1024

# What decoding raises for bytes that are not what they should be.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


# Kinds of routes whose answers have choices.
SAMPLED = ("chat", "completions")


class Route(Struct, frozen=True):
    """One path that is relayed to workers."""

    # Metric label: the path without its version.
    name: str
    path: bytes
    kind: Literal["chat", "completions", "embeddings", "responses", "messages", "other"]
    # Whether `stream_options.include_usage` exists there.
    usage_option: bool = False
    # Whether a body may leave the model out.
    model_optional: bool = False
    # Whether text is produced; else nothing but the input costs.
    generates: bool = True
    # Which older service's request may come here that is no OpenAI one: see `wire/older.py`.
    older: Literal["", "completions", "logprobs", "interactive"] = ""


ROUTES: dict[bytes, Route] = {
    route.path: route
    for route in (
        Route("chat/completions", b"/v1/chat/completions", "chat", usage_option=True),
        Route("completions", b"/v1/completions", "completions", usage_option=True),
        Route("embeddings", b"/v1/embeddings", "embeddings", generates=False),
        Route("responses", b"/v1/responses", "responses"),
        Route("messages", b"/v1/messages", "messages"),
        Route("rerank", b"/v1/rerank", "other", generates=False),
        Route("score", b"/v1/score", "other", generates=False),
        Route("tokenize", b"/tokenize", "other", model_optional=True, generates=False),
        Route("detokenize", b"/detokenize", "other", model_optional=True, generates=False),
    )
}
# What older services called these routes.
ROUTES[b"/v1/completions_qos"] = ROUTES[b"/v1/completions"]
ROUTES[b"/v1/chat/completions_qos"] = ROUTES[b"/v1/chat/completions"]
ROUTES[b"/completions"] = Route(
    "completions", b"/v1/completions", "completions", usage_option=True, older="completions"
)
ROUTES[b"/logprobs"] = Route("logprobs", b"/v1/completions", "completions", usage_option=True, older="logprobs")
ROUTES[b"/v1/chat/interactive_qos"] = Route(
    "chat/interactive", b"/v1/chat/completions", "chat", usage_option=True, older="interactive"
)


class Request(Struct, gc=False):
    """What the gateway needs to know of a request; everything else stays in its bytes."""

    # "" where the route allows to leave it out.
    model: str
    stream: bool
    # Sequences that run on a worker: prompts times max(n, best_of); 1 where nothing is sampled (embeddings).
    sequences: int
    n: int
    prompts: int
    # Size of the prompt text as sent, an upper estimate; a token id counts as four bytes.
    prompt_bytes: int
    # None: the caller set no limit.
    max_tokens: int | None
    # The caller asked for the usage of a stream.
    include_usage: bool
    # The field is there, be it null: then it must be edited in place, not appended.
    stream_options_present: bool
    user: str | None
    api_key: str | None
    # OpenAI's name for a tier.
    service_tier: str | None = None
    # As older services name a user; None without one.
    user_id: str | None = None
    # Asks for what engines differ in: no tokens at all; on /v1/completions an echo or log-probabilities.
    special: bool = False


class Usage(Struct, gc=False, frozen=True):
    """Token counts as a worker reports them. `input_tokens` includes `cached_tokens`."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def joined(self, earlier: "Usage | None") -> "Usage":
        """This report completed by an earlier one of the same stream: counts there only grow."""
        if earlier is None:
            return self
        return Usage(
            max(self.input_tokens, earlier.input_tokens),
            max(self.cached_tokens, earlier.cached_tokens),
            max(self.output_tokens, earlier.output_tokens),
        )


# ----------------------------------------------------------------------------------------------------
# Requests


_NULL = Raw(b"null")
_QUOTE, _BRACKET, _N = b'"[n'


class _StreamOptions(Struct, gc=False):
    include_usage: bool | None = None


class _Object(Struct, gc=False):
    """Only that it is an object."""


class _Body(Struct, gc=False):
    """Fields of every route. Numbers that decide nothing are here so that infinities are refused by name."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    api_key: str | None = None
    service_tier: str | None = None
    user_id: Raw = _NULL
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    min_tokens: float | None = None
    logprobs: float | bool | None = None
    top_logprobs: float | None = None
    priority: float | None = None


class _Sampled(_Body, gc=False):
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: _StreamOptions | UnsetType | None = UNSET
    logit_bias: Raw = _NULL


class _ChatBody(_Sampled, gc=False):
    messages: Raw = _NULL


class _CompletionsBody(_Sampled, gc=False):
    prompt: Raw = _NULL
    prompt_embeds: Raw = _NULL
    echo: bool | None = None


class _EmbeddingsBody(_Body, gc=False):
    input: Raw = _NULL
    messages: Raw = _NULL


class _ResponsesBody(_Body, gc=False):
    max_output_tokens: int | None = None


class _MessagesBody(_Body, gc=False):
    messages: Raw = _NULL
    max_tokens: int | None = None


_text = msgspec.json.Decoder(str)
_logit_bias = msgspec.json.Decoder(dict[str, float])
_prompt_list = msgspec.json.Decoder(list[str | int | list[int]])
_input_list = msgspec.json.Decoder(list[str | int | list[int] | _Object])

# Fields that must not stand in a body twice: one reader would take the first, another the last.
_DECIDING = frozenset(
    {"model", "messages", "prompt", "input", "stream", "stream_options", "n", "best_of", "seed", "echo", "logprobs"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "user", "api_key", "service_tier", "user_id"}
)

# What a field must be, for messages. {n_max} is filled in.
_RIGHT = {
    "model": "the name of a model as a string, one of those that GET /v1/models lists",
    "messages": "a list of at least one message object",
    "stream": "true or false",
    "echo": "true or false",
    "user": "a string",
    "api_key": "a string",
    "service_tier": "a string, such as auto, default or flex",
    "seed": "a whole number that fits in 64 bits",
    "n": "a whole number from 1 to {n_max}",
    "best_of": "a whole number from 1 to {n_max}",
    "max_tokens": "a whole number, 0 or more",
    "max_completion_tokens": "a whole number, 0 or more",
    "max_output_tokens": "a whole number, 0 or more",
    "stream_options": "an object such as {{\"include_usage\": true}}",
    "stream_options.include_usage": "true or false",
    "logit_bias": "an object from token ids to finite numbers",
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists, none of them empty",
    "input": "a string, a list of strings, a list of token ids, or a list of such lists, none of them empty",
}  # fmt: skip
_RIGHT_NUMBER = "a finite number"

_KINDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number with a fraction or an exponent",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


# Where the text begins that an engine's cache would know again.
_PROMPTS = {
    "chat": re.compile(rb'"messages"\s*:\s*'),
    "completions": re.compile(rb'"prompt"\s*:\s*'),
    "messages": re.compile(rb'"messages"\s*:\s*'),
    "responses": re.compile(rb'"input"\s*:\s*'),
}


def prompt_of(kind: str, body: bytes, most: int) -> bytes:
    """The first `most` bytes of a body from where its prompt begins, as far as a glance tells.

    For what may be wrong now and then: a text in front of the prompt can look like it.
    """
    found = _PROMPTS[kind].search(body)
    start = found.end() if found is not None else 0
    return body[start : start + most]


def parse_request(route: Route, body: bytes, n_max: int) -> Request:
    """Reads a request body. Raises CallerError (400) that names the field which is wrong.

    `null` in a field means that it is absent. `n_max` bounds prompts times choices of one request.
    """
    if not body.isascii():
        _check_utf8(body)
    decoder, read = _READERS[route.kind]
    try:
        fields = decoder.decode(body)
        names = _top_level_names(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, n_max) from None
    except msgspec.DecodeError as error:
        raise _invalid_json(body, error) from None
    except RecursionError:
        raise _too_deep() from None
    if len(names) != len(set(names)):
        _refuse_duplicates(names, _DECIDING)
    if not fields.model and not route.model_optional:
        raise _wrong("model", "missing or empty", n_max)
    return read(fields, len(body), n_max)


def _read_chat(fields: _ChatBody, body_bytes: int, n_max: int) -> Request:
    _check_messages(fields.messages)
    return _sampled_request(fields, n_max, 1, body_bytes)


def _read_completions(fields: _CompletionsBody, body_bytes: int, n_max: int) -> Request:
    if _is_null(fields.prompt):
        # vLLM takes embeddings in the place of a prompt.
        if _is_null(fields.prompt_embeds):
            raise _wrong("prompt", "missing", n_max)
        return _sampled_request(fields, n_max, 1, body_bytes)
    prompts, tokens = _prompts(fields.prompt, "prompt", _prompt_list, n_max)
    special = fields.echo is True or not (fields.logprobs is None or fields.logprobs is False)
    return _sampled_request(fields, n_max, prompts, tokens * TOKEN_BYTES or body_bytes, special=special)


def _read_embeddings(fields: _EmbeddingsBody, body_bytes: int, n_max: int) -> Request:
    prompts, tokens = 1, 0
    if not _is_null(fields.input):
        prompts, tokens = _prompts(fields.input, "input", _input_list, n_max)
    elif _is_null(fields.messages):
        raise _wrong("input", "missing", n_max)
    else:
        # vLLM embeds chats too.
        _check_messages(fields.messages)
    return _plain_request(fields, None, prompts, tokens * TOKEN_BYTES or body_bytes)


def _read_responses(fields: _ResponsesBody, body_bytes: int, n_max: int) -> Request:
    return _plain_request(fields, _limit(fields.max_output_tokens, "max_output_tokens"), 1, body_bytes)


def _read_messages(fields: _MessagesBody, body_bytes: int, n_max: int) -> Request:
    _check_messages(fields.messages)
    return _plain_request(fields, _limit(fields.max_tokens, "max_tokens"), 1, body_bytes)


def _read_other(fields: _Body, body_bytes: int, n_max: int) -> Request:
    return _plain_request(fields, None, 1, body_bytes)


# One line per kind of body: how it is decoded, and how its fields become a Request.
_READERS: dict[str, tuple["msgspec.json.Decoder[Any]", Callable[[Any, int, int], Request]]] = {
    "chat": (msgspec.json.Decoder(_ChatBody), _read_chat),
    "completions": (msgspec.json.Decoder(_CompletionsBody), _read_completions),
    "embeddings": (msgspec.json.Decoder(_EmbeddingsBody), _read_embeddings),
    "responses": (msgspec.json.Decoder(_ResponsesBody), _read_responses),
    "messages": (msgspec.json.Decoder(_MessagesBody), _read_messages),
    "other": (msgspec.json.Decoder(_Body), _read_other),
}


def _sampled_request(
    fields: _Sampled, n_max: int, prompts: int, prompt_bytes: int, *, special: bool = False
) -> Request:
    n = choices = 1
    if fields.n is not None:
        n = choices = fields.n
        if not 1 <= n <= n_max:
            raise _wrong("n", _shown(n), n_max)
    if fields.best_of is not None:
        choices = fields.best_of
        if not 1 <= choices <= n_max:
            raise _wrong("best_of", _shown(choices), n_max)
        if choices < n:
            raise CallerError(f"'best_of' ({choices}) must not be less than 'n' ({n}).", param="best_of")
        if choices > 1 and fields.stream:
            raise CallerError(
                "'best_of' cannot be streamed, since the best are known only at the end; leave one of them out.",
                param="best_of",
            )
    if prompts * choices > n_max:
        raise _too_many(prompts, choices, n_max)
    if fields.seed is not None:
        _check_seed(fields.seed)
    if fields.logit_bias is not _NULL and not _is_null(fields.logit_bias):
        _check_logit_bias(fields.logit_bias)
    limit = _limit(fields.max_tokens, "max_tokens")
    if fields.max_completion_tokens is not None:
        limit = _limit(fields.max_completion_tokens, "max_completion_tokens")
    options = fields.stream_options
    return Request(
        fields.model or "",
        fields.stream is True,
        prompts * choices,
        n,
        prompts,
        prompt_bytes,
        limit,
        bool(options and options.include_usage),
        options is not UNSET,
        fields.user,
        fields.api_key,
        fields.service_tier,
        None if fields.user_id is _NULL else _user_id(fields.user_id),
        special or limit == 0,
    )


def _plain_request(fields: _Body, limit: int | None, prompts: int, prompt_bytes: int) -> Request:
    if fields.seed is not None:
        _check_seed(fields.seed)
    return Request(
        fields.model or "",
        fields.stream is True,
        1,
        1,
        prompts,
        prompt_bytes,
        limit,
        False,
        False,
        fields.user,
        fields.api_key,
        fields.service_tier,
        None if fields.user_id is _NULL else _user_id(fields.user_id),
    )


# A list whose first item is an object. The engine looks at the others, which are its to understand.
_MESSAGES = re.compile(rb"\[\s*\{")


def _check_messages(messages: Raw) -> None:
    if not _MESSAGES.match(messages):
        raise _wrong("messages", "missing" if _is_null(messages) else "another thing or empty", 0)


def _check_logit_bias(bias: Raw) -> None:
    if memoryview(bias).nbytes > VALUE_BYTES_DECODED:
        return
    try:
        _logit_bias.decode(bias)
    except _UNREADABLE:
        raise _wrong("logit_bias", "another thing", 0) from None


def _is_null(raw: Raw) -> bool:
    return memoryview(raw)[0] == _N


def _user_id(raw: Raw) -> str | None:
    """A user_id is a label that only older services give a meaning, so nothing but text is taken for one."""
    try:
        return _text.decode(raw)
    except _UNREADABLE:
        return None


def _limit(value: int | None, name: str) -> int | None:
    if value is not None and not 0 <= value <= LIMIT_MAX:
        raise _wrong(name, _shown(value), 0)
    return value


def _check_seed(seed: int) -> None:
    if not SEED_MIN <= seed <= SEED_MAX:
        raise _wrong("seed", "a larger one", 0)


# A list of token ids, or of lists of them, is judged by its shape: digits as 0, no spaces.
_LIST_OF_IDS = re.compile(rb"\[\s*[\[0-9]")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


def _prompts(raw: Raw, name: str, decoder: "msgspec.json.Decoder[list[Any]]", n_max: int) -> tuple[int, int]:
    """How many prompts a `prompt` or `input` field holds, and how many token ids (0: it is text)."""
    view = memoryview(raw)
    if view[0] == _QUOTE:
        if len(view) == 2:
            raise _wrong(name, "empty", n_max)
        return 1, 0
    if view[0] != _BRACKET:
        raise _wrong(name, "of another type", n_max)
    if _LIST_OF_IDS.match(raw):
        counts = _count_ids(bytes(raw))
        if counts is not None:
            return counts
        if view.nbytes > VALUE_BYTES_DECODED:
            raise _wrong(name, "a long list with something other than common token ids inside", n_max)
    return _count_items(raw, name, decoder, n_max)


def _count_ids(text: bytes) -> tuple[int, int] | None:
    """Prompts and ids of a sound list of ids, without making numbers of them; None when in any doubt."""
    shape = text.translate(_DIGITS, b" \t\r\n")
    brackets = shape.translate(None, b"0,")
    prompts = brackets.count(b"[") - 1
    if brackets != b"[" + b"[]" * prompts + b"]":
        return None
    # Not: ids of ten digits or more, numbers beside lists, empty lists.
    if b"0000000000" in shape:
        return None
    if prompts and (b"0,[" in shape or b"],0" in shape or b"[]" in shape):
        return None
    return prompts or 1, shape.count(b",") + 1


def _count_items(
    raw: Raw, name: str, decoder: "msgspec.json.Decoder[list[Any]]", n_max: int
) -> tuple[int, int]:
    """The same for any list, or what is wrong with it."""
    try:
        items = decoder.decode(raw)
    except msgspec.ValidationError:
        raise _wrong(name, "a list with something else inside", n_max) from None
    kinds = set(map(type, items))
    if len(kinds) != 1:
        raise _wrong(name, "a list of mixed types" if kinds else "an empty list", n_max)
    kind = kinds.pop()
    if kind is int:
        _check_token_ids(items, name)
        return 1, len(items)
    if kind is list:
        for ids in items:
            if not ids:
                raise _wrong(name, "a list with an empty list inside", n_max)
            _check_token_ids(ids, name)
        return len(items), sum(map(len, items))
    if kind is str and not all(items):
        raise _wrong(name, "a list with an empty string inside", n_max)
    return len(items), 0


def _check_token_ids(ids: list[int], name: str) -> None:
    if min(ids) < 0 or max(ids) > TOKEN_ID_MAX:
        raise CallerError(
            f"'{name}' holds a token id below 0 or above {TOKEN_ID_MAX}; send ids of the model's tokenizer.",
            param=name,
        )


# ----------------------------------------------------------------------------------------------------
# What is wrong with a request, in words


def _wrong(name: str, got: str, n_max: int) -> CallerError:
    right = _RIGHT.get(name, _RIGHT_NUMBER).format(n_max=n_max)
    return CallerError(f"'{name}' must be {right}; it is {got}.", param=name)


def _too_many(prompts: int, choices: int, n_max: int) -> CallerError:
    return CallerError(
        f"{prompts} prompts with {choices} choices each are {prompts * choices} sequences; one request may"
        f" have {n_max}. Lower 'n' or 'best_of', or send the prompts in several requests.",
        param="n" if choices > 1 else "prompt",
    )


def _too_deep() -> CallerError:
    return CallerError("The body is nested too deeply; send a flatter one.", param="body")


def _shown(number: int) -> str:
    return str(number) if abs(number) < 10**15 else "far out of range"


_WRONG_TYPE = re.compile(r"(?:got `(\w+)`|out of range).* at `\$\.?([a-z_0-9.]*)(\[)?")


def _wrong_type(error: msgspec.ValidationError, n_max: int) -> CallerError:
    """Turns msgspec's message, which holds type names and a path but no values, into ours."""
    match = _WRONG_TYPE.search(str(error))
    if match is None:
        return CallerError("The body must be a JSON object, {...}.", param="body")
    kind, name, inside = match.groups()
    got = _KINDS.get(kind, "a number that is too large")
    return _wrong(name, f"one with {got} inside" if inside else got, n_max)


def _refuse_duplicates(names: Iterable[str], refused: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if name in seen and name in refused:
            raise CallerError(f"The body has '{name}' more than once; send it once.", param=name)
        seen.add(name)


_MALFORMED = re.compile(r"malformed: (.*) \(byte (\d+)\)")
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)


def _invalid_json(body: bytes, error: Exception) -> CallerError:
    match = _MALFORMED.search(str(error))
    if not body.strip():
        return CallerError("The body is empty; send a JSON object.", param="body")
    place = int(match[2]) if match else len(body)
    if body.startswith(b"\xef\xbb\xbf"):
        reason = "it begins with a byte order mark; leave that out"
    elif body.startswith((b"NaN", b"Infinity"), place):
        reason = "NaN and Infinity do not exist in JSON; send a finite number or leave the field out"
    elif _lone_surrogate_before(body, place):
        reason = "half of a surrogate pair (\\ud800 to \\udfff) stands alone; escape the whole character"
    elif match is None:
        reason = "it ends too early; check Content-Length and how the body was built"
    else:
        reason = f"{match[1]} at byte {place}; write it with a JSON library"
    field = _field_at(body, place)
    return CallerError(f"The body is not valid JSON{_inside(field)}: {reason}.", param=field or "body")


def _lone_surrogate_before(body: bytes, place: int) -> bool:
    return _LONE_SURROGATE.search(body, max(0, place - 16), place + 12) is not None


def _check_utf8(body: bytes) -> None:
    """Raises CallerError unless the body is UTF-8: msgspec skips over strings without looking at that."""
    start = 0
    size = len(body)
    while start < size:
        end = start + _UTF8_PIECE_BYTES
        # A piece does not end inside of a character.
        while end < size and body[end] & 0xC0 == 0x80 and end > start + _UTF8_PIECE_BYTES - 4:
            end -= 1
        try:
            body[start:end].decode()
        except UnicodeDecodeError as error:
            field = _field_at(body, start + error.start)
            raise CallerError(
                f"The body is not valid UTF-8{_inside(field)} at byte {start + error.start}; encode it so.",
                param=field or "body",
            ) from None
        start = end


_TOKEN = re.compile(rb'"((?:[^"\\]++|\\.)*+)(?:"\s*(:)?)?|[{}\[\]]', re.DOTALL)
_FIELD_NAME = re.compile(rb"[a-z][a-z0-9_]{0,40}")


def _field_at(body: bytes, place: int) -> str | None:
    """The top-level field in which a place of a broken body lies; None if it has no usual name."""
    depth = 0
    field = None
    for token in _TOKEN.finditer(body, 0, min(place + 1, BLAME_BYTES_MAX)):
        first = body[token.start()]
        if first == _QUOTE:
            if depth == 1 and token[2]:
                field = token[1]
        else:
            depth += 1 if first in b"{[" else -1
    if field is None or place > BLAME_BYTES_MAX or not _FIELD_NAME.fullmatch(field):
        return None
    return field.decode()


def _inside(field: str | None) -> str:
    return f" in '{field}'" if field else ""


# ----------------------------------------------------------------------------------------------------
# Edits of top-level fields


class _Key:
    """A top-level key; equal to nothing but itself, so that a dict of them keeps duplicates."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_ONE_KEY = _Key("")


class _NameReader:
    """The top-level names of an object, unescaped, in order, duplicates included."""

    __slots__ = ("_decoder", "_names")

    def __init__(self) -> None:
        self._names = names = list[str]()
        append = names.append

        def note(_: type, name: str) -> _Key:
            append(name)
            if len(names) > FIELDS_MAX:
                raise CallerError(f"The body has more than {FIELDS_MAX} fields; send fewer.", param="body")
            return _ONE_KEY

        self._decoder = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=note)

    def read(self, body: bytes) -> list[str]:
        """The same list each time, valid until the next call."""
        self._names.clear()
        self._decoder.decode(body)
        return self._names


_top_level_names = _NameReader().read
_top_level = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=lambda _, name: _Key(name))
_BEFORE_VALUE = re.compile(rb'[\s{,]*("(?:[^"\\]++|\\.)*+"\s*:\s*)')


class _Member(Struct, gc=False):
    """Where one top-level field stands in a body: from the quote of its key to the end of its value."""

    name: str
    start: int
    value_start: int
    end: int


def _top_level_values(body: bytes) -> list[tuple[str, Raw]]:
    """The names and raw values of an object in order, duplicates included."""
    try:
        return [(key.name, value) for key, value in _top_level.decode(body).items()]
    except msgspec.ValidationError as error:
        raise _wrong_type(error, 0) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid_json(body, error) from None
    except RecursionError:
        raise _too_deep() from None


def _places(body: bytes, values: list[tuple[str, Raw]], count: int) -> list[tuple[int, int, int]]:
    """Of the first `count` fields: where the quote of the key is, where the value begins, and where it ends.

    The values are known to their bytes, so that only keys are looked at.
    """
    places = []
    end = 0
    for _, value in values[:count]:
        before = _BEFORE_VALUE.match(body, end)
        assert before is not None
        value_start = before.end()
        end = value_start + memoryview(value).nbytes
        places.append((before.start(1), value_start, end))
    return places


def splice(body: bytes, edits: Mapping[str, bytes | None]) -> bytes:
    """Sets top-level fields to JSON values, in place or behind the last one, or removes them (None).

    Every other byte stays. Raises CallerError when the body is not an object or has an edited field twice.
    """
    values = _top_level_values(body)
    found = [i for i, (name, _) in enumerate(values) if name in edits]
    names = [values[i][0] for i in found]
    if len(set(names)) != len(names):
        _refuse_duplicates(names, edits)
    # One field behind the last edited one, for the case that it is removed.
    places = _places(body, values, found[-1] + 2 if found else 0)
    pieces: list[bytes] = []
    copied = 0
    removed = 0
    for i in found:
        start, value_start, end = places[i]
        value = edits[values[i][0]]
        if value is not None:
            pieces += (body[copied:value_start], value)
            copied = end
        elif removed < i:
            # A field before it stays: it goes with the comma in front of it.
            pieces.append(body[copied : places[i - 1][2]])
            copied = end
            removed += 1
        else:
            # All before it went: it goes with the comma behind it.
            pieces.append(body[copied:start])
            copied = places[i + 1][0] if i + 1 < len(values) else end
            removed += 1
    added = [
        msgspec.json.encode(name) + b":" + value
        for name, value in edits.items()
        if value is not None and name not in names
    ]
    if added:
        brace = body.rindex(b"}")
        pieces += (body[copied:brace], b"," if removed < len(values) else b"", b",".join(added))
        copied = brace
    pieces.append(body[copied:])
    return b"".join(pieces)


_USAGE_ASKED = b'{"include_usage":true}'


def ask_for_usage(body: bytes, request: Request) -> bytes:
    """The body of a stream with `stream_options.include_usage` true; everything else as it was."""
    if request.include_usage:
        return body
    if not request.stream_options_present:
        end = body.rindex(b"}")
        return b"%b,\"stream_options\":%b%b" % (body[:end], _USAGE_ASKED, body[end:])  # fmt: skip
    options = next(bytes(value) for name, value in _top_level_values(body) if name == "stream_options")
    if options == b"null":
        asked = _USAGE_ASKED
    else:
        # Usage in every chunk is tied to include_usage: it would reach a caller who switched both off.
        asked = splice(options, {"include_usage": b"true", "continuous_usage_stats": None})
    return splice(body, {"stream_options": asked})


# ----------------------------------------------------------------------------------------------------
# Answers

# More tokens than any request can have: an engine that tells more is not believed.
TOKENS_MAX = 10**9
_Count = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]


class _Cached(Struct, gc=False):
    cached_tokens: _Count | None = None


class _Usage(Struct, gc=False):
    """OpenAI's two spellings and Anthropic's, in one."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Cached | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None


class _Nested(Struct, gc=False):
    usage: _Usage | None = None


class _Answer(Struct, gc=False):
    usage: _Usage | None = None
    # Responses API: {"type": "response.completed", "response": {..., "usage": {...}}}
    response: _Nested | None = None
    # Messages API: {"type": "message_start", "message": {..., "usage": {...}}}
    message: _Nested | None = None


_answer = msgspec.json.Decoder(_Answer)
_usage_object = msgspec.json.Decoder(_Usage)
# A usage object: at most one more level of braces inside, no string with a brace.
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class _Choices(Struct, gc=False):
    choices: list[Raw] = []


_choices_object = msgspec.json.Decoder(_Choices)


def choices_of(body: bytes) -> int:
    """How many choices an answer has; as many as there can be when it has none to count."""
    try:
        return len(_choices_object.decode(body).choices) or TOKENS_MAX
    except _UNREADABLE:
        return TOKENS_MAX


def usage_of(body: bytes) -> Usage | None:
    """The usage of a whole answer, or of its tail; None when it has none that can be read."""
    if len(body) > ANSWER_BYTES_DECODED or not body.startswith(b"{"):
        return _usage_near_end(body)
    return usage_in_event(body)


def usage_in_event(payload: bytes) -> Usage | None:
    """The usage that one event of a stream reports; None when it has none.

    The events of the Messages API report in parts: see `Usage.joined`.
    """
    if b'"usage"' not in payload:
        return None
    try:
        answer = _answer.decode(payload)
    except _UNREADABLE:
        return None
    found = answer.usage
    if found is None:
        nested = answer.response or answer.message
        found = nested.usage if nested else None
    return _usage(found) if found else None


def _usage(found: _Usage) -> Usage | None:
    details = found.prompt_tokens_details or found.input_tokens_details
    cached = details.cached_tokens or 0 if details else 0
    if found.prompt_tokens is not None or found.completion_tokens is not None:
        return Usage(found.prompt_tokens or 0, cached, found.completion_tokens or 0)
    if found.input_tokens is None and found.output_tokens is None:
        return None
    # Anthropic counts what it read from and wrote to the cache apart from input_tokens.
    read = found.cache_read_input_tokens or 0
    apart = read + (found.cache_creation_input_tokens or 0)
    return Usage((found.input_tokens or 0) + apart, cached or read, found.output_tokens or 0)


def _usage_near_end(body: bytes) -> Usage | None:
    end = len(body)
    for _ in range(4):
        start = body.rfind(b'"usage"', 0, end)
        if start < 0:
            return None
        match = _USAGE_OBJECT.match(body, start, start + ANSWER_BYTES_DECODED)
        if match:
            try:
                found = _usage(_usage_object.decode(match[1]))
            except _UNREADABLE:
                found = None
            if found:
                return found
        end = start
    return None


class _UsageOnly(Struct, gc=False):
    usage: _Object | None = None
    choices: list[_Object] | None = None
    error: Raw = _NULL
    # Events of the Messages and Responses APIs have a type; what they say besides usage is not ours to hide.
    type: Raw | UnsetType = UNSET


_usage_only = msgspec.json.Decoder(_UsageOnly)


def is_usage_only(payload: bytes) -> bool:
    """Whether a chunk holds usage and nothing else that a caller waits for: `choices` is empty or missing."""
    if b'"usage"' not in payload:
        return False
    try:
        chunk = _usage_only.decode(payload)
    except _UNREADABLE:
        return False
    if chunk.usage is None or chunk.choices or chunk.type is not UNSET:
        return False
    return bytes(chunk.error) == b"null"


class _Failed(Struct, gc=False):
    error: Raw = _NULL
    response: "_Failed | None" = None
    object: Raw = _NULL
    type: Raw = _NULL
    code: Raw = _NULL
    status: Raw = _NULL
    status_code: Raw = _NULL


_failed = msgspec.json.Decoder(_Failed)
_status = msgspec.json.Decoder(Annotated[int, Meta(ge=100, le=599)])
_status_text = msgspec.json.Decoder(Annotated[str, Meta(pattern=r"^[1-5]\d\d$")])
_NO_ERROR = (b"null", b"false", b'""', b"{}", b"[]")


def error_in_event(payload: bytes) -> tuple[int | None, bytes] | None:
    """The error that an event or an answer reports: its HTTP status, if it names one, and a JSON object.

    The object is the value of `error` as the worker sent it; a bare text becomes an object with a `message`.
    """
    if b'"error"' not in payload:
        return None
    try:
        event = _failed.decode(payload)
        shown = bytes(event.error)
        if shown in _NO_ERROR and event.response is not None:
            shown = bytes(event.response.error)
        if shown in _NO_ERROR:
            # {"object": "error", "message": …} and {"type": "error", "message": …} are the error themselves.
            if b'"error"' not in (bytes(event.object), bytes(event.type)):
                return None
            shown = payload
        if not shown.startswith(b"{"):
            message: Raw | str = Raw(shown) if shown.startswith(b'"') else shown.decode(errors="replace")
            shown = msgspec.json.encode(
                {"message": message, "type": "upstream_error", "param": None, "code": None}
            )
        return _status_in(_failed.decode(shown)) or _status_in(event), shown
    except _UNREADABLE:
        return None


def _status_in(fields: _Failed) -> int | None:
    for value in (fields.code, fields.status, fields.status_code):
        try:
            return _status.decode(value)
        except msgspec.DecodeError:
            pass
        try:
            return int(_status_text.decode(value))
        except msgspec.DecodeError:
            pass
    return None


_Nothing = Literal[""] | None
_NoItems = Annotated[list[_Object], Meta(max_length=0)] | None


class _ErrorText(Struct, gc=False):
    message: str | None = None


def error_message(error: bytes) -> str | None:
    """The `message` of an error object; None when it has none that is text."""
    try:
        return msgspec.json.decode(error, type=_ErrorText).message
    except _UNREADABLE:
        return None


class _EmptyDelta(Struct, gc=False, forbid_unknown_fields=True):
    """A delta that says nothing but who speaks."""

    role: str | None = None
    content: _Nothing = None
    reasoning_content: _Nothing = None
    reasoning: _Nothing = None
    refusal: _Nothing = None
    tool_calls: _NoItems = None
    function_call: None = None
    audio: None = None


class _EmptyChoice(Struct, gc=False):
    delta: _EmptyDelta | None = None
    text: _Nothing = None
    message: None = None
    finish_reason: None = None
    logprobs: None = None


class _EmptyChunk(Struct, gc=False):
    choices: list[_EmptyChoice]
    error: None = None


class _Opening(Struct, gc=False):
    type: Literal["message_start", "response.created", "response.queued", "response.in_progress"]


_empty_chunk = msgspec.json.Decoder(_EmptyChunk)
_opening = msgspec.json.Decoder(_Opening)


def has_content(payload: bytes) -> bool:
    """Whether an event brings anything of an answer; True for anything unknown.

    False for a role-only or empty delta and for the opening events of the Messages and Responses APIs.
    """
    try:
        if b'"choices"' in payload:
            _empty_chunk.decode(payload)
        else:
            _opening.decode(payload)
    except _UNREADABLE:
        return True
    return False


# ----------------------------------------------------------------------------------------------------
# Model names in answers


class _Names(Struct, frozen=True):
    """One renaming, ready to run: the spellings in use, and a pattern for all others."""

    compact: bytes
    spaced: bytes
    compact_shown: bytes
    spaced_shown: bytes
    pattern: "re.Pattern[bytes]"
    shown: bytes


@lru_cache(maxsize=4096)
def _renaming(worker_name: bytes, shown: bytes) -> _Names:
    old = msgspec.json.encode(worker_name.decode())
    new = msgspec.json.encode(shown.decode())
    spellings = b"".join(map(_spellings, worker_name.decode()))
    return _Names(
        compact=b'"model":' + old,
        spaced=b'"model": ' + old,
        compact_shown=b'"model":' + new,
        spaced_shown=b'"model": ' + new,
        pattern=re.compile(b'("model"\\s*:\\s*)"%b"' % spellings),
        shown=new,
    )


def _spellings(character: str) -> bytes:
    """A pattern for every way to write a character in a JSON string."""
    plain = re.escape(msgspec.json.encode(character)[1:-1])
    units = character.encode("utf-16-be").hex()
    escapes = b"".join(b"\\\\u(?i:%b)" % units[i : i + 4].encode() for i in range(0, len(units), 4))
    return b"(?:%b|%b%b)" % (plain, escapes, b"|\\\\/" if character == "/" else b"")


def rename_model(data: bytes, worker_name: bytes, shown: bytes) -> bytes:
    """Replaces the value of `model` in an answer or a run of events where it is `worker_name`.

    Text of an answer cannot match: quotes inside of strings are escaped.
    """
    names = _renaming(worker_name, shown)
    if names.compact in data:
        return data.replace(names.compact, names.compact_shown)
    if names.spaced in data:
        return data.replace(names.spaced, names.spaced_shown)
    if b'"model"' not in data:
        return data
    return names.pattern.sub(lambda match: match[1] + names.shown, data)

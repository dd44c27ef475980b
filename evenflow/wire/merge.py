"""One answer out of many: the events of several streams become one stream, or one whole object.

A call for m prompts with n choices each may be answered by m·n streams of one choice. `StreamMerge` passes their events
on as they come, each with its own index and all with one id; `WholeMerge` joins them into the object that a caller
expects who did not ask for a stream. Texts keep their bytes: only the fields around them are written anew.

What engines do differently, and a caller would notice, is made equal here and nowhere else.
Never touches a socket, never reads a clock. Raises WorkerError for what is no event of a completion.
"""

from typing import Any

import msgspec
from msgspec import Raw

from evenflow.wire.faults import WorkerError
from evenflow.wire.openai import Usage, usage_in_event

DONE = b"data: [DONE]\n\n"
# OpenAI's words for what other engines call otherwise.
FINISH_REASONS = {
    "eos_token": "stop",
    "eos": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "abort": "stop",
    "limit": "length",
    "max_tokens": "length",
}
_NULL = Raw(b"null")
_fields = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.encode


def _read(data: bytes | Raw) -> dict[str, Raw]:
    try:
        return _fields.decode(data)
    except msgspec.DecodeError:
        raise WorkerError("The worker sent an event that is no JSON object. Try again.") from None


def _choices(event: dict[str, Raw]) -> list[dict[str, Raw]]:
    raw = event.get("choices")
    if raw is None or bytes(raw) == b"null":
        return []
    try:
        return [_read(choice) for choice in _list.decode(raw)]
    except msgspec.DecodeError:
        raise WorkerError("The worker sent choices that are no list. Try again.") from None


class Identity:
    """What all parts of one answer share; taken from the first event, but for what the gateway decides."""

    __slots__ = ("created", "fields", "model", "object_name")

    def __init__(self, answer_id: str, model: str) -> None:
        self.model = Raw(_encode(model))
        # Fields of the first event that are of the whole answer: id, created, system_fingerprint, ...
        self.fields: dict[str, Raw] = {"id": Raw(_encode(answer_id))}
        self.created = _NULL
        self.object_name = _NULL

    def take(self, event: dict[str, Raw]) -> None:
        """Remembers what the first event tells of the whole answer."""
        if len(self.fields) == 1:
            self.created = event.get("created", _NULL)
            self.object_name = event.get("object", _NULL)
            kept = ("system_fingerprint", "service_tier")
            self.fields.update({name: Raw(bytes(event[name])) for name in kept if name in event})
            self.fields["object"] = Raw(bytes(self.object_name))
            self.fields["created"] = Raw(bytes(self.created))
            self.fields["model"] = self.model


class Part:
    """One choice of the answer, and what has come of it."""

    __slots__ = ("finish_reason", "index", "output_tokens", "text_offset")

    def __init__(self, index: int) -> None:
        self.index = index
        # Characters of the text that have log-probabilities so far.
        self.text_offset = 0
        self.finish_reason: str | None = None
        # Events with a piece of it.
        self.output_tokens = 0

    def note(self, choice: dict[str, Raw]) -> None:
        self.output_tokens += 1
        reason = choice.get("finish_reason")
        if reason is not None and bytes(reason).startswith(b'"'):
            self.finish_reason = finish_reason(msgspec.json.decode(reason))


class Group:
    """Choices of one prompt that one request to a worker asked for."""

    __slots__ = ("_usages", "parts", "prompt", "warm")

    def __init__(self, first: int, size: int, prompt: int = 0) -> None:
        # Of the call's prompts, which.
        self.prompt = prompt
        self.parts = [Part(first + place) for place in range(size)]
        # Its first token has come, so that its prompt is in its worker's cache.
        self.warm = False
        self._usages: list[Usage] = []

    def note(self, data: bytes, choices: list[dict[str, Raw]]) -> list[tuple[Part, dict[str, Raw]]]:
        """The choices of an event, each with its part. Raises WorkerError for one that nobody asked for."""
        if b'"usage"' in data:
            usage = usage_in_event(data)
            if usage is not None:
                self._usages.append(usage)
        found = []
        for choice in choices:
            place = _place(choice)
            if place >= len(self.parts):
                raise WorkerError("The worker sent more choices than it was asked for. Try again.")
            part = self.parts[place]
            part.note(choice)
            found.append((part, choice))
        return found

    @property
    def output_tokens(self) -> int:
        return sum(part.output_tokens for part in self.parts)

    @property
    def finished(self) -> bool:
        return all(part.finish_reason is not None for part in self.parts)

    def missing(self) -> list[Part]:
        """Those of which nothing came: the engine made fewer than it was asked for."""
        return [part for part in self.parts if not part.output_tokens]

    def usage(self) -> Usage | None:
        """What the engine told. Some tell it for each choice, some for all, and some for the first of several only."""
        usages = self._usages
        if not usages:
            return None
        several = len(self.parts) > 1 and len(usages) >= len(self.parts)
        outputs = sum(usage.output_tokens for usage in usages) if several else usages[-1].output_tokens
        # A choice has up to two events without a token, its first and its last.
        if len(self.parts) > 1:
            outputs = max(outputs, self.output_tokens - 2 * len(self.parts))
        return Usage(max(u.input_tokens for u in usages), min(u.cached_tokens for u in usages), outputs)


def _place(choice: dict[str, Raw]) -> int:
    raw = choice.get("index")
    if raw is None or not bytes(raw).isdigit():
        return 0
    return int(bytes(raw))


def finish_reason(reason: Any) -> str:
    """In OpenAI's words; one that is no text, or unknown, stays a word."""
    return FINISH_REASONS.get(str(reason), str(reason))


def total_usage(prompts: list[list[Group]]) -> Usage:
    """Of the groups of each prompt: the prompt once whatever n, as it was computed first, and the tokens of all."""
    inputs = cached = outputs = 0
    for groups in prompts:
        usages = [usage for group in groups if (usage := group.usage()) is not None]
        if usages:
            inputs += max(usage.input_tokens for usage in usages)
            cached += min(usage.cached_tokens for usage in usages)
        for group in groups:
            usage = group.usage()
            outputs += usage.output_tokens if usage is not None else group.output_tokens
    return Usage(inputs, cached, outputs)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class StreamMerge:
    """Events of all parts as one stream. What `take` and `end` return is to be written as it is."""

    def __init__(self, identity: Identity, *, legacy: bool, with_usage: bool) -> None:
        self._identity = identity
        # Of /v1/completions, whose log-probabilities have another shape.
        self._legacy = legacy
        self._with_usage = with_usage

    def take(self, group: Group, data: bytes) -> bytes:
        """One event of a group; b"" for one that says nothing of a choice."""
        event = _read(data)
        found = group.note(data, _choices(event))
        if not found:
            return b""
        self._identity.take(event)
        shown: dict[str, Any] = dict(self._identity.fields)
        shown["choices"] = [healed_choice(choice, part, legacy=self._legacy) for part, choice in found]
        return b"data: %b\n\n" % _encode(shown)

    def end_of(self, part: Part) -> bytes:
        """A part's stream came to its end: says how it ended, if the engine did not."""
        if part.finish_reason is not None:
            return b""
        part.finish_reason = "stop"
        choice: dict[str, Any] = {"index": part.index, "finish_reason": "stop", "logprobs": None}
        choice["text" if self._legacy else "delta"] = "" if self._legacy else {}
        return b"data: %b\n\n" % _encode({**self._identity.fields, "choices": [choice]})

    def end(self, usage: Usage) -> bytes:
        """All parts have ended."""
        if not self._with_usage:
            return DONE
        last = {**self._identity.fields, "choices": [], "usage": usage_object(usage)}
        return b"data: %b\n\n%b" % (_encode(last), DONE)


def healed_choice(choice: dict[str, Raw], part: Part, *, legacy: bool) -> dict[str, Any]:
    """A choice with its own index, the usual words, and log-probabilities in the shape of its route."""
    shown: dict[str, Any] = dict(choice)
    shown["index"] = part.index
    reason = choice.get("finish_reason")
    if reason is not None and bytes(reason).startswith(b'"'):
        shown["finish_reason"] = part.finish_reason
    if legacy and "logprobs" in choice:
        shown["logprobs"] = logprobs = legacy_logprobs(choice["logprobs"], part.text_offset)
        if isinstance(logprobs, dict):
            part.text_offset += sum(map(len, logprobs["tokens"]))
    return shown


def legacy_logprobs(raw: Raw, offset: int) -> Any:
    """Log-probabilities as /v1/completions has them; those that are in the shape of chat are turned."""
    if not bytes(raw).startswith(b"{"):
        return raw
    fields = msgspec.json.decode(raw)
    content = fields.get("content")
    if not isinstance(content, list):
        return raw
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in content:
        text = str(token.get("token", ""))
        shown["tokens"].append(text)
        shown["token_logprobs"].append(token.get("logprob"))
        tops = token.get("top_logprobs") or []
        shown["top_logprobs"].append({str(top.get("token", "")): top.get("logprob") for top in tops})
        shown["text_offset"].append(offset)
        offset += len(text)
    return shown


class _Whole:
    """What has come of one choice of a whole answer."""

    __slots__ = ("fields", "logprobs", "message", "texts", "tools")

    def __init__(self) -> None:
        # Text fields of a delta by name, in pieces; "text" for /v1/completions.
        self.texts: dict[str, list[str]] = {}
        self.message: dict[str, Any] = {}
        self.tools: dict[int, dict[str, Any]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.fields: dict[str, Any] = {}

    def take(self, choice: dict[str, Any]) -> None:
        for name, value in choice.items():
            if name == "delta":
                self._take_delta(value or {})
            elif name == "text":
                self.texts.setdefault("text", []).append(value or "")
            elif name == "logprobs":
                self._take_logprobs(value)
            elif name not in ("index", "finish_reason") and value is not None:
                self.fields[name] = value

    def _take_delta(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name == "tool_calls" and value:
                for number, call in enumerate(value):
                    self._take_tool(call.get("index", number), call)
            elif isinstance(value, str) and name != "role":
                self.texts.setdefault(name, []).append(value)
            elif value is not None:
                self.message[name] = value

    def _take_tool(self, index: int, delta: dict[str, Any]) -> None:
        tool = self.tools.setdefault(index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        for name in ("id", "type"):
            if delta.get(name):
                tool[name] = delta[name]
        function = delta.get("function") or {}
        tool["function"]["name"] += function.get("name") or ""
        tool["function"]["arguments"] += function.get("arguments") or ""

    def _take_logprobs(self, logprobs: Any) -> None:
        if isinstance(logprobs, dict):
            for name, items in logprobs.items():
                if isinstance(items, list):
                    self.logprobs.setdefault(name, []).extend(items)

    def choice(self, part: Part, *, legacy: bool) -> dict[str, Any]:
        texts = {name: "".join(pieces) for name, pieces in self.texts.items()}
        whole: dict[str, Any] = {"index": part.index}
        if legacy:
            whole["text"] = texts.get("text", "")
            logprobs: Any = self.logprobs or None
            if logprobs is not None and "content" in logprobs:
                logprobs = legacy_logprobs(Raw(_encode(logprobs)), 0)
        else:
            message = {"role": "assistant", "content": texts.pop("content", None if self.tools else "")}
            whole["message"] = {**message, **self.message, **texts}
            if self.tools:
                whole["message"]["tool_calls"] = [self.tools[index] for index in sorted(self.tools)]
            logprobs = self.logprobs or None
        return {**whole, **self.fields, "logprobs": logprobs, "finish_reason": part.finish_reason or "stop"}


class WholeMerge:
    """All parts as the one object that a caller gets who did not ask for a stream."""

    def __init__(self, identity: Identity, *, legacy: bool) -> None:
        self._identity = identity
        self._legacy = legacy
        self._choices: dict[int, _Whole] = {}

    def take(self, group: Group, data: bytes) -> None:
        event = _read(data)
        found = group.note(data, _choices(event))
        if found:
            self._identity.take(event)
        for part, choice in found:
            whole = self._choices.get(part.index)
            if whole is None:
                whole = self._choices[part.index] = _Whole()
            whole.take(msgspec.json.decode(_encode(choice)))

    def end(self, parts: list[Part], usage: Usage) -> bytes:
        """The object, JSON bytes."""
        fields: dict[str, Any] = dict(self._identity.fields)
        fields["object"] = "text_completion" if self._legacy else "chat.completion"
        fields["choices"] = [
            self._choices.get(part.index, _Whole()).choice(part, legacy=self._legacy) for part in parts
        ]
        fields["usage"] = usage_object(usage)
        return _encode(fields)

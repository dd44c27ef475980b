"""One answer out of many: the events of several streams become one stream, or one whole object.

A call for m prompts with n choices each may be answered by m·n streams of one choice. `StreamMerge` passes their events
on as they come, each with its own index and all with one id; `WholeMerge` joins them into the object that a caller
expects who did not ask for a stream. Texts keep their bytes: only the fields around them are written anew.

Never touches a socket, never reads a clock. Raises WorkerError for what is no event of a completion.
"""

import re
from typing import Any

import msgspec
from msgspec import Raw

from evenflow.wire.faults import CallerError, WorkerError
from evenflow.wire.heal import Shape, finish_reason, joined_text, legacy_logprobs, mean_logprob
from evenflow.wire.openai import Usage, usage_in_event

DONE = b"data: [DONE]\n\n"
_KEPT = ("system_fingerprint", "service_tier")
_NULL = Raw(b"null")
_fields = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])
_any = msgspec.json.Decoder()
_encode = msgspec.json.encode
# A quote inside of a string is escaped, so that this finds names of fields only.
_INDEX = re.compile(rb'"index":[ ]?([0-9]+)')
_UNFINISHED = (b'"finish_reason":null', b'"finish_reason": null')
_WITHOUT_LOGPROBS = (b'"logprobs":null', b'"logprobs": null')


def _read(data: bytes | Raw) -> dict[str, Raw]:
    try:
        return _fields.decode(data)
    except msgspec.DecodeError:
        raise WorkerError("The worker sent an event that is no JSON object. Try again.") from None


def _choices(event: dict[str, Raw]) -> list[Raw]:
    raw = event.get("choices")
    if raw is None or bytes(raw) == b"null":
        return []
    try:
        return _list.decode(raw)
    except msgspec.DecodeError:
        raise WorkerError("The worker sent choices that are no list. Try again.") from None


class Identity:
    """What all parts of one answer share; taken from the first event, but for what the gateway decides."""

    __slots__ = ("before", "fields", "model")

    def __init__(self, answer_id: str, model: str) -> None:
        self.model = Raw(_encode(model))
        # Fields of the whole answer: id, created, system_fingerprint, ...
        self.fields: dict[str, Raw] = {"id": Raw(_encode(answer_id))}
        # An event up to its choices.
        self.before = b""

    def take(self, event: dict[str, Raw]) -> None:
        """Remembers what the first event tells of the whole answer."""
        if self.before:
            return
        fields = self.fields
        for name in ("object", "created"):
            fields[name] = Raw(bytes(event.get(name, _NULL)))
        fields["model"] = self.model
        fields.update({name: Raw(bytes(event[name])) for name in _KEPT if name in event})
        self.before = b"data: " + _encode(fields)[:-1] + b',"choices":['


class Part:
    """One choice of the answer, and what has come of it."""

    __slots__ = ("finish_reason", "index", "output_tokens", "role_shown", "text_offset")

    def __init__(self, index: int) -> None:
        self.index = index
        # Characters of the text that have log-probabilities so far.
        self.text_offset = 0
        self.finish_reason: str | None = None
        # Events with a piece of it.
        self.output_tokens = 0
        self.role_shown = False

    def note(self, choice: dict[str, Raw]) -> None:
        self.output_tokens += 1
        reason = choice.get("finish_reason")
        if reason is not None and bytes(reason).startswith(b'"'):
            self.finish_reason = finish_reason(msgspec.json.decode(reason))


class Group:
    """Choices of one prompt that one request to a worker asked for."""

    __slots__ = ("_usages", "after", "before", "parts", "prompt", "warm")

    def __init__(self, first: int, size: int, prompt: int = 0) -> None:
        # Of the call's prompts, which.
        self.prompt = prompt
        self.parts = [Part(first + place) for place in range(size)]
        # Its first token has come, so that its prompt is in its worker's cache.
        self.warm = False
        # What stood around the only choice of its last event, which is what stands around that of the next.
        self.before = b""
        self.after = b""
        self._usages: list[Usage] = []

    def note(self, data: bytes, choices: list[Raw]) -> list[tuple[Part, dict[str, Raw]]]:
        """The choices of an event, each with its part. Raises WorkerError for one that nobody asked for."""
        if b'"usage"' in data:
            usage = usage_in_event(data)
            if usage is not None:
                self._usages.append(usage)
        found = []
        for raw in choices:
            choice = _read(raw)
            part = self.part(choice.get("index", _NULL))
            if part.finish_reason is None:
                part.note(choice)
                found.append((part, choice))
        return found

    def part(self, index: bytes | Raw) -> Part:
        digits = bytes(index)
        place = int(digits) if digits.isdigit() else 0
        if place >= len(self.parts):
            raise WorkerError("The worker sent more choices than it was asked for. Try again.")
        return self.parts[place]

    def learn(self, data: bytes, event: dict[str, Raw], choices: list[Raw]) -> None:
        """Remembers what stands around the only choice of an event that tells nothing else."""
        usage = event.get("usage")
        if len(choices) == 1 and (usage is None or bytes(usage) == b"null"):
            raw = bytes(choices[0])
            start = data.index(raw)
            self.before, self.after = data[:start], data[start + len(raw) :]
        else:
            self.before = self.after = b""

    @property
    def output_tokens(self) -> int:
        return sum([part.output_tokens for part in self.parts])

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
        outputs = sum([usage.output_tokens for usage in usages]) if several else usages[-1].output_tokens
        # A choice has up to two events without a token, its first and its last.
        if len(self.parts) > 1:
            outputs = max(outputs, self.output_tokens - 2 * len(self.parts))
        return Usage(max([u.input_tokens for u in usages]), min([u.cached_tokens for u in usages]), outputs)


def total_usage(prompts: list[list[Group]], *, silent: bool = False) -> Usage:
    """Of the groups of each prompt: the prompt once whatever n, as it was computed first, and the tokens of all."""
    inputs = cached = outputs = 0
    for groups in prompts:
        told = [(group, group.usage()) for group in groups]
        usages = [usage for _, usage in told if usage is not None]
        if usages:
            inputs += max([usage.input_tokens for usage in usages])
            cached += min([usage.cached_tokens for usage in usages])
        for group, usage in told:
            outputs += group.output_tokens if usage is None else usage.output_tokens
    return Usage(inputs, cached, 0 if silent else outputs)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class StreamMerge:
    """Events of all parts as one stream. What `take` and `end` return is to be written as it is."""

    __slots__ = ("_identity", "_plain", "_shape", "_with_usage")

    def __init__(self, identity: Identity, shape: Shape, *, with_usage: bool) -> None:
        self._identity = identity
        self._shape = shape
        # Nothing but the index must change in an event of the common kind.
        self._plain = not shape.rewrites
        self._with_usage = with_usage

    def take(self, group: Group, data: bytes) -> bytes:
        """One event of a group; b"" for one that says nothing new of a choice.

        1. The same as the last but for its choice, which neither begins nor ends: its index is written anew, no more.
        2. All else is read and written again, but for the texts.
        """
        before, after = group.before, group.after
        if before and self._plain and data.startswith(before) and data.endswith(after):  # (1)
            shown = self._renumbered(group, data[len(before) : len(data) - len(after)])
            if shown is not None:
                return shown
        event = _read(data)  # (2)
        choices = _choices(event)
        found = group.note(data, choices)
        if not found:
            return b""
        self._identity.take(event)
        group.learn(data, event, choices)
        shape = self._shape
        shown_choices = [self._healed(choice, part, group) for part, choice in found if not shape.silent]
        if not shown_choices:
            return b""
        return b"%b%b]}\n\n" % (self._identity.before, _encode(shown_choices)[1:-1])

    def _renumbered(self, group: Group, choice: bytes) -> bytes | None:
        """The event with a choice that needs no more; None for one that does."""
        pieces = _INDEX.split(choice)
        if (
            len(pieces) != 3
            or b'"role"' in choice
            or (b'"finish_reason"' in choice and not _has_any(choice, _UNFINISHED))
            or (self._shape.legacy and b'"logprobs"' in choice and not _has_any(choice, _WITHOUT_LOGPROBS))
        ):
            return None
        part = group.part(pieces[1])
        if part.finish_reason is not None or not (part.role_shown or self._shape.legacy):
            return None
        part.output_tokens += 1
        return b'%b%b"index":%d%b]}\n\n' % (self._identity.before, pieces[0], part.index, pieces[2])

    def _healed(self, choice: dict[str, Raw], part: Part, group: Group) -> dict[str, Any]:
        """A choice with its own index, the usual words, one role, and log-probabilities in the shape of its route."""
        shape = self._shape
        shown: dict[str, Any] = dict(choice)
        shown["index"] = part.index
        if part.finish_reason is not None:
            shown["finish_reason"] = part.finish_reason
        if not shape.legacy:
            if "delta" in choice and bytes(choice["delta"]).startswith(b"{"):
                shown["delta"] = _with_one_role(choice["delta"], part)
            return shown
        if shape.echoes is not None and not part.role_shown:
            part.role_shown = True
            text = bytes(choice.get("text", _NULL))
            echo = shape.echoes[group.prompt]
            shown["text"] = Raw(joined_text(echo, text) if text.startswith(b'"') else echo)
        if "logprobs" in choice:
            logprobs = legacy_logprobs(choice["logprobs"], part.text_offset, chosen_only=shape.chosen_only)
            shown["logprobs"] = logprobs
            if isinstance(logprobs, dict):
                part.text_offset += sum(map(len, logprobs["tokens"]))
        return shown

    def end_of(self, group: Group) -> bytes:
        """A group's stream came to its end: says how its choices ended, where the engine did not."""
        self._identity.take({})
        events = []
        shape = self._shape
        for part in group.parts:
            if part.finish_reason is not None and not shape.silent:
                continue
            part.finish_reason = shape.finish()
            choice: dict[str, Any] = {"index": part.index, "finish_reason": part.finish_reason, "logprobs": None}
            if shape.legacy:
                choice["text"] = "" if shape.echoes is None or part.role_shown else Raw(shape.echoes[group.prompt])
            else:
                choice["delta"] = {} if part.role_shown else {"role": "assistant"}
            events.append(b"%b%b]}\n\n" % (self._identity.before, _encode(choice)))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        """All parts have ended."""
        if not self._with_usage:
            return DONE
        self._identity.take({})
        return b'%b],"usage":%b}\n\n%b' % (self._identity.before, _encode(usage_object(usage)), DONE)


def _has_any(data: bytes, wanted: tuple[bytes, bytes]) -> bool:
    return wanted[0] in data or wanted[1] in data


def _with_one_role(delta: Raw, part: Part) -> Any:
    """The first delta of a choice names its role, and no other does, whatever the engine sent."""
    if part.role_shown == (b'"role"' not in bytes(delta)):
        part.role_shown = True
        return delta
    fields: dict[str, Any] = dict(_read(delta))
    if part.role_shown:
        fields.pop("role", None)
        return fields
    part.role_shown = True
    return fields if "role" in fields else {"role": "assistant", **fields}


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

    def take(self, choice: dict[str, Raw]) -> None:
        for name, raw in choice.items():
            if name == "index" or name == "finish_reason":
                continue
            value = _any.decode(raw)
            if name == "delta":
                self._take_delta(value or {})
            elif name == "text":
                self.texts.setdefault("text", []).append(value or "")
            elif name == "logprobs":
                self._take_logprobs(value)
            elif isinstance(value, list) and isinstance(self.fields.get(name), list):
                self.fields[name] += value  # such as token ids
            elif value is not None:
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

    def choice(self, index: int, finish: str, shape: Shape, echo: str, *, with_logprobs: bool) -> dict[str, Any]:
        texts = {name: "".join(pieces) for name, pieces in self.texts.items()}
        logprobs: Any = self.logprobs if with_logprobs and self.logprobs else None
        whole: dict[str, Any] = {"index": index}
        if shape.legacy:
            whole["text"] = echo + texts.get("text", "")
            if logprobs is not None and "content" in logprobs:
                logprobs = legacy_logprobs(Raw(_encode(logprobs)), 0, chosen_only=shape.chosen_only)
        else:
            message = {"role": "assistant", "content": texts.pop("content", None if self.tools else "")}
            whole["message"] = {**message, **self.message, **texts}
            if self.tools:
                whole["message"]["tool_calls"] = [self.tools[index] for index in sorted(self.tools)]
        return {**whole, **self.fields, "logprobs": logprobs, "finish_reason": finish}


class WholeMerge:
    """All parts as the one object that a caller gets who did not ask for a stream."""

    __slots__ = ("_choices", "_identity", "_shape")

    def __init__(self, identity: Identity, shape: Shape) -> None:
        self._identity = identity
        self._shape = shape
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
            if not self._shape.silent:
                try:
                    whole.take(choice)
                except (AttributeError, TypeError, KeyError):  # members of other types than a choice has
                    raise WorkerError("The worker sent a choice that is none. Try again.") from None

    def end(
        self, prompts: list[list[Part]], usage: Usage, best: int | None = None, *, with_logprobs: bool = True
    ) -> bytes:
        """The object, JSON bytes: the choices of each prompt in their order, or its `best` by mean log-probability.

        Raises CallerError when the best are asked for and the engine gave no log-probabilities.
        """
        choices: list[dict[str, Any]] = []
        for prompt, parts in enumerate(prompts):
            kept = parts if best is None else self._best(parts, best)
            echoes = self._shape.echoes
            echo = "" if echoes is None else msgspec.json.decode(echoes[prompt], type=str)
            for part in kept:
                whole = self._choices.get(part.index) or _Whole()
                finish = self._shape.finish() if self._shape.silent else part.finish_reason or "stop"
                index = part.index if best is None else len(choices)
                choices.append(whole.choice(index, finish, self._shape, echo, with_logprobs=with_logprobs))
        fields: dict[str, Any] = dict(self._identity.fields)
        fields["object"] = "text_completion" if self._shape.legacy else "chat.completion"
        fields["choices"] = choices
        fields["usage"] = usage_object(usage)
        return _encode(fields)

    def _best(self, parts: list[Part], count: int) -> list[Part]:
        """The likeliest first; of equal ones the earlier."""
        scores: dict[int, float] = {}
        for part in parts:
            whole = self._choices.get(part.index)
            score = None if whole is None else mean_logprob(whole.logprobs)
            if score is None:
                raise CallerError(
                    "'best_of' above 'n' is not available for this model: its engine gives no log-probabilities to "
                    "choose by. Ask for as many choices as you want to see.",
                    param="best_of",
                )
            scores[part.index] = score
        return sorted(parts, key=lambda part: (-scores[part.index], part.index))[:count]

"""Stage 4½, for few calls: one call becomes several parts, and their answers become one again.

Where a worker cannot make all choices of a call itself, they become parts of as many as it can, each a call of its own
with its own ticket, so that parts wait, run, fail and are retried as all calls do. Parts of one prompt go to one
worker, one ahead of the others, which follow its first token: by then the worker has the prompt in its cache, and
computes it once. Different prompts go wherever there is room. Workers are asked for streams, which can be cancelled; a
caller who did not ask for one gets one whole object.

All parts are one admission, one line of the log and one usage. A part that fails, and cannot be tried again, ends them
all: with an error answer while nothing was shown, with an error event after that. A caller that leaves cancels all.
"""

from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from evenflow.observe.why import why_line
from evenflow.policy.cost import CostModel
from evenflow.policy.fairness import Ticket
from evenflow.policy.placement.prefix import PROMPT_BYTES_HASHED_MAX
from evenflow.policy.sampling import Order, groups_of, order_of
from evenflow.request import Call
from evenflow.wire.answer import Head, fault_of_event, last_event
from evenflow.wire.faults import CallerError, Fault, WorkerError
from evenflow.wire.heal import Shape
from evenflow.wire.http import LAST_CHUNK, AnswerHead, status_line
from evenflow.wire.merge import Group, Identity, Part, StreamMerge, WholeMerge, total_usage
from evenflow.wire.openai import SEED_MAX, Request, Usage, error_in_event, has_content, prompt_of, splice
from evenflow.wire.ratelimit import rate_limit_lines
from evenflow.wire.sse import EventReader, EventTooLarge, payload, split_events

if TYPE_CHECKING:
    from evenflow.fleet.registry import Lane, Registry, Worker
    from evenflow.request.place import Scheduler
    from evenflow.request.settle import Settler

# Of an error's body so much is kept for its message.
ERROR_BYTES_MAX = 64 * 1024
SEEDS = 2**64
_prompts = msgspec.json.Decoder(list[Raw])
_members = msgspec.json.Decoder(dict[str, Raw])
_seed = msgspec.json.Decoder(int | None)
_NULL = Raw(b"null")
_ASK_USAGE = b'{"include_usage":true}'


class Sink:
    """Stands where a client stands, for one part: what the stages tell a client goes to the fanout."""

    __slots__ = ("call", "fanout")

    def __init__(self, fanout: "Fanout") -> None:
        self.fanout = fanout
        self.call: Call

    @property
    def stalled(self) -> bool:
        client = self.fanout.call.client
        return client is not None and client.stalled

    def pause_writing(self) -> None:
        if self.call.connection is not None:
            self.call.connection.pause()

    def wait_in_queue(self, limit_s: float | None) -> None:
        return None  # the limit of the whole call holds

    def wait_for_worker(self, call: Call) -> None:
        self.fanout.dispatched(call)

    def write(self, data: bytes) -> None:
        return None

    def cors(self, origin: bytes) -> bytes:
        return b""

    def peer_host(self) -> str:
        return ""

    def answer(
        self,
        call: Call,
        status: int,
        content_type: bytes,
        body: bytes,
        extra: bytes = b"",
        *,
        cors: bool = True,
    ) -> None:
        return None  # who refuses a part fails the whole call

    def done(self, call: Call) -> None:
        self.fanout.part_ended(call)

    def break_off(self, call: Call, last: bytes | None) -> None:
        assert call.fault is not None
        self.fanout.fail(call.fault)


class Fanout:
    """The parts of one call."""

    __slots__ = (
        "_best",
        "_bodies",
        "_choices",
        "_cost",
        "_lane",
        "_order",
        "_registry",
        "_scheduler",
        "_settler",
        "_shape",
        "_stream",
        "_tier",
        "_whole",
        "call",
        "cost",
        "ended",
        "parts",
        "prompts",
        "waiting",
    )

    def __init__(
        self,
        call: Call,
        lane: "Lane",
        tier: int,
        cost: CostModel,
        scheduler: "Scheduler",
        settler: "Settler",
        registry: "Registry",
    ) -> None:
        request, route = call.request, call.route
        assert request is not None and route is not None
        self.call = call
        self._lane = lane
        self._tier = tier
        self._cost = cost
        self._scheduler = scheduler
        self._settler = settler
        self._registry = registry
        tenant = call.tenant.name if call.tenant is not None else ""
        self._order = order_of(
            slot_caches=lane.slot_caches,
            input_tokens=cost.input_tokens(tenant, request.model, request.prompt_bytes // request.prompts),
            output_tokens=cost.output_tokens(tenant, request.model, request.max_tokens),
        )
        # Choices that are made of each prompt, of which the `n` best may be shown.
        self._choices = request.sequences // request.prompts
        self._best = request.n if self._choices > request.n else None
        # Parts of each prompt, in the order of their choices; and all of them.
        self.prompts: list[list[Call]] = []
        self.parts: list[Call] = []
        self.waiting = True
        self.ended = 0
        # What was charged in all.
        self.cost = 0.0
        legacy = route.kind == "completions"
        identity = Identity(("cmpl-" if legacy else "chatcmpl-") + call.request_id.decode("ascii"), request.model)
        self._bodies = bodies = Bodies(call.body, request, legacy=legacy, best=self._best is not None)
        self._shape = shape = bodies.shape(heals=lane.heals_completions)
        self._stream = StreamMerge(identity, shape, with_usage=request.include_usage) if request.stream else None
        self._whole = None if request.stream else WholeMerge(identity, shape)

    # -- out: parts go their ways --------------------------------------------------------------------------------

    def start(self) -> None:
        """Submits the first part of each prompt, or all."""
        request, lane = self.call.request, self._lane
        assert request is not None
        choices, cap = self._choices, max(1, min(lane.n_max, lane.slots_max))
        for prompt in range(request.prompts):
            self.prompts.append(
                [self._part(prompt, prompt * choices + first, size) for first, size in groups_of(choices, cap)]
            )
        for parts in self.prompts:
            for part in parts if self._order is Order.AT_ONCE else parts[:1]:
                if not self.call.ended:
                    self._submit(part, self._lane, cached=False)

    def _part(self, prompt: int, first: int, size: int) -> Call:
        """`size` choices of a prompt, from choice `first` of the whole answer on."""
        whole = self.call
        request, head = whole.request, whole.head
        assert request is not None
        sink = Sink(self)
        part = Call(sink, head, whole.route, whole.tenant, b"%b-%d" % (whole.request_id, first))
        sink.call = part
        part.fanout, part.part = self, Group(first, size, prompt)
        part.accepted_s = whole.accepted_s
        part.keep_alive = False
        part.request = Request(
            model=request.model,
            stream=True,
            sequences=size,
            n=size,
            prompts=1,
            prompt_bytes=request.prompt_bytes // request.prompts,
            max_tokens=request.max_tokens,
            include_usage=True,
            stream_options_present=True,
            user=None,
            api_key=None,
        )
        self.parts.append(part)
        return part

    def _submit(self, part: Call, lane: "Lane", *, cached: bool) -> None:
        """`cached`: its prompt is in the cache of the lane's worker by now."""
        tenant, request = part.tenant, part.request
        assert tenant is not None and request is not None
        cost = self._cost
        tokens = cost.input_tokens(tenant.name, request.model, request.prompt_bytes)
        output = cost.output_tokens(tenant.name, request.model, request.max_tokens) * request.n
        counted = tokens * cost.cached_weight / (cost.input_weight or 1.0) if cached else tokens
        part.ticket = ticket = Ticket(
            tenant, self._tier, lane, request.n, cost.charge(counted, output, request.n), part
        )
        ticket.tokens = output if cached else tokens + output
        ticket.prompt_work = cost.prompt_work(counted)
        ticket.since_s = part.accepted_s
        scheduler, session = self._scheduler, part.head.session
        if not cached and scheduler.wants_ask(lane, request, session):
            assert part.part is not None
            prompt = self._bodies.prompt(part.part.prompt)
            ticket.ask = scheduler.ask(request, prompt, cost.charge(tokens, 0.0, 1), cost.cached_saves(), session)
        self._scheduler.submit(ticket)

    def _follow(self, first: Call, worker: "Worker | None") -> None:
        """A part of a prompt has its first token, or has ended: others follow it to its worker."""
        assert first.part is not None
        parts = self.prompts[first.part.prompt]
        lane = self._registry.pinned.get(worker, self._lane) if worker is not None else self._lane
        for part in parts:
            if part.ticket is None and not part.ended and not self.call.ended:
                self._submit(part, lane if lane.live else self._lane, cached=True)
                if self._order is Order.CHAIN:
                    break

    def _ask_again(self, call: Call, group: Group, missing: list[Part]) -> None:
        """The engine made fewer choices than it was asked for, without a word: the missing ones are asked for alone."""
        if call.lease is not None:
            self._registry.makes_one_choice(call.lease.worker)
        for part in missing:
            group.parts.remove(part)
            again = self._part(group.prompt, part.index, 1)
            self.prompts[group.prompt].append(again)
            self._submit(again, self._lane, cached=True)

    def reroute(self, part: Call) -> bool:
        """The worker that had its prompt is gone; another may do. False when nobody has the model."""
        if part.shown or not self._lane.live:
            return False
        if part.lease is not None and part.ticket is not None:
            self._scheduler.finish(part.ticket, part.lease, 0.0)
            part.lease = None
        part.failed_on = None
        self._submit(part, self._lane, cached=False)
        return True

    # -- in: what the stages tell of parts -----------------------------------------------------------------------

    def dispatched(self, part: Call) -> None:
        """A part goes to its worker. Only now it gets its body, or many choices would be as many copies of a prompt."""
        whole, group = self.call, part.part
        assert group is not None and whole.request is not None
        first = group.parts[0].index - group.prompt * self._choices
        part.body = self._bodies.of(group.prompt, first, len(group.parts))
        if self.waiting:
            self.waiting = False
            whole.dispatched_s = part.dispatched_s
            whole.lease, whole.rivals = part.lease, part.rivals
            if whole.client is not None:
                whole.client.wait_for_worker(whole)

    def events(self, call: Call, group: Group, block: list[bytes]) -> None:
        """Events of a part have come, each the data of one."""
        if not block:
            return
        if not call.shown and call.lease is not None:
            call.lease.prompt_done()
        call.shown = True
        call.body = b""  # it is tried nowhere else from here on
        if self._whole is not None:
            for data in block:
                self._whole.take(group, data)
        else:
            assert self._stream is not None
            out = b"".join([self._stream.take(group, data) for data in block])
            if self.call.form is None:
                self._write(out)
        if self.call.form is not None:
            self._write(b"".join([self.call.form.take(group.prompt, data) for data in block]))
        if (
            not group.warm
            and self._order is Order.FOLLOW
            and call.lease is not None
            and any(map(has_content, block))
        ):
            group.warm = True
            self._follow(call, call.lease.worker)

    def part_ended(self, call: Call) -> None:
        """A part's answer is whole."""
        assert call.part is not None
        if self.call.ended:
            return
        group = call.part
        if len(group.parts) > 1:
            missing = group.missing()
            if missing and len(missing) < len(group.parts):
                self._ask_again(call, group, missing)
            elif not missing and call.lease is not None:
                self._registry.makes_choices(call.lease.worker)
        if self._stream is not None:
            rest = self._stream.end_of(group)
            if self.call.form is None:
                self._write(rest)
        self._follow(call, call.lease.worker if call.lease is not None else None)
        self.ended += 1
        if self.ended == len(self.parts):
            self._end()

    def _end(self) -> None:
        whole = self.call
        usage = self.usage()
        if self._stream is not None:
            form = whole.form
            self._write(self._stream.end(usage) if form is None else form.end(usage), last=True)
        elif not self._write_whole(usage):
            return
        client = whole.client
        self._settler.end(whole, 200, b"ok", None)
        if client is not None:
            client.done(whole)

    def _write_whole(self, usage: Usage) -> bool:
        """The one object; False when it cannot be had, and the call has failed."""
        whole = self.call
        assert self._whole is not None
        prompts = [
            sorted([part for group in groups for part in group.parts], key=lambda part: part.index)
            for groups in self._groups()
        ]
        try:
            if whole.form is not None:
                body = whole.form.end(usage)
            else:
                body = self._whole.end(prompts, usage, self._best, with_logprobs=self._bodies.with_logprobs)
        except Fault as error:
            self.fail(error)
            return False
        if whole.client is not None:
            whole.first_byte_s = monotonic()
            whole.client.write(self._head().write(b"content-length: %d\r\n" % len(body)) + body)
        return True

    def fail(self, fault: Fault) -> None:
        """A part failed for good, and with it all."""
        whole = self.call
        if whole.ended:
            return
        if not whole.shown:
            self._settler.refuse(whole, fault)
            return
        client = whole.client
        self._settler.end(whole, fault.status, b"failed", fault)
        if client is not None:
            client.break_off(whole, self._last(fault))

    def _last(self, fault: Fault) -> bytes:
        """The end of a stream that failed."""
        form, http11 = self.call.form, self.call.head.http11
        if form is None:
            return last_event(fault, http11=http11)
        line = form.failed(fault)
        return b"%x\r\n%b\r\n%b" % (len(line), line, LAST_CHUNK) if http11 else line

    def end_early(self) -> None:
        """What has come until now is the answer."""
        if not self.call.ended:
            self._end()

    def stop(self) -> None:
        """The whole call has ended, however it did: no part may hold anything."""
        for part in self.parts:
            if part.connection is not None:
                part.connection.drop()
            if not part.ended:
                self._settler.end(part, 499, b"cancelled", None)

    def usage(self) -> Usage:
        return total_usage(self._groups(), silent=self._shape.silent)

    def _groups(self) -> list[list[Group]]:
        """Of each prompt."""
        return [[part.part for part in parts if part.part is not None] for parts in self.prompts]

    # -- towards the caller --------------------------------------------------------------------------------------

    def pause(self) -> None:
        """The caller does not keep up: no part is read further until it does."""
        for part in self.parts:
            if part.connection is not None:
                part.connection.pause()

    def resume(self) -> None:
        for part in self.parts:
            if part.connection is not None:
                part.connection.resume()

    def _write(self, data: bytes, *, last: bool = False) -> None:
        whole = self.call
        client = whole.client
        if client is None or not data:
            return
        http11 = whole.head.http11
        framed = b"%x\r\n%b\r\n%b" % (len(data), data, LAST_CHUNK if last else b"") if http11 else data
        if not whole.shown:
            whole.shown = True
            whole.first_byte_s = monotonic()
            whole.body = b""
            if not whole.opened:
                if not http11:
                    whole.keep_alive = False
                framed = self._head().write(b"transfer-encoding: chunked\r\n" if http11 else b"") + framed
        client.write(framed)

    def _head(self) -> Head:
        whole = self.call
        worker = whole.lease.worker if whole.lease is not None else None
        kind = b"application/json" if self._whole is not None else b"text/event-stream; charset=utf-8"
        if self._stream is not None and whole.form is not None:
            kind = whole.form.content_type
        lines = [status_line(200), b"content-type: %b\r\n" % kind]
        if self._stream is not None:
            lines.append(b"cache-control: no-cache\r\n")
        lines.append(b"x-request-id: %b\r\n" % whole.request_id)
        if worker is not None:
            lines.append(worker.name_line)
            lines.append(b"x-evenflow-queue-ms: %d\r\n" % ((whole.dispatched_s - whole.accepted_s) * 1e3))
        if whole.head.origin is not None and whole.client is not None:
            lines.append(whole.client.cors(whole.head.origin))
        if whole.tenant is not None and whole.tenant.limits is not None:
            lines.append(rate_limit_lines(whole.tenant.limits, monotonic()))
        if whole.head.why:
            lines.append(why_line(whole.waited, whole.rivals, worker.name if worker is not None else None))
        return Head(b"".join(lines), http11=whole.head.http11, keep_alive=whole.keep_alive, rename=None)


class PartAnswer:
    """A worker's answer to one part: its events go to the fanout, nothing to the part's own client."""

    __slots__ = ("_call", "_done", "_error", "_reader", "_status", "broken", "outcome", "output_tokens", "usage")

    def __init__(self, call: Call, head: AnswerHead) -> None:
        self._call = call
        self._status = head.status
        self._error = b"" if head.status >= 400 else None
        self._reader = EventReader()
        self._done = False
        self.broken: WorkerError | None = None
        self.outcome = b"ok"
        self.output_tokens = 0
        self.usage: Usage | None = None

    def take(self, body: bytes, complete: bool) -> bytes:
        """Raises a Fault for a stream that failed or ended before its end."""
        if self._error is not None:
            self._take_error(body, complete)
            return b""
        try:
            block = self._reader.feed(body)
        except EventTooLarge as error:
            raise WorkerError(f"The worker sent an event that is too large: {error}.") from None
        if complete:
            block += self._reader.take_rest()
        call = self._call
        part, fanout = call.part, call.fanout
        assert part is not None and fanout is not None
        events = []
        for event in split_events(block):
            data = payload(event)
            if data == b"[DONE]":
                self._done = True
            elif data is not None and not self._done:
                failed = error_in_event(data) if b'"error"' in data else None
                if failed is not None:
                    raise fault_of_event(*failed)
                events.append(data)
        fanout.events(call, part, events)
        self.output_tokens = part.output_tokens
        if complete and not self._done and not part.finished:
            raise WorkerError("The worker broke its answer off. Try again.", retry_safe=not call.shown)
        return b""

    def _take_error(self, body: bytes, complete: bool) -> None:
        assert self._error is not None
        if len(self._error) < ERROR_BYTES_MAX:
            self._error += body
        if complete:
            told = error_in_event(self._error)
            if told is None:
                raise CallerError("The worker refused the request. Check its parameters.", status=self._status)
            raise fault_of_event(self._status, told[1])

    def broken_off(self, fault: Fault) -> bytes | None:
        self._call.fault = fault
        return b""


class Bodies:
    """The bodies of the parts: one prompt, some of its choices, their seed, as a stream with usage."""

    __slots__ = ("_body", "_edits", "_legacy", "_prompts", "_seed", "_echo", "_logprobs", "_silent", "with_logprobs")

    def __init__(self, body: bytes, request: Request, *, legacy: bool, best: bool) -> None:
        fields = _members.decode(body)
        self._body = body
        self._legacy = legacy
        self._silent = request.max_tokens == 0
        self._seed: int | None = _seed.decode(fields["seed"]) if "seed" in fields else None
        # JSON values; those of the body itself when there is one.
        self._prompts = [fields.get("prompt", _NULL)]
        if bytes(self._prompts[0]).startswith(b"["):
            listed = _prompts.decode(self._prompts[0])
            if request.prompts > 1 or not bytes(listed[0])[:1].isdigit():
                self._prompts = listed
        self._echo = legacy and bytes(fields.get("echo", _NULL)) == b"true"
        self._logprobs = bytes(fields.get("logprobs", _NULL))
        # Whether the caller sees log-probabilities, which may be asked for just to find the best.
        self.with_logprobs = self._logprobs not in (b"null", b"false")
        # What all parts have in common.
        self._edits: dict[str, bytes | None] = {
            "best_of": None,
            "stream": b"true",
            "stream_options": _ASK_USAGE,
        }
        if best and not self.with_logprobs:
            self._edits["logprobs"] = b"1" if legacy else b"true"

    def shape(self, *, heals: bool) -> Shape:
        """How the answer has to look. `heals`: the engine does not do it itself on /v1/completions.

        Raises CallerError for what this engine cannot do, and nobody can do for it.
        """
        chosen_only = heals and self._legacy and self._logprobs == b"0"
        if chosen_only:
            self._edits["logprobs"] = b"1"
        echoes = None
        if heals and self._echo:
            echoes = [bytes(prompt) for prompt in self._prompts]
            if self.with_logprobs:
                raise CallerError(
                    "'echo' with 'logprobs' is not available for this model: its engine gives no log-probabilities of "
                    "the prompt. Leave one of them out.",
                    param="echo",
                )
            if not all(echo.startswith(b'"') for echo in echoes):
                raise CallerError(
                    "'echo' of token ids is not available for this model: its engine does not echo. Send the prompt "
                    "as text, or leave 'echo' out.",
                    param="echo",
                )
        return Shape(legacy=self._legacy, echoes=echoes, silent=heals and self._silent, chosen_only=chosen_only)

    def prompt(self, index: int) -> bytes:
        """As caches may know it again; as much of it as is looked at."""
        if self._legacy:
            return bytes(self._prompts[index])[:PROMPT_BYTES_HASHED_MAX]
        return prompt_of("chat", self._body, PROMPT_BYTES_HASHED_MAX)

    def of(self, prompt: int, first: int, size: int) -> bytes:
        """Choices `first` to `first + size - 1` of a prompt; choice j has the seed of the whole plus j."""
        edits = dict(self._edits)
        edits["n"] = b"%d" % size if size > 1 else None
        if len(self._prompts) > 1:
            edits["prompt"] = bytes(self._prompts[prompt])
        if self._seed is not None:
            seed = self._seed + first
            edits["seed"] = b"%d" % (seed if seed <= SEED_MAX else seed - SEEDS)
        return splice(self._body, edits)

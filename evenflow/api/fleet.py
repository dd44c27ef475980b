"""Routes by which workers join, leave and are looked after: FastChat's, LMDeploy's, and those under /admin/v1/workers.

Whatever protocol a worker speaks, it becomes a `Registration` for `fleet/joining.py`, and what is shown of it comes
from the registry. Joining asks for `auth.worker_token` (or an admin key) as soon as any kind of key is configured.
The older workers of both protocols send no token of their own; a user part in the gateway's address, such as
http://worker:TOKEN@host, makes their HTTP client send it as Basic authorization, which counts here.
"""

from base64 import b64decode
from math import inf
from time import monotonic, time
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from evenflow.api.local import GET, GET_POST, LocalRoutes, is_loopback, percent_decoded
from evenflow.config.problems import did_you_mean
from evenflow.fleet.joining import Joining, Registration
from evenflow.fleet.registry import Registry, Source, Worker
from evenflow.request import Call
from evenflow.request.accept import Front, LocalAnswer, LocalRoute
from evenflow.request.authenticate import Authenticator
from evenflow.wire.faults import CallerError

POST = (b"POST",)
WORKER_METHODS = (b"GET", b"HEAD", b"POST", b"DELETE")
WORKERS = b"/admin/v1/workers"
NULL = b"null"
Shape = TypeVar("Shape")
# What LMDeploy calls a worker that does prefill and decode; others are parts of one.
WHOLE_ROLES = ("", "hybrid")


class _Status(msgspec.Struct):
    model_names: list[str] = []
    speed: float = 1.0
    queue_length: float = 0.0


class _FastChatWorker(msgspec.Struct):
    """`/register_worker`. The last three are ours, and sent by `evenflow join`."""

    worker_name: str
    check_heart_beat: bool = True
    worker_status: _Status | None = None
    name: str = ""
    slots: int | str | None = None
    aliases: dict[str, str] = {}


class _FastChatBeat(msgspec.Struct):
    worker_name: str


class _FastChatModel(msgspec.Struct):
    model: str


class _NodeStatus(msgspec.Struct):
    models: list[str] = []
    speed: float | None = None
    role: str | int = ""


class _Node(msgspec.Struct):
    """`/nodes/add`, and with the address alone the others."""

    url: str
    status: _NodeStatus | None = None


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/v1/workers."""

    url: str
    name: str = ""
    models: list[str] = []
    slots: int | str | None = None
    speed: float = 1.0
    api_key: str | None = None
    aliases: dict[str, str] = {}


class FleetRoutes:
    """The handlers; each takes the call and returns the whole answer, or raises a Fault."""

    def __init__(
        self, front: Front, local: LocalRoutes, registry: Registry, joining: Joining, authenticator: Authenticator
    ) -> None:
        self._front = front
        self._local = local
        self._registry = registry
        self._joining = joining
        self._authenticator = authenticator

    def mount(self) -> None:
        """Enters all routes into the front's tables."""
        for path, methods, answer in (
            (b"/register_worker", POST, self.register_worker),
            (b"/receive_heart_beat", POST, self.receive_heart_beat),
            (b"/refresh_all_workers", POST, self.refresh_all_workers),
            (b"/get_worker_address", POST, self.get_worker_address),
            (b"/worker_get_status", POST, self.worker_get_status),
            (b"/nodes/status", GET, self.nodes_status),
            (b"/nodes/add", POST, self.nodes_add),
            (b"/nodes/remove", POST, self.nodes_remove),
            (b"/nodes/terminate", POST, self.nodes_remove),
            (WORKERS, GET_POST, self.workers),
        ):
            self._front.local[path] = LocalRoute(methods, answer, for_operators=True)
        self._front.local_under[WORKERS + b"/"] = LocalRoute(WORKER_METHODS, self.worker, for_operators=True)

    # -- FastChat ------------------------------------------------------------------------------------------------

    def register_worker(self, call: Call) -> LocalAnswer:
        here = self._may_join(call)
        told = decoded(call, _FastChatWorker)
        status = told.worker_status or _Status()
        self._joining.join(
            Registration(
                told.worker_name,
                name=told.name,
                models=status.model_names,
                speed=status.speed,
                slots=told.slots,
                aliases=told.aliases,
                beats=told.check_heart_beat,
            ),
            Source.JOINED,
            from_here=here,
        )
        return LocalAnswer(NULL)

    def receive_heart_beat(self, call: Call) -> LocalAnswer:
        self._may_join(call)
        exists = self._joining.beat(decoded(call, _FastChatBeat).worker_name)
        return LocalAnswer(msgspec.json.encode({"exist": exists}))

    def refresh_all_workers(self, call: Call) -> LocalAnswer:
        """Every worker is probed now; nothing is forgotten meanwhile."""
        self._local.change_by_operator(call)
        for worker in self._registry.workers.values():
            if worker.wake_probe is not None:
                worker.wake_probe()
        return LocalAnswer(NULL)

    def get_worker_address(self, call: Call) -> LocalAnswer:
        """The live worker with the model that has most room; empty when there is none."""
        self._local.operators_only(call)
        lane = self._registry.lanes.get(decoded(call, _FastChatModel).model)
        live = [worker for worker in lane.workers if worker.live] if lane is not None else []
        best = min(live, key=lambda worker: worker.in_flight / worker.slots / worker.speed, default=None)
        return LocalAnswer(msgspec.json.encode({"address": best.url if best is not None else ""}))

    def worker_get_status(self, call: Call) -> LocalAnswer:
        """The whole fleet as if it were one worker."""
        self._local.operators_only(call)
        live = [worker for worker in self._registry.workers.values() if worker.live]
        status = {
            "model_names": self._registry.model_names(),
            "speed": sum(worker.speed for worker in live),
            "queue_length": sum(worker.in_flight for worker in live),
        }
        return LocalAnswer(msgspec.json.encode(status))

    # -- LMDeploy ------------------------------------------------------------------------------------------------

    def nodes_status(self, call: Call) -> LocalAnswer:
        self._local.operators_only(call)
        nodes = {
            worker.url: {
                "models": sorted(worker.serves()),
                "role": "Hybrid",
                "unfinished": worker.in_flight,
                "speed": worker.speed,
                "state": worker.state.value,
            }
            for worker in self._registry.workers.values()
        }
        return LocalAnswer(msgspec.json.encode(nodes))

    def nodes_add(self, call: Call) -> LocalAnswer:
        here = self._may_join(call)
        told = decoded(call, _Node)
        status = told.status or _NodeStatus()
        role = status.role if isinstance(status.role, str) else ""
        if role.lower() not in WHOLE_ROLES:
            raise CallerError(
                f"A worker of the role {role[:40]!r} does only a part of the work, which this gateway does not join "
                "together. Start it with the role Hybrid.",
                param="status.role",
            )
        registration = Registration(told.url, models=status.models, speed=status.speed or 1.0)
        self._joining.join(registration, Source.JOINED, from_here=here)
        return LocalAnswer(b'{"message":"Added successfully"}')

    def nodes_remove(self, call: Call) -> LocalAnswer:
        """It finishes what it runs, then it is gone. Its process is left to who started it."""
        self._may_join(call)
        asked = parse_qs(call.head.query.lstrip(b"?").decode("utf-8", "replace"))
        url = (asked.get("url") or asked.get("node_url") or [""])[0]
        if not url:
            url = decoded(call, _Node).url
        worker = self._joining.find(url)
        if worker is None:
            raise no_such_worker(url, self._registry)
        self._leave(worker)
        return LocalAnswer(b'{"message":"Deleted successfully"}')

    # -- our own -------------------------------------------------------------------------------------------------

    def workers(self, call: Call) -> LocalAnswer:
        if call.head.method == b"POST":
            self._local.change_by_operator(call)
            told = decoded(call, _Added)
            registration = Registration(
                told.url,
                name=told.name,
                models=told.models,
                slots=told.slots,
                speed=told.speed,
                api_key=told.api_key,
                aliases=told.aliases,
            )
            worker = self._joining.join(registration, Source.ADDED, from_here=True)
            return LocalAnswer(msgspec.json.encode(shown(worker)), status=201)
        self._local.operators_only(call)
        rows = [shown(worker) for worker in self._registry.workers.values()]
        refused = [
            {"name": one.name, "url": one.url, "reason": one.reason, "seconds_ago": round(time() - one.at_s, 1)}
            for one in self._joining.refused.values()
        ]
        return LocalAnswer(msgspec.json.encode({"workers": rows, "refused": refused}))

    def worker(self, call: Call) -> LocalAnswer:
        """/admin/v1/workers/{name}, and what may be done with it."""
        method = call.head.method
        if method in GET:
            self._local.operators_only(call)
        else:
            self._local.change_by_operator(call)
        name, _, action = call.head.path.removeprefix(WORKERS + b"/").partition(b"/")
        worker = self._registry.workers.get(percent_decoded(name))
        if worker is None:
            raise no_such_worker(percent_decoded(name), self._registry)
        handler = _ACTIONS.get((b"GET" if method == b"HEAD" else method, action))
        if handler is None:
            raise CallerError(
                "There is no such action. POST …/drain, …/resume or …/restart, GET …/logs, or DELETE the worker.",
                code="not_found",
                status=404,
            )
        return handler(self, call, worker)

    def _show(self, call: Call, worker: Worker) -> LocalAnswer:
        return LocalAnswer(msgspec.json.encode(shown(worker)))

    def _drain(self, call: Call, worker: Worker) -> LocalAnswer:
        self._registry.drain(worker, "drained by an operator")
        return self._show(call, worker)

    def _resume(self, call: Call, worker: Worker) -> LocalAnswer:
        self._registry.resume(worker)
        return self._show(call, worker)

    def _remove(self, call: Call, worker: Worker) -> LocalAnswer:
        self._leave(worker, now=b"now=1" in call.head.query)
        state = worker.state.value
        return LocalAnswer(
            msgspec.json.encode({"name": worker.name, "state": state, "in_flight": worker.in_flight})
        )

    def _leave(self, worker: Worker, *, now: bool = False) -> None:
        self._joining.leave(worker, "removed by an operator", now=now)

    # -- who may -------------------------------------------------------------------------------------------------

    def _may_join(self, call: Call) -> bool:
        """Raises CallerError for who has no token, where one is asked for. True for somebody on this machine."""
        head, directory = call.head, self._authenticator.directory
        key = head.bearer if head.bearer is not None else head.api_key
        if key is not None:
            key = token_of(key)
        if directory.asks_workers and not (
            key is not None and (directory.is_worker_token(key) or directory.is_admin(key))
        ):
            if not directory.has_worker_token:
                raise CallerError(
                    "Nobody may join this fleet while the gateway has keys but no auth.worker_token. Set one in its "
                    "configuration, and send it from the worker as 'Authorization: Bearer TOKEN'.",
                    code="invalid_api_key",
                    status=401,
                )
            raise CallerError(
                "Joining the fleet needs the worker token. Send auth.worker_token of the gateway's configuration as "
                "'Authorization: Bearer TOKEN' (evenflow join --token), or within the gateway's address: "
                "http://worker:TOKEN@host:port.",
                code="invalid_api_key",
                status=401,
            )
        if head.origin is not None:
            raise CallerError("A web page may not do this.", code="forbidden", status=403)
        return not head.forwarded and call.client is not None and is_loopback(call.client.peer_host())


_ACTIONS = {
    (b"GET", b""): FleetRoutes._show,
    (b"DELETE", b""): FleetRoutes._remove,
    (b"POST", b"drain"): FleetRoutes._drain,
    (b"POST", b"resume"): FleetRoutes._resume,
}


def token_of(key: bytes) -> bytes:
    """The password of Basic authorization; any other key as it is."""
    scheme, _, rest = key.partition(b" ")
    if scheme.lower() != b"basic":
        return key
    try:
        return b64decode(rest.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return key


def decoded(call: Call, shape: type[Shape]) -> Shape:
    """The body as that shape. Raises CallerError that says what is wrong, and nothing of the body."""
    try:
        return msgspec.json.decode(call.body, type=shape)
    except msgspec.ValidationError as error:
        text = str(error)
        param = text.partition(" - at `$.")[2].partition("`")[0] or None
        raise CallerError(f"The body is not what this route takes: {text}.", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CallerError("The body is not JSON. Send a JSON object.") from None


def shown(worker: Worker) -> dict[str, Any]:
    """A worker as operators see it. Never its credential."""
    now = time()
    return {
        "name": worker.name,
        "url": worker.url,
        "state": worker.state.value,
        "reason": worker.reason,
        "source": worker.source.value,
        "group": worker.group or None,
        "version": worker.version or None,
        "kind": worker.kind,
        "models": sorted(worker.serves()),
        "in_flight": worker.in_flight,
        # A request waits in the gateway's fair queue and never at a worker that has no slot for it.
        "queued": 0,
        "slots": worker.slots,
        "speed": worker.speed,
        "kv_use": worker.kv_use,
        "answered": worker.answered,
        "errors": worker.errors,
        "last_seen_s": round(now - worker.last_seen_s, 1) if worker.last_seen_s else None,
        "heartbeat_due_s": None if worker.expires_s == inf else round(worker.expires_s - monotonic(), 1),
    }


def no_such_worker(name: str, registry: Registry) -> CallerError:
    near = did_you_mean(name, list(registry.workers))
    return CallerError(
        f"There is no worker {name[:100]!r} here{near}. GET /admin/v1/workers lists them.",
        code="worker_not_found",
        status=404,
    )

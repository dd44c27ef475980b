"""The routes that the gateway answers itself, from memory and at once: health, models, workers, metrics.

Who may ask: health and readiness are for everyone, model lists for whoever may call a model, the list of workers
and the metrics for operators. Operators come with an admin key; while none is configured, from this machine.
"""

from ipaddress import ip_address
from time import time
from urllib.parse import unquote_to_bytes

import msgspec

from evenflow.fleet.registry import Registry
from evenflow.observe.metrics import Metrics
from evenflow.request import Call
from evenflow.request.accept import Front, LocalAnswer, LocalRoute
from evenflow.request.authenticate import Authenticator
from evenflow.wire.faults import CallerError

GET = (b"GET", b"HEAD")
GET_POST = (b"GET", b"HEAD", b"POST")
OWNER = "evenflow"


class LocalRoutes:
    """The handlers; each takes the call and returns the whole answer, or raises a Fault."""

    def __init__(
        self, front: Front, registry: Registry, authenticator: Authenticator, metrics: Metrics
    ) -> None:
        self._front = front
        self._registry = registry
        self._authenticator = authenticator
        self._metrics = metrics
        # Stands in for the unknown time at which a worker got its model.
        self._created = int(time())

    def mount(self) -> None:
        """Enters all routes into the front's tables."""
        self._front.local.update(
            {
                b"/health": LocalRoute(GET, self.health),
                b"/readiness": LocalRoute(GET, self.readiness),
                b"/metrics": LocalRoute(GET, self.metrics, for_operators=True),
                b"/v1/models": LocalRoute(GET, self.models),
                b"/list_models": LocalRoute(GET_POST, self.list_models),
                b"/list_workers": LocalRoute(GET, self.list_workers, for_operators=True),
            }
        )
        self._front.local_under[b"/v1/models/"] = LocalRoute(GET, self.model)

    def health(self, call: Call) -> LocalAnswer:
        """The process lives; says nothing of its workers, so that load or their death restarts no gateway."""
        return LocalAnswer(b'{"status":"ok"}')

    def readiness(self, call: Call) -> LocalAnswer:
        if self._front.draining:
            return LocalAnswer(b'{"status":"stopping"}', status=503)
        if not self._registry.any_live():
            return LocalAnswer(b'{"status":"no live worker"}', status=503)
        return LocalAnswer(b'{"status":"ready"}')

    def models(self, call: Call) -> LocalAnswer:
        self._identify(call)
        data = [self._model(name) for name in self._registry.model_names()]
        return LocalAnswer(msgspec.json.encode({"object": "list", "data": data}))

    def model(self, call: Call) -> LocalAnswer:
        self._identify(call)
        name = percent_decoded(call.head.path.removeprefix(b"/v1/models/"))
        if name not in self._registry.lanes:
            raise CallerError(
                "That model does not exist here. GET /v1/models lists the models that do.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return LocalAnswer(msgspec.json.encode(self._model(name)))

    def list_models(self, call: Call) -> LocalAnswer:
        self._identify(call)
        return LocalAnswer(msgspec.json.encode({"models": self._registry.model_names()}))

    def list_workers(self, call: Call) -> LocalAnswer:
        self.operators_only(call)
        now = time()
        workers = [
            {
                "name": worker.name,
                "url": worker.url,
                "state": worker.state.value,
                "reason": worker.reason,
                "models": sorted(worker.serves()),
                "in_flight": worker.in_flight,
                # A request waits in the gateway's fair queue and never at a worker that has no slot for it.
                "queued": 0,
                "slots": worker.slots,
                "speed": worker.speed,
                "last_seen_s": round(now - worker.last_seen_s, 1) if worker.last_seen_s else None,
            }
            for worker in self._registry.workers.values()
        ]
        return LocalAnswer(msgspec.json.encode({"workers": workers}))

    def metrics(self, call: Call) -> LocalAnswer:
        self.operators_only(call)
        return LocalAnswer(self._metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}

    def _identify(self, call: Call) -> None:
        """Whoever may call a model may list them; so may an operator."""
        head = call.head
        key = head.bearer if head.bearer is not None else head.api_key
        if key is not None and self._authenticator.directory.is_admin(key):
            return
        call.tenant = self._authenticator.by_head(head) or self._authenticator.nobody()

    def is_operator(self, call: Call) -> bool:
        """True for an admin key, or without any configured, for a caller on this machine."""
        try:
            self.operators_only(call)
        except CallerError:
            return False
        return True

    def change_by_operator(self, call: Call) -> None:
        """As `operators_only`, for what changes something: no web page may, not even on an operator's machine."""
        self.operators_only(call)
        if call.head.origin is not None:
            raise CallerError("A web page of another site may not do this.", code="forbidden", status=403)

    def operators_only(self, call: Call) -> None:
        """Raises CallerError for everybody else."""
        directory = self._authenticator.directory
        head = call.head
        key = head.bearer if head.bearer is not None else head.api_key
        if directory.has_admin:
            if key is None or not directory.is_admin(key):
                raise CallerError(
                    "This is for operators. Send one of auth.admin_keys as 'Authorization: Bearer KEY'.",
                    code="invalid_api_key",
                    status=401,
                )
        elif head.forwarded or call.client is None or not is_loopback(call.client.peer_host()):
            raise CallerError(
                "This is for operators, and without auth.admin_keys in the configuration it answers on the "
                "gateway's own machine only.",
                code="forbidden",
                status=403,
            )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def percent_decoded(path: bytes) -> str:
    return unquote_to_bytes(path).decode("utf-8", "replace")

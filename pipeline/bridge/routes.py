"""The ASGI application: routes, bounds, drain, one log line per request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive, Scope, Send

from infra.health import Health, health_app
from infra.steady import Counter
from pipeline.alarms import Alarms
from pipeline.bridge.answers import model_list, model_object
from pipeline.bridge.call import Call
from pipeline.bridge.endpoints import ENDPOINTS, Generator, Services
from pipeline.bridge.errors import (
    ClientLeft,
    MethodNotAllowed,
    OriginRefused,
    ShuttingDown,
    UnknownPath,
)
from pipeline.bridge.metering import counted, find_model, visible_models
from pipeline.bridge.openapi import document
from pipeline.bridge.resume import PREFIX, SUFFIX, Resumer
from pipeline.bridge.tokenize import DETOKENIZE, TOKENIZE, TokenizeEndpoints
from schemas.errors import MeshError, QueueFull, RequestCancelled

Handler = Callable[[Call], Awaitable[None]]

_MODELS = "/v1/models"
_OPENAPI = "/openapi.json"
_METRICS = "/metrics"
_OPERATIONS = ("/health", "/ready", _METRICS)
_READ = ("GET", "HEAD")


class Bridge:
    """The ASGI application.

    Args:
        is_shared: other processes answer at this port, too; what is this process's alone is not
            there then.
    """

    def __init__(
        self, process: str, health: Health, services: Services, *, is_shared: bool = False
    ) -> None:
        self.is_draining = False
        self._hides_metrics = is_shared or services.door.needs_key
        self._cors = services.cors
        self._services = services
        self._limits = services.limits
        self._operations = health_app(process, health, services.metrics)
        self._open: set[Call] = set()
        self._alarms = Alarms()
        services.metrics.open_requests.set_function(lambda: len(self._open))
        self._ended: dict[str, Counter] = {}  # by outcome: a closed set
        self._routes: dict[str, tuple[tuple[str, ...], Handler]] = {
            _MODELS: (_READ, self._list_models),
            _OPENAPI: (_READ, self._show_openapi),
            TOKENIZE: (("POST",), counted(TokenizeEndpoints(services).tokenize)),
            DETOKENIZE: (("POST",), counted(TokenizeEndpoints(services).detokenize)),
            **{
                one.path: (("POST",), Generator(one, services).answer) for one in ENDPOINTS.values()
            },
        }
        self._resumer = Resumer(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; websockets are refused."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        call = Call(scope, receive, send, self._alarms)
        call.answer_headers += self._cors.answer_headers(call.headers)
        if self._is_operation(call):
            await self._operate(call, scope, receive, send)
        elif self._cors.is_preflight(call.method, call.headers):
            await self._answer_preflight(call)
        else:
            await self._answer(call)

    @property
    def num_open(self) -> int:
        """Requests being answered."""
        return len(self._open)

    def drain(self) -> None:
        """Refuse what comes from now on."""
        self.is_draining = True

    def cut(self) -> None:
        """End what still runs, with an error that says why."""
        for call in list(self._open):
            call.interrupt(ShuttingDown("the server shuts down"))

    # --- beside the requests ------------------------------------------------------------------

    def _is_operation(self, call: Call) -> bool:
        return call.path in _OPERATIONS and not (self._hides_metrics and call.path == _METRICS)

    async def _operate(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *call.common_headers()]
            await send(message)

        if call.method in _READ:
            await self._operations(scope, receive, named)
        else:
            await call.fail(_not_allowed(call, _READ), self._limits.retry_after_s)

    async def _answer_preflight(self, call: Call) -> None:
        if self._cors.allows(call.headers):
            call.answer_headers = self._cors.preflight_headers(call.headers)
            await call.respond_empty()
        else:
            error = OriginRefused("pages of this origin may not call", param="origin")
            await call.fail(error, self._limits.retry_after_s)

    # --- around every request -----------------------------------------------------------------

    async def _answer(self, call: Call) -> None:
        outcome = RequestCancelled.code  # unless something below says otherwise
        try:
            self._identify(call)
            self._enter(call)
            await self._route(call)(call)
            outcome = str(call.facts.get("finish_reason", "ok"))
        except MeshError as error:
            outcome = error.code
            await self._refuse(call, error)
        except Exception:
            outcome = MeshError.code
            self._services.log.exception(
                "request_crashed", path=call.path, request_id=call.request_id
            )
            await self._refuse(call, MeshError("internal error; the server's log has more"))
        finally:
            self._open.discard(call)
            call.permit.end(None)  # what did not come to its own end
            self._record(call, outcome)

    def _identify(self, call: Call) -> None:
        permit = self._services.door.permit(call.headers.get(b"authorization"))
        if permit.key_name:
            call.facts |= {"key": permit.key_name, "tenant": permit.tenant}
        call.permit = permit

    def _enter(self, call: Call) -> None:
        if self.is_draining:
            raise ShuttingDown("the server shuts down")
        if len(self._open) >= self._limits.max_open_requests:
            raise QueueFull(f"{len(self._open)} requests are open already")
        self._open.add(call)

    async def _refuse(self, call: Call, error: MeshError) -> None:
        if isinstance(error, ClientLeft):
            call.status = call.status or error.http_status  # for the log: nobody reads it
        else:
            await call.fail(error, self._limits.retry_after_s)

    def _record(self, call: Call, outcome: str) -> None:
        ended = self._ended.get(outcome)
        if ended is None:
            ended = self._ended[outcome] = self._services.metrics.requests_ended.labels(outcome)
        ended.inc()
        if call.request_id and not call.is_resumed:
            self._services.metrics.e2e_seconds.observe(call.age_s)
        self._services.log.info(
            "request_ended",
            method=call.method,
            path=call.path,
            status=call.status,
            outcome=outcome,
            request_id=call.request_id,
            label=call.label,
            stream=call.is_stream,
            e2e_ms=round(call.age_s * 1000, 3),
            **call.facts,
        )

    # --- routes -------------------------------------------------------------------------------

    def _route(self, call: Call) -> Handler:
        methods, handler = self._routes.get(call.path, ((), None))
        if handler is None and call.path.startswith(_MODELS + "/"):
            methods, handler = _READ, self._show_model
        if handler is None and call.path.startswith(PREFIX) and call.path.endswith(SUFFIX):
            methods, handler = ("GET",), self._resumer.answer
        if handler is None:
            raise UnknownPath(self._why_unknown(call.path))
        if call.method not in methods:
            raise _not_allowed(call, methods)
        return handler

    def _why_unknown(self, path: str) -> str:
        if self._hides_metrics and path == _METRICS:
            return "/metrics is not public here; each process has it at its health port"
        return f"no such address: {path[:200]}"

    async def _show_openapi(self, call: Call) -> None:
        await call.respond(200, document())

    async def _list_models(self, call: Call) -> None:
        await call.respond(200, model_list(visible_models(call, self._services.models)))

    async def _show_model(self, call: Call) -> None:
        name = call.path.removeprefix(_MODELS + "/")
        await call.respond(200, model_object(find_model(call, self._services.models, name)))


def _not_allowed(call: Call, methods: tuple[str, ...]) -> MethodNotAllowed:
    allowed = ", ".join(methods)
    return MethodNotAllowed(f"{call.method} is none of {allowed}", allowed=allowed)

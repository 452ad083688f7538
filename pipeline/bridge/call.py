"""One HTTP request, from its headers to the last byte of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from infra.failure import first_mesh_error
from infra.http_exchange import Exchange, header_lines
from infra.http_protocol import new_request_label, request_label
from pipeline.access.errors import extra_headers
from pipeline.access.permit import ANYONE, Permit
from pipeline.alarms import Alarm, Alarms
from pipeline.bridge.answers import error_answer
from pipeline.bridge.errors import BodyTooSlow, ClientLeft, MethodNotAllowed, ShuttingDown
from schemas.errors import DeadlineExceeded, MeshError, PayloadTooLarge, ReaderTooSlow

Header = tuple[bytes, bytes]
FailureEvent = Callable[[MeshError], bytes]

_JSON: Header = (b"content-type", b"application/json")
_STREAM: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that gather would hold tokens back
)
_STREAM_LINES = header_lines(_STREAM)
_LAST_WORD_S = 1.0  # for the error event to leave
_SLOW_WORD_S = 30.0
_encode = msgspec.json.Encoder().encode


class Call:
    """An ASGI request with what the bridge knows of it.

    ``facts`` are for the one log line that the request gets. ``status`` is 0 until an answer has
    begun.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, alarms: Alarms) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started_s = time.perf_counter()
        self.alarms = alarms
        self.status = 0
        self.is_stream = False
        self.facts: dict[str, Any] = {}
        self.permit: Permit = ANYONE
        self.runs_on = False  # the request outlives its client
        self.is_resumed = False  # the answer began elsewhere, or before
        self.answer_headers: list[Header] = []  # beside those that every answer has
        self.label = request_label(self.headers.get(b"x-request-id", b""))
        self.request_id = ""
        self._is_complete = False
        self._failure_event: FailureEvent | None = None
        self._receive = receive
        self._send = send
        self._exchange = Exchange.of(scope)
        self._attended: asyncio.Task[Any] | None = None  # the task that is
        self._reason: MeshError | None = None  # why it is to end

    @property
    def tenant(self) -> str:
        """Whose request it is; "" without API keys."""
        return self.permit.tenant

    @property
    def age_s(self) -> float:
        """Seconds since the headers were read."""
        return time.perf_counter() - self.started_s

    # --- in -----------------------------------------------------------------------------------

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body.

        Raises:
            PayloadTooLarge: it is, or says it is, over ``max_bytes``.
            BodyTooSlow: it did not arrive within ``timeout_s``.
            ClientLeft: the connection closed before its end.
        """
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        body = self._exchange.whole_body() if self._exchange is not None else None
        if body is not None and len(body) <= max_bytes:
            return body
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(max_bytes)
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None

    async def _read(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft("the client left while it sent the body")
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    # --- work ---------------------------------------------------------------------------------

    async def attended(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Do ``work`` while the client stays.

        Raises:
            ClientLeft: the connection closed first. Only our own server tells of that.
            DeadlineExceeded: ``timeout_s`` passed first.
            MeshError: what ``work`` raised, or what :meth:`interrupt` was given.
        """
        exchange = self._exchange
        task = self._attended = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        num_cancels = task.cancelling()
        alarm = self.interrupt_after(
            timeout_s, lambda: DeadlineExceeded(f"no complete answer within {timeout_s:.3g} s")
        )
        try:
            if exchange is not None:
                exchange.watch(self._leave)
            await work
        except asyncio.CancelledError:
            if self._reason is None or task.cancelling() > num_cancels + 1:
                raise  # somebody else ends this task
            raise self._reason from None
        except ExceptionGroup as group:
            error = first_mesh_error(group)
            if error is None:
                raise
            raise error from group
        finally:
            self._attended = None
            alarm.cancel()
            if self._reason is not None:
                task.uncancel()
            if exchange is not None:
                exchange.unwatch()

    def interrupt(self, reason: MeshError) -> None:
        """Make the attended work end with ``reason``; without effect when there is none."""
        if self._attended is not None and self._reason is None:
            self._reason = reason
            self._attended.cancel()

    def interrupt_after(self, delay_s: float, why: Callable[[], MeshError]) -> Alarm:
        """:meth:`interrupt` the work in ``delay_s``, unless what is returned is cancelled first."""
        return self.alarms.set(delay_s, lambda: self.interrupt(why()))

    def _leave(self) -> None:
        self.interrupt(ClientLeft("the client closed the connection"))

    # --- out ----------------------------------------------------------------------------------

    async def respond(
        self, status: int, answer: msgspec.Struct | msgspec.Raw, extra: Sequence[Header] = ()
    ) -> None:
        """Send ``answer`` as JSON."""
        body = _encode(answer)
        self.status = status
        headers = [_JSON, *extra, *self._own_headers()]
        if self._exchange is not None and self._exchange.answer(status, headers, body):
            self._is_complete = True
            return
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send_head(status, headers)
        await self.write(body, last=True)

    async def respond_empty(self) -> None:
        """Send 204: there is nothing to say but in headers."""
        self.status = 204
        await self._send_head(204, self._own_headers())
        await self.write(b"", last=True)

    async def open_stream(self, failure_event: FailureEvent) -> None:
        """Begin a stream of events; ``failure_event`` makes the event with which it ends should it
        fail. Status and headers may leave with its first part: see :meth:`flush`."""
        self.is_stream = True
        self._failure_event = failure_event
        self.status = 200
        headers = self._own_headers()
        if self._exchange is None or not self._exchange.begin(200, headers, _STREAM_LINES):
            await self._send_head(200, [*_STREAM, *headers])

    def flush(self) -> None:
        """Send the head of a stream whose first part has not come yet."""
        if self._exchange is not None:
            self._exchange.flush()

    @property
    def was_told(self) -> bool:
        """Whether the client has the headers of an answer, as far as we know."""
        return self.status > 0 and (self._exchange is None or self._exchange.has_left)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of a stream, or the rest of a body; waits while the client's connection is
        full."""
        if self.write_now(data, last=last):
            return
        self.flush()
        message: Message = {"type": "http.response.body", "body": data, "more_body": not last}
        await self._send(message)
        self._is_complete = last

    @property
    def writable(self) -> Exchange | None:
        """Where a part of a stream can be put right now, without waiting; None while it can't."""
        exchange = self._exchange
        return exchange if exchange is not None and exchange.is_writable else None

    def write_now(self, data: bytes, *, last: bool = False) -> bool:
        """Send a part of a stream if that needs no waiting; whether it was sent."""
        if self._exchange is None:
            return False
        if last:
            self._is_complete = self._exchange.finish(data)
            return self._is_complete
        return self._exchange.write(data)

    async def fail(self, error: MeshError, retry_after_s: int) -> None:
        """Tell the client of ``error``: as the answer, or as the last event of a stream."""
        if self.status == 0:
            await self._refuse(error, retry_after_s)
        elif self._failure_event is not None and not self._is_complete:
            # A slow reader gets it behind all that is on its way to it.
            patience_s = _SLOW_WORD_S if isinstance(error, ReaderTooSlow) else _LAST_WORD_S
            with contextlib.suppress(TimeoutError):  # it does not read: nothing can be told
                async with asyncio.timeout(patience_s):
                    await self.write(self._failure_event(error), last=True)

    async def _refuse(self, error: MeshError, retry_after_s: int) -> None:
        extra: list[Header] = extra_headers(error)
        if error.retryable:
            said_s = error.retry_after_s
            pause_s = retry_after_s if said_s is None else max(1, math.ceil(said_s))
            extra.append((b"retry-after", b"%d" % pause_s))
        if isinstance(error, MethodNotAllowed):
            extra.append((b"allow", error.allowed.encode()))
        if isinstance(error, BodyTooSlow | ShuttingDown):
            extra.append((b"connection", b"close"))
        await self.respond(error.http_status, error_answer(error), extra)

    async def _send_head(self, status: int, headers: Sequence[Header]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _own_headers(self) -> list[Header]:
        age_ms = b"%d" % (self.age_s * 1000)
        return [*self.common_headers(), (b"openai-processing-ms", age_ms)]

    def common_headers(self) -> list[Header]:
        """What every answer carries. A request that brought no id and got none in the mesh gets
        one here, so that its client can name what went wrong."""
        if not self.label and not self.request_id:
            self.label = new_request_label()
        headers = [
            *self.answer_headers,
            *self.permit.headers(),
            (b"x-request-id", (self.label or self.request_id).encode()),
        ]
        if self.request_id:
            headers.append((b"x-mesh-request-id", self.request_id.encode()))
        return headers


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over {max_bytes} bytes")

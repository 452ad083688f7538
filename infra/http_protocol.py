"""HTTP/1.1 on one connection: uvicorn's protocol, with bounds on what a stranger may send.

    no request            closed after ``idle_s``
    a head that is slow   408 after ``head_s``, however steadily its bytes drip in
    a head that is large  431; so are trailers and chunk extensions
    bytes that are none   400
    one too many          503 with Retry-After; far too many are closed at once

Answers given here have OpenAI's error shape and an ``x-request-id``, as all others. A whole request
that came before bad bytes is answered first. Bodies are the application's part. What still arrives
behind an early answer is read away for ``head_s``: a connection closed over unread bytes is reset,
and its client might never see the answer.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from infra.http_exchange import Exchange
from schemas.errors import InvalidRequest, MeshError
from schemas.openai import ErrorAnswer, ErrorBody

_RETRY_AFTER_S = 1
_HOPELESS = 2  # times ``max_connections``: not even an answer
_MAX_LABEL = 128

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    """Seconds, bytes and counts, per process."""

    max_connections: int = 8192
    max_head_bytes: int = 64 * 1024
    head_s: float = 10.0
    idle_s: float = 75.0


class NoHttp(InvalidRequest):
    """Bytes that are no request."""

    code = "bad_http"


class HeadTooSlow(InvalidRequest):
    """Request line and headers did not arrive in time."""

    code = "request_timeout"
    http_status = 408


class HeadTooLarge(InvalidRequest):
    """Request line and headers, or trailers, are over the limit."""

    code = "headers_too_large"
    http_status = 431


class TooManyConnections(MeshError):
    """This process has all the connections that it may have."""

    code = "too_many_connections"
    http_status = 503
    retryable = True


def request_label(raw: bytes) -> str:
    """A client's own ``x-request-id``, when it can go into a header and a log line; else none."""
    if not raw:
        return ""
    text = raw.decode("latin-1").strip()
    fits = 0 < len(text) <= _MAX_LABEL and text.isascii() and text.isprintable()
    return text if fits else ""


def new_request_label() -> str:
    """An ``x-request-id`` for a request that brought none."""
    return f"req-{secrets.token_hex(16)}"


def plain_error(error: MeshError) -> bytes:
    """``error`` in OpenAI's shape."""
    kind = "invalid_request_error" if isinstance(error, InvalidRequest) else "server_error"
    body = ErrorBody(message=error.message, type=kind, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorAnswer(error=body))


class BoundedProtocol(HttpToolsProtocol):
    """One connection; :func:`bounded` makes a subclass with bounds of its own."""

    bounds: ClassVar[HttpBounds] = HttpBounds()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False  # between its first byte and the empty line
        self._in_body = False  # until the end of the message; at once where there is no body
        self._has_progress = False  # within the bytes at hand: what came before it is done
        self._fed_bytes = 0  # of an unfinished head; of a body since its last progress
        self._timer: asyncio.TimerHandle | None = None  # for the rest of what has begun
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since_s = math.inf  # by the loop's time; never while somebody is answered
        self._refusal: MeshError | None = None
        self._num_bytes = 0  # at hand
        self._is_deaf = False  # closes after the answer on its way
        self._is_refused = False  # has been told; waits for the client to close
        self._watched: set[Exchange] = set()

    # --- the connection -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        most = self.bounds.max_connections
        if len(self.connections) > _HOPELESS * most:
            transport.abort()
            return
        if len(self.connections) > most:
            self.app = _refuse_all(TooManyConnections(f"{most} connections are open already"))
        self._wait_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)
        for exchange in list(self._watched):
            exchange.tell()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client: parts of a request, one, or several."""
        if self._is_deaf:
            return
        self._idle_since_s = math.inf
        self._has_progress = False
        self._num_bytes = len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or NoHttp(f"this is no HTTP request: {error}"))
            return
        if (self._in_head or self._in_body) and not self._has_progress:
            self._fed_bytes += len(data)
            if self._fed_bytes > self.bounds.max_head_bytes:
                self._refuse(_too_large(self.bounds.max_head_bytes))
                return
        self._wait_on()

    def _feed(self, data: bytes) -> None:
        """Upgrades are not served: what asks for one is a request as any other, but the last, for
        the parser takes its body for the other protocol's first bytes."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_deaf = True
            self.cycle.keep_alive = False

    # --- the parser's words -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head = True
        self._fed_bytes = 0

    def on_headers_complete(self) -> None:
        """The empty line behind the headers."""
        self._in_head = False
        most_bytes = self._fed_bytes + self._num_bytes
        self._note_progress()
        self._stop_timer()
        if most_bytes > self.bounds.max_head_bytes and self._is_head_too_large():
            self._refusal = _too_large(self.bounds.max_head_bytes)
            raise self._refusal
        super().on_headers_complete()
        exchange = Exchange(self.transport, self.flow, self.cycle, self._watched)
        exchange.put_into(self.scope)  # type: ignore[arg-type] # before its task has begun
        self._in_body = True

    def _is_head_too_large(self) -> bool:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        return size > self.bounds.max_head_bytes

    def on_chunk_header(self) -> None:
        """The size of a chunk."""
        self._note_progress()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._note_progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self._in_body = False
        self._note_progress()
        super().on_message_complete()
        if self._is_quiet:  # it was refused before
            self._stop_timer()

    def on_response_complete(self) -> None:
        """An answer has been given; of its request, or of the next, a part may have come. The next
        request may have come as a whole: its answer begins then."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._wait_on()

    def _note_progress(self) -> None:
        self._has_progress = True
        self._fed_bytes = 0

    # --- bounds -------------------------------------------------------------------------------

    @property
    def _is_quiet(self) -> bool:
        """Nobody is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_on(self) -> None:
        """While nobody is answered: for the rest of what has begun, or for the next request."""
        if not self._is_quiet or self._timer is not None or self.transport.is_closing():
            return
        if self._in_head or self._in_body:
            self._idle_since_s = math.inf
            self._timer = self.loop.call_later(self.bounds.head_s, self._too_slow)
            return
        self._idle_since_s = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.bounds.idle_s, self._look_for_idleness)

    def _look_for_idleness(self) -> None:
        """One timer, set anew when it rings: requests that follow each other neither set nor stop
        one."""
        self._idle_timer = None
        if self._idle_since_s == math.inf:
            return  # whoever is answered sets it again
        left_s = self._idle_since_s + self.bounds.idle_s - self.loop.time()
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._look_for_idleness)
        elif not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(HeadTooSlow(f"no whole request head within {self.bounds.head_s:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: MeshError) -> None:
        """Answer and close, unless an answer is on its way: that goes first, and alone."""
        self._is_deaf = True
        if not self._is_quiet and not self._in_body:
            self.cycle.keep_alive = False
            return
        has_begun = not self._is_quiet and self.cycle.response_started
        if self.pipeline or has_begun:
            self.transport.close()
            return
        self.transport.write(self._answer(error))
        self._linger()

    def _linger(self) -> None:
        """Wait until the client has closed, too, for ``head_s`` at most."""
        self._is_refused = True
        if not self._is_quiet:  # the application need not wait for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._stop_timer()
            self._timer = self.loop.call_later(self.bounds.head_s, self.transport.close)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server ends: so does the connection, after the answer on its way."""
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    def _answer(self, error: MeshError) -> bytes:
        body = plain_error(error)
        given = dict(self.headers or ()).get(b"x-request-id", b"")
        label = request_label(given) or new_request_label()
        status = HTTPStatus(error.http_status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {label}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


def bounded(bounds: HttpBounds) -> type[BoundedProtocol]:
    """The protocol with these bounds."""
    return type("BoundedProtocol", (BoundedProtocol,), {"bounds": bounds})


def _too_large(most: int) -> HeadTooLarge:
    return HeadTooLarge(f"request line and headers are over {most} bytes")


def _refuse_all(error: MeshError) -> Any:
    """An application that has one answer."""
    body = plain_error(error)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        label = request_label(dict(scope["headers"]).get(b"x-request-id", b""))
        headers: list[Header] = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % _RETRY_AFTER_S),
            (b"x-request-id", (label or new_request_label()).encode()),
            (b"connection", b"close"),
        ]
        start = {"type": "http.response.start", "status": error.http_status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return app

"""A small HTTP/1.1 client for streamed answers, cheap per event.

Bytes go from the socket through httptools straight into a callback, without a task switch or a
queue between. A load generator shares its cores with what it measures, and its delays stand in the
figures.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from schemas.errors import ConfigError, MeshError

MAX_IDLE = 1024  # connections kept for the next request
CONNECT_TIMEOUT_S = 10.0

OnBody = Callable[[int, bytes], None]  # status, a piece of the body


class BadHttp(MeshError):
    """The server's answer is no HTTP."""

    code = "bad_http"


class NoAnswer(ConnectionError):
    """The connection closed before the head of an answer came."""


class Connection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[None] | None = None
        self._status = 0  # 0: no head of an answer yet
        self._ends_with_close = True  # until a header says where the body ends

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send one whole request, feed the answer's body to ``on_body``, return the status.

        Raises:
            NoAnswer: closed before the head of an answer.
            OSError: closed in the middle of the answer.
            BadHttp: the answer is no HTTP.
        """
        if self._transport is None or not self.is_open:
            raise NoAnswer("the server closed the connection")
        self._status, self._ends_with_close, self._on_body = 0, True, on_body
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.abort()
            raise
        finally:
            self._done = self._on_body = None
        return self._status

    def abort(self) -> None:
        """Close at once; the server sees that its client is gone."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Bytes came; the parser calls the methods below while it eats them."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._end(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(BadHttp(f"the answer is no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """The socket is closed, by either side."""
        self.is_open = False
        if self._status == 0:
            self._end(NoAnswer("the server closed the connection before an answer"))
        elif self._ends_with_close and error is None:
            self._end()
        else:
            self._end(error or ConnectionAbortedError("closed in the middle of the answer"))

    def on_header(self, name: bytes, _value: bytes) -> None:
        """Parser: one header."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_close = False

    def on_headers_complete(self) -> None:
        """Parser: the head is over."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Parser: a piece of the body, without chunk framing."""
        if self._on_body is not None:
            self._on_body(self._status, body)

    def on_message_complete(self) -> None:
        """Parser: the answer is whole (interim ones, such as 100, don't count)."""
        if self._status >= 200 and not self._ends_with_close:
            if not self._parser.should_keep_alive():
                self.abort()
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class HttpClient:
    """Talks to one server, over connections that are used again."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        """``url``: scheme, host, port, and a path that stands before every path posted to.

        Raises:
            ConfigError: no http:// or https:// address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no http:// or https:// address", param="target")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "mesh-load"}
        lines |= {"Content-Type": "application/json", "Accept": "text/event-stream"}
        lines |= headers or {}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[Connection] = []

    async def post(
        self, path: str, body: bytes, on_body: OnBody, headers: dict[str, str] | None = None
    ) -> int:
        """Post ``body`` and feed the answer's body to ``on_body``, as it comes; its status.

        A kept connection that the server closed meanwhile is replaced without further notice.

        Raises:
            OSError: no connection within ten seconds, or closed before the end of the answer.
            BadHttp: the answer is no HTTP.
        """
        length = {"Content-Length": str(len(body))}
        request = self._request("POST", path, (headers or {}) | length) + body
        return await self._send(request, on_body)

    async def get(self, path: str, on_body: OnBody, headers: dict[str, str] | None = None) -> int:
        """As :meth:`post`, for what has no body."""
        return await self._send(self._request("GET", path, headers or {}), on_body)

    def _request(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{method} {self._base}{path} HTTP/1.1\r\n{self._head}{own}\r\n".encode()

    async def _send(self, request: bytes, on_body: OnBody) -> int:
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, request, on_body)
            except NoAnswer:
                continue
        return await self._exchange(await self._connect(), request, on_body)

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().abort()

    async def _exchange(self, connection: Connection, request: bytes, on_body: OnBody) -> int:
        status = await connection.exchange(request, on_body)
        if connection.is_open and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()
        return status

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                Connection, self._host, self._port, ssl=self._tls
            )
        return connection

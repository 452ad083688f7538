"""What an application may do with its client's connection beside ASGI.

ASGI tells of a client that left only to a task that waits for it, and takes each part of an answer
in a message that may have to wait. With thousands of answers at once that is a task per answer, and
most of what a part costs. :class:`BoundedProtocol` puts an exchange into the scope of each request;
servers of others have none.

What an exchange writes and what goes through ASGI's ``send`` are one answer, in one order: each of
them takes up where the other stopped.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_EXTENSION = "mesh.exchange"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CHUNKED = b"transfer-encoding: chunked\r\n"

Header = tuple[bytes, bytes]


def header_lines(headers: Sequence[Header]) -> bytes:
    """``headers`` as they stand in an answer's head.

    Raises:
        ValueError: one holds what would end it.
    """
    if _CONTROL.search(b"".join([value for _, value in headers])):
        raise ValueError(f"headers can't hold control characters: {headers!r}")
    return b"".join([b"%b: %b\r\n" % header for header in headers])


class Exchange:
    """One request and its answer on a connection.

    Args:
        watched: the exchanges of the connection that want to hear of its end.
    """

    __slots__ = ("_cycle", "_flow", "_head", "_on_leave", "_transport", "_watched")

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        cycle: RequestResponseCycle,
        watched: set[Exchange],
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._cycle = cycle
        self._watched = watched
        self._head = b""  # of a stream that has begun, until its first part leaves
        self._on_leave: Callable[[], None] | None = None

    @classmethod
    def of(cls, scope: MutableMapping[str, Any]) -> Exchange | None:
        """The exchange of a request; None behind another server."""
        found: Exchange | None = (scope.get("extensions") or {}).get(_EXTENSION)
        return found

    def put_into(self, scope: MutableMapping[str, Any]) -> None:
        """Let the application find it."""
        scope["extensions"] = {_EXTENSION: self}

    def watch(self, on_leave: Callable[[], None]) -> None:
        """Call ``on_leave`` once, when the client's connection ends before :meth:`unwatch`; soon,
        when it has ended already."""
        self._flow.resume_reading()  # its end is read, too
        if self._cycle.disconnected or self._transport.is_closing():
            asyncio.get_running_loop().call_soon(on_leave)
            return
        self._on_leave = on_leave
        self._watched.add(self)

    def unwatch(self) -> None:
        """Tell nobody any more."""
        self._on_leave = None
        self._watched.discard(self)

    def tell(self) -> None:
        """The connection has ended."""
        on_leave = self._on_leave
        self.unwatch()
        if on_leave is not None:
            on_leave()

    def whole_body(self) -> bytes | None:
        """The body, when all of it has come with the headers, as small ones do; else None: it is
        to be received part by part."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        self._flow.resume_reading()
        return body

    # --- the answer ---------------------------------------------------------------------------

    @property
    def _may_begin(self) -> bool:
        cycle = self._cycle
        return not (
            self._flow.write_paused
            or cycle.disconnected
            or cycle.response_started
            or cycle.scope["method"] == "HEAD"
            or self._transport.is_closing()
        )

    def answer(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        """Give a whole answer in one write.

        Returns:
            False when nothing was written: the connection is full, or gone, or an answer has begun,
            or this is one without a body. ASGI's ``send`` waits, or knows what to do.

        Raises:
            ValueError: a header holds what would end it.
        """
        if not self._may_begin:
            return False
        self._begin(status, headers, b"content-length: %d\r\n" % len(body))
        self._cycle.chunked_encoding = False
        head, self._head = self._head, b""
        self._transport.write(head + body)
        self._end()
        return True

    def begin(self, status: int, headers: Sequence[Header], lines: bytes = b"") -> bool:
        """Begin a stream. Its head leaves with the first part, or with :meth:`flush`.

        Args:
            lines: more headers, those that every such stream has (of :func:`header_lines`).

        Returns:
            False when it was not begun, as for :meth:`answer`.

        Raises:
            ValueError: a header holds what would end it.
        """
        if not self._may_begin:
            return False
        self._begin(status, headers, lines + _CHUNKED)
        self._cycle.chunked_encoding = True
        return True

    def _begin(self, status: int, headers: Sequence[Header], lines: bytes) -> None:
        cycle = self._cycle
        head = STATUS_LINE[status] + header_lines(headers) + lines
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            head += b"connection: close\r\n"
        self._head = head + b"\r\n"
        cycle.response_started = True
        cycle.waiting_for_100_continue = False

    @property
    def has_left(self) -> bool:
        """Whether an answer has begun, and its head is on its way."""
        return self._cycle.response_started and not self._head

    def flush(self) -> None:
        """Let the head of a stream leave by itself, if it has not."""
        if self._head:
            head, self._head = self._head, b""
            if not self._cycle.disconnected:
                self._transport.write(head)

    @property
    def is_writable(self) -> bool:
        """Whether :meth:`write` would write."""
        cycle = self._cycle
        return not (
            self._flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or not cycle.chunked_encoding
            or self._transport.is_closing()
        )

    def write(self, data: bytes) -> bool:
        """Write a part of a stream that has begun, at once; not an empty one.

        Returns:
            False when nothing was written: the connection is full, or gone, or this is another
            kind of answer. ASGI's ``send`` waits, or knows what to do.
        """
        if not self.is_writable:
            return False
        self.put(data)
        return True

    def put(self, data: bytes) -> None:
        """:meth:`write` for whoever has just seen that the stream ``is_writable``."""
        self._transport.write(b"%b%x\r\n%b\r\n" % (self._head, len(data), data))
        self._head = b""

    def finish(self, data: bytes) -> bool:
        """Write the last part of a stream, and its end.

        Returns:
            False when nothing was written, as for :meth:`write`.
        """
        if not self.is_writable:
            return False
        self._transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._head, len(data), data))
        self._head = b""
        self._end()
        return True

    def _end(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.scope.pop("extensions", None)  # a circle: scope, exchange, cycle
        cycle.message_event.set()  # who waits for the client to leave has nothing to wait for
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

"""What an application may do with its client's connection beside ASGI.

ASGI tells of a client that left only to a task that waits for it, and takes each part of an answer
in a message that may have to wait. With thousands of answers at once that is a task per answer, and
most of what a part costs. :class:`BoundedProtocol` puts an exchange into the scope of each request;
servers of others have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "mesh.exchange"


class Exchange:
    """One request and its answer on a connection.

    Args:
        watched: the exchanges of the connection that want to hear of its end.
    """

    __slots__ = ("_cycle", "_flow", "_on_leave", "_transport", "_watched")

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
        """Write a part of an answer that is sent in chunks and has begun, at once.

        Returns:
            False when nothing was written: the connection is full, or gone, or this is another
            kind of answer. ASGI's ``send`` waits, or knows what to do.
        """
        if not self.is_writable:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

"""From the socket to the parser, without the stops between: asyncio's stream copies each read into
a buffer, wakes a task, and copies it out again, which costs as much as to parse what came.

    socket -> Incoming -> MessageParser.take          whole messages, at once
                   └────> StreamReader -> parse       all else, in the library's own loop

While that loop is behind, everything goes its way, so the order is that of the wire.
"""

from __future__ import annotations

import asyncio
from typing import Any

from infra.bus.wire import MessageParser


class Incoming(asyncio.Protocol):
    """Stands before the protocol of a connected stream, which hears all but whole messages.

    Args:
        client: whose messages these are; they are taken while it ``is_connected``.
        num_behind: bytes that the stream has and the parser has not seen.
    """

    def __init__(
        self,
        inner: asyncio.StreamReaderProtocol,
        client: Any,
        parser: MessageParser,
        num_behind: int,
    ) -> None:
        self._inner = inner
        self._client = client
        self._parser = parser
        self._num_behind = num_behind

    @classmethod
    def stand_before(
        cls,
        writer: asyncio.StreamWriter,
        reader: asyncio.StreamReader,
        client: Any,
        parser: MessageParser,
    ) -> None:
        """Take what comes on a connected stream from now on."""
        transport: Any = writer.transport
        inner = transport.get_protocol()
        buffered: bytearray = reader._buffer  # type: ignore[attr-defined]
        incoming = cls(inner, client, parser, len(buffered))
        parser.on_parsed = incoming.note_parsed
        transport.set_protocol(incoming)

    def note_parsed(self, num_bytes: int) -> None:
        """The library's loop has parsed so many."""
        self._num_behind -= num_bytes

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if not self._num_behind and self._client.is_connected:
            data = self._parser.take(data)
        if data:
            self._num_behind += len(data)
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """See ``asyncio.Protocol``."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._inner.resume_writing()

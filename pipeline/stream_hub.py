"""The requests that one reader is waiting for, and who gets what comes for it.

:meth:`StreamHub.on_message` gets every message of the reader in stream order and hands it to the
:class:`TokenStream` of its request; what counts is decided by ``pipeline/ownership.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from infra.bus import StoredMessage
from pipeline.alarms import Alarms
from pipeline.claim_chain import ClaimChain
from pipeline.quiet import QuietWatch
from pipeline.token_stream import Part, TokenStream
from pipeline.wakes import Wakes
from schemas.errors import InvalidRequest, SchemaError
from schemas.tokens import TokenBatch, decode_stream_message

MAX_WAITING = 4096  # deltas of one stream that may wait to be read


class StreamHub:
    """The requests that one reader is waiting for.

    Args:
        tell_worker: the quick word to a worker that a request ended on its chain; None leaves it
            to the router.
        check: asks the stream whether the reader missed anything; called when some request
            waits in silence (``pipeline/quiet.py``).
        max_waiting: how many deltas of one stream may wait to be read. A stream over that is
            given up alone (:class:`ReaderTooSlow`); what it kept is dropped.
        on_overflow: told of each stream that was opened here and then given up like that.

    Made and used in one event loop.
    """

    def __init__(
        self,
        chain: ClaimChain,
        now_unix_ms: Callable[[], int],
        tell_worker: Callable[[str, str], Awaitable[None]] | None,
        check: Callable[[], None],
        *,
        max_waiting: int = MAX_WAITING,
        on_overflow: Callable[[TokenStream], None] | None = None,
    ) -> None:
        self.chain = chain
        self.now_unix_ms = now_unix_ms
        self.tell_worker = tell_worker
        self.max_waiting = max_waiting
        self._on_overflow = on_overflow
        self.loop = asyncio.get_running_loop()
        self.quiet = QuietWatch(check, self.loop)
        self.wakes = Wakes()
        self.alarms = Alarms()
        self._streams: dict[str, tuple[TokenStream, ...]] = {}  # who reads a request, oldest first

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str, reader: str, deadline_unix_ms: int) -> TokenStream:
        """Start to listen for a request; call before it is published.

        Raises:
            InvalidRequest: it is being read here already.
        """
        if request_id in self._streams:
            raise InvalidRequest(f"{request_id} is being read already", param="request_id")
        stream = TokenStream(
            self, request_id, reader, deadline_unix_ms, on_overflow=self._on_overflow
        )
        self._streams[request_id] = (stream,)
        return stream

    def join(
        self, request_id: str, reader: str, deadline_unix_ms: int, from_number: int = 0
    ) -> TokenStream:
        """Listen for a request that others may be reading here as well.

        Args:
            from_number: of each choice, the first token that is to be shown.
        """
        stream = TokenStream(self, request_id, reader, deadline_unix_ms, from_number)
        self._streams[request_id] = (*self._streams.get(request_id, ()), stream)
        return stream

    def forget(self, stream: TokenStream) -> None:
        """Stop to listen for one reader of a request."""
        stream.disarm()
        stream.note_heard()
        readers = self._streams.get(stream.request_id)
        if readers is None:
            return
        others = tuple([other for other in readers if other is not stream])
        if others:
            self._streams[stream.request_id] = others
        else:
            del self._streams[stream.request_id]

    def on_message(self, seq: int, subject: str, data: bytes) -> None:
        """One message of the reader, in stream order."""
        readers = self._streams.get
        for part in _parts(data):
            for stream in readers(part.request_id, ()):
                stream.take(seq, part)

    async def catch_up(
        self, streams: Sequence[TokenStream], past: AsyncGenerator[StoredMessage, None]
    ) -> None:
        """Give ``streams`` the reader's stored messages ``past``, before what comes live meanwhile.

        Raises:
            BusUnavailable: as ``past`` does; the streams are of no use then, but for another try.
        """
        behind: dict[str, tuple[TokenStream, ...]] = {}
        for stream in streams:
            stream.hold()
            behind[stream.request_id] = (*behind.get(stream.request_id, ()), stream)
        last_seq = 0
        async with contextlib.aclosing(past) as messages:
            async for message in messages:
                last_seq = message.seq
                for part in _parts(message.data):
                    for stream in behind.get(part.request_id, ()):
                        stream.apply(last_seq, part)
        for stream in streams:
            stream.go_on(last_seq)


def _parts(data: bytes) -> Sequence[Part]:
    try:
        message = decode_stream_message(data)
    except SchemaError:
        return ()  # from a newer peer: what we don't know we can't need
    return message.deltas if isinstance(message, TokenBatch) else (message,)

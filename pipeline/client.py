"""The mesh's own client: publish requests to the bus, read their token streams.

    async with MeshClient.connect(url) as mesh:
        stream = await mesh.submit(InferenceRequest(request_id=new_request_id(), …))
        async for delta in stream:
            print(delta.text, end="")
        print(stream.end.usage)

All requests of one client share one reader, so what one engine step brings for them comes as one
message. A stream can be read again from any number, by this client or another (``resume``).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from urllib.parse import urlsplit

import msgspec

from infra.bus import Bus
from infra.task_scope import task_scope
from infra.times import Times
from pipeline.acceptance import accepted_of
from pipeline.claim_chain import ClaimChain
from pipeline.reader_feed import ReaderFeed
from pipeline.stream_hub import MAX_WAITING
from pipeline.submitting import DirectWay, Submission
from pipeline.token_stream import TokenStream, reader_of
from schemas import subjects
from schemas.codec import encode, tag_of
from schemas.control import CancelWord
from schemas.errors import InvalidRequest, MeshError
from schemas.headers import WorkHeaders
from schemas.requests import InferenceRequest, RequestRecord
from schemas.tokens import Cancelled

DEFAULT_USER = "client"
_MAX_SUBMITTED = 4096
_FEW_OPEN = 8  # up to so many, each request leaves at once; with more, one write for several


def new_request_id() -> str:
    """128 random bits as text."""
    return os.urandom(16).hex()


class MeshClient:
    """Submits requests over one bus connection and reads their streams.

    Args:
        user: the broker user of the connection; the first part of the reader.
        name: the rest of the reader; None makes a new one. A client that names an old one can
            ``resume`` what that one had submitted.
        is_direct: say requests to control processes without the queue, while they answer (bridges
            may): faster by what two stored messages take.
        tells_workers: send the quick word to the worker itself when a request is cancelled
            (bridges may); else the router does, one hop later.
        max_waiting: deltas of one stream that may wait to be read; a request whose stream is
            over that is cancelled, see :class:`ReaderTooSlow`.
    """

    def __init__(
        self,
        bus: Bus,
        user: str = DEFAULT_USER,
        name: str | None = None,
        *,
        is_direct: bool = False,
        tells_workers: bool = False,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.bus = bus
        self.reader = reader_of(user, name or secrets.token_hex(8))
        self._max_waiting = max_waiting
        self._chain = ClaimChain(bus)
        self._submitted: OrderedDict[str, int] = OrderedDict()  # the latest ids, oldest first
        self._too_slow: asyncio.Queue[TokenStream] = asyncio.Queue(_MAX_SUBMITTED)
        self._feed = ReaderFeed(
            bus,
            self.reader,
            max_waiting=max_waiting,
            tell_worker=self._tell_worker if tells_workers else None,
            on_overflow=self._give_up,
        )
        self._direct = DirectWay(bus) if is_direct else None
        self._feeds: dict[str, ReaderFeed] = {}  # those followed now, by reader

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, *, name: str | None = None, times: Times | None = None
    ) -> AsyncIterator[MeshClient]:
        """A client with a connection of its own.

        Args:
            times: those of the mesh, where they are not the usual ones.

        Raises:
            BusUnavailable: the broker can't be reached, or refuses the credentials.
        """
        user = urlsplit(url).username or DEFAULT_USER
        bus = await Bus.connect(url, role=user, times=times)
        try:
            client = cls(bus, user, name)
            async with client:
                yield client
        finally:
            await bus.close()

    async def __aenter__(self) -> MeshClient:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._following(self._feed))
            tasks = await stack.enter_async_context(task_scope())
            tasks.create_task(self._cancel_too_slow(), name="too slow readers")
            if self._direct is not None:
                tasks.create_task(self._direct.run(), name="direct way")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; requests that run go on without us."""
        await self._stack.aclose()

    @property
    def num_open(self) -> int:
        """Requests that have not ended and are being read."""
        return len(self._feed.hub)

    async def submit(self, request: InferenceRequest, *, traceparent: str = "") -> TokenStream:
        """Publish ``request`` to admission; durable once this returns, or, for a client that is
        direct, once its stream tells of it: until then it is this client that sees to it.

        The reader is this client's; a request without deadline gets the default one. A repeat
        with the same id is the same request: its stream is read from the first token again.

        Raises:
            BusUnavailable: not known to be published; a repeat is safe.
            InvalidRequest: this client is reading a request of this id, or model or id can't be.
            QueueFull: too many requests wait for admission.
            PayloadTooLarge: over the limit of the object store.

        Cancelled in between, it cancels the request, which may have been published.
        """
        subjects.check_request_id(request.request_id)
        deadline = request.deadline_unix_ms or self._default_deadline()
        request = msgspec.structs.replace(request, reader=self.reader, deadline_unix_ms=deadline)
        stream = self._feed.hub.open(request.request_id, self.reader, deadline)
        before = self._note_submitted(request.request_id)
        headers = WorkHeaders(
            schema=tag_of(InferenceRequest),
            request_id=request.request_id,
            epoch=0,
            deadline_unix_ms=deadline,
            traceparent=traceparent,
        )
        try:
            submission = Submission(
                stream, subjects.admission(request.model), encode(request), headers
            )
            if self._direct is not None and before is None and self._direct.say(submission):
                if self.num_open <= _FEW_OPEN:
                    self.bus.hurry()
                return stream
            stored = await submission.queue(self.bus)
            if before is not None or stored.duplicate:
                await self._feed.catch_up(stream, (before or 0) + 1)
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        except BaseException:
            stream.leave()
            raise
        return stream

    async def cancel(self, request_id: str, reason: str = "") -> None:
        """End a request of this client's that it does not read any more. Nothing happens when it
        has ended already.

        Raises:
            BusUnavailable: not known to be ended; the same call again is harmless.
        """
        await self._chain.end(self.reader, Cancelled(request_id=request_id, reason=reason))

    async def record(self, request_id: str) -> tuple[int, RequestRecord] | None:
        """What admission wrote of a request, and where that lies in the stream: no token of it
        lies before. None for an id that is not known (any more).

        Raises:
            SchemaError: this can be no id, or the record is from a newer peer.
            BusUnavailable, BusForbidden: it can't be read now, or not by our user.
        """
        return await self._chain.record(request_id)

    @asynccontextmanager
    async def resume(
        self,
        request_id: str,
        from_number: int = 0,
        *,
        reader: str | None = None,
        start_seq: int | None = None,
        record: RequestRecord | None = None,
    ) -> AsyncIterator[TokenStream]:
        """Read a request's stream again, from token ``from_number`` of each choice on.

        Whoever may read the reader may do so, any number of times, beside others. Leaving does
        not cancel the request.

        Args:
            reader: the reader that it was submitted with (``TokenStream.reader``); None: the one
                of a request that named none.
            start_seq: the sequence of the request's record: what its reader got before that is
                not read. None: all of it, and the request must have been heard of there.
            record: that record; where its reader was told directly, it stands for Accepted.

        Raises:
            InvalidRequest: nothing is stored of such a request (streams are kept for minutes).
        """
        reader = reader or subjects.default_reader(request_id)
        latest = self.bus.now_unix_ms() + int(self.bus.times.max_deadline_s * 1000)
        feed = self._feeds.get(reader) or ReaderFeed(
            self.bus, reader, max_waiting=self._max_waiting
        )
        async with self._following(feed):
            stream = feed.hub.join(request_id, reader, latest, from_number)
            try:
                await feed.catch_up(stream, start_seq or 1)
                if record is not None and record.is_direct:
                    stream.told(accepted_of(record))
                if start_seq is None and not stream.is_known:
                    raise InvalidRequest(f"no request {request_id} is known", param="request_id")
                yield stream
            finally:
                stream.leave()

    @asynccontextmanager
    async def _following(self, feed: ReaderFeed) -> AsyncIterator[None]:
        """``feed`` is followed, and found by others, until the last of its users leaves."""
        self._feeds[feed.reader] = feed
        feed.num_users += 1
        stack = AsyncExitStack()
        try:
            await feed.follow(stack)
            yield
        finally:
            feed.num_users -= 1
            if not feed.num_users:
                del self._feeds[feed.reader]
            await stack.aclose()

    def _note_submitted(self, request_id: str) -> int | None:
        """Where in the stream everything of a request lies behind, if it was submitted before."""
        before = self._submitted.pop(request_id, None)
        self._submitted[request_id] = self._feed.last_seq if before is None else before
        if len(self._submitted) > _MAX_SUBMITTED:
            self._submitted.popitem(last=False)
        return before

    def _give_up(self, stream: TokenStream) -> None:
        with suppress(asyncio.QueueFull):  # then its reader, when it comes, cancels it
            self._too_slow.put_nowait(stream)

    async def _cancel_too_slow(self) -> None:
        while True:
            stream = await self._too_slow.get()
            with suppress(MeshError):  # the bus is away: the same
                await stream.cancel("its reader is too slow")

    def _default_deadline(self) -> int:
        return self.bus.now_unix_ms() + int(self.bus.times.default_deadline_s * 1000)

    async def _tell_worker(self, worker: str, request_id: str) -> None:
        word = CancelWord(request_id=request_id)
        await self.bus.publish(subjects.cancel(worker), encode(word))

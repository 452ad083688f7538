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

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from infra.bus import TOKENS, Bus, StreamReader, publish_work, replay
from infra.task_scope import task_scope
from infra.times import Times
from pipeline.claim_chain import ClaimChain
from pipeline.token_stream import StreamHub, TokenStream, reader_of
from schemas import subjects
from schemas.codec import encode, tag_of
from schemas.control import CancelWord
from schemas.errors import InvalidRequest
from schemas.headers import WorkHeaders
from schemas.requests import InferenceRequest

DEFAULT_USER = "client"
_MAX_SUBMITTED = 4096


def new_request_id() -> str:
    """128 random bits as text."""
    return secrets.token_hex(16)


class MeshClient:
    """Submits requests over one bus connection and reads their streams.

    Args:
        user: the broker user of the connection; the first part of the reader.
        name: the rest of the reader; None makes a new one. A client that names an old one can
            ``resume`` what that one had submitted.
        tells_workers: send the quick word to the worker itself when a request is cancelled
            (bridges may); else the router does, one hop later.
    """

    def __init__(
        self,
        bus: Bus,
        user: str = DEFAULT_USER,
        name: str | None = None,
        *,
        tells_workers: bool = False,
    ) -> None:
        self.bus = bus
        self._tells_workers = tells_workers
        self.reader = reader_of(user, name or secrets.token_hex(8))
        self._submitted: dict[str, int] = {}  # the latest ids, oldest first
        self._streams = StreamReader(bus, subjects.reader_filter(self.reader), self._on_message)
        self._hub = self._make_hub(self._streams)

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
            await self._follow(self._streams, stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; requests that run go on without us."""
        await self._stack.aclose()

    @property
    def num_open(self) -> int:
        """Requests that have not ended and are being read."""
        return len(self._hub)

    async def submit(self, request: InferenceRequest, *, traceparent: str = "") -> TokenStream:
        """Publish ``request`` to admission; durable once this returns.

        The reader is this client's; a request without deadline gets the default one. A repeat
        with the same id is the same request: its stream is read from the first token again.

        Raises:
            BusUnavailable: not known to be published; a repeat is safe.
            InvalidRequest: this client is reading a request of this id, or model or id can't be.
            QueueFull: too many requests wait for admission.
            PayloadTooLarge: over the limit of the object store.
        """
        subjects.check_request_id(request.request_id)
        deadline = request.deadline_unix_ms or self._default_deadline()
        request = msgspec.structs.replace(request, reader=self.reader, deadline_unix_ms=deadline)
        stream = self._hub.open(request.request_id, self.reader, deadline)
        before = self._note_submitted(request.request_id)
        headers = WorkHeaders(
            schema=tag_of(InferenceRequest),
            request_id=request.request_id,
            epoch=0,
            deadline_unix_ms=deadline,
            traceparent=traceparent,
        )
        try:
            stored = await publish_work(
                self.bus,
                subjects.admission(request.model),
                encode(request),
                headers,
                msg_id=f"{request.request_id}.admission",
            )
            if before is not None or stored.duplicate:
                everything = subjects.reader_filter(self.reader)
                past = replay(self.bus, TOKENS, everything, start_seq=(before or 0) + 1)
                await self._hub.catch_up(stream, past)
        except BaseException:
            self._hub.forget(stream)
            raise
        return stream

    @asynccontextmanager
    async def resume(
        self, request_id: str, from_number: int = 0, *, reader: str | None = None
    ) -> AsyncIterator[TokenStream]:
        """Read a request's stream again, from token ``from_number`` of each choice on.

        Whoever may read the reader may do so, any number of times, beside others. Leaving does
        not cancel the request.

        Args:
            reader: the reader that it was submitted with (``TokenStream.reader``); None: the one
                of a request that named none.

        Raises:
            InvalidRequest: nothing is stored of such a request (streams are kept for minutes).
        """
        reader = reader or subjects.default_reader(request_id)
        hubs: list[StreamHub] = []
        streams = StreamReader(
            self.bus, subjects.reader_filter(reader), lambda *m: hubs[0].on_message(*m)
        )
        hubs.append(hub := self._make_hub(streams))
        latest = self.bus.now_unix_ms() + int(self.bus.times.max_deadline_s * 1000)
        stream = hub.open(request_id, reader, latest, from_number)
        stack = AsyncExitStack()
        try:
            await self._follow(streams, stack, from_seq=1)
            if not stream.is_known:
                raise InvalidRequest(f"no request {request_id} is known", param="request_id")
            yield stream
        finally:
            await stack.aclose()

    @staticmethod
    async def _follow(
        streams: StreamReader, stack: AsyncExitStack, from_seq: int | None = None
    ) -> None:
        """Start ``streams`` and a task that keeps it going; ``stack`` ends both. Closed by its
        ``aclose``, which tells the task's scope of no exception, it leaves callers theirs."""
        await streams.start(from_seq)
        stack.push_async_callback(streams.close)
        tasks = await stack.enter_async_context(task_scope())
        tasks.create_task(streams.run(), name="reader")

    def _note_submitted(self, request_id: str) -> int | None:
        """Where in the stream everything of a request lies behind, if it was submitted before."""
        before = self._submitted.pop(request_id, None)
        self._submitted[request_id] = self._streams.last_seq if before is None else before
        if len(self._submitted) > _MAX_SUBMITTED:
            del self._submitted[next(iter(self._submitted))]
        return before

    def _make_hub(self, streams: StreamReader) -> StreamHub:
        return StreamHub(
            ClaimChain(self.bus),
            self.bus.now_unix_ms,
            self._tell_worker if self._tells_workers else None,
            streams.check,
        )

    def _default_deadline(self) -> int:
        return self.bus.now_unix_ms() + int(self.bus.times.default_deadline_s * 1000)

    def _on_message(self, seq: int, subject: str, data: bytes) -> None:
        self._hub.on_message(seq, subject, data)

    async def _tell_worker(self, worker: str, request_id: str) -> None:
        word = CancelWord(request_id=request_id)
        await self.bus.publish(subjects.cancel(worker), encode(word))

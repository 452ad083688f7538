"""Reading the token streams of many requests that share one reader.

``StreamHub.on_message`` gets every message of the reader in stream order and hands it to the
:class:`TokenStream` of its request; what counts is decided by ``pipeline/ownership.py``. Nothing
here publishes except the end of a request that its reader gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Sequence,
)
from types import TracebackType
from typing import Self

from infra.bus import StoredMessage
from pipeline.claim_chain import ClaimChain
from pipeline.ownership import RequestView
from pipeline.quiet import QuietWatch
from pipeline.wakes import Wakes
from schemas import subjects
from schemas.errors import (
    BusUnavailable,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MeshError,
    ReaderTooSlow,
    RequestCancelled,
    SchemaError,
    from_info,
)
from schemas.tokens import (
    Accepted,
    Cancelled,
    ChainEntry,
    Claim,
    Expired,
    StreamEnd,
    StreamError,
    TokenBatch,
    TokenDelta,
    decode_stream_message,
)

Part = TokenDelta | Accepted | ChainEntry  # of one request

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
        self.quiet = QuietWatch(check)
        self.wakes = Wakes()
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
        others = tuple(
            other for other in self._streams.get(stream.request_id, ()) if other is not stream
        )
        if others:
            self._streams[stream.request_id] = others
        else:
            self._streams.pop(stream.request_id, None)

    def on_message(self, seq: int, subject: str, data: bytes) -> None:
        """One message of the reader, in stream order."""
        readers = self._streams.get
        for part in self._parts(data):
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
                for part in self._parts(message.data):
                    for stream in behind.get(part.request_id, ()):
                        stream.apply(last_seq, part)
        for stream in streams:
            stream.go_on(last_seq)

    def _parts(self, data: bytes) -> Sequence[Part]:
        try:
            message = decode_stream_message(data)
        except SchemaError:
            return ()  # from a newer peer: what we don't know we can't need
        return message.deltas if isinstance(message, TokenBatch) else (message,)


class TokenStream:
    """One request as its client reads it: every token once, in order, then one end.

    Iterate over it, or call :meth:`next_deltas`. After the last token ``end`` is set. What ends
    a request otherwise is raised: what admission refused, DeadlineExceeded, RequestCancelled, or
    the error that a worker met. Tokens, even the end, may come before Accepted.

    As a context manager it cancels the request when left before the end.
    """

    def __init__(
        self,
        hub: StreamHub,
        request_id: str,
        reader: str,
        deadline_unix_ms: int,
        from_number: int = 0,
        *,
        on_overflow: Callable[[TokenStream], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.reader = reader
        self.deadline_unix_ms = deadline_unix_ms
        self.end: StreamEnd | None = None
        self.view = RequestView(request_id)
        self._hub = hub
        self._from_number = from_number
        self._on_overflow = on_overflow
        self._ready: list[TokenDelta] = []
        self._max_ready = hub.max_waiting
        self._too_slow: ReaderTooSlow | None = None
        self._held: list[tuple[int, Part]] | None = None
        self._accepted: Accepted | None = None
        self._wake = asyncio.Event()
        self._take_now: Callable[[Sequence[TokenDelta]], bool] | None = None
        self._failure: Exception | None = None  # of ``_take_now``
        self._has_begun = False  # a token was shown
        self._alarm: asyncio.TimerHandle | None = None  # at the deadline

    @property
    def num_tokens(self) -> int:
        """Tokens heard of so far, of all choices."""
        return sum(len(choice.token_ids) for choice in self.view.choices.values())

    @property
    def is_ending(self) -> bool:
        """Whether the request has gone well to its end: nothing follows what is ready."""
        return isinstance(self.view.terminal, StreamEnd)

    @property
    def is_known(self) -> bool:
        """Whether anything was heard of the request."""
        return self._accepted is not None or self.view.chain_seq > 0

    async def accepted(self) -> Accepted:
        """Admission's word that the request is in.

        Raises:
            MeshError: it was refused (ModelNotFound, InvalidRequest, ContextTooLong, QueueFull),
                or ended before it began.
        """
        while self._accepted is None:
            if self._too_slow is not None:
                raise self._too_slow
            terminal = self.view.terminal
            if terminal is not None and not isinstance(terminal, StreamEnd):
                self._hub.forget(self)
                raise _error_of(terminal)
            await self._wait()
        return self._accepted

    async def next_deltas(self) -> list[TokenDelta]:
        """Everything that came since the last call, at least one delta.

        Returns:
            [] when the request is complete; ``end`` is set then.

        Raises:
            ReaderTooSlow: these calls came too rarely; what was kept is dropped.
            MeshError: the request ended otherwise.
        """
        while self._failure is not None or not self._ready:
            if self._failure is not None:
                raise self._failure
            if self._too_slow is not None:
                raise self._too_slow
            if self.view.terminal is not None:
                self.end = self._complete_or_raise()
                return []  # listening on for admission's word, if that is still to come
            await self._wait()
        ready, self._ready = self._ready, []
        self._max_ready = self._hub.max_waiting
        return ready

    def follow(self, take: Callable[[Sequence[TokenDelta]], bool] | None) -> None:
        """Offer what comes to ``take`` first, from wherever it comes: it is to return at once.
        True: it has taken all of it, and who waits in :meth:`next_deltas` is not woken. False, or
        without one: it is ready there. What ``take`` raises is raised there, too."""
        self._take_now = take

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """All deltas to the end."""
        while deltas := await self.next_deltas():
            for delta in deltas:
                yield delta

    async def cancel(self, reason: str = "") -> None:
        """End the request, wherever it is. Nothing happens when it has ended already."""
        await self._end(Cancelled(request_id=self.request_id, reason=reason))

    def leave(self) -> None:
        """Stop reading; the request runs on."""
        self._hub.forget(self)

    async def aclose(self) -> None:
        """Stop reading; a request that has not ended is cancelled. With the bus away it is left
        to its deadline instead."""
        try:
            if self.view.terminal is None:
                await self.cancel("reader left")
        except BusUnavailable:
            pass  # nobody can be told; the deadline ends it
        finally:
            self._hub.forget(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # From the hub ----------------------------------------------------------------------------

    def take(self, seq: int, part: Part) -> None:
        """What came live, in stream order."""
        if self._held is not None:
            self._held.append((seq, part))
        elif type(part) is TokenDelta:  # nearly all are
            self._apply_delta(part)
        else:
            self.apply(seq, part)

    def hold(self) -> None:
        """Begin anew: all that was heard is applied again, and what comes live waits for it."""
        self.view = RequestView(self.request_id)
        self._ready.clear()
        self._held = []

    def go_on(self, after_seq: int) -> None:
        """Everything up to ``after_seq`` is applied: follow with what waits."""
        held, self._held = self._held or (), None
        self._max_ready = self._hub.max_waiting + len(self._ready)  # these come all at once
        for seq, part in held:
            if seq > after_seq:
                self.apply(seq, part)

    def apply(self, seq: int, part: Part) -> None:
        """Let it count, if it does."""
        if isinstance(part, TokenDelta):
            self._apply_delta(part)
        elif isinstance(part, Accepted):
            self._accepted = part
            if part.deadline_unix_ms != self.deadline_unix_ms:
                self.deadline_unix_ms = part.deadline_unix_ms
                self.disarm()
            self._heard()
        else:
            self.view.apply_entry(seq, part)
            if self.view.terminal is not None:
                self._heard()

    def _apply_delta(self, delta: TokenDelta) -> None:
        ready = self.view.apply_delta(delta)
        if self._from_number:
            ready = [d for d in ready if d.number + len(d.ids) > self._from_number]
        if not ready:
            return
        is_told = bool(self._ready)  # and then whoever reads has been, or will be in a round
        self._ready += ready
        if not self._has_begun:
            self._has_begun = True
            self._hand_on()
        elif not is_told:
            self._hub.wakes.add(self._hand_on)
        if len(self._ready) > self._max_ready and self._held is None:
            self._overflow()

    def _hand_on(self) -> None:
        """What is ready, to whoever follows, or to who waits."""
        if self._take_now is None or self._held is not None:
            self._wake.set()
        elif self._ready:
            try:
                is_taken = self._take_now(self._ready)
            except Exception as error:  # its own task is to hear of it, not the bus's
                self._failure, self._take_now, is_taken = error, None, False
            if is_taken:
                self._ready = []
                self._max_ready = self._hub.max_waiting
                self._hub.quiet.again(self)
            else:
                self._wake.set()

    def _overflow(self) -> None:
        """Its reader does not keep up: keep nothing more for it."""
        self._too_slow = ReaderTooSlow(f"over {self._hub.max_waiting} tokens waited to be read")
        self._ready.clear()
        self._hub.forget(self)
        if self._on_overflow is not None:
            self._on_overflow(self)

    def _heard(self) -> None:
        self._wake.set()
        if self.view.terminal is not None and self._accepted is not None:
            self._hub.forget(self)  # nothing that may still come counts

    # For the reader --------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until something came; a request past its deadline is ended here."""
        self._wake.clear()
        if self._alarm is None:  # it rang, or the deadline is a new one
            if self._left_s() <= 0:
                await self._expire()
                return
            self._arm()
        self._hub.quiet.begin(self)
        try:
            await self._wake.wait()
        finally:
            self._hub.quiet.end(self)

    def _left_s(self) -> float:
        return (self.deadline_unix_ms - self._hub.now_unix_ms()) / 1000

    def _arm(self) -> None:
        """Wake whoever waits, at the deadline: one timer per request, not one per wait."""
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(max(self._left_s(), 0), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._wake.set()

    def disarm(self) -> None:
        """The deadline is another one, or none."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _expire(self) -> None:
        if self.view.terminal is not None:
            raise DeadlineExceeded("the request ended, and admission's word of it did not come")
        try:
            await self._end(Expired(request_id=self.request_id))
        except BusUnavailable:
            self._hub.forget(self)
            raise DeadlineExceeded("the deadline passed while the bus was away") from None

    async def _end(self, entry: Cancelled | Expired) -> None:
        """Put a terminal entry on the chain and tell the worker that computes."""
        if self.view.terminal is not None:
            return
        claim = self.view.claim
        tip = await self._hub.chain.end(self.reader, entry)
        if tip.entry is not None:
            self.apply(tip.seq, tip.entry)
        if claim is not None and self._hub.tell_worker is not None:
            with contextlib.suppress(BusUnavailable):  # the router says it as well
                await self._hub.tell_worker(claim.worker, self.request_id)

    def _complete_or_raise(self) -> StreamEnd:
        terminal = self.view.terminal
        if not isinstance(terminal, StreamEnd):
            self._hub.forget(self)
            raise _error_of(terminal)
        num_tokens = tuple(len(run) for run in self.view.tokens(len(terminal.num_tokens)))
        if num_tokens != terminal.num_tokens:
            self._hub.forget(self)
            raise EngineFailed(
                f"the stream holds {num_tokens} tokens, its end says {terminal.num_tokens}"
            )
        return terminal


def _error_of(terminal: ChainEntry | None) -> MeshError:
    match terminal:
        case StreamError(error=info):
            return from_info(info)
        case Expired():
            return DeadlineExceeded("the request's deadline passed before it ended")
        case Cancelled(reason=reason):
            return RequestCancelled(reason or "cancelled")
        case Claim() | None | StreamEnd():
            raise AssertionError(f"{terminal!r} is no failure")


def reader_of(user: str, name: str) -> str:
    """The reader ``<broker user>.<name>``, checked."""
    return subjects.check_reader(f"{user}.{name}")

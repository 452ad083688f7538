"""One request as its client reads it.

What comes for it is handed over by its :class:`~pipeline.stream_hub.StreamHub`, in stream order.
Nothing here publishes except the end of a request that its reader gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pipeline.alarms import Alarm
from pipeline.ownership import RequestView
from schemas import subjects
from schemas.errors import (
    BusUnavailable,
    DeadlineExceeded,
    EngineFailed,
    MeshError,
    ReaderTooSlow,
    RequestCancelled,
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
    TokenDelta,
)

if TYPE_CHECKING:
    from pipeline.stream_hub import StreamHub

Part = TokenDelta | Accepted | ChainEntry  # of one request


class TokenStream:
    """One request as its client reads it: every token once, in order, then one end.

    Iterate over it, or call :meth:`next_deltas`: one task at a time. After the last token ``end``
    is set. What ends a request otherwise is raised: what admission refused, DeadlineExceeded,
    RequestCancelled, or the error that a worker met. Tokens, even the end, may come before
    Accepted.

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
        self.is_ending = False  # it has gone well to its end: nothing follows what is ready
        self.view = RequestView(request_id)
        self._hub = hub
        self._from_number = from_number
        self._on_overflow = on_overflow
        self._ready: list[TokenDelta] = []
        self._max_ready = hub.max_waiting
        self._too_slow: ReaderTooSlow | None = None
        self._held: list[tuple[int, Part]] | None = None
        self._accepted: Accepted | None = None
        self._on_heard: Callable[[TokenStream], None] | None = None  # see expect()
        self._waiter: asyncio.Future[None] | None = None  # what the reader's task waits for
        self._take_now: Callable[[Sequence[TokenDelta]], bool] | None = None
        self._failure: Exception | None = None  # of ``_take_now``, or of who submits it
        self._has_begun = False  # a token was shown
        self._was_put_off = False  # its last tokens were
        self._alarm: Alarm | None = None  # at the deadline

    @property
    def num_tokens(self) -> int:
        """Tokens heard of so far, of all choices."""
        return sum(len(choice.token_ids) for choice in self.view.choices.values())

    @property
    def is_known(self) -> bool:
        """Whether anything was heard of the request."""
        return self._accepted is not None or self.view.chain_seq > 0

    @property
    def is_durable(self) -> bool:
        """Whether the request is stored, and goes on without whoever submitted it."""
        return self._on_heard is None

    async def accepted(self) -> Accepted:
        """Admission's word that the request is in.

        Raises:
            MeshError: it was refused (ModelNotFound, InvalidRequest, ContextTooLong, QueueFull),
                or ended before it began.
        """
        while self._accepted is None:
            if self._failure is not None:
                raise self._failure
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

    # From who submits it ---------------------------------------------------------------------

    def expect(self, on_heard: Callable[[TokenStream], None]) -> None:
        """Have ``on_heard`` called, once, when the stream first tells of the request, or nobody
        reads it here any more."""
        self._on_heard = on_heard

    def told(self, word: Accepted) -> None:
        """Admission's word came by another way than the stream."""
        self._take_word(word)

    def fail(self, error: MeshError) -> None:
        """It could not be submitted: whoever reads it is told ``error``."""
        self._failure = error
        self._wake()

    def note_heard(self) -> None:
        """See :meth:`expect`."""
        if self._on_heard is not None:
            on_heard, self._on_heard = self._on_heard, None
            on_heard(self)

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
        self.is_ending = False
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
            self.note_heard()
            self._take_word(part)
        else:
            self.note_heard()
            self.view.apply_entry(seq, part)
            if self.view.terminal is not None:
                self.is_ending = isinstance(self.view.terminal, StreamEnd)
                self._heard()

    def _take_word(self, word: Accepted) -> None:
        self._accepted = word
        if word.deadline_unix_ms != self.deadline_unix_ms:
            self.deadline_unix_ms = word.deadline_unix_ms
            self.disarm()
        self._heard()

    def _apply_delta(self, delta: TokenDelta) -> None:
        ready = self._ready
        num_before = len(ready)
        self.view.show(delta, ready)
        if self._from_number:
            new = [one for delta in ready[num_before:] for one in delta.split()]
            ready[num_before:] = [d for d in new if d.number + len(d.ids) > self._from_number]
        num_ready = len(ready)
        if num_ready == num_before:
            return
        if not self._has_begun:
            self._has_begun = True
            self._hand_on()
        elif not num_before:  # else whoever reads has been told, or will be in a round
            self._hub.wakes.add(self._in_round)
        if num_ready > self._max_ready and self._held is None:
            self._overflow()

    def _in_round(self) -> None:
        """The last tokens are put off once: as a rule the end comes meanwhile, and what would be
        two writes is one."""
        if not self._was_put_off and self._ready and self._ready[-1].finish_reason is not None:
            self._was_put_off = True
            self._hub.wakes.put_off(self._in_round)
        else:
            self._hand_on()

    def _hand_on(self) -> None:
        """What is ready, to whoever follows, or to who waits."""
        if self._take_now is None or self._held is not None:
            self._wake()
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
                self._wake()

    def _overflow(self) -> None:
        """Its reader does not keep up: keep nothing more for it."""
        self._too_slow = ReaderTooSlow(f"over {self._hub.max_waiting} pieces waited to be read")
        self._ready.clear()
        self._hub.forget(self)
        if self._on_overflow is not None:
            self._on_overflow(self)

    def _heard(self) -> None:
        self._wake()
        if self.view.terminal is not None and self._accepted is not None:
            self._hub.forget(self)  # nothing that may still come counts

    # For the reader --------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until something came; a request past its deadline is ended here."""
        hub = self._hub
        if self._alarm is None:  # it rang, or the deadline is a new one
            left_s = (self.deadline_unix_ms - hub.now_unix_ms()) / 1000
            if left_s <= 0:
                await self._expire()
                return
            # One timer per request, not one per wait.
            self._alarm = hub.alarms.set(left_s, self._ring)
        self._waiter = hub.loop.create_future()
        hub.quiet.begin(self)
        try:
            await self._waiter
        finally:
            self._waiter = None
            hub.quiet.end(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ring(self) -> None:
        self._alarm = None
        self._wake()

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
        num_tokens = self.view.num_tokens(len(terminal.num_tokens))
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

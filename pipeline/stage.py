"""A stage: messages of one consumer in, the next messages out.

This file alone pulls, checks deadlines, decodes, calls, publishes, and *then* acks. Every message
ends in exactly one of: what the handler says comes next; a terminal entry on the request's chain;
another delivery; a dead letter. Which one, by what the handler does:

    returns Handled                   its messages are stored, one after the other, then the ack;
                                      with ``then``, that is waited for between the two
    raises a retryable MeshError      delivered again after a pause (BusUnavailable, NoCapacity)
    raises another MeshError          StreamError on the chain: the client hears of it
    raises anything else              delivered again a few times; then dead letter, StreamError
    bytes that are no such message    dead letter, and StreamError where the request is known
    past its deadline                 Expired on the chain

What comes directly, without the queue, is handled in the same way; there is no ack, and to be
delivered again it is put into the queue.

Should even that fail, for the broker is away or refuses, the message is left un-acked and comes
again. No message ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Generic, TypeVar

from nats.js.api import ConsumerConfig

from infra.bus import (
    BeforeQueue,
    DirectMessage,
    Msg,
    WorkMessage,
    WorkPull,
    load_payload,
    publish_work,
)
from infra.metrics import Metrics
from infra.pulse import next_pulse
from infra.steady import Counter
from infra.task_scope import task_scope
from pipeline.endings import CRASH_LIMIT, Endings, StageContext
from pipeline.work import Handled, Handler, Outgoing, Parser, Work, parse_as
from schemas.codec import Message, encode
from schemas.errors import BusUnavailable, MeshError, NoCapacity, QueueFull
from schemas.headers import WorkHeaders

__all__ = [
    "CRASH_LIMIT",
    "Handled",
    "Handler",
    "Outgoing",
    "Parser",
    "Stage",
    "StageContext",
    "Work",
    "parse_as",
]

_SIGNS_PER_TURN = 256
_MAX_IN_LINE = 256  # that came directly and wait for a place; more go into the queue

T = TypeVar("T", bound=Message)


class _TooLate(Exception):
    """A message's deadline has passed."""


class Stage(Generic[T]):
    """One consumer and the function that handles its messages.

    Args:
        name: for log and metrics: "admission", "prefill", ...
        parse: bytes to :class:`Work` whose ids can stand in subjects; raises SchemaError.
        reader_of: the reader of a decoded message, for errors that its client must hear.
        capacity: how many more messages this process would take now, running ones not counted.
        concurrency: the most that are handled at once, those that wait not counted.
        max_waiting: the most that wait (see :class:`Handled`) and are handled together.
        on_fenced: called when our own consumer was deleted under us: somebody declared us dead.
            None for a consumer that is shared.
        when_full: what the client of a message hears when a queue behind this stage is full.
            None: the message waits for room.
        direct: the subject on which messages come without the queue; with ``direct_queue`` each
            comes to one of the processes that name the same.
        before_queue: stores, with the data of a message that came directly, what is to be stored
            before it may lie in the queue.
        told_elsewhere: outcomes after which the request's own line follows, so that this stage's
            is one for debugging.
    """

    def __init__(
        self,
        ctx: StageContext,
        name: str,
        consumer: ConsumerConfig,
        parse: Parser[T],
        reader_of: Callable[[T], str],
        handler: Handler[T],
        *,
        capacity: Callable[[], int] | None = None,
        concurrency: int = 32,
        max_waiting: int = 4096,
        on_fenced: Callable[[], None] | None = None,
        when_full: Callable[[T], QueueFull] | None = None,
        direct: str = "",
        direct_queue: str = "",
        before_queue: BeforeQueue | None = None,
        told_elsewhere: Collection[str] = (),
    ) -> None:
        self.name = name
        self._ctx = ctx
        self._parse = parse
        self._reader_of = reader_of
        self._handler = handler
        self._capacity = capacity
        self._concurrency = concurrency
        self._max_waiting = max_waiting
        self._when_full = when_full
        self._told_elsewhere = told_elsewhere
        self._direct = direct
        self._direct_queue = direct_queue
        self._before_queue = before_queue
        self._line: deque[DirectMessage] = deque()  # came directly, and wait for a place
        self._running: dict[int, WorkMessage] = {}
        self._waiting: dict[int, asyncio.Task[None]] = {}  # those of them that wait
        self._is_stopping = False
        self._is_over = False
        self._handled = _Handled(ctx.metrics, name)
        self._endings = Endings(ctx, name)
        self._tasks: asyncio.TaskGroup | None = None
        self._pull = WorkPull(
            ctx.bus, consumer, on_message=self._take, free=self._free, on_fenced=on_fenced
        )

    @property
    def num_running(self) -> int:
        """Messages taken and not finished, those that wait included."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Those of them that wait for something (see :class:`Handled`)."""
        return len(self._waiting)

    async def run(self) -> None:
        """Pull and handle until stopped or fenced, then finish what was taken, and give back what
        waits: it comes to others at once.

        When cancelled, messages in work are given back as well.
        """
        async with task_scope() as helpers:
            helpers.create_task(self._keep_alive(), name=f"{self.name} keep-alive")
            async with asyncio.TaskGroup() as self._tasks, self._hearing():
                await self._pull.run()
                # Now, not when told to stop: it would come back to our own pull.
                self._is_over = True
                for task in self._waiting.values():
                    task.cancel()

    def stop(self) -> None:
        """Take nothing more; :meth:`run` returns when what was taken is finished or given back."""
        self._is_stopping = True
        self._pull.stop()

    def poke(self) -> None:
        """Capacity may have grown: ask for more at once."""
        self._take_in_line()
        self._pull.poke()

    def _free(self) -> int:
        num_working = len(self._running) - len(self._waiting)
        free = min(self._concurrency - num_working, self._max_waiting - len(self._running))
        return free if self._capacity is None else min(free, self._capacity())

    @contextlib.asynccontextmanager
    async def _hearing(self) -> AsyncGenerator[None, None]:
        """Take what comes directly, until the end; then what is in line goes into the queue."""
        if not self._direct:
            yield
            return
        subscription = await self._ctx.bus.subscribe(
            self._direct, self._hear_direct, queue=self._direct_queue
        )
        try:
            yield
        finally:
            await subscription.unsubscribe()
            while self._line:
                await _to_queue(self._line.popleft())

    def _hear_direct(self, message: Msg) -> None:
        self._line.append(DirectMessage(self._ctx.bus, message, self._before_queue))
        self._take_in_line()
        if len(self._line) > (0 if self._is_stopping else _MAX_IN_LINE):
            assert self._tasks is not None, "a stage is run before it hears"
            self._tasks.create_task(_to_queue(self._line.pop()))

    def _take_in_line(self) -> None:
        while self._line and not self._is_stopping and self._free() > 0:
            self._take(self._line.popleft())

    def _take(self, message: WorkMessage) -> None:
        assert self._tasks is not None, "a stage is run before it takes"
        if message.stream_seq in self._running:
            return  # delivered again while it is in work here: that work ends it
        self._running[message.stream_seq] = message
        self._tasks.create_task(self._handle(message))

    async def _keep_alive(self) -> None:
        """In-progress signs, so that work which takes long is not delivered to another. Of 4,000
        that wait they take 1.5 % of a core, broker and this process together."""
        while True:
            await next_pulse(self._ctx.bus.times.in_progress_s)
            for number, message in enumerate(list(self._running.values())):
                if number % _SIGNS_PER_TURN == 0:
                    await asyncio.sleep(0)  # others have work to do as well
                try:
                    await message.in_progress()
                except BusUnavailable:
                    break  # nothing can be delivered to another either

    async def _handle(self, message: WorkMessage) -> None:
        started_s = time.perf_counter()
        outcome, facts = "cut_off", {"subject": message.subject}
        try:
            outcome = await self._finish(message, facts)
        except asyncio.CancelledError:
            with contextlib.suppress(BusUnavailable):  # then it comes again when its time is over
                await message.nak()
            raise
        except BusUnavailable as error:
            outcome, facts["reason"] = "bus_away", error.message  # un-acked: it comes again
        except Exception:
            outcome = "failed"  # the same; it may be for the broker's sake, not the message's
            self._ctx.log.exception("stage_failed", stage=self.name, **facts)
        finally:
            self._running.pop(message.stream_seq, None)
            seconds = time.perf_counter() - started_s
            self._handled.count(outcome, seconds)
            log = self._ctx.log
            tell = log.debug if outcome in self._told_elsewhere else log.info
            tell(
                "stage_handled",
                stage=self.name,
                outcome=outcome,
                ms=round(seconds * 1000, 2),
                delivery=message.num_delivered,
                **facts,
            )
        self.poke()

    async def _finish(self, message: WorkMessage, facts: dict[str, str]) -> str:
        """Handle one message to its end; the outcome's word."""
        data = message.data
        try:
            data = await load_payload(self._ctx.bus, message)
            work = self._parse(message, data)
        except BusUnavailable:
            raise
        except MeshError as error:
            return await self._endings.undecodable(message, data, error, facts)
        facts |= {"request_id": work.headers.request_id, "epoch": str(work.headers.epoch)}
        reader = self._reader_of(work.message)
        try:
            outcome = await self._run_handler(message, work)
        except _TooLate:
            return await self._endings.expired(message, reader, work.headers)
        except MeshError as error:
            facts["code"] = error.code
            full = self._full_error(work.message, error)
            return await self._endings.refused(message, reader, work.headers, error, full)
        except Exception:
            self._ctx.log.exception("stage_crashed", stage=self.name, **facts)
            return await self._endings.crashed(message, data, reader, work.headers)
        await message.ack()
        return outcome

    def _full_error(self, message: T, error: MeshError) -> QueueFull | None:
        """What the client hears when a queue behind this stage is full."""
        if not isinstance(error, QueueFull) or self._when_full is None:
            return None
        return self._when_full(message) if error.retry_after_s is None else error

    async def _run_handler(self, message: WorkMessage, work: Work[T]) -> str:
        """Handle a message, wait where it has to, and publish what comes next; its outcome."""
        if self._left_s(work.headers) <= 0:
            raise _TooLate
        handled = await self._handler(work)
        await self._publish_all(handled, work.headers)
        while handled.then is not None:
            handled = await self._wait(message, work.headers, handled.then)
            try:
                await self._publish_all(handled, work.headers)
            except QueueFull as error:  # it has been promised to its client: it comes again
                raise NoCapacity(error.message) from error
        if handled.answer is not None and isinstance(message, DirectMessage):
            message.answer(encode(handled.answer))
        return handled.outcome

    async def _wait(
        self, message: WorkMessage, headers: WorkHeaders, then: Callable[[], Awaitable[Handled]]
    ) -> Handled:
        """Let a message wait, at most until its deadline."""
        task = asyncio.current_task()
        assert task is not None, "messages are handled in tasks"
        self._waiting[message.stream_seq] = task
        if self._is_over:
            task.cancel()
        self._pull.poke()
        try:
            async with asyncio.timeout(self._left_s(headers)):
                return await then()
        except TimeoutError:
            raise _TooLate from None
        finally:
            del self._waiting[message.stream_seq]

    def _left_s(self, headers: WorkHeaders) -> float:
        return (headers.deadline_unix_ms - self._ctx.bus.now_unix_ms()) / 1000

    async def _publish_all(self, handled: Handled, headers: WorkHeaders) -> None:
        for outgoing in handled.publish:
            await self._publish(outgoing, headers)

    async def _publish(self, outgoing: Outgoing, headers: WorkHeaders) -> None:
        """Store one message that comes next; returns when the broker has it."""
        bus, message = self._ctx.bus, outgoing.message
        if outgoing.epoch is None:
            await bus.publish_stored(outgoing.subject, encode(message), msg_id=outgoing.msg_id)
            return
        await publish_work(
            bus,
            outgoing.subject,
            encode(message),
            outgoing.headers(headers),
            msg_id=outgoing.msg_id,
        )


async def _to_queue(message: DirectMessage) -> None:
    with contextlib.suppress(BusUnavailable):  # whoever said it queues it, too
        await message.nak()


class _Handled:
    """The metrics of one stage, looked up once."""

    def __init__(self, metrics: Metrics, stage: str) -> None:
        self._stage = stage
        self._metrics = metrics
        self._seconds = metrics.stage_seconds.labels(stage)
        self._by_outcome: dict[str, Counter] = {}

    def count(self, outcome: str, seconds: float) -> None:
        counter = self._by_outcome.get(outcome)
        if counter is None:
            counter = self._metrics.stage_handled.labels(self._stage, outcome)
            self._by_outcome[outcome] = counter
        counter.inc()
        self._seconds.observe(seconds)

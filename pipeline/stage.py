"""A stage: messages of one consumer in, the next messages out.

This file alone pulls, checks deadlines, decodes, calls, publishes, and *then* acks. Every message
ends in exactly one of: what the handler says comes next; a terminal entry on the request's chain;
another delivery; a dead letter. Which one, by what the handler does:

    returns Handled                   its messages are stored, one after the other, then the ack
    raises a retryable MeshError      delivered again after a pause (BusUnavailable, NoCapacity)
    raises another MeshError          StreamError on the chain: the client hears of it
    raises anything else              delivered again a few times; then dead letter, StreamError
    bytes that are no such message    dead letter, and StreamError where the request is known
    past its deadline                 Expired on the chain

Should even that fail, for the broker is away or refuses, the message is left un-acked and comes
again. No message ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nats.js.api import ConsumerConfig

from infra.bus import Bus, WorkMessage, WorkPull, load_payload, publish_work
from infra.log import Logger
from infra.metrics import Metrics
from infra.pulse import next_pulse
from infra.steady import Counter
from infra.task_scope import task_scope
from pipeline.claim_chain import ClaimChain
from pipeline.dead_letters import bury, known_request
from schemas import subjects
from schemas.codec import Message, decode, encode, tag_of
from schemas.decode import DecodeTask
from schemas.errors import BusUnavailable, EngineFailed, MeshError, QueueFull, SchemaError
from schemas.headers import REQUEST, SCHEMA, WorkHeaders
from schemas.kv import KvReady
from schemas.prefill import PrefillTask
from schemas.tokens import Expired, StreamError

CRASH_LIMIT = 3  # deliveries of a message whose handler raises what it should not
_RETRY_S = (0.05, 0.2, 0.5, 1.0)

T = TypeVar("T", bound=Message)
Task = TypeVar("Task", bound=PrefillTask | DecodeTask | KvReady)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message to store before the ack.

    ``msg_id`` makes the broker drop a repeat: <request>.<stage>.<epoch>. Work messages carry
    headers (``epoch`` is set); messages to readers carry none.
    """

    subject: str
    message: Message
    msg_id: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """The regular end of a message. ``outcome`` is a word for log and metrics."""

    outcome: str
    publish: tuple[Outgoing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Generic[T]):
    """A decoded work message with its checked headers."""

    subject: str
    message: T
    headers: WorkHeaders


Handler = Callable[[Work[T]], Awaitable[Handled]]
Parser = Callable[[WorkMessage, bytes], Work[T]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What every stage of a process shares."""

    bus: Bus
    chain: ClaimChain
    metrics: Metrics
    log: Logger
    process: str


class Stage(Generic[T]):
    """One consumer and the function that handles its messages.

    Args:
        name: for log and metrics: "admission", "prefill", ...
        parse: bytes to :class:`Work` whose ids can stand in subjects; raises SchemaError.
        reader_of: the reader of a decoded message, for errors that its client must hear.
        capacity: how many more messages this process would take now, running ones not counted.
        concurrency: the most that are handled at once.
        on_fenced: called when our own consumer was deleted under us: somebody declared us dead.
            None for a consumer that is shared.
        when_full: what the client of a message hears when a queue behind this stage is full.
            None: the message waits for room.
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
        on_fenced: Callable[[], None] | None = None,
        when_full: Callable[[T], QueueFull] | None = None,
    ) -> None:
        self.name = name
        self._ctx = ctx
        self._parse = parse
        self._reader_of = reader_of
        self._handler = handler
        self._capacity = capacity
        self._concurrency = concurrency
        self._when_full = when_full
        self._running: dict[int, WorkMessage] = {}
        self._handled = _Handled(ctx.metrics, name)
        self._tasks: asyncio.TaskGroup | None = None
        self._pull = WorkPull(
            ctx.bus, consumer, on_message=self._take, free=self._free, on_fenced=on_fenced
        )

    @property
    def num_running(self) -> int:
        """Messages taken and not finished."""
        return len(self._running)

    async def run(self) -> None:
        """Pull and handle until stopped or fenced, then finish what was taken.

        When cancelled, messages in work are given back: they come to others at once.
        """
        async with task_scope() as helpers:
            helpers.create_task(self._keep_alive(), name=f"{self.name} keep-alive")
            async with asyncio.TaskGroup() as self._tasks:
                await self._pull.run()

    def stop(self) -> None:
        """Take nothing more; :meth:`run` returns when what was taken is finished."""
        self._pull.stop()

    def poke(self) -> None:
        """Capacity may have grown: ask for more at once."""
        self._pull.poke()

    def _free(self) -> int:
        free = self._concurrency - len(self._running)
        return free if self._capacity is None else min(free, self._capacity())

    def _take(self, message: WorkMessage) -> None:
        assert self._tasks is not None, "a stage is run before it takes"
        if message.stream_seq in self._running:
            return  # delivered again while it is in work here: that work ends it
        self._running[message.stream_seq] = message
        self._tasks.create_task(self._handle(message))

    async def _keep_alive(self) -> None:
        """In-progress signs, so that work which takes long is not delivered to another."""
        while True:
            await next_pulse(self._ctx.bus.times.in_progress_s)
            for message in list(self._running.values()):
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
            self._ctx.log.info(
                "stage_handled",
                stage=self.name,
                outcome=outcome,
                ms=round(seconds * 1000, 2),
                delivery=message.num_delivered,
                **facts,
            )
        self._pull.poke()

    async def _finish(self, message: WorkMessage, facts: dict[str, str]) -> str:
        """Handle one message to its end; the outcome's word."""
        data = message.data
        try:
            data = await load_payload(self._ctx.bus, message)
            work = self._parse(message, data)
        except BusUnavailable:
            raise
        except MeshError as error:
            return await self._undecodable(message, data, error, facts)
        facts |= {"request_id": work.headers.request_id, "epoch": str(work.headers.epoch)}
        reader = self._reader_of(work.message)
        if work.headers.deadline_unix_ms <= self._ctx.bus.now_unix_ms():
            await self._ctx.chain.end(reader, Expired(request_id=work.headers.request_id))
            await message.ack()
            return "expired"
        try:
            handled = await self._handler(work)
            for outgoing in handled.publish:
                await self._publish(outgoing, work.headers)
        except MeshError as error:
            return await self._refused(message, work, reader, error, facts)
        except Exception:
            self._ctx.log.exception("stage_crashed", stage=self.name, **facts)
            return await self._crashed(message, data, work, reader)
        await message.ack()
        return handled.outcome

    async def _publish(self, outgoing: Outgoing, headers: WorkHeaders) -> None:
        """Store one message that comes next; returns when the broker has it."""
        bus, message = self._ctx.bus, outgoing.message
        if outgoing.epoch is None:
            await bus.publish_stored(outgoing.subject, encode(message), msg_id=outgoing.msg_id)
            return
        next_headers = WorkHeaders(
            schema=tag_of(type(message)),
            request_id=headers.request_id,
            epoch=outgoing.epoch,
            deadline_unix_ms=headers.deadline_unix_ms,
            traceparent=headers.traceparent,
        )
        await publish_work(
            bus, outgoing.subject, encode(message), next_headers, msg_id=outgoing.msg_id
        )

    async def _refused(
        self,
        message: WorkMessage,
        work: Work[T],
        reader: str,
        error: MeshError,
        facts: dict[str, str],
    ) -> str:
        facts["code"] = error.code
        is_full = isinstance(error, QueueFull) and self._when_full is not None
        if error.retryable and not is_full:
            pause = _RETRY_S[min(message.num_delivered, len(_RETRY_S)) - 1]
            await message.nak(pause)
            return "later"
        if is_full and error.retry_after_s is None and self._when_full is not None:
            error = self._when_full(work.message)
        await self._end(reader, work.headers, error)
        await message.ack()
        return "refused"

    async def _crashed(self, message: WorkMessage, data: bytes, work: Work[T], reader: str) -> str:
        """The handler raised what it should not: a bug, or something only this message does."""
        if message.num_delivered < CRASH_LIMIT:
            await message.nak(_RETRY_S[-1])
            return "crashed"
        error = EngineFailed(f"the {self.name} stage failed on this request")
        await bury(self._ctx.bus, message, data, error, self.name, self._ctx.process)
        await self._end(reader, work.headers, error)
        self._ctx.metrics.dead_letters.labels(self.name).inc()
        await message.term("handler failed")
        return "dead"

    async def _undecodable(
        self, message: WorkMessage, data: bytes, error: MeshError, facts: dict[str, str]
    ) -> str:
        facts |= {"code": error.code, "param": error.param or "", "reason": error.message}
        known = await known_request(self._ctx.chain, message.headers, data)
        if known is not None:
            facts["request_id"] = known.request_id
            failed = StreamError(request_id=known.request_id, epoch=0, error=error.info)
            await self._ctx.chain.end(known.reader, failed)
        await bury(self._ctx.bus, message, data, error, self.name, self._ctx.process)
        self._ctx.metrics.dead_letters.labels(self.name).inc()
        await message.term(error.code)
        return "dead"

    async def _end(self, reader: str, headers: WorkHeaders, error: MeshError) -> None:
        self._ctx.metrics.requests_refused.labels(error.code).inc()
        failed = StreamError(request_id=headers.request_id, epoch=headers.epoch, error=error.info)
        await self._ctx.chain.end(reader, failed)


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


def parse_as(kind: type[Task]) -> Parser[Task]:
    """The parser of a work message that carries our headers and one message class."""
    tag = tag_of(kind)

    def parse(message: WorkMessage, data: bytes) -> Work[Task]:
        headers = WorkHeaders.from_dict(message.headers)
        if headers.schema != tag:
            raise SchemaError(f"header says {headers.schema!r}, not {tag!r}", param=SCHEMA)
        task = decode(data, kind)
        if subjects.check_request_id(task.request_id) != headers.request_id:
            raise SchemaError("header and body name two requests", param=REQUEST)
        subjects.check_reader(task.reader)
        return Work(subject=message.subject, message=task, headers=headers)

    return parse

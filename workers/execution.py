"""From claimed requests to tokens on the stream.

    start(claimed)  ->  engine  ->  reports  ->  one TokenBatch per reader and step
    plan .. adopt   ->     "           "         the same; begun while the claim was being stored
                                    held      ->  lease, KvReady
                                    finished  ->  every token confirmed, then StreamEnd
                                    failed    ->  StreamError

Reports are handled in order by one task; those that wait already go out together. What happens once
per request waits for the broker in a task of its own, so that no request delays the tokens of
another.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TypeVar

from infra.bus import Bus, TokenWriter
from infra.log import Logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from pipeline.prefix_hash import request_salt
from schemas import subjects
from schemas.codec import encode
from schemas.errors import (
    ContextTooLong,
    EngineFailed,
    MeshError,
    NoCapacity,
    PayloadTooLarge,
    QueueFull,
)
from schemas.tokens import TokenBatch, TokenDelta
from workers.ahead import Ahead, Begun
from workers.claims import Claimed, Claims
from workers.ending import Endings
from workers.engine.api import (
    EngineRequest,
    FinishedRequest,
    HeldRequest,
    StepReport,
    TokenOutput,
)
from workers.engine.thread import EngineThread
from workers.hops import HopTrace, Point
from workers.kv.prefetch import Brought
from workers.running import Running

_ADD_S = 30.0  # a step may take seconds; after so long another worker may be better
_REST_S = 0.002  # between two messages of tokens
_MAX_TOGETHER = 1024  # tokens that go out together before the loop turns

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Blocks that were filled from outside for a request."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0


NOTHING_IMPORTED = Import()


class Execution:
    """Runs claimed requests of one worker id.

    Args:
        writer: of this process; tokens of all requests pass it.
        hand_over: what to do with a request that is held after its first token: prefill workers
            give a lease and publish KvReady. None: requests are not held.
        on_room: called when a request has its first token, or computes no more: there may be room
            for another.
    """

    def __init__(
        self,
        bus: Bus,
        claims: Claims,
        engine: EngineThread,
        writer: TokenWriter,
        metrics: Metrics,
        log: Logger,
        *,
        fingerprint: str,
        hand_over: Callable[[Running, HeldRequest], None] | None = None,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.trace = HopTrace(bus, claims.worker)
        self._bus = bus
        self._claims = claims
        self._engine = engine
        self._writer = writer
        self._metrics = metrics
        self._log = log
        self._endings = Endings(claims, writer, metrics, log)
        self._fingerprint = fingerprint
        self._hand_over = hand_over
        self._on_room = on_room
        self._running: dict[str, Running] = {}
        self._ahead = Ahead(engine)
        self._num_decoding = 0
        # Bounded by what the running requests may still generate. It grows only while the writer's
        # ring is full, that is when the broker has been away for minutes.
        self._reports: deque[StepReport] = deque()
        self._until_report: asyncio.Future[None] | None = None  # while there is none, or rest
        self._rests_until_s = -math.inf  # on the loop's clock
        self._is_resting = False
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def num_running(self) -> int:
        """Requests in the engine, and those whose end is not stored yet; held ones don't count."""
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        """Sequences of those requests that have brought a token."""
        return self._num_decoding

    def runs(self, claimed: Claimed) -> bool:
        """Whether this request is among them."""
        return claimed.key in self._running

    def on_report(self, report: StepReport) -> None:
        """From the engine's thread, on the loop."""
        self._ahead.keep(report)
        self._reports.append(report)
        if not self._is_resting or report.is_urgent:
            _settle(self._until_report)

    async def run(self) -> None:
        """Publish what the engine reports, until cancelled. What it has reported meanwhile goes
        out together: one message for several steps that are over costs what one step's does."""
        loop, reports = asyncio.get_running_loop(), self._reports
        async with task_scope() as self._tasks:
            while True:
                if not reports:
                    self._until_report = loop.create_future()
                    await self._until_report
                await self._rest(loop)
                report = reports.popleft()
                while reports and len(report.outputs) < _MAX_TOGETHER:
                    report.join(reports.popleft())
                await self._publish(report)
                self._rests_until_s = loop.time() + _REST_S

    async def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        """So that an engine whose steps take microseconds does not make a message of each: its next
        ones come along. Others' steps take longer than the rest, and what is urgent ends it."""
        left_s = self._rests_until_s - loop.time()
        if left_s <= 0 or any(report.is_urgent for report in self._reports):
            return
        self._until_report = loop.create_future()
        self._is_resting = True
        timer = loop.call_later(left_s, _settle, self._until_report)
        try:
            await self._until_report
        finally:
            self._is_resting = False
            timer.cancel()

    def spawn(self, work: Coroutine[None, None, T], name: str) -> asyncio.Task[T]:
        """Let ``work`` run beside, as long as this execution does."""
        assert self._tasks is not None, "run comes first"
        return self._tasks.create_task(work, name=name)

    def plan(self, wished: Claimed) -> None:
        """A request that is about to be claimed, as it will be if the claim is stored: then
        :meth:`adopt` or :meth:`start` follows, else :meth:`give_up`; maybe :meth:`begin` before."""
        if wished.record.sampling.response_format is None:  # that one is to be prepared
            self._ahead.plan(self._request(wished, NOTHING_IMPORTED))

    def begin(self, key: str) -> None:
        """The claim of what was planned is on its way, whatever the engine does with it: the engine
        has it from here on."""
        self._ahead.begin(key)

    def adopt(self, claimed: Claimed) -> bool:
        """Go on with what was begun, which is claimed now.

        Returns:
            False when the engine has not taken it by now: it is to be started.
        """
        begun = self._ahead.find(claimed.key)
        if begun is None or not begun.is_taken:
            return False
        self._enter(Running(claimed))
        self._mark_started(claimed)
        return True

    def give_up(self, key: str) -> None:
        """Compute no more of what was begun, and of which nothing was told."""
        self._ahead.give_up(key)

    async def start(
        self,
        claimed: Claimed,
        imported: Import = NOTHING_IMPORTED,
        num_cached_tokens: int = 0,
        brought: Brought | None = None,
    ) -> None:
        """Give a claimed request to the engine. Whatever fails here ends or gives back the
        request: the caller owes nothing any more, and holds nothing of what was ``brought``.

        Raises:
            EngineFailed: the engine has stopped, and with it this process; the router places the
                request again.
        """
        if not self._claims.owes(claimed):
            self.give_up(claimed.key)
            self.release(claimed.key)  # cancelled before it began
            if brought is not None:
                brought.let_go()
            return
        running = Running(claimed, num_cached_tokens, imported.num_tokens, brought)
        try:
            begun = self._enter(running)
            if begun is None:
                await self._add(self._request(claimed, imported))
            else:
                async with asyncio.timeout(_ADD_S):
                    await begun.adding
        except (EngineFailed, asyncio.CancelledError):
            running.brought.let_go()
            raise
        except TimeoutError:
            busy = QueueFull(f"the engine did not answer in {_ADD_S:.0f} s")
            await self._abandon(claimed, busy)
        except NoCapacity as error:  # admitted when there was no worker to ask, or a larger one
            small = f"too long for this worker's memory: {error.message}"
            await self._abandon(claimed, ContextTooLong(small, param="max_tokens"))
        except MeshError as error:
            await self._abandon(claimed, error)
        except Exception as error:  # a request that contradicts itself, or a bug: of this one only
            self._log.exception("request_not_taken", key=claimed.key)
            await self._abandon(claimed, EngineFailed(f"the engine did not take it: {error}"))
        else:
            self._mark_started(claimed)

    def _enter(self, running: Running) -> Begun | None:
        """What the engine reports of it is told from here on, and what it has reported, if it was
        begun."""
        key = running.claimed.key
        begun = self._ahead.take(key)
        self._running[key] = running
        if begun is not None:
            running.started_s = begun.since_s
            if not begun.report.is_silent:
                self.on_report(begun.report)
        return begun

    def _mark_started(self, claimed: Claimed) -> None:
        point: Point = "prefill_started" if claimed.role == "prefill" else "decode_started"
        self.trace.mark(claimed.record.request_id, point)

    async def _add(self, request: EngineRequest) -> None:
        if request.sampling.response_format is not None:
            async with asyncio.timeout(_ADD_S):
                await self._engine.prepare(request)
        await self._engine.call(lambda engine: engine.add(request), _ADD_S)

    def _request(self, claimed: Claimed, imported: Import) -> EngineRequest:
        record = claimed.record
        return EngineRequest(
            key=claimed.key,
            prompt_ids=claimed.prompt_ids,
            sampling=record.sampling,
            salt=request_salt(record, self._fingerprint),
            tokens=claimed.tokens,
            finished=claimed.finished,
            hold_after_first=self._hand_over is not None and claimed.role == "prefill",
            imported_blocks=imported.blocks,
            num_imported_tokens=imported.num_tokens,
            overtakes=claimed.overtakes,
        )

    def drop(self, claimed: Claimed) -> None:
        """Compute no more of a request that is not ours any more."""
        if self._forget(claimed.key) is not None:
            self.release(claimed.key)

    def drop_all(self) -> None:
        """Compute nothing more."""
        self._ahead.give_up_all()
        for running in list(self._running.values()):
            self.drop(running.claimed)

    def release(self, key: str) -> None:
        """Give back what ``key`` holds in the engine."""
        self._engine.release(key)

    def _forget(self, key: str) -> Running | None:
        running = self._running.pop(key, None)
        if running is not None:
            running.brought.let_go()
            if running.first_token_s:
                self._num_decoding -= running.claimed.num_choices
        return running

    async def _abandon(self, claimed: Claimed, error: MeshError) -> None:
        self._forget(claimed.key)
        self.release(claimed.key)
        if error.retryable:
            await self._claims.give_back(claimed, error.message)
        else:
            await self._claims.fail(claimed, error)

    # Reports ---------------------------------------------------------------------------------

    async def _publish(self, report: StepReport) -> None:
        await self._publish_tokens(report)
        self._metrics.tokens_generated.inc(len(report.outputs))
        self._metrics.tokens_computed.inc(report.num_computed_tokens)
        for step_s in report.steps_s:
            self._metrics.step_seconds.observe(step_s)
        for finished in report.finished:
            if (running := self._running.get(finished.key)) is not None:
                self.spawn(self._end(running, finished), f"end {finished.key}")
        for held in report.held:
            if (running := self._forget(held.key)) is not None:
                assert self._hand_over is not None, "nothing is held without a hand-over"
                self._hand_over(running, held)
                self._on_room()
                self._endings.tell(running, "held", held)
        for failed in report.failed:
            if (running := self._running.get(failed.key)) is not None:
                error = EngineFailed(f"the engine failed on this request: {failed.message}")
                self._log.error("request_failed", key=failed.key, reason=failed.message)
                self.spawn(self._abandon(running.claimed, error), f"fail {failed.key}")

    async def _publish_tokens(self, report: StepReport) -> None:
        by_reader: defaultdict[str, list[TokenDelta]] = defaultdict(list)
        scored: list[tuple[Running, TokenDelta]] = []
        for running, delta in self._take_tokens(report):
            if delta.prompt_logprobs is None:
                by_reader[running.reader].append(delta)
            else:
                scored.append((running, delta))
        is_last = bool(report.finished or report.held)
        for running, delta in scored:
            await self._write_scored(running, delta, ask=is_last)
        for reader, deltas in by_reader.items():
            await self._write(reader, deltas, ask=is_last)

    def _take_tokens(self, report: StepReport) -> Iterator[tuple[Running, TokenDelta]]:
        """The deltas of its tokens, and the requests that they are of: those of one step each by
        itself, those of several steps together. Tokens of what was cancelled or given up while its
        step ran are nobody's."""
        num_decoding, is_one_step = self._num_decoding, len(report.steps_s) <= 1
        together: defaultdict[Running, list[TokenOutput]] = defaultdict(list)
        for output in report.outputs:
            running = self._running.get(output.key)
            if running is None:
                continue
            if not running.first_token_s:
                self._begin(running)
            if is_one_step:
                yield running, running.take(output)
            else:
                together[running].append(output)
        for running, outputs in together.items():
            for delta in running.take_all(outputs):
                yield running, delta
        if self._num_decoding > num_decoding:
            self._on_room()

    def _begin(self, running: Running) -> None:
        """It has its first token."""
        running.first_token_s = time.perf_counter()
        running.brought.let_go()
        self._num_decoding += running.claimed.num_choices

    async def _write_scored(self, running: Running, delta: TokenDelta, *, ask: bool) -> None:
        """In a message of its own: a long prompt's logprobs nearly fill one. Admission bounds their
        number; where the vocabulary has long tokens, they may be too much all the same."""
        try:
            await self._write(running.reader, [delta], ask=ask)
        except PayloadTooLarge as error:
            self._forget(running.claimed.key)
            refused = PayloadTooLarge(f"the prompt's logprobs: {error.message}", param="logprobs")
            self.spawn(self._abandon(running.claimed, refused), f"refuse {running.claimed.key}")

    async def _write(self, reader: str, deltas: list[TokenDelta], *, ask: bool) -> None:
        data = encode(TokenBatch(worker=self._claims.worker, deltas=tuple(deltas)))
        if not self._bus.fits(data):
            parts = deltas if len(deltas) > 1 else deltas[0].split()
            half = len(parts) // 2
            if half:
                await self._write(reader, parts[:half], ask=False)
                await self._write(reader, parts[half:], ask=ask)
                return
        await self._writer.until_room()
        await self._writer.put(subjects.token_stream(reader), data, ask=ask)
        if self.trace.is_on:
            for delta in deltas:
                self.trace.mark(delta.request_id, "token_written", delta.number)

    async def _end(self, running: Running, finished: FinishedRequest) -> None:
        outcome = await self._endings.store(running, finished)
        self._forget(running.claimed.key)
        self._claims.settle(running.claimed)
        self._endings.tell(running, outcome, finished)


def _settle(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)

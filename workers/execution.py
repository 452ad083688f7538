"""From claimed requests to tokens on the stream.

    start(claimed)  ->  engine  ->  reports  ->  one TokenBatch per reader and step
                                    held      ->  lease, KvReady
                                    finished  ->  every token confirmed, then StreamEnd
                                    failed    ->  StreamError

Reports are handled in order by one task; those that wait already go out together. What happens once
per request waits for the broker in a task of its own, so that no request delays the tokens of
another.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
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
    DeadlineExceeded,
    EngineFailed,
    MeshError,
    NoCapacity,
    PayloadTooLarge,
    QueueFull,
)
from schemas.tokens import StreamEnd, TokenBatch, TokenDelta, Usage
from workers.claims import Claimed, Claims
from workers.engine.api import (
    EngineRequest,
    FinishedRequest,
    HeldRequest,
    StepReport,
    TokenOutput,
)
from workers.engine.thread import EngineThread
from workers.hops import HopTrace, Point
from workers.kv.origins import Origins, origins_of
from workers.kv.prefetch import Brought

_ADD_S = 30.0  # a step may take seconds; after so long another worker may be better
_FLUSH_S = 2.0
_MAX_TOGETHER = 1024  # tokens that go out together before the loop turns

T = TypeVar("T")


class Running:
    """A claimed request in the engine, and the tokens it has by now."""

    __slots__ = (
        "_is_scored",
        "brought",
        "claimed",
        "epoch",
        "finished",
        "first_token_s",
        "num_cached_tokens",
        "num_imported_tokens",
        "num_new_tokens",
        "reader",
        "request_id",
        "started_s",
        "tokens",
    )

    def __init__(
        self,
        claimed: Claimed,
        num_cached_tokens: int = 0,
        num_imported_tokens: int = 0,
        brought: Brought | None = None,
    ) -> None:
        sampling = claimed.record.sampling
        num_choices = sampling.n
        self.claimed = claimed
        self.reader = claimed.reader
        self.request_id = claimed.record.request_id
        self.epoch = claimed.epoch
        self.num_cached_tokens = num_cached_tokens  # as the prefill worker found them
        self.num_imported_tokens = num_imported_tokens
        self.brought = brought or Brought()
        self.tokens = [list(run) for run in claimed.tokens or ((),) * num_choices]
        self.finished = list(claimed.finished or ("",) * num_choices)
        self.num_new_tokens = 0
        self._is_scored = not (sampling.logprobs is None and sampling.prompt_logprobs is None)
        self.started_s = time.perf_counter()
        self.first_token_s = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Of the request."""
        return len(self.claimed.record.prompt_ids) // 4

    def origins(self, num_cached: int, num_host: int) -> Origins:
        """Where its prompt's KV came from, by what the engine found: in all, and of that in the
        host tier."""
        return origins_of(
            self.num_prompt_tokens,
            num_cached=num_cached,
            num_promoted=num_host,
            num_disk=self.brought.num_disk_tokens,
            num_remote=self.brought.num_remote_tokens,
            num_imported=self.num_imported_tokens,
        )

    def take(self, outputs: Sequence[TokenOutput]) -> list[TokenDelta]:
        """Note new tokens, in order; the deltas that tell of them: one per choice, or one per token
        where logprobs are asked for."""
        self.num_new_tokens += len(outputs)
        for output in outputs:
            self.tokens[output.index].append(output.token_id)
            if output.finish_reason is not None:
                self.finished[output.index] = output.finish_reason
        if self._is_scored:
            return [self._delta([output]) for output in outputs]
        if len(self.tokens) == 1:
            return [self._delta(outputs)]
        runs = [[one for one in outputs if one.index == i] for i in range(len(self.tokens))]
        return [self._delta(run) for run in runs if run]

    def _delta(self, run: Sequence[TokenOutput]) -> TokenDelta:
        first, last = run[0], run[-1]
        return TokenDelta(
            request_id=self.request_id,
            epoch=self.epoch,
            number=first.number,
            ids=tuple([output.token_id for output in run]),
            text="".join([output.text for output in run]),
            index=first.index,
            finish_reason=last.finish_reason,
            logprobs=None if first.logprob is None else (first.logprob,),
            prompt_logprobs=first.prompt_logprobs,
            sizes=tuple([len(output.text) for output in run[:-1]]),
        )


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
        self._fingerprint = fingerprint
        self._hand_over = hand_over
        self._on_room = on_room
        self._running: dict[str, Running] = {}
        self._num_decoding = 0
        # Bounded by what the running requests may still generate. It grows only while the writer's
        # ring is full, that is when the broker has been away for minutes.
        self._reports: deque[StepReport] = deque()
        self._until_report: asyncio.Future[None] | None = None  # while there is none
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
        self._reports.append(report)
        if self._until_report is not None and not self._until_report.done():
            self._until_report.set_result(None)

    async def run(self) -> None:
        """Publish what the engine reports, until cancelled. What it has reported meanwhile goes
        out together: one message for several steps that are over costs what one step's does."""
        loop, reports = asyncio.get_running_loop(), self._reports
        async with task_scope() as self._tasks:
            while True:
                if not reports:
                    self._until_report = loop.create_future()
                    await self._until_report
                report = reports.popleft()
                while reports and len(report.outputs) < _MAX_TOGETHER:
                    report.join(reports.popleft())
                await self._publish(report)

    def spawn(self, work: Coroutine[None, None, T], name: str) -> asyncio.Task[T]:
        """Let ``work`` run beside, as long as this execution does."""
        assert self._tasks is not None, "run comes first"
        return self._tasks.create_task(work, name=name)

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
            self.release(claimed.key)  # cancelled before it began
            if brought is not None:
                brought.let_go()
            return
        running = Running(claimed, num_cached_tokens, imported.num_tokens, brought)
        self._running[claimed.key] = running
        try:
            request = self._request(claimed, imported)
            await self._add(request)
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
            point: Point = "prefill_started" if claimed.role == "prefill" else "decode_started"
            await self.trace.mark(claimed.record.request_id, point)

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
                self._log_stage(running, "held", held)
        for failed in report.failed:
            if (running := self._running.get(failed.key)) is not None:
                error = EngineFailed(f"the engine failed on this request: {failed.message}")
                self._log.error("request_failed", key=failed.key, reason=failed.message)
                self.spawn(self._abandon(running.claimed, error), f"fail {failed.key}")

    async def _publish_tokens(self, report: StepReport) -> None:
        by_reader: dict[str, list[TokenDelta]] = {}
        is_last = bool(report.finished or report.held)
        has_begun = False  # some request has its first token
        by_key: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for output in report.outputs:
            by_key[output.key].append(output)
        for key, outputs in by_key.items():
            running = self._running.get(key)
            if running is None:
                continue  # cancelled or given up while this step ran
            if not running.first_token_s:
                running.first_token_s = time.perf_counter()
                running.brought.let_go()
                self._num_decoding += running.claimed.num_choices
                has_begun = True
            for delta in running.take(outputs):
                if delta.prompt_logprobs is None:
                    by_reader.setdefault(running.reader, []).append(delta)
                else:
                    await self._write_scored(running, delta, ask=is_last)
        for reader, deltas in by_reader.items():
            await self._write(reader, deltas, ask=is_last)
        if has_begun:
            self._on_room()

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
                await self.trace.mark(delta.request_id, "token_written", delta.number)

    async def _end(self, running: Running, finished: FinishedRequest) -> None:
        """Every token confirmed, then the end; through outages, until the deadline."""
        claimed = running.claimed
        num_prompt = running.num_prompt_tokens
        num_cached = min(running.num_cached_tokens + finished.num_cached_tokens, num_prompt)
        is_answered = claimed.record.sampling.max_tokens != 0  # else the one token is hidden
        entry = StreamEnd(
            request_id=claimed.record.request_id,
            epoch=claimed.epoch,
            num_tokens=finished.num_tokens,
            finish_reasons=finished.finish_reasons,
            usage=Usage(
                prompt_tokens=num_prompt,
                completion_tokens=sum(finished.num_tokens) if is_answered else 0,
                cached_tokens=num_cached,
            ),
        )

        async def end() -> int | None:
            await self._writer.flush(_FLUSH_S)
            return await self._claims.chain.append(claimed.reader, entry, claimed.seq)

        try:
            seq = await self._claims.through_outages(claimed.record, end)
            outcome = "superseded" if seq is None else "ended"
        except DeadlineExceeded:
            outcome = "expired"
        self._forget(claimed.key)
        self._claims.settle(claimed)
        self._log_stage(running, outcome, finished)

    def _log_stage(
        self, running: Running, outcome: str, ended: HeldRequest | FinishedRequest
    ) -> None:
        """The canonical line of this stage, and where its prompt's KV came from."""
        claimed, now_s = running.claimed, time.perf_counter()
        origins = running.origins(ended.num_cached_tokens, ended.num_host_tokens)
        origins.count(self._metrics)
        first_s = running.first_token_s or now_s
        self._log.info(
            "request_executed",
            stage=claimed.role,
            outcome=outcome,
            request_id=claimed.record.request_id,
            epoch=claimed.epoch,
            prompt_tokens=running.num_prompt_tokens,
            **origins.facts(),
            new_tokens=running.num_new_tokens,
            first_token_ms=round((first_s - running.started_s) * 1000, 2),
            total_ms=round((now_s - running.started_s) * 1000, 2),
        )

"""Prefill and decode workers on a real broker, in one process, with simulated engines.

Nothing between the queues is replaced: consumers, claims, token writers, leases and the hand-over
through shared memory are those of production. Requests are placed as admission does it, so a test
can place the same task twice, or one that is out of date.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from infra.bus import TOKENS, WORK, Bus, EmbeddedBroker, kv_ready_consumer, publish_work, replay
from infra.bus.calls import has_no_responders
from infra.config import BusConfig, WorkerConfig
from infra.health import Health
from infra.metrics import Metrics
from infra.process import RoleContext
from infra.transport.plan import SHM_ONLY, TransportPlan
from pipeline.claim_chain import ClaimChain
from pipeline.ownership import RequestView
from pipeline.placement import PrefillPlace
from pipeline.prefix_walk import Found
from pipeline.router import Router
from pipeline.stage import Stage, StageContext, parse_as
from schemas import subjects
from schemas.codec import encode, pack_ids, tag_of
from schemas.control import CancelWord
from schemas.errors import SchemaError
from schemas.headers import WorkHeaders
from schemas.kv import KvReady, KvSource
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord, SamplingParams
from schemas.tokens import (
    Cancelled,
    ChainEntry,
    Claim,
    StreamEnd,
    TokenBatch,
    TokenDelta,
    decode_chain_entry,
    decode_stream_message,
)
from tests.workers.engine.simulated_engines import StrictRunner, expected_answer, make_engine
from workers.engine.api import Sampled, ScheduledSequence
from workers.engine.engine import Engine
from workers.host import Host, running_host
from workers.incarnation import Incarnation

SERVED = "tiny@1"
READER = "client.tests"
PROMPT = tuple(range(10, 31))  # five blocks and a token of the sixth
PATIENCE_S = 60.0
log = structlog.get_logger("test")


class GatedRunner(StrictRunner):
    """Computes only while its gate is open, and fails on prompts that hold a certain token."""

    POISON = 299

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = False
        self.num_left: int | None = None  # steps until the gate closes by itself
        self.num_steps = 0  # that were computed

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[Sampled]:
        if self.num_left is not None:
            if self.num_left == 0:
                self.gate.clear()
                self.num_left = None
            else:
                self.num_left -= 1
        self.is_waiting = True
        assert self.gate.wait(PATIENCE_S), "a test left the gate shut"
        self.is_waiting = False
        if any(self.POISON in s.token_ids[: s.num_prompt_tokens] for s in batch):
            raise ArithmeticError("a poisonous token")
        self.num_steps += 1
        return super().execute(batch)

    def close_after(self, num_steps: int) -> None:
        """Let so many more steps through; the one after them waits until ``open``."""
        self.num_left = num_steps

    def open(self) -> None:
        self.num_left = None
        self.gate.set()


class Decider:
    """The router's placement: ``any``, unless a test says who."""

    def __init__(self) -> None:
        self.decode = subjects.ANY

    knows_prefixes = False

    def place_prefill(
        self, record: RequestRecord, *, hurries: bool = False, found: Found | None = None
    ) -> PrefillPlace:
        return PrefillPlace(worker=subjects.ANY)

    def decode_worker(self, served: str, ready: KvReady) -> str:
        return self.decode

    def max_sequence_tokens(self, served: str) -> int | None:
        return None


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker: its host lives as long as this, its incarnations follow one another."""

    ctx: RoleContext
    host: Host
    config: WorkerConfig
    runner: GatedRunner
    incarnations: list[Incarnation] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        return self.host.engine

    @property
    def now(self) -> Incarnation:
        """The incarnation at work."""
        return self.incarnations[-1]

    @property
    def owed(self) -> int:
        return self.now._claims.num_owed

    async def serve(self) -> None:
        """What ``workers.service.serve`` does, with a list of who it was."""
        while not self.ctx.draining.is_set():
            self.incarnations.append(Incarnation(self.ctx, self.config, self.host))
            self.ctx.describe = self.now.describe
            await self.now.run()

    async def num_used_blocks(self) -> int:
        return await self.host.thread.call(lambda _: self.engine.blocks.counts().active)

    async def is_idle(self) -> bool:
        """Whether nothing is held: owed, leased, or in the engine."""
        return not (self.owed or len(self.host.leases) or await self.num_used_blocks())


@dataclass(frozen=True, slots=True)
class Answer:
    """What the stream holds of a request that ended, by the rules for readers."""

    view: RequestView
    chain: tuple[ChainEntry, ...]
    deltas: tuple[TokenDelta, ...]

    def tokens(self, index: int = 0) -> list[int]:
        return self.view.choice(index).token_ids

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def reason(self, index: int = 0) -> str | None:
        return self.view.choice(index).finish_reason

    @property
    def end(self) -> StreamEnd:
        assert isinstance(self.view.terminal, StreamEnd), self.view.terminal
        return self.view.terminal

    @property
    def claims(self) -> list[tuple[int, str]]:
        """Epoch and role of each claim."""
        return [(entry.epoch, entry.role) for entry in self.chain if isinstance(entry, Claim)]


class Workplace:
    """A broker's users in one process: workers, a router, and whoever asks."""

    def __init__(
        self,
        broker: EmbeddedBroker,
        bus: Bus,
        connect: Callable[[str], Any],
        tasks: asyncio.TaskGroup,
        hosts: contextlib.AsyncExitStack,
        folder: Path,
    ) -> None:
        self.broker = broker
        self.bus = bus
        self.chain = ClaimChain(bus)
        self.decider = Decider()
        self.workers: dict[str, Worker] = {}
        self.connect = connect
        self._tasks = tasks
        self._hosts = hosts
        self.folder = folder
        self._router: Stage[KvReady] | None = None

    # Who is there ----------------------------------------------------------------------------

    async def worker(
        self,
        name: str,
        role: str,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        max_num_sequences: int = 8,
        grace_s: float = 5.0,
        starts: bool = True,
        transports: TransportPlan = SHM_ONLY,
    ) -> Worker:
        """A worker, serving unless ``starts`` says otherwise."""
        engine = make_engine(
            num_blocks,
            num_host_blocks=num_host_blocks,
            max_num_sequences=max_num_sequences,
            runner_class=GatedRunner,
        )
        runner = engine.runner
        assert isinstance(runner, GatedRunner)
        bus = await self.connect("worker")
        process = f"worker-{name}-{secrets.token_hex(4)}"
        ctx = RoleContext(
            process=process,
            kind="worker",
            bus=bus,
            times=bus.times,
            health=Health(),
            metrics=Metrics(),
            log=log,
        )
        config = WorkerConfig(
            bus=BusConfig(data=self.folder),
            name=name,
            role=role,
            max_num_sequences=max_num_sequences,
            max_batch_tokens=16,
            grace_s=grace_s,
        )
        host = await self._hosts.enter_async_context(
            running_host(engine, SERVED, process, ctx.metrics, log, transports=transports)
        )
        self.workers[name] = Worker(ctx=ctx, host=host, config=config, runner=runner)
        if starts:
            self.start(name)
        return self.workers[name]

    def start(self, name: str) -> None:
        worker = self.workers[name]
        worker.task = self._tasks.create_task(worker.serve(), name=f"serve {name}")

    def start_router(self) -> None:
        """Whoever is to decode is asked to."""
        context = StageContext(
            bus=self.bus, chain=self.chain, metrics=Metrics(), log=log, process="control-test"
        )
        self._router = Stage(
            context,
            "kv-ready",
            kv_ready_consumer(self.bus.times),
            parse_as(KvReady),
            lambda ready: ready.reader,
            Router(context, self.decider).handle,
        )
        self._tasks.create_task(self._router.run(), name="router")

    async def leave(self) -> None:
        """Drain everybody; whatever is held then is a leak."""
        for worker in self.workers.values():
            worker.runner.open()
        await self.until_idle()
        for worker in self.workers.values():
            await worker.host.thread.call(lambda engine: engine.check_invariants())
            worker.host.leases.check_invariants()
            worker.ctx.drain()
        if self._router is not None:
            self._router.stop()
        for worker in self.workers.values():
            if worker.task is not None:
                async with asyncio.timeout(PATIENCE_S):
                    await worker.task

    async def until_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no worker holds anything."""
        async with asyncio.timeout(timeout_s):
            for worker in self.workers.values():
                while worker.task is not None and not await worker.is_idle():
                    await asyncio.sleep(0.01)

    async def restart_broker(self) -> None:
        """Kill it, if that is not done yet, and start it again; everybody has noticed both."""
        await self.broker.kill()
        buses = [self.bus, *(worker.ctx.bus for worker in self.workers.values())]
        await until(lambda: not any(bus.is_connected for bus in buses))
        await self.broker.restart()
        for bus in buses:
            assert await bus.until_connected(PATIENCE_S)

    async def until_queues_empty(self) -> None:
        """Wait until every work message is acked."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.num_queued():
                await asyncio.sleep(0.01)

    async def num_queued(self) -> int:
        """Work messages that are not acked."""
        info = await self.bus.api(f"STREAM.INFO.{WORK}")
        return int(info["state"]["messages"])

    # Requests --------------------------------------------------------------------------------

    async def record(
        self,
        prompt_ids: Sequence[int] = PROMPT,
        *,
        deadline_s: float = 60.0,
        reader: str = READER,
        is_stored: bool = True,
        **sampling: object,
    ) -> RequestRecord:
        """An admitted request that nobody was told of yet."""
        params = {"max_tokens": 12, "temperature": 0.0, "seed": 7, "ignore_eos": True, **sampling}
        now_ms = self.bus.now_unix_ms()
        record = RequestRecord(
            request_id=secrets.token_hex(16),
            model="tiny",
            revision="1",
            served=SERVED,
            prompt_ids=pack_ids(list(prompt_ids)),
            sampling=SamplingParams(**params),  # type: ignore[arg-type]
            reader=reader,
            admitted_unix_ms=now_ms,
            deadline_unix_ms=now_ms + int(deadline_s * 1000),
        )
        if is_stored:
            assert await self.chain.write_record(record) is record
        return record

    async def place(
        self,
        record: RequestRecord,
        *,
        epoch: int = 1,
        after_seq: int = 0,
        worker: str = subjects.ANY,
        is_inline: bool = True,
        kv_sources: Sequence[KvSource] = (),
    ) -> None:
        """Put its prefill task into a queue."""
        task = PrefillTask(
            request_id=record.request_id,
            epoch=epoch,
            after_seq=after_seq,
            reader=record.reader,
            record=record if is_inline else None,
            kv_sources=tuple(kv_sources),
        )
        await self.place_task(task, subjects.prefill(SERVED, worker), record.deadline_unix_ms)

    async def say(self, record: RequestRecord, worker: Worker) -> None:
        """Say its task to a worker, without the queue; the record is the worker's to store."""
        task = PrefillTask(
            request_id=record.request_id,
            epoch=1,
            after_seq=0,
            reader=record.reader,
            record=record,
            is_recorded=False,
        )
        headers = WorkHeaders(
            schema=tag_of(PrefillTask),
            request_id=record.request_id,
            epoch=1,
            deadline_unix_ms=record.deadline_unix_ms,
        )
        own = subjects.direct(subjects.prefill(SERVED, worker.now.worker))
        wire = headers.to_dict(f"{record.request_id}.prefill.1")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = self.bus.ask(own, encode(task), wire, PATIENCE_S)
                await self.num_queued()  # a round trip
                if not (answer.done() and has_no_responders(answer.result())):
                    break  # else it does not listen yet
        answer.cancel()

    async def place_task(self, task: Any, subject: str, deadline_unix_ms: int) -> None:
        headers = WorkHeaders(
            schema=tag_of(type(task)),
            request_id=task.request_id,
            epoch=task.epoch,
            deadline_unix_ms=deadline_unix_ms,
        )
        await publish_work(self.bus, subject, encode(task), headers, msg_id=secrets.token_hex(8))

    async def ask(self, prompt_ids: Sequence[int] = PROMPT, **fields: Any) -> RequestRecord:
        """Admit a request and place it."""
        record = await self.record(prompt_ids, **fields)
        await self.place(record)
        return record

    async def cancel(self, record: RequestRecord, *, tells: Worker | None = None) -> None:
        """End a request from outside, and say the quick word to a worker."""
        await self.chain.end(record.reader, Cancelled(request_id=record.request_id))
        if tells is not None:
            word = CancelWord(request_id=record.request_id)
            await self.bus.publish(subjects.cancel(tells.now.worker), encode(word))

    async def dead_claim(self, record: RequestRecord, epoch: int, after_seq: int) -> int:
        """The claim of a worker that died right after it; its sequence."""
        claim = Claim(
            request_id=record.request_id,
            epoch=epoch,
            worker="dead-worker",
            role="prefill",
            served=SERVED,
            deadline_unix_ms=record.deadline_unix_ms,
        )
        seq = await self.chain.append(record.reader, claim, after_seq)
        assert seq is not None
        return seq

    async def dead_tokens(self, record: RequestRecord, deltas: Sequence[TokenDelta]) -> None:
        """What that worker had published."""
        batch = TokenBatch(worker="dead-worker", deltas=tuple(deltas))
        await self.bus.publish_stored(subjects.token_stream(record.reader), encode(batch))

    async def until_tip(
        self, record: RequestRecord, condition: Callable[[ChainEntry | None], bool]
    ) -> int:
        """Wait until the last entry of the chain is as wanted; its sequence."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(
                (tip := await self.chain.tip(record.reader, record.request_id)).entry
            ):
                await asyncio.sleep(0.01)
        return tip.seq

    async def until_tokens(self, record: RequestRecord, count: int) -> None:
        """Wait until so many tokens of the first choice are stored."""
        async with asyncio.timeout(PATIENCE_S):
            while len((await self.stored(record)).tokens()) < count:
                await asyncio.sleep(0.01)

    async def answer(self, record: RequestRecord) -> Answer:
        """Wait for the request's end; what a reader then has."""
        await self.until_tip(record, lambda entry: entry is not None and not is_claim(entry))
        return await self.stored(record)

    async def stored(self, record: RequestRecord) -> Answer:
        """What a reader has by now."""
        view, chain, deltas = RequestView(record.request_id), [], []
        claims = subjects.chain(record.reader, record.request_id)
        stored = replay(self.bus, TOKENS, [subjects.token_stream(record.reader), claims])
        async for message in stored:
            if message.subject == claims:
                entry = decode_chain_entry(message.data)
                chain.append(entry)
                view.apply_entry(message.seq, entry)
                continue
            with contextlib.suppress(SchemaError):
                batch = decode_stream_message(message.data)
                for delta in batch.deltas if isinstance(batch, TokenBatch) else ():
                    if delta.request_id == record.request_id:
                        shown = view.apply_delta(delta)
                        deltas += [one for delta in shown for one in delta.split()]
        return Answer(view, tuple(chain), tuple(deltas))

    def check(self, record: RequestRecord, answer: Answer, prompt: Sequence[int] = PROMPT) -> None:
        """The answer is the undisturbed one, token for token, and its end says so."""
        for index in range(record.sampling.n):
            tokens, reason = expected_answer(tuple(prompt), record.sampling, index)
            assert answer.tokens(index) == tokens
            assert answer.reason(index) == reason
            assert answer.end.num_tokens[index] == len(tokens)
            assert answer.end.finish_reasons[index] == reason
        assert answer.end.usage.prompt_tokens == len(prompt)
        assert answer.end.usage.completion_tokens == sum(answer.end.num_tokens)


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def is_claim(entry: ChainEntry | None, role: str = "") -> bool:
    """Whether it is a claim (of that role)."""
    return isinstance(entry, Claim) and role in ("", entry.role)


@asynccontextmanager
async def workplace(
    broker: EmbeddedBroker, bus: Bus, connect: Callable[[str], Any], folder: Path
) -> AsyncIterator[Workplace]:
    """An empty one; at the end everybody drains and nothing may be left."""
    async with contextlib.AsyncExitStack() as hosts, asyncio.TaskGroup() as tasks:
        place = Workplace(broker, bus, connect, tasks, hosts, folder)
        try:
            yield place
            await place.leave()
        finally:
            for worker in place.workers.values():
                worker.runner.open()
            place.workers.clear()  # the test may hold on to the place, but not to pools

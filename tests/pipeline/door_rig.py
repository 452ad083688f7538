"""Admission at work, with one model, for tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.bus import Bus, EmbeddedBroker, admission_consumer, ensure_topology
from infra.task_scope import task_scope
from infra.times import Times
from pipeline.admission import Admission
from pipeline.backlog import Backlog
from pipeline.budget import Budget
from pipeline.dispatch import Dispatch
from pipeline.door_meter import DoorMeter
from pipeline.doorkeeper import Doorkeeper
from pipeline.fleet import Fleet
from pipeline.outlook import Outlook
from pipeline.policy import FixedPolicies
from pipeline.prompt_reader import PromptReader
from pipeline.registry import Registry
from pipeline.stage import Stage, StageContext
from pipeline.tokenizing import ChatTokenizer
from schemas import subjects
from schemas.codec import encode
from schemas.control import Beat
from schemas.models import ModelCard
from schemas.requests import (
    ChatMessage,
    InferenceRequest,
    RequestRecord,
    ResponseFormat,
    SamplingParams,
)
from schemas.tokens import Accepted, StreamError
from tests.conftest import Until
from tests.pipeline.placing import placing
from tests.pipeline.rig import READER, SERVED, Ear, LogLines, running, stage_context
from tests.tiny_tokenizer import write_tiny_tokenizer

CONTEXT = 128
LIMIT = 4096
VOCAB = 512
SUBJECT = subjects.admission("tiny")
DIRECT = subjects.direct(SUBJECT)


def card_of(folder: Path) -> ModelCard:
    return ModelCard(
        name="tiny",
        revision="r1",
        served=SERVED,
        folder=str(folder),
        architecture="llama",
        context_length=CONTEXT,
        vocab_size=VOCAB,
        has_chat_template=True,
        created_unix_s=1,
    )


@dataclass(slots=True)
class Door:
    """Admission at work, with one model and no worker yet."""

    bus: Bus
    ctx: StageContext
    ear: Ear
    lines: LogLines
    fleet: Fleet
    tokenizer: ChatTokenizer
    until: Until
    gate: Doorkeeper
    outlook: Outlook
    dispatch: Dispatch

    def hear(self, beat: Beat) -> None:
        """A worker's heartbeat, as everybody in a control process hears it."""
        self.fleet.hear(beat, time.monotonic())
        self.outlook.hear_beat(beat, time.monotonic())
        self.gate.hear_beat()

    async def publish(self, request: InferenceRequest | bytes, subject: str = SUBJECT) -> None:
        """As any NATS client would: the body, no headers."""
        data = request if isinstance(request, bytes) else encode(request)
        await self.bus.publish_stored(subject, data)

    async def admitted(self, request: InferenceRequest | bytes, request_id: str) -> Accepted:
        await self.publish(request)
        reader = READER
        if isinstance(request, InferenceRequest) and request.reader is None:
            reader = subjects.default_reader(request_id)
        await self.until(lambda: self.ear.stream(reader, request_id))
        accepted = self.ear.stream(reader, request_id)[0]
        assert isinstance(accepted, Accepted), accepted
        return accepted

    async def refused(self, request_id: str, reader: str = READER) -> StreamError:
        """The refusal that the client of a request hears, and that it hears nothing else."""
        await self.until(lambda: self.ear.end(reader, request_id))
        (end,) = self.ear.stream(reader, request_id)
        assert isinstance(end, StreamError), end
        assert self.ear.prefill_tasks(request_id) == []
        return end

    async def record(self, request_id: str) -> RequestRecord:
        found = await self.ctx.chain.record(request_id)
        assert found is not None
        return found[1]


def admission_of(
    ctx: StageContext, registry: Registry, fleet: Fleet, limit: int = LIMIT
) -> tuple[Admission, Doorkeeper, Outlook, Dispatch]:
    """Admission for the workers of ``fleet``, who lets requests go to them, by what, and how."""
    outlook, policies = Outlook(fleet, beat_s=60.0), FixedPolicies()
    placement = placing(fleet, outlook=outlook, clock=time.monotonic)
    door = Doorkeeper(
        fleet, outlook, Budget(fleet, outlook, policies), placement, None, DoorMeter(ctx.metrics)
    )
    backlog = Backlog(ctx.bus, limit, door.room.num_waiting)
    reader = PromptReader(fleet.max_sequence_tokens)
    dispatch = Dispatch(ctx.bus, ctx.chain, ctx.log)
    admission = Admission(
        ctx, registry, reader, backlog=backlog, door=door, policies=policies, dispatch=dispatch
    )
    return admission, door, outlook, dispatch


@asynccontextmanager
async def open_door(
    tmp_path_factory: pytest.TempPathFactory, times: Times, until: Until
) -> AsyncIterator[Door]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder, VOCAB)
    async with AsyncExitStack() as stack:
        data = tmp_path_factory.mktemp("broker")
        broker = await stack.enter_async_context(EmbeddedBroker(data))
        connection = await Bus.connect(broker.url("control"), role="control", times=times)
        bus = await stack.enter_async_context(connection)
        await ensure_topology(bus)
        lines, ear = LogLines(), Ear()
        await bus.subscribe(f"{subjects.ROOT}.>", ear.hear)
        ctx = stage_context(bus, lines)
        fleet = Fleet(times.dead_s, 0.0)
        registry = Registry(bus)
        await registry.start()
        await registry.register(card_of(folder))
        admission, gate, outlook, dispatch = admission_of(ctx, registry, fleet)
        stage = Stage(
            ctx,
            "admission",
            admission_consumer(times),
            admission.parse,
            admission.reader_of,
            admission.handle,
            when_full=admission.when_full,
            direct=subjects.direct(subjects.ALL_ADMISSION),
            direct_queue="control",
        )
        tasks = await stack.enter_async_context(task_scope())
        tasks.create_task(dispatch.run())
        await stack.enter_async_context(running(stage))
        yield Door(
            bus, ctx, ear, lines, fleet, ChatTokenizer(folder), until, gate, outlook, dispatch
        )


def ask(request_id: str, **fields: Any) -> InferenceRequest:
    fields.setdefault("reader", READER)
    if "messages" not in fields:
        fields.setdefault("prompt", "The sea is")
    return InferenceRequest(request_id=request_id, model="tiny", **fields)


def sampled(**params: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**params)}


def schema(text: str) -> ResponseFormat:
    return ResponseFormat(kind="json_schema", json_schema=text)


def says(*contents: str, role: str = "user") -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for content in contents)

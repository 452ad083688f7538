"""What the tests of stages share: something that hears the whole bus, logs that can be read."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack

from infra.bus import Bus, Msg, publish_work
from infra.log import make_logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from pipeline.claim_chain import ClaimChain
from pipeline.stage import Stage, StageContext
from schemas import subjects
from schemas.codec import Message, decode, encode, tag_of
from schemas.control import Beat, DeadLetter, Load
from schemas.decode import DecodeTask
from schemas.errors import SchemaError
from schemas.headers import WorkHeaders
from schemas.kv import KvHandle, KvReady
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord, SamplingParams
from schemas.tokens import (
    Claim,
    StreamEnd,
    StreamMessage,
    TokenBatch,
    TokenDelta,
    Usage,
    decode_stream_message,
)

SERVED = "tiny@r1"
READER = "client.reader-1"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def new_id() -> str:
    return secrets.token_hex(16)


@dataclass(slots=True)
class Ear:
    """Everything that is said on the bus: work as it is published, streams in stream order."""

    messages: list[Msg] = field(default_factory=list)

    def hear(self, message: Msg) -> None:
        self.messages.append(message)

    def on(self, subject: str) -> list[Msg]:
        return [message for message in self.messages if message.subject == subject]

    def stream(self, reader: str, request_id: str) -> list[StreamMessage]:
        """What the stream keeps for a reader of one request; batches are taken apart elsewhere."""
        found: list[StreamMessage] = []
        prefix = subjects.live(subjects.reader_filter(reader)).removesuffix(">")
        for message in self.messages:
            if message.subject.startswith(prefix):
                try:
                    part = decode_stream_message(message.data)
                except SchemaError:
                    continue
                if getattr(part, "request_id", request_id) == request_id:
                    found.append(part)
        return found

    def end(self, reader: str, request_id: str) -> StreamMessage | None:
        """The terminal entry of a request, once there is one."""
        kinds = ("stream-end/1", "stream-error/1", "cancelled/1", "expired/1")
        for part in self.stream(reader, request_id):
            if tag_of(type(part)) in kinds:
                return part
        return None

    def letters(self) -> list[DeadLetter]:
        return [decode(message.data, DeadLetter) for message in self.on(subjects.DEAD)]

    def prefill_tasks(self, request_id: str) -> list[tuple[str, PrefillTask]]:
        """Where prefill tasks of a request were published, and what they say."""
        found = []
        for message in self.messages:
            if message.subject.startswith(f"{subjects.ROOT}.prefill."):
                fields = msgpack.unpackb(message.data, strict_map_key=False)
                if fields["request_id"] == request_id:
                    found.append((message.subject, decode(message.data, PrefillTask)))
        return found


@dataclass(slots=True)
class LogLines:
    """A log that can be asked."""

    stream: io.StringIO = field(default_factory=io.StringIO)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in lines if line["event"] == name]

    def outcomes(self, stage: str) -> list[str]:
        """How each message of a stage was handled, in order."""
        return [e["outcome"] for e in self.events("stage_handled") if e["stage"] == stage]


def stage_context(bus: Bus, lines: LogLines) -> StageContext:
    return StageContext(
        bus=bus,
        chain=ClaimChain(bus),
        metrics=Metrics(),
        log=make_logger("test", stream=lines.stream),
        process="control-test-1",
    )


@asynccontextmanager
async def running(stage: Stage[Any]) -> AsyncIterator[asyncio.Task[None]]:
    """The stage at work; ended at once at the end of the block."""
    async with task_scope() as tasks:
        yield tasks.create_task(stage.run())


def record(
    request_id: str, *, deadline_unix_ms: int = 2**50, reader: str = READER
) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        model="tiny",
        revision="r1",
        served=SERVED,
        prompt_ids=b"\1\0\0\0",
        sampling=SamplingParams(max_tokens=4, seed=1),
        reader=reader,
        admitted_unix_ms=1,
        deadline_unix_ms=deadline_unix_ms,
    )


def prefill_task(request_id: str, *, epoch: int = 1, after_seq: int = 0) -> PrefillTask:
    return PrefillTask(request_id=request_id, epoch=epoch, after_seq=after_seq, reader=READER)


def handle(*, num_tokens: int = 1, fingerprint: str = "f00d") -> KvHandle:
    return KvHandle(
        lease_id="lease-1",
        secret=b"secret",
        owner="prefill-0",
        fingerprint=fingerprint,
        num_tokens=num_tokens,
        blocks=b"",
        generations=b"",
        checksums=b"",
        addresses=(),
        expires_unix_ms=1,
    )


def kv_ready(request_id: str, *, fingerprint: str = "f00d") -> KvReady:
    return KvReady(
        request_id=request_id,
        epoch=1,
        after_seq=1,
        reader=READER,
        worker="prefill-0",
        handle=handle(fingerprint=fingerprint),
        tokens=(b"",),
        finished=("",),
        record=record(request_id),
    )


def claim(request_id: str, worker: str, *, epoch: int = 1, deadline_unix_ms: int = 2**50) -> Claim:
    return Claim(
        request_id=request_id,
        epoch=epoch,
        worker=worker,
        role="prefill",
        served=SERVED,
        deadline_unix_ms=deadline_unix_ms,
    )


def batch(request_id: str, epoch: int, number: int, *ids: int, text: str = "") -> TokenBatch:
    delta = TokenDelta(request_id=request_id, epoch=epoch, number=number, ids=ids, text=text)
    return TokenBatch(worker="w", deltas=(delta,))


def stream_end(request_id: str, epoch: int, num_tokens: int) -> StreamEnd:
    return StreamEnd(
        request_id=request_id,
        epoch=epoch,
        num_tokens=(num_tokens,),
        finish_reasons=("length",),
        usage=Usage(prompt_tokens=1, completion_tokens=num_tokens),
    )


def beat(
    worker: str,
    *,
    process: str = "",
    state: str = "ready",
    roles: tuple[str, ...] = ("prefill",),
    fingerprint: str = "f00d",
    **load: int,
) -> Beat:
    return Beat(
        process=process or f"worker-{worker}",
        kind="worker",
        state=state,  # type: ignore[arg-type]
        host="here",
        pid=1,
        started_unix_ms=1,
        worker=worker,
        roles=roles,
        served=SERVED,
        fingerprint=fingerprint,
        load=Load(**load),
    )


async def send(
    bus: Bus,
    subject: str,
    message: PrefillTask | DecodeTask | KvReady,
    *,
    deadline_unix_ms: int | None = None,
) -> None:
    """Publish a work message as a stage would."""
    later = bus.now_unix_ms() + 60_000 if deadline_unix_ms is None else deadline_unix_ms
    headers = WorkHeaders(
        schema=tag_of(type(message)),
        request_id=message.request_id,
        epoch=message.epoch,
        deadline_unix_ms=later,
        traceparent=TRACE,
    )
    await publish_work(bus, subject, encode(message), headers, msg_id=new_id())


async def send_direct(
    bus: Bus, subject: str, message: PrefillTask, *, reply: str = "", msg_id: str = ""
) -> None:
    """Say a work message of the queue ``subject`` without the queue."""
    headers = WorkHeaders(
        schema=tag_of(type(message)),
        request_id=message.request_id,
        epoch=message.epoch,
        deadline_unix_ms=bus.now_unix_ms() + 60_000,
        traceparent=TRACE,
    )
    wire = headers.to_dict(msg_id or new_id())
    await bus.publish(subjects.direct(subject), encode(message), wire, reply)


async def store(bus: Bus, subject: str, message: Message) -> int:
    """Put a message into its stream as it is; its sequence."""
    return (await bus.publish_stored(subject, encode(message))).seq

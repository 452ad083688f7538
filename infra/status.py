"""What runs on a bus: processes by their beats, models by their bucket, queues by their streams."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from rich.console import Console
from rich.table import Table

from infra.bus import DEAD, MODELS, MODELS_BUCKET, TOKENS, WORK, Bus, Msg
from infra.bus.errors import BrokerRefused
from infra.bus.replay import replay
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat
from schemas.errors import ConfigError, SchemaError
from schemas.models import ModelCard

LISTEN_BEATS = 2.4  # beat intervals: two beats of each process, and some for the way


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of one work subject that are not acked yet."""

    stage: str
    model: str
    worker: str  # "any", or empty where a stage has no workers
    num_messages: int


class MeshStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``mesh status`` shows."""

    processes: tuple[Beat, ...]
    models: tuple[ModelCard, ...]
    queues: tuple[Queue, ...]  # empty ones are not listed
    num_dead_letters: int
    token_stream_bytes: int


async def gather(bus: Bus) -> MeshStatus:
    """Listen for two beats, then read models and queues.

    Raises:
        ConfigError: there is no mesh on this bus: no process has made the streams.
        BusUnavailable, BusForbidden: as calls on the bus; the user must be control's.
    """
    beats: dict[str, Beat] = {}

    def on_beat(message: Msg) -> None:
        with contextlib.suppress(SchemaError):  # of a newer version
            beat = decode(message.data, Beat)
            beats[beat.process] = beat

    heard = await bus.subscribe(subjects.ALL_BEATS, on_beat)
    await asyncio.sleep(LISTEN_BEATS * bus.times.beat_s)
    await heard.unsubscribe()
    try:
        work = await bus.api(f"STREAM.INFO.{WORK}", {"subjects_filter": ">"})
        tokens = await bus.api(f"STREAM.INFO.{TOKENS}")
        dead = await bus.api(f"STREAM.INFO.{DEAD}")
    except BrokerRefused as error:
        raise ConfigError(
            f"no mesh uses the bus at {bus.where}: {error.message}", param="mesh.nats_url"
        ) from error
    waiting: dict[str, int] = work["state"].get("subjects") or {}
    return MeshStatus(
        processes=tuple(
            sorted((b for b in beats.values() if b.state != "gone"), key=lambda b: b.process)
        ),
        models=await _models(bus),
        queues=tuple(_queue(subject, num) for subject, num in sorted(waiting.items())),
        num_dead_letters=dead["state"]["messages"],
        token_stream_bytes=tokens["state"]["bytes"],
    )


async def _models(bus: Bus) -> tuple[ModelCard, ...]:
    cards = []
    async for message in replay(bus, MODELS, f"$KV.{MODELS_BUCKET}.>", last_per_subject=True):
        with contextlib.suppress(SchemaError):  # a delete marker, or a newer version
            cards.append(decode(message.data, ModelCard))
    return tuple(sorted(cards, key=lambda card: card.name))


def _queue(subject: str, num: int) -> Queue:
    stage, model, worker = subjects.split_work(subject)
    name = subjects.decode_name(model.partition("@")[0])
    return Queue(stage=stage, model=name, worker=worker or "", num_messages=num)


def show(status: MeshStatus, console: Console) -> None:
    """Tables for a person."""
    workers = _table("workers", "id", "state", "roles", "model", "engine", "running",
                     "waiting", "free blocks", "pid")  # fmt: skip
    others = _table("processes", "id", "state", "pid", "health port")
    for beat in status.processes:
        state = f"{beat.state}: {beat.reason}" if beat.reason else beat.state
        if beat.kind == "worker":
            load = beat.load
            model = subjects.decode_name(beat.served.partition("@")[0]) if beat.served else ""
            workers.add_row(beat.worker or beat.process, state, ", ".join(beat.roles), model,
                            beat.engine, str(load.num_running), str(load.num_waiting),
                            f"{load.num_free_blocks} of {load.num_blocks}",
                            str(beat.pid))  # fmt: skip
        else:
            others.add_row(beat.process, state, str(beat.pid), str(beat.health_port))
    models = _table("models", "model", "revision", "architecture", "context")
    for card in status.models:
        models.add_row(card.name, card.revision, card.architecture, str(card.context_length))
    queues = _table("queues", "stage", "model", "worker", "messages")
    for queue in status.queues:
        queues.add_row(queue.stage, queue.model, queue.worker, str(queue.num_messages))
    for table in (others, workers, models, queues):
        if table.row_count:
            console.print(table)
        else:
            console.print(f"{table.title}: none")
    console.print(
        f"dead letters: {status.num_dead_letters}, "
        f"token streams: {status.token_stream_bytes / 1e6:.1f} MB"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

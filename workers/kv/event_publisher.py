"""One worker id says on the bus what its process's tiers hold.

Publishes  mesh.v1.kv-events.<model@rev>.<worker>    KvEvents, some tens of ms after a change
Answers    mesh.v1.kv-snapshot.<worker>              KvSnapshotAsk -> KvSnapshotPart

A new id finds blocks of the one before it: it begins with a gap, and readers take a snapshot. What
can't be said while the broker is away keeps its number, so readers find it missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.bus import Bus, Msg
from infra.log import Logger
from infra.task_scope import task_scope
from schemas import subjects
from schemas.codec import decode, encode
from schemas.errors import BusUnavailable, MeshError, SchemaError
from schemas.kv_events import KvEvents, KvSnapshotAsk, KvSnapshotPart, StoredRun
from workers.kv.events import BlockLog, Changes, in_batches

BATCH_S = 0.05  # that changes are collected
SNAPSHOT_S = 0.2  # between two new snapshots; readers in between get the same one
_AT_ONCE_BLOCKS = 1024  # packed in 2 ms: to go to a thread and back is no better
_MAX_WAITING = 64  # questions; who gets no answer asks again
_PAYLOAD_SHARE = 4  # of what the bus takes: nobody else waits long behind one of ours
_MAX_BYTES = 256 * 1024
_ENVELOPE_BYTES = 1024  # more than a worker id, numbers and names of fields ever need


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What was held when batch ``seq`` had been said, ready to be sent."""

    seq: int
    parts: tuple[bytes, ...]


class EventPublisher:
    """Tells what ``blocks`` notes, under one worker id.

    Attributes:
        seq: the number of the last batch; 0: nothing was said.
    """

    def __init__(self, bus: Bus, blocks: BlockLog, served: str, worker: str, log: Logger) -> None:
        self.seq = 0
        self._bus = bus
        self._blocks = blocks
        self._subject = subjects.kv_events(served, worker)
        self._worker = worker
        self._log = log
        self._has_news = asyncio.Event()
        self._saying = asyncio.Lock()
        self._questions: asyncio.Queue[Msg] = asyncio.Queue(_MAX_WAITING)
        self._snapshot: _Snapshot | None = None
        self._made_s = -SNAPSHOT_S

    async def run(self) -> None:
        """Publish and answer, until cancelled. One at a time per ``BlockLog``."""
        questions = await self._bus.subscribe(subjects.kv_snapshot(self._worker), self._hear)
        try:
            async with task_scope() as tasks:
                tasks.create_task(self._answer_for_ever(), name="kv snapshots")
                await self._begin()
                while True:
                    await self._has_news.wait()
                    await asyncio.sleep(BATCH_S)
                    self._has_news.clear()
                    async with self._saying:
                        await self._say(self._blocks.cut())
        finally:
            self._blocks.on_change = None
            await questions.unsubscribe()

    @property
    def _max_bytes(self) -> int:
        return min(_MAX_BYTES, self._bus.max_payload // _PAYLOAD_SHARE) - _ENVELOPE_BYTES

    async def _begin(self) -> None:
        """What was noted before belongs to no number of ours."""
        loop = asyncio.get_running_loop()

        def on_change() -> None:
            loop.call_soon_threadsafe(self._has_news.set)

        async with self._saying:
            self._blocks.on_change = on_change
            self._blocks.cut()
            if len(self._blocks):
                await self._say(Changes(is_gap=True))

    async def _say(self, changes: Changes) -> None:
        for batch in in_batches(changes, self._max_bytes):
            self.seq += 1
            events = KvEvents(
                worker=self._worker,
                seq=self.seq,
                stored=batch.stored,
                removed=batch.removed,
                is_gap=batch.is_gap,
            )
            try:
                await self._bus.publish(self._subject, encode(events))
            except BusUnavailable as error:
                self._log.info("kv_events_unsaid", seq=self.seq, reason=error.message)

    # Snapshots -------------------------------------------------------------------------------

    def _hear(self, message: Msg) -> None:
        if message.reply and not self._questions.full():
            self._questions.put_nowait(message)

    async def _answer_for_ever(self) -> None:
        while True:
            message = await self._questions.get()
            try:
                ask = decode(message.data, KvSnapshotAsk)
                await self._bus.publish(message.reply, await self._answer(ask))
            except SchemaError as error:
                self._log.warning("kv_snapshot_refused", reason=error.message)
            except MeshError as error:  # whoever asked hears nothing in time, and asks again
                self._log.info("kv_snapshot_unsaid", reason=error.message)

    async def _answer(self, ask: KvSnapshotAsk) -> bytes:
        if ask.part == 0:
            await self._refresh(ask.at_least_seq)
        found = self._snapshot
        is_of_use = found is not None and (ask.part > 0 or found.seq >= ask.at_least_seq)
        if found is None or not is_of_use or not 0 <= ask.part < len(found.parts):
            return encode(KvSnapshotPart(worker=self._worker, seq=self.seq))
        return found.parts[ask.part]

    async def _refresh(self, at_least_seq: int) -> None:
        """Have a snapshot that is new enough, unless the last one was made just now."""
        if self._snapshot is not None and self._snapshot.seq >= at_least_seq:
            return
        if time.monotonic() - self._made_s < SNAPSHOT_S:
            return
        self._made_s = time.monotonic()
        async with self._saying:
            changes, held = self._blocks.cut_whole()
            await self._say(changes)
            seq = self.seq
        if len(self._blocks) <= _AT_ONCE_BLOCKS:
            parts = self._parts(seq, held)
        else:
            parts = await asyncio.to_thread(self._parts, seq, held)
        self._snapshot = _Snapshot(seq, parts)

    def _parts(self, seq: int, held: Callable[[], tuple[StoredRun, ...]]) -> tuple[bytes, ...]:
        batches = in_batches(Changes(stored=held()), self._max_bytes) or [Changes()]
        return tuple(
            encode(
                KvSnapshotPart(
                    worker=self._worker,
                    seq=seq,
                    part=number,
                    num_parts=len(batches),
                    stored=batch.stored,
                )
            )
            for number, batch in enumerate(batches)
        )

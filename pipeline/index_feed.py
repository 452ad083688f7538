"""The index of one control process, kept equal to what the workers hold.

Consumes   mesh.v1.kv-events.<model@rev>.<worker>    KvEvents
           heartbeats, passed on by whoever hears them: the number of the last batch
Asks       mesh.v1.kv-snapshot.<worker>              KvSnapshotAsk, when something was missed
Keeps      the index; a process that starts has all of it a beat and a few questions later
Fails      a worker that does not answer is asked again; it delays nobody else's snapshot. When the
           fleet declares it dead, its blocks are gone from the index
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter

from infra.bus import Bus, Msg
from infra.log import Logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from pipeline.fleet import Fleet
from pipeline.index_book import IndexBook
from pipeline.radix_index import RadixIndex
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Beat
from schemas.errors import MeshError, SchemaError
from schemas.kv_events import KvEvents, KvSnapshotPart

MAX_ASKED = 8  # workers at once
_SWEEP_STEPS = 20_000  # per look around: 3 ms


class IndexFeed:
    """Fills ``index`` while it runs.

    Args:
        fleet: who is alive; whoever fills it calls :meth:`hear_beat`, too.
    """

    def __init__(
        self, bus: Bus, index: RadixIndex, fleet: Fleet, metrics: Metrics, log: Logger
    ) -> None:
        self._bus = bus
        self._index = index
        self._book = IndexBook(index)
        self._fleet = fleet
        self._metrics = metrics
        self._log = log
        self._must_look = asyncio.Event()
        self._asked: set[str] = set()
        self._free = asyncio.Semaphore(MAX_ASKED)
        self._asked_s: dict[str, float] = {}
        self._shown: Counter[str] = Counter()

    async def run(self) -> None:
        """Listen, ask and forget, until cancelled."""
        events = await self._bus.subscribe(subjects.ALL_KV_EVENTS, self._hear)
        try:
            async with task_scope() as tasks:
                while True:
                    self._look(tasks)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._pause_s):
                            await self._must_look.wait()
                    self._must_look.clear()
        finally:
            await events.unsubscribe()

    @property
    def _pause_s(self) -> float:
        return self._bus.times.beat_s

    # What is heard ---------------------------------------------------------------------------

    def hear_beat(self, beat: Beat) -> None:
        """A heartbeat, after the fleet has heard it."""
        if beat.state == "gone":
            self._must_look.set()
        elif beat.kv_seq and self._fleet.worker(beat.worker) is not None:
            self._book.hear_seq(beat.worker, beat.kv_seq)
            self._look_soon(beat.worker)

    def _hear(self, message: Msg) -> None:
        try:
            events = decode(message.data, KvEvents)
            # Of one that has not beaten yet, or was given up, the next beat tells, if there is one.
            if self._fleet.worker(events.worker) is not None:
                self._book.hear(events)
                self._look_soon(events.worker)
        except SchemaError as error:
            self._log.warning("kv_events_refused", subject=message.subject, reason=error.message)

    def _look_soon(self, worker: str) -> None:
        if worker not in self._asked and self._book.next_ask(worker) is not None:
            self._must_look.set()

    # What is done ----------------------------------------------------------------------------

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        now_s = time.monotonic()
        alive = {beat.worker for beat in self._fleet.members()}
        for worker in self._book.workers:
            if worker not in alive:
                self._book.drop(worker)
                self._asked_s.pop(worker, None)
        for worker in self._book.stale():
            is_due = now_s - self._asked_s.get(worker, -self._pause_s) >= self._pause_s
            if is_due and worker not in self._asked:
                self._asked.add(worker)
                tasks.create_task(self._ask(worker), name=f"kv snapshot {worker}")
        self._index.sweep(_SWEEP_STEPS)
        self._show()

    async def _ask(self, worker: str) -> None:
        """Ask for a snapshot, part by part. One that fails is asked for again, a pause later."""
        try:
            async with self._free:
                while (ask := self._book.next_ask(worker)) is not None:
                    self._asked_s[worker] = time.monotonic()
                    message = await self._bus.request(
                        subjects.kv_snapshot(worker), encode(ask), timeout_s=self._bus.times.dead_s
                    )
                    if self._book.take(decode(message.data, KvSnapshotPart)) != "more":
                        return
        except MeshError as error:
            self._log.info(
                "kv_snapshot_missed", worker=worker, code=error.code, reason=error.message
            )
        finally:
            self._asked.discard(worker)

    def _show(self) -> None:
        book, metrics = self._book, self._metrics
        metrics.kv_index_blocks.set(self._index.num_blocks)
        for name, counter, value in (
            ("changes", metrics.kv_index_changes, book.num_changes),
            ("gaps", metrics.kv_index_gaps, book.num_gaps),
            ("snapshots", metrics.kv_index_snapshots, book.num_snapshots),
            ("evicted", metrics.kv_index_evicted, self._index.num_evicted),
        ):
            counter.inc(value - self._shown[name])
            self._shown[name] = value

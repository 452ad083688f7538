"""Queues of dead workers go to whoever lives, and their consumers go: a frozen worker learns by
that that it was given up. What a dead process had taken from shared queues comes to others at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from infra.bus import (
    Bus,
    WorkMessage,
    admission_consumer,
    any_consumer,
    kv_ready_consumer,
)
from infra.bus.reaper import Placement, next_attempt, reap, redeliver, waiting_work
from infra.log import Logger
from infra.pulse import set_or_pulse
from pipeline.fleet import Fleet
from pipeline.suffix import SUFFIX
from schemas import subjects
from schemas.control import Beat
from schemas.errors import MeshError, SchemaError


class Reaper:
    """Moves what is left of the dead.

    Args:
        fleet: who is dead, and who had said before that it would go.
        holds: whether a worker holds a request yet: then it did not just leave.
    """

    def __init__(
        self, bus: Bus, fleet: Fleet, log: Logger, *, holds: Callable[[str], bool]
    ) -> None:
        self._bus = bus
        self._fleet = fleet
        self._log = log
        self._holds = holds
        self._dead: deque[Beat] = deque()
        self._must_reap = asyncio.Event()

    def take(self, verdicts: Iterable[Beat]) -> None:
        """These are dead: their last beats."""
        self._dead += verdicts
        self._must_reap.set()

    async def run(self) -> None:
        """Reap for ever. In a task of its own: another router may hold what is to be moved for a
        while."""
        while True:
            for _ in range(len(self._dead)):
                beat = self._dead.popleft()
                try:
                    await self._fence(beat)
                except MeshError as error:
                    self._log.warning("reap_failed", worker=beat.worker, reason=error.message)
                    if error.retryable:
                        self._dead.append(beat)
            try:
                await self._sweep()
            except MeshError as error:
                self._log.warning("sweep_failed", reason=error.message)
            beats = 1 if self._dead else 4  # what failed is tried again soon
            await set_or_pulse(self._must_reap, beats * self._bus.times.beat_s)

    async def _fence(self, beat: Beat) -> None:
        if beat.kind == "control":
            await redeliver_to_control(self._bus)
            return
        facts = {"worker": beat.worker, "process": beat.process}
        if self._fleet.has_drained(beat.worker) and not self._holds(beat.worker):
            self._log.info("worker_left", **facts)
        else:
            self._log.warning("worker_dead", **facts)
        for role in beat.roles:
            if role == SUFFIX:  # it read its own prefill queue, and never the shared one
                await self._move_queue("prefill", beat.served, beat.worker)
                continue
            await self._move_queue(role, beat.served, beat.worker)
            await redeliver(self._bus, any_consumer(role, beat.served, self._bus.times))

    async def _sweep(self) -> None:
        """Look for queues whose worker is dead: an old view may still have placed there."""
        for subject in await waiting_work(self._bus):
            try:
                stage, served, worker = subjects.split_work(subject)
            except SchemaError:
                continue  # a request under an odd subject: admission deals with it
            named = worker if worker != subjects.ANY else None
            if named and self._fleet.is_dead(named, time.monotonic()):
                await self._move_queue(stage, served, named)

    async def _move_queue(self, stage: str, served: str, worker: str) -> None:
        shared = subjects.prefill(served) if stage == "prefill" else subjects.decode(served)

        def to_shared(message: WorkMessage) -> Placement:
            headers = next_attempt(message.headers)
            return Placement(subject=shared, data=message.data, headers=headers)

        num_moved = await reap(self._bus, stage, served, worker, to_shared)
        if num_moved:
            self._log.warning("queue_moved", worker=worker, stage=stage, num_moved=num_moved)


async def redeliver_to_control(bus: Bus) -> None:
    """What a control process that died had taken and not finished comes to another at once.

    Raises:
        BusUnavailable, BrokerRefused: not done; it comes after ``ack_wait_s``.
    """
    for consumer in (admission_consumer(bus.times), kv_ready_consumer(bus.times)):
        await redeliver(bus, consumer)

"""Moving what a dead worker left in its queue.

Its consumer is deleted first. From then on every word of the worker about its messages, should it
only have been frozen, means nothing, and all of them, delivered or not, are free at once. They
are read through a consumer that all routers share, and each is acked only when its copy is stored;
the copy's message id is the original's place in the stream, so two routers make one copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nats.js.api import ConsumerConfig

from infra.bus.connection import Bus
from infra.bus.errors import BrokerRefused, NobodyListens
from infra.bus.names import WORK
from infra.bus.pull import WorkMessage, WorkPull
from infra.bus.topology import (
    delete_consumer,
    ensure_consumer,
    reap_consumer,
    worker_consumer,
)
from schemas import subjects
from schemas.headers import ATTEMPT, MSG_ID

_IN_HAND = 64
_LOOK_S = 0.1  # while another router still holds messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a message goes instead."""

    subject: str
    data: bytes
    headers: Mapping[str, str]


Place = Callable[[WorkMessage], Placement | None]


def next_attempt(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers for another try of the same work."""
    return {**headers, ATTEMPT: str(int(headers.get(ATTEMPT, "1")) + 1)}


async def waiting_work(bus: Bus) -> dict[str, int]:
    """How many messages lie on each subject of the work queue, delivered ones counted.

    Raises:
        BusUnavailable, BusForbidden: as :meth:`Bus.api`.
    """
    return await _num_messages(bus, f"{subjects.ROOT}.>")


async def _num_messages(bus: Bus, subject_filter: str) -> dict[str, int]:
    info = await bus.api(f"STREAM.INFO.{WORK}", {"subjects_filter": subject_filter})
    return dict(info["state"].get("subjects") or {})


async def redeliver(bus: Bus, config: ConsumerConfig) -> int:
    """Let what a dead process holds of a shared queue come to another at once.

    The consumer is deleted and made again, which the others that pull on it take as a sign to
    begin anew. Everything un-acked is delivered again, also what a living process holds: handlers
    of shared queues take repeats.

    Returns:
        How many messages were held.

    Raises:
        BusUnavailable, BusForbidden, BrokerRefused: as :meth:`Bus.api`.
    """
    try:
        info = await bus.api(f"CONSUMER.INFO.{WORK}.{config.name}")
    except BrokerRefused as error:
        if error.status == 404:
            return 0
        raise
    num_held = int(info["num_ack_pending"])
    if num_held:
        await delete_consumer(bus, WORK, str(config.name))
        await ensure_consumer(bus, WORK, config)
    return num_held


async def reap(bus: Bus, stage: str, served: str, worker: str, place: Place) -> int:
    """Move everything that waits for a worker that is judged dead.

    Args:
        stage: ``prefill`` or ``decode``.
        place: where a message goes; None drops it (its request has ended).

    Returns:
        How many this call moved or dropped; another router may have moved the others.

    Raises:
        BusUnavailable, QueueFull: not finished; the same call again goes on.
    """
    config = worker_consumer(stage, served, worker, bus.times)
    await delete_consumer(bus, WORK, str(config.name))
    reaping = _Reaping(bus, str(config.filter_subject), str(config.name), place)
    return await reaping.run()


class _Reaping:
    """One router's part in emptying one subject."""

    def __init__(self, bus: Bus, subject: str, consumer: str, place: Place) -> None:
        self._bus = bus
        self._config = reap_consumer(subject, consumer, bus.times)
        self._place = place
        self._arrived: asyncio.Queue[WorkMessage] = asyncio.Queue(2 * _IN_HAND)
        self._num_moved = 0
        self._is_finished_elsewhere = False

    async def run(self) -> int:
        if not await self._is_empty():
            try:
                await self._pull_and_move()
            except ExceptionGroup as group:
                raise group.exceptions[0] from None  # the pull and the mover fail one at a time
            await delete_consumer(self._bus, WORK, str(self._config.name))
        return self._num_moved

    async def _pull_and_move(self) -> None:
        pull = WorkPull(
            self._bus,
            self._config,
            self._arrived.put_nowait,
            lambda: _IN_HAND - self._arrived.qsize(),
            on_fenced=self._finish,
        )
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(pull.run())
            await self._move_all(pull)
            pulling.cancel()

    def _finish(self) -> None:
        self._is_finished_elsewhere = True

    async def _move_all(self, pull: WorkPull) -> None:
        while not self._is_finished_elsewhere:
            try:
                async with asyncio.timeout(_LOOK_S):
                    message = await self._arrived.get()
            except TimeoutError:
                if await self._is_empty():
                    return
                continue
            await self._move(message)
            pull.poke()
            if self._arrived.empty() and await self._is_empty():
                return

    async def _move(self, message: WorkMessage) -> None:
        placement = self._place(message)
        if placement is not None:
            copy_id = f"mv-{message.stream_seq}"
            headers = {k: v for k, v in placement.headers.items() if k != MSG_ID}
            await self._bus.publish_stored(
                placement.subject, placement.data, headers, msg_id=copy_id
            )
        try:
            await message.ack_sync()
        except NobodyListens:
            return  # moved by another router, or a restarted broker forgot the consumer
        self._num_moved += 1

    async def _is_empty(self) -> bool:
        """Nothing lies on the subject, delivered or not: other routers may still hold some."""
        return not await _num_messages(self._bus, str(self._config.filter_subject))

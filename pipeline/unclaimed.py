"""Requests that wait for a worker though nobody waits for them any more.

A request that no worker has claimed has no entry on its chain, and so none in the ledger: what
tells of it is its task in the queue, or that it waits in this very process for its turn. Once per
resume window the prefill queues are read through, without taking anything from them, and those that
wait here are looked at:

    its bridge is silent for the window, and no other adopted it   Cancelled on the chain
    past its deadline                                              Expired on the chain

and its task is deleted, so that it takes no room from requests that somebody wants. A worker that
pulls such a task in the meantime finds that the request has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infra.bus import Bus, StoredMessage, drop, peek
from infra.log import Logger
from pipeline.attendance import ABANDONED, Attendance
from pipeline.claim_chain import ClaimChain
from schemas import subjects
from schemas.codec import decode, tag_of
from schemas.errors import MeshError, SchemaError
from schemas.headers import WorkHeaders
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from schemas.tokens import Cancelled, Expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The request of a prefill task that lies in the queue."""

    request_id: str
    reader: str
    deadline_unix_ms: int


class Unclaimed:
    """Looks through the prefill queues of all models.

    Args:
        attendance: who reads what; filled by whoever hears beats and adoptions.
        waiting: the requests that wait in this process.
    """

    def __init__(
        self,
        bus: Bus,
        chain: ClaimChain,
        attendance: Attendance,
        log: Logger,
        *,
        waiting: Callable[[], Iterable[RequestRecord]] = lambda: (),
    ) -> None:
        self._here = waiting
        self._bus = bus
        self._chain = chain
        self._attendance = attendance
        self._log = log

    async def run(self) -> None:
        """Look once per window, for ever; a look that fails is left to the next."""
        while True:
            await asyncio.sleep(self._bus.times.resume_window_s)
            try:
                await self.look()
            except MeshError as error:
                self._log.warning("queue_look_failed", code=error.code, reason=error.message)

    async def look(self) -> int:
        """End what nobody waits for; returns how many requests that were.

        Raises:
            BusUnavailable: not finished; the same call again goes on.
        """
        num_ended = 0
        async for message in peek(self._bus, f"{subjects.ROOT}.prefill.>"):
            waiting = _waiting(message)
            entry = None if waiting is None else self._end_of(waiting)
            if waiting is None or entry is None:
                continue
            await self._end(waiting, entry)
            await drop(self._bus, message.seq)
            num_ended += 1
        for record in list(self._here()):
            if (entry := self._end_of(record)) is not None:
                await self._end(record, entry)  # whoever let it wait hears that
                num_ended += 1
        return num_ended

    async def _end(self, waiting: Waiting | RequestRecord, entry: Cancelled | Expired) -> None:
        await self._chain.end(waiting.reader, entry)
        facts = {"request_id": waiting.request_id, "reader": waiting.reader}
        self._log.warning("waiting_request_ended", how=tag_of(type(entry)), **facts)

    def _end_of(self, waiting: Waiting | RequestRecord) -> Cancelled | Expired | None:
        if waiting.deadline_unix_ms <= self._bus.now_unix_ms():
            return Expired(request_id=waiting.request_id)
        if self._attendance.abandoned([waiting], time.monotonic()):
            return Cancelled(request_id=waiting.request_id, reason=ABANDONED)
        return None


def _waiting(message: StoredMessage) -> Waiting | None:
    """None for what can't be read: whoever takes it deals with it."""
    try:
        task = decode(message.data, PrefillTask)
        return Waiting(
            request_id=subjects.check_request_id(task.request_id),
            reader=subjects.check_reader(task.reader),
            deadline_unix_ms=WorkHeaders.from_dict(message.headers).deadline_unix_ms,
        )
    except SchemaError:
        return None

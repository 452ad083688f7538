"""Tasks that are said to a worker without the queue.

    say      the worker hears it at once; the claim that it makes is heard on the chains
    heard    somebody claimed it, or it ended: nothing is left to do
    lost     its worker is gone
    run      what nobody hears, or has claimed in ``CLAIM_S``, or was said to one that is gone, is
             put into the queue

Only for requests that nobody has been promised anything for: one that dies with this process before
it is claimed is asked for again by whoever waits for it (``pipeline/submitting.py``). Said and
queued, a task is there twice, and the claim decides.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

import msgspec
from msgspec.structs import replace

from infra.bus import Bus, Msg, publish_work
from infra.bus.calls import has_no_responders
from infra.log import Logger
from infra.task_scope import task_scope
from pipeline.claim_chain import ClaimChain
from pipeline.placement import PrefillPlace
from pipeline.records import is_inline, prefill_task
from schemas import subjects
from schemas.codec import encode
from schemas.errors import BusUnavailable, MeshError, PayloadTooLarge
from schemas.headers import WorkHeaders
from schemas.requests import RequestRecord

CLAIM_S = 1.0  # a worker that lives has claimed by then, or has put it into the queue itself
MAX_SAID = 4096  # not claimed; further ones go into the queue
_LOOK_S = 0.25


class _Said(msgspec.Struct, frozen=True):
    """A task that was said and is not known to be claimed."""

    record: RequestRecord
    place: PrefillPlace
    headers: WorkHeaders  # of the task
    worker: str
    due_s: float


class Dispatch:
    """What this process has said directly."""

    def __init__(self, bus: Bus, chain: ClaimChain, log: Logger) -> None:
        self._bus = bus
        self._chain = chain
        self._log = log
        self._inbox = bus.new_inbox()  # where the broker says that nobody listens
        self._said: dict[str, _Said] = {}  # by request, oldest first
        self._some_said = asyncio.Event()
        self._overdue: OrderedDict[str, None] = OrderedDict()  # of what was said, each once
        self._some_overdue = asyncio.Event()

    def __len__(self) -> int:
        return len(self._said)

    def say(self, record: RequestRecord, place: PrefillPlace, headers: WorkHeaders) -> bool:
        """Say the task of a request, which came with ``headers``, to the worker of its place. The
        worker stores the record with its claim. If nothing comes of that the task is queued, for
        all rather than for that worker, and the record is stored before.

        Returns:
            False when it can't be said: it is to be queued.
        """
        worker = place.alone or place.worker
        if worker == subjects.ANY or len(self._said) >= MAX_SAID or not is_inline(record):
            return False
        task = prefill_task(record, place, is_recorded=False)
        to = subjects.direct(subjects.prefill(record.served, worker))
        headers, reply = task.headers(headers), f"{self._inbox}.{record.request_id}"
        try:
            self._bus.say(to, encode(task.message), headers.to_dict(task.msg_id), reply)
        except (BusUnavailable, PayloadTooLarge):
            return False
        due_s = time.monotonic() + CLAIM_S
        self._said[record.request_id] = _Said(record, place, headers, worker, due_s)
        self._some_said.set()
        return True

    def heard(self, request_id: str) -> None:
        """A request was claimed, or has ended."""
        self._said.pop(request_id, None)

    def lost(self, worker: str) -> None:
        """A worker is gone: it will claim nothing more."""
        for request_id, said in self._said.items():
            if said.worker == worker:
                self._hurry(request_id)

    async def run(self) -> None:
        """Queue what nobody hears, and what is overdue, for ever."""
        answers = await self._bus.subscribe(f"{self._inbox}.*", self._hear)
        try:
            async with task_scope() as tasks:
                tasks.create_task(self._look_for_ever(), name="overdue tasks")
                while True:
                    await self._some_overdue.wait()
                    self._some_overdue.clear()
                    while self._overdue:
                        request_id, _ = self._overdue.popitem(last=False)
                        await self._queue(request_id)
        finally:
            await answers.unsubscribe()

    async def finish(self) -> None:
        """Nothing more is said: put into the queue what is not claimed."""
        for request_id in list(self._said):
            await self._queue(request_id)

    def _hear(self, message: Msg) -> None:
        if has_no_responders(message):
            self._hurry(message.subject.rpartition(".")[2])

    def _hurry(self, request_id: str) -> None:
        self._overdue[request_id] = None
        self._some_overdue.set()

    async def _look_for_ever(self) -> None:
        while True:
            await self._some_said.wait()
            self._some_said.clear()
            while self._said:
                await asyncio.sleep(_LOOK_S)
                now_s = time.monotonic()
                for request_id, said in self._said.items():
                    if said.due_s > now_s:
                        break
                    self._hurry(request_id)

    async def _queue(self, request_id: str) -> None:
        said = self._said.pop(request_id, None)
        if said is None:
            return  # claimed meanwhile, or queued
        task = prefill_task(said.record, replace(said.place, worker=subjects.ANY))
        facts = {"request_id": request_id, "subject": task.subject}
        try:
            await self._chain.write_record(said.record)
            await publish_work(
                self._bus, task.subject, encode(task.message), said.headers, task.msg_id
            )
        except MeshError as error:  # whoever waits for it asks again
            self._log.warning("task_not_queued", reason=error.message, **facts)
        else:
            self._log.info("task_queued", **facts)

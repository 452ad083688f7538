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

from infra.bus import Bus, Msg, publish_work
from infra.bus.calls import has_no_responders
from infra.log import Logger
from infra.task_scope import task_scope
from pipeline.work import Outgoing
from schemas import subjects
from schemas.codec import encode
from schemas.errors import BusUnavailable, MeshError, PayloadTooLarge
from schemas.headers import WorkHeaders

CLAIM_S = 1.0  # a worker that lives has claimed by then, or has put it into the queue itself
MAX_SAID = 4096  # not claimed; further ones go into the queue
_LOOK_S = 0.25


class _Said(msgspec.Struct, frozen=True):
    """A task that was said and is not known to be claimed."""

    outgoing: Outgoing
    headers: WorkHeaders
    payload: bytes
    to: str  # subject of its worker's queue
    due_s: float


class Dispatch:
    """What this process has said directly."""

    def __init__(self, bus: Bus, log: Logger) -> None:
        self._bus = bus
        self._log = log
        self._inbox = bus.new_inbox()  # where the broker says that nobody listens
        self._said: dict[str, _Said] = {}  # by request, oldest first
        self._some_said = asyncio.Event()
        self._overdue: OrderedDict[str, None] = OrderedDict()  # of what was said, each once
        self._some_overdue = asyncio.Event()

    def __len__(self) -> int:
        return len(self._said)

    def say(self, outgoing: Outgoing, headers: WorkHeaders, to: str) -> bool:
        """Say the task ``outgoing`` to the worker whose queue has the subject ``to``. If nothing
        comes of that, it is queued as ``outgoing`` says: rather for all than for that worker.

        Returns:
            False when it can't be said: it is to be queued.
        """
        request_id, payload = headers.request_id, encode(outgoing.message)
        wire, reply = headers.to_dict(outgoing.msg_id), f"{self._inbox}.{request_id}"
        if len(self._said) >= MAX_SAID:
            return False
        try:
            self._bus.say(subjects.direct(to), payload, wire, reply)
        except (BusUnavailable, PayloadTooLarge):
            return False
        due_s = time.monotonic() + CLAIM_S
        self._said[request_id] = _Said(outgoing, headers, payload, to, due_s)
        self._some_said.set()
        return True

    def heard(self, request_id: str) -> None:
        """A request was claimed, or has ended."""
        self._said.pop(request_id, None)

    def lost(self, worker: str) -> None:
        """A worker is gone: it will claim nothing more."""
        for request_id, said in self._said.items():
            if said.to.endswith(f".{worker}"):
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
        outgoing = said.outgoing
        facts = {"request_id": request_id, "subject": outgoing.subject}
        try:
            await publish_work(
                self._bus, outgoing.subject, said.payload, said.headers, outgoing.msg_id
            )
        except MeshError as error:  # whoever waits for it asks again
            self._log.warning("task_not_queued", reason=error.message, **facts)
        else:
            self._log.info("task_queued", **facts)

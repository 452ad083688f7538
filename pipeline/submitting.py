"""How requests get to admission: straight to a control process while that works, else by the queue.

    directly   stored nowhere. Whoever hears it answers Accepted when a worker was told its task, or
               the queue has it; what must wait goes into the queue from there.
    queued     durable from then on

A request that was said directly is *open* until its stream tells of it: of its claim, its end, or
that it was accepted by way of the queue. Until then nobody has promised anything, so it is queued
here when nobody hears it, when nobody answers (``ANSWER_S``; at once when a control process is
gone), and when it stays open (``OPEN_S``).
Twice is harmless: the record is written once, and the claim decides.

While nobody answers, requests are queued; one of them is tried directly once in ``REST_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

import msgspec
import structlog

from infra.bus import Bus, Msg, Stored, publish_work
from infra.bus.calls import has_no_responders
from infra.task_scope import task_scope
from pipeline.token_stream import TokenStream
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat
from schemas.errors import BusUnavailable, MeshError, PayloadTooLarge, SchemaError
from schemas.headers import WorkHeaders
from schemas.tokens import Accepted

ANSWER_S = 1.0
OPEN_S = 2.5  # longer than a task may be said to a worker that does not claim it
REST_S = 5.0
_OUTAGE_S = 60.0  # that putting it into the queue waits for a broker, if its reader does
_LATE_S = 10.0  # an answer that comes so late still says that somebody is there
_LOOK_S = 0.25

log = structlog.get_logger("submitting")


class Submission(msgspec.Struct, frozen=True):
    """A request as it is published, and who reads it."""

    stream: TokenStream
    subject: str  # of the queue
    payload: bytes
    headers: WorkHeaders

    @property
    def msg_id(self) -> str:
        """Makes the broker drop a repeat."""
        return f"{self.headers.request_id}.admission"

    async def queue(self, bus: Bus) -> Stored:
        """Put it into the queue; raises as :func:`publish_work`."""
        return await publish_work(bus, self.subject, self.payload, self.headers, self.msg_id)


class _Open:
    """A request of which its stream has not told."""

    __slots__ = ("is_answered", "is_being_queued", "since_s", "submission")

    def __init__(self, submission: Submission, since_s: float) -> None:
        self.submission = submission
        self.since_s = since_s
        self.is_answered = False
        self.is_being_queued = False

    def is_overdue(self, now_s: float) -> bool:
        """Whether nothing seems to come of it."""
        if self.is_being_queued:
            return False
        return now_s - self.since_s > (OPEN_S if self.is_answered else ANSWER_S)


class DirectWay:
    """The requests that one client says directly."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._open: dict[TokenStream, _Open] = {}
        self._some_open = asyncio.Event()
        self._to_queue: asyncio.Queue[Submission] = asyncio.Queue()  # of what is open: no more
        self._rests_until_s = -math.inf
        self._is_resting = False

    def __len__(self) -> int:
        return len(self._open)

    def say(self, submission: Submission) -> bool:
        """Say it to whichever control process hears it.

        Returns:
            False when that can't be now: it is to be queued.
        """
        now_s = self._loop.time()
        if now_s < self._rests_until_s:
            return False
        if self._is_resting:  # this one tells whether somebody answers again
            self._rests_until_s = now_s + REST_S
        wire = submission.headers.to_dict(submission.msg_id)
        try:
            answer = self._bus.ask(
                subjects.direct(submission.subject), submission.payload, wire, _LATE_S
            )
        except (BusUnavailable, PayloadTooLarge):
            return False
        self._open[submission.stream] = _Open(submission, now_s)
        self._some_open.set()
        submission.stream.expect(self._heard_of)
        answer.add_done_callback(lambda answer: self._hear(submission, answer))
        return True

    async def run(self) -> None:
        """Queue what nothing comes of, for ever."""
        beats = await self._bus.subscribe(subjects.ALL_BEATS, self._hear_beat)
        try:
            async with task_scope() as tasks:
                tasks.create_task(self._look_for_ever(), name="open requests")
                while True:
                    submission = await self._to_queue.get()
                    tasks.create_task(self._queue(submission), name="queue a request")
        finally:
            await beats.unsubscribe()

    def _hear_beat(self, message: Msg) -> None:
        """A control process that is gone answers nothing more; which of them had heard a request is
        not known."""
        with contextlib.suppress(SchemaError):  # a newer peer's
            beat = decode(message.data, Beat)
            if beat.kind == "control" and beat.state == "gone":
                for opened in self._open.values():
                    if not opened.is_answered:
                        self._to_queue.put_nowait(opened.submission)

    def _heard_of(self, stream: TokenStream) -> None:
        self._open.pop(stream, None)

    def _hear(self, submission: Submission, answer: asyncio.Future[Msg]) -> None:
        """An answer, be it late, or the error that stands for one."""
        if answer.cancelled():
            return
        error = answer.exception()
        if error is not None or has_no_responders(answer.result()):
            self._unanswered(submission, str(error or "nobody listens"))
            return
        self._is_resting, self._rests_until_s = False, -math.inf
        opened = self._open.get(submission.stream)
        if opened is not None:
            opened.is_answered = True
        try:
            submission.stream.told(decode(answer.result().data, Accepted))
        except SchemaError:  # of a newer peer: the stream will tell
            self._to_queue.put_nowait(submission)

    def _unanswered(self, submission: Submission, reason: str) -> None:
        if submission.stream not in self._open:
            return  # its stream has told of it: it was refused, or queued for it must wait
        if not self._is_resting:
            log.info("direct_way_rests", reason=reason)
        self._is_resting, self._rests_until_s = True, self._loop.time() + REST_S
        self._to_queue.put_nowait(submission)

    async def _look_for_ever(self) -> None:
        """Queue what has been open for too long."""
        while True:
            await self._some_open.wait()
            self._some_open.clear()
            while self._open:
                await asyncio.sleep(_LOOK_S)
                now_s = self._loop.time()
                for opened in [one for one in self._open.values() if one.is_overdue(now_s)]:
                    if opened.is_answered:
                        self._to_queue.put_nowait(opened.submission)
                    else:
                        self._unanswered(opened.submission, f"no answer in {ANSWER_S:g} s")

    async def _queue(self, submission: Submission) -> None:
        """Queue what is still open, through an outage; whoever reads it is told why it can't be."""
        stream = submission.stream
        opened = self._open.get(stream)
        if opened is None or opened.is_being_queued:
            return
        opened.is_being_queued = True
        ends_s = self._loop.time() + _OUTAGE_S
        while stream in self._open:  # else it was heard of, or left
            try:
                await submission.queue(self._bus)
            except BusUnavailable as error:
                left_s = ends_s - self._loop.time()
                if left_s > 0 and await self._bus.until_connected(left_s):
                    continue
                stream.fail(error)
            except MeshError as error:
                stream.fail(error)
            stream.note_heard()

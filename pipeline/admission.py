"""Admission: who asks for what, what it becomes in tokens, may it enter, and when may it go.

Consumes   mesh.v1.admission.<model>                      InferenceRequest (MessagePack or JSON)
Hears      mesh.v1.direct.admission.<model>               the same, without the queue
Publishes  mesh.v1.request.<id>                           RequestRecord, once; of what came
                                                          directly its worker does
           mesh.v1.token-stream.<reader>.tokens           Accepted
           mesh.v1.token-stream.<reader>.claim.<id>       StreamError, when refused
           mesh.v1.prefill.<model@rev>.<worker|any>       PrefillTask
           mesh.v1.direct.prefill.<model@rev>.<worker>    the same, for what came directly
Answers    Accepted, to what came directly
Keeps      who waits (pipeline/doorkeeper.py); their messages are un-acked meanwhile
Twice?     the record is written once; a repeat publishes the same Accepted and task again
Fails      ModelNotFound, InvalidRequest, ContextTooLong, QueueFull, OverBudget -> StreamError
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec.structs import replace

from infra.bus import DirectMessage, WorkMessage
from pipeline.acceptance import accepted_of, told_in_stream
from pipeline.backlog import Backlog
from pipeline.degradation import UNKNOWN_S, error_of
from pipeline.dispatch import Dispatch
from pipeline.doorkeeper import Doorkeeper
from pipeline.placement import PrefillPlace
from pipeline.policy import Policies
from pipeline.prompt_reader import PromptReader
from pipeline.records import prefill_task, record_of
from pipeline.registry import Registry
from pipeline.stage import Handled, Outgoing, StageContext, Work
from pipeline.verdict import Ask, Clamp, Fallback, Refuse, Verdict, Wait
from schemas import subjects
from schemas.codec import decode, decode_json, is_json, tag_of, unpack_ids
from schemas.errors import InvalidRequest, MeshError, NoCapacity, QueueFull, SchemaError
from schemas.headers import REQUEST, TRACEPARENT, WorkHeaders
from schemas.models import ModelCard
from schemas.requests import InferenceRequest, RequestRecord, Slo

_MOMENT_S = 0.25  # that one waits for a worker which came directly; then it goes into the queue


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A request that may enter, or did before.

    Args:
        is_admitted: by the budget; else it waits for that.
        asked_max_tokens: before they were cut for lack of room; 0: they were not.
    """

    record: RequestRecord
    ask: Ask
    is_new: bool = True
    is_admitted: bool = True
    asked_max_tokens: int = 0


class Admission:
    """The admission stage's handler.

    Args:
        dispatch: says tasks of requests that came directly to their workers.
    """

    def __init__(
        self,
        ctx: StageContext,
        registry: Registry,
        reader: PromptReader,
        *,
        backlog: Backlog,
        door: Doorkeeper,
        policies: Policies,
        dispatch: Dispatch,
    ) -> None:
        self._ctx = ctx
        self._registry = registry
        self._reader = reader
        self._backlog = backlog
        self._door = door
        self._policies = policies
        self._dispatch = dispatch

    def parse(self, message: WorkMessage, data: bytes) -> Work[InferenceRequest]:
        """A request as MessagePack or JSON; headers are optional on this subject."""
        request = (decode_json if is_json(data) else decode)(data, InferenceRequest)
        subjects.check_request_id(request.request_id)
        reader = subjects.check_reader(
            request.reader or subjects.default_reader(request.request_id)
        )
        if message.subject != subjects.admission(request.model):
            raise SchemaError(f"model {request.model!r} has another subject", param="model")
        stated = message.headers.get(REQUEST)
        if stated is not None and stated != request.request_id:
            raise SchemaError("header and body name two requests", param=REQUEST)
        headers = WorkHeaders(
            schema=tag_of(InferenceRequest),
            request_id=request.request_id,
            epoch=0,
            deadline_unix_ms=self._deadline(request),
            traceparent=message.headers.get(TRACEPARENT, ""),
        )
        return Work(
            subject=message.subject,
            message=request if request.reader else replace(request, reader=reader),
            headers=headers,
            is_direct=isinstance(message, DirectMessage),
        )

    @staticmethod
    def reader_of(request: InferenceRequest) -> str:
        """Where its client listens."""
        return request.reader or subjects.default_reader(request.request_id)

    def when_full(self, request: InferenceRequest) -> QueueFull:
        """What a client hears when the broker has no place for its task."""
        return self._backlog.full(self._registry.require(request.model).served)

    async def handle(self, work: Work[InferenceRequest]) -> Handled:
        """Check, tokenize, write the record, and pass it on as soon as a worker has room.

        What is published goes one after the other, each confirmed before the next. A task before
        its record could carry another seed than the record that stands in the end. Accepted before
        the task would give a client its 200, and then the refusal of a queue that is full. Only a
        request that waits has Accepted first, for its client does not wait that long for a status;
        then it is this message that keeps the promise: it lies un-acked in the queue.
        """
        if work.is_direct:
            return await self._handle_direct(work)
        request = work.message
        try:
            entry = await self._enter(work)
        except (InvalidRequest, QueueFull):
            found = await self._ctx.chain.record(request.request_id)
            if found is None or found[1].reader != self.reader_of(request):
                raise
            entry = self._known(request, found[1])  # admitted before, when there was more room
        told = await self._accepted(request, entry)
        if entry.is_new:
            self._note_admitted(entry)
        elif await self._is_taken(entry.record):
            return _done(entry, told)
        place = self._place(entry)
        if place is not None:
            return _done(entry, prefill_task(entry.record, place), told)
        return Handled(outcome="waits", publish=(told,), then=lambda: self._wait(entry))

    def _note_admitted(self, entry: _Entry) -> None:
        self._ctx.metrics.requests_admitted.inc()
        self._ctx.metrics.prompt_tokens.observe(entry.ask.num_prompt)

    def _place(self, entry: _Entry) -> PrefillPlace | None:
        """Where it goes at once; None: it must wait."""
        if not entry.is_new and self._door.is_under_way(entry.record.request_id):
            return self._door.place(entry.record, entry.ask)  # our ack was lost, perhaps
        return self._door.enter(entry.record, entry.ask) if entry.is_admitted else None

    async def _wait(self, entry: _Entry) -> Handled:
        place = await self._door.wait(entry.record, entry.ask, is_admitted=entry.is_admitted)
        if place is None:
            return Handled(outcome="left")
        return _done(entry, prefill_task(entry.record, place))

    async def _is_taken(self, record: RequestRecord) -> bool:
        """Whether a worker has it, or it has ended: a task more would be for nothing."""
        tip = await self._ctx.chain.tip(record.reader, record.request_id)
        return tip.seq > 0

    # What came directly ----------------------------------------------------------------------

    async def _handle_direct(self, work: Work[InferenceRequest]) -> Handled:
        """The same for a request that lies in no queue. Nobody has been promised anything yet, so
        its task goes directly, too, with a record that its worker stores; Accepted is an answer,
        not a message in the stream.

        Raises:
            NoCapacity: it is to be queued: it must wait, is none that can be told so simply, or was
                admitted before.
        """
        try:
            return await self._admit_direct(work)
        except (InvalidRequest, QueueFull) as error:
            raise await self._unless_known(work.message, error) from None

    async def _unless_known(self, request: InferenceRequest, error: MeshError) -> MeshError:
        """``error`` itself, unless the request was admitted before, when there was more room: then
        it is to come by way of the queue."""
        found = await self._ctx.chain.record(request.request_id)
        if found is None or found[1].reader != self.reader_of(request):
            return error
        return NoCapacity("it was admitted before")

    async def _admit_direct(self, work: Work[InferenceRequest]) -> Handled:
        if work.message.echo:
            raise NoCapacity("what is given back goes through the stream")
        entry = await self._judged(work)
        record = entry.record
        if entry.asked_max_tokens or record.model != work.message.model:
            self._door.drop(record.request_id)
            raise NoCapacity("what it became goes through the stream")
        try:
            await self._backlog.enter(record.served)
        except MeshError:
            self._door.drop(record.request_id)
            raise
        place = self._door.enter(record, entry.ask) if entry.is_admitted else None
        if place is not None:
            return await self._send(work, entry, place)
        return Handled(outcome="waits", then=lambda: self._wait_a_moment(work, entry))

    async def _wait_a_moment(self, work: Work[InferenceRequest], entry: _Entry) -> Handled:
        record, place = entry.record, None
        try:
            async with asyncio.timeout(_MOMENT_S):
                place = await self._door.wait(record, entry.ask, is_admitted=entry.is_admitted)
        except TimeoutError:
            raise NoCapacity("no worker has room now") from None
        except QueueFull as error:
            raise await self._unless_known(work.message, error) from None
        return Handled(outcome="left") if place is None else await self._send(work, entry, place)

    async def _send(
        self, work: Work[InferenceRequest], entry: _Entry, place: PrefillPlace
    ) -> Handled:
        """To its worker, which stores its record; else as what comes by way of the queue."""
        record, answer = entry.record, accepted_of(entry.record)
        if self._dispatch.say(record, place, work.headers):
            self._note_admitted(entry)
            return Handled(outcome="admitted", answer=answer)
        try:
            if await self._ctx.chain.write_record(record) is not record:
                raise NoCapacity("it was admitted before")
        except MeshError:
            self._door.drop(record.request_id)
            self._door.hear_end(record.request_id, None)
            raise
        self._note_admitted(entry)
        task = prefill_task(record, place)
        return Handled(outcome="admitted", publish=(task,), answer=answer)

    # What it becomes -------------------------------------------------------------------------

    async def _enter(self, work: Work[InferenceRequest]) -> _Entry:
        """The request with its record written, if it may enter."""
        entry = await self._judged(work)
        record = entry.record
        try:
            await self._backlog.enter(record.served)
            stands = await self._ctx.chain.write_record(record)
        except MeshError:
            self._door.drop(record.request_id)
            raise
        return entry if stands is record else self._known(work.message, stands)

    def _known(self, request: InferenceRequest, record: RequestRecord) -> _Entry:
        """A request that was accepted before; whatever the budget says now, that stands."""
        age_s = (self._ctx.bus.now_unix_ms() - record.admitted_unix_ms) / 1000
        ask = self._door.ask(record, age_s=max(0.0, age_s))
        self._door.admit(ask)
        asked, given = request.sampling.max_tokens or 0, record.sampling.max_tokens or 0
        was_cut = asked > given and record.model == request.model
        return _Entry(
            record=record, ask=ask, is_new=False, asked_max_tokens=asked if was_cut else 0
        )

    async def _judged(self, work: Work[InferenceRequest]) -> _Entry:
        """What the budget lets become of it: with fewer tokens, or by another model, maybe.

        Raises:
            OverBudget, SloUnreachable: nothing.
        """
        request = work.message
        card = self._registry.require(request.model)
        slo = self._policies.of(card.name).slo_of(request.slo)
        entry, verdict = await self._read(work, card, slo)
        if isinstance(verdict, Fallback):
            card = self._registry.require(verdict.model)
            entry, verdict = await self._read(work, card, slo, asked_model=request.model)
        if isinstance(verdict, Fallback):  # of a fallback: one is enough
            verdict = Refuse(
                retry_after_s=UNKNOWN_S, reason="another model would do", shortage=verdict.shortage
            )
        if isinstance(verdict, Refuse):
            raise error_of(verdict, entry.record.served)
        if isinstance(verdict, Clamp):
            return _clamped(entry, verdict.max_tokens)
        return replace(entry, is_admitted=False) if isinstance(verdict, Wait) else entry

    async def _read(
        self, work: Work[InferenceRequest], card: ModelCard, slo: Slo, asked_model: str = ""
    ) -> tuple[_Entry, Verdict]:
        """The request as one for ``card``, and what the budget says to it."""
        record = record_of(
            work.message,
            card,
            await self._reader.read(work.message, card),
            reader=self.reader_of(work.message),
            slo=slo,
            admitted_unix_ms=self._ctx.bus.now_unix_ms(),
            deadline_unix_ms=work.headers.deadline_unix_ms,
            is_direct=work.is_direct,
        )
        ask = self._door.ask(record, asked_model=asked_model)
        return _Entry(record=record, ask=ask), self._door.judge(ask)

    async def _accepted(self, request: InferenceRequest, entry: _Entry) -> Outgoing:
        record, echo = entry.record, None
        if request.echo:
            card = self._registry.require(record.model)
            echo = await self._reader.text_of(unpack_ids(record.prompt_ids), card)
        word = accepted_of(
            record,
            echo_text=echo,
            asked_model=request.model,
            asked_max_tokens=entry.asked_max_tokens,
        )
        return told_in_stream(word, record.reader)

    def _deadline(self, request: InferenceRequest) -> int:
        times, now = self._ctx.bus.times, self._ctx.bus.now_unix_ms()
        asked = request.deadline_unix_ms
        if asked is None:
            asked = now + int(times.default_deadline_s * 1000)
        return min(asked, now + int(times.max_deadline_s * 1000))


def _clamped(entry: _Entry, max_tokens: int) -> _Entry:
    """With ``max_tokens`` over all choices instead of what was asked for."""
    sampling = entry.record.sampling
    each = max(1, max_tokens // sampling.n)
    cut = replace(sampling, max_tokens=each)
    return replace(
        entry,
        record=replace(entry.record, sampling=cut),
        ask=replace(entry.ask, max_tokens=each * sampling.n),
        asked_max_tokens=sampling.max_tokens or 0,
    )


def _done(entry: _Entry, *publish: Outgoing) -> Handled:
    return Handled(outcome="admitted" if entry.is_new else "repeated", publish=publish)

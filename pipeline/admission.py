"""Admission: who asks for what, what it becomes in tokens, may it enter.

Consumes   mesh.v1.admission.<model>                      InferenceRequest (MessagePack or JSON)
Publishes  mesh.v1.request.<id>                           RequestRecord, once
           mesh.v1.token-stream.<reader>.tokens           Accepted
           mesh.v1.token-stream.<reader>.claim.<id>       StreamError, when refused
           mesh.v1.prefill.<model@rev>.<worker|any>       PrefillTask
Keeps      nothing between messages
Twice?     the record is written once; a repeat publishes the same Accepted and task again
Fails      ModelNotFound, InvalidRequest, ContextTooLong, QueueFull -> StreamError to the client
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from infra.bus import WorkMessage, WrongLastSequence
from pipeline.backlog import Backlog
from pipeline.limits import SequenceLimit, check_priority, check_sampling, check_token_ids
from pipeline.placement import Placement
from pipeline.registry import Registry
from pipeline.response_format import FormatChecks
from pipeline.stage import Handled, Outgoing, StageContext, Work
from pipeline.tokenizing import ChatTokenizer
from schemas import subjects
from schemas.codec import decode, decode_json, encode, is_json, pack_ids, tag_of, unpack_ids
from schemas.errors import ContextTooLong, InvalidRequest, QueueFull, SchemaError
from schemas.headers import REQUEST, TRACEPARENT, WorkHeaders
from schemas.models import ModelCard
from schemas.prefill import PrefillTask
from schemas.requests import (
    MAX_READER_NOTE_BYTES,
    InferenceRequest,
    RequestRecord,
    SamplingParams,
)
from schemas.tokens import Accepted

INLINE_IDS_BYTES = 64 * 1024  # a longer prompt is read from the record instead of the task
_LONG_TEXT_CHARS = 2_000  # tokenized on another thread, so that the loop goes on
_LONG_TEXT_TOKENS = 500


class Admission:
    """The admission stage's handler.

    Args:
        tokenizers: by model folder; filled by :meth:`load` for each model that is registered.
    """

    def __init__(
        self, ctx: StageContext, registry: Registry, placement: Placement, backlog: Backlog
    ) -> None:
        self._ctx = ctx
        self._backlog = backlog
        self._registry = registry
        self._placement = placement
        self._tokenizers: dict[str, ChatTokenizer] = {}
        self._formats = FormatChecks()

    def load(self, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        """Be able to admit requests for ``card``."""
        self._tokenizers[card.served] = tokenizer

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
            message=msgspec.structs.replace(request, reader=reader),
            headers=headers,
        )

    @staticmethod
    def reader_of(request: InferenceRequest) -> str:
        """Where its client listens."""
        return request.reader or subjects.default_reader(request.request_id)

    async def handle(self, work: Work[InferenceRequest]) -> Handled:
        """Check, tokenize, write the record, pass it on."""
        request = work.message
        card = self._registry.require(request.model)
        tokenizer = await self.tokenizer_of(card)
        try:
            record, is_new = await self._write_record(await self._check(work, card, tokenizer))
        except (InvalidRequest, QueueFull):
            found = await self._ctx.chain.record(request.request_id)
            if found is None or found[1].reader != self.reader_of(request):
                raise
            record, is_new = found[1], False  # admitted before, when there was more room
        prompt_ids = unpack_ids(record.prompt_ids)
        if is_new:
            self._ctx.metrics.requests_admitted.inc()
            self._ctx.metrics.prompt_tokens.observe(len(prompt_ids))
        echo = await _decode(tokenizer, prompt_ids) if request.echo else None
        outcome = "admitted" if is_new else "repeated"
        return Handled(outcome=outcome, publish=self._next(record, echo))

    def when_full(self, request: InferenceRequest) -> QueueFull:
        """What a client hears when the broker has no place for its task."""
        return self._backlog.full(self._registry.require(request.model).served)

    async def _check(
        self, work: Work[InferenceRequest], card: ModelCard, tokenizer: ChatTokenizer
    ) -> RequestRecord:
        """The record that ``work`` asks for, if it may enter."""
        request = work.message
        check_sampling(request.sampling)
        check_priority(request.priority)
        if len(request.reader_note) > MAX_READER_NOTE_BYTES:
            raise InvalidRequest(f"over {MAX_READER_NOTE_BYTES} bytes", param="reader_note")
        await self._formats.check(request.sampling.response_format)
        prompt_ids = await self._tokenize(request, card, tokenizer)
        sampling = self._resolve(request, len(prompt_ids), card)
        await self._backlog.enter(card.served)
        return RequestRecord(
            request_id=request.request_id,
            model=card.name,
            revision=card.revision,
            served=card.served,
            prompt_ids=pack_ids(prompt_ids),
            sampling=sampling,
            reader=self.reader_of(request),
            admitted_unix_ms=self._ctx.bus.now_unix_ms(),
            deadline_unix_ms=work.headers.deadline_unix_ms,
            tenant=request.tenant,
            priority=request.priority,
            label=request.label[:256],
            cache_salt=request.cache_salt,
            cost=_cost(sampling, len(prompt_ids)),
            reader_note=request.reader_note,
        )

    def _resolve(
        self, request: InferenceRequest, num_prompt: int, card: ModelCard
    ) -> SamplingParams:
        held = self._placement.max_sequence_tokens(card.served)
        limit = SequenceLimit.of(card, held)
        prompt_field = "prompt" if request.messages is None else "messages"
        return limit.resolve(request.sampling, num_prompt, prompt_field)

    async def tokenizer_of(self, card: ModelCard) -> ChatTokenizer:
        """The tokenizer of a registered model; read from its folder the first time."""
        found = self._tokenizers.get(card.served)
        if found is None:  # registered by another control process
            found = await asyncio.to_thread(ChatTokenizer, Path(card.folder))
            self.load(card, found)
        return found

    async def _tokenize(
        self, request: InferenceRequest, card: ModelCard, tokenizer: ChatTokenizer
    ) -> list[int]:
        if (request.messages is None) == (request.prompt is None):
            raise InvalidRequest("give either messages or prompt", param="messages")
        if request.messages is not None:
            text = tokenizer.render_chat(request.messages)
            ids = await _encode(tokenizer, text, card, add_special=False)
        elif isinstance(request.prompt, str):
            ids = await _encode(tokenizer, request.prompt, card, add_special=True)
        else:
            check_token_ids("prompt", request.prompt or (), card.vocab_size)
            ids = list(request.prompt or ())
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        sampling = request.sampling
        check_token_ids("stop_token_ids", sampling.stop_token_ids, card.vocab_size)
        check_token_ids("logit_bias", tuple(sampling.logit_bias), card.vocab_size)
        return ids

    async def _write_record(self, record: RequestRecord) -> tuple[RequestRecord, bool]:
        """Write the record.

        Returns:
            The one that stands, which was written first, and whether that was now.
        """
        try:
            await self._ctx.bus.publish_stored(
                subjects.request_record(record.request_id),
                encode(record),
                expect_last_subject_seq=0,
            )
        except WrongLastSequence as error:
            found = await self._ctx.chain.record(record.request_id, at_least_seq=error.last_seq)
            if found is None or found[1].reader != record.reader:
                raise InvalidRequest("this request id is in use", param="request_id") from None
            return found[1], False
        return record, True

    def _next(self, record: RequestRecord, echo: str | None) -> tuple[Outgoing, ...]:
        """The task first: a client that hears Accepted has its request in the queue."""
        request_id = record.request_id
        accepted = Accepted(
            request_id=request_id,
            model=record.model,
            revision=record.revision,
            prompt_tokens=len(record.prompt_ids) // 4,
            max_tokens=record.sampling.max_tokens or 0,
            admitted_unix_ms=record.admitted_unix_ms,
            deadline_unix_ms=record.deadline_unix_ms,
            echo_text=echo,
        )
        place = self._placement.place_prefill(record)
        task = PrefillTask(
            request_id=request_id,
            epoch=1,
            after_seq=0,
            reader=record.reader,
            record=record if len(record.prompt_ids) <= INLINE_IDS_BYTES else None,
            kv_sources=place.sources,
        )
        return (
            Outgoing(
                subject=subjects.prefill(record.served, place.worker),
                message=task,
                msg_id=f"{request_id}.prefill.1",
                epoch=1,
            ),
            Outgoing(
                subject=subjects.token_stream(record.reader),
                message=accepted,
                msg_id=f"{request_id}.accepted",
            ),
        )

    def _deadline(self, request: InferenceRequest) -> int:
        times, now = self._ctx.bus.times, self._ctx.bus.now_unix_ms()
        asked = request.deadline_unix_ms
        if asked is None:
            asked = now + int(times.default_deadline_s * 1000)
        return min(asked, now + int(times.max_deadline_s * 1000))


async def _encode(
    tokenizer: ChatTokenizer, text: str, card: ModelCard, *, add_special: bool
) -> list[int]:
    least = tokenizer.least_num_tokens(text)
    if least > card.context_length:
        raise ContextTooLong(
            f"the prompt has over {least} tokens, the context of {card.name} is "
            f"{card.context_length}",
            param="messages",
        )
    if len(text) < _LONG_TEXT_CHARS:
        return tokenizer.encode(text, add_special=add_special)
    return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special)


async def _decode(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    if len(ids) < _LONG_TEXT_TOKENS:
        return tokenizer.decode(ids)
    return await asyncio.to_thread(tokenizer.decode, ids)


def _cost(params: SamplingParams, num_prompt: int) -> float:
    """The default cost model ``2 p^2 + p m``, with no prefix known to be cached."""
    num_new = (params.max_tokens or 0) * params.n
    return 2.0 * num_prompt**2 + float(num_prompt) * num_new

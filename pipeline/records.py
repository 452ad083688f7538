"""What admission writes: the record, the word to the client, the task. Pure."""

from __future__ import annotations

from pipeline.cost_model import quadratic_cost
from pipeline.placement import PrefillPlace
from pipeline.prefix_hash import ID_BYTES
from pipeline.prompt_reader import Prompt
from pipeline.stage import Outgoing
from schemas import subjects
from schemas.models import ModelCard
from schemas.prefill import PrefillTask
from schemas.requests import InferenceRequest, RequestRecord, Slo
from schemas.tokens import Accepted

INLINE_IDS_BYTES = 64 * 1024  # a longer prompt is read from the record instead of the task
_MAX_LABEL = 256


def record_of(
    request: InferenceRequest,
    card: ModelCard,
    prompt: Prompt,
    *,
    reader: str,
    slo: Slo,
    admitted_unix_ms: int,
    deadline_unix_ms: int,
) -> RequestRecord:
    """The record of a request that ``card`` is to answer."""
    sampling = prompt.sampling
    return RequestRecord(
        request_id=request.request_id,
        model=card.name,
        revision=card.revision,
        served=card.served,
        prompt_ids=prompt.packed_ids,
        sampling=sampling,
        reader=reader,
        admitted_unix_ms=admitted_unix_ms,
        deadline_unix_ms=deadline_unix_ms,
        tenant=request.tenant,
        priority=request.priority,
        label=request.label[:_MAX_LABEL],
        cache_salt=request.cache_salt,
        cost=quadratic_cost(prompt.num_tokens, (sampling.max_tokens or 0) * sampling.n),
        reader_note=request.reader_note,
        slo=slo,
    )


def accepted(
    record: RequestRecord, *, echo_text: str | None, asked_model: str, asked_max_tokens: int
) -> Outgoing:
    """The word to a request's reader that it was accepted.

    Args:
        asked_model: what the client named; said where another answers.
        asked_max_tokens: before they were cut for lack of room; 0: they were not.
    """
    message = Accepted(
        request_id=record.request_id,
        model=record.model,
        revision=record.revision,
        prompt_tokens=len(record.prompt_ids) // ID_BYTES,
        max_tokens=record.sampling.max_tokens or 0,
        admitted_unix_ms=record.admitted_unix_ms,
        deadline_unix_ms=record.deadline_unix_ms,
        echo_text=echo_text,
        asked_model=asked_model if asked_model != record.model else "",
        asked_max_tokens=asked_max_tokens,
    )
    return Outgoing(
        subject=subjects.token_stream(record.reader),
        message=message,
        msg_id=f"{record.request_id}.accepted",
    )


def prefill_task(record: RequestRecord, place: PrefillPlace) -> Outgoing:
    """The task of a request, for the worker that was chosen or whichever pulls first."""
    task = PrefillTask(
        request_id=record.request_id,
        epoch=1,
        after_seq=0,
        reader=record.reader,
        record=record if len(record.prompt_ids) <= INLINE_IDS_BYTES else None,
        kv_sources=place.sources,
        overtakes=place.overtakes,
    )
    return Outgoing(
        subject=subjects.prefill(record.served, place.worker),
        message=task,
        msg_id=f"{record.request_id}.prefill.1",
        epoch=1,
    )

"""What admission writes: the record and the task. Pure."""

from __future__ import annotations

from pipeline.cost_model import quadratic_cost
from pipeline.placement import PrefillPlace
from pipeline.prompt_reader import Prompt
from pipeline.stage import Outgoing
from schemas import subjects
from schemas.models import ModelCard
from schemas.prefill import PrefillTask
from schemas.requests import InferenceRequest, RequestRecord, Slo

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
    is_direct: bool = False,
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
        is_direct=is_direct,
    )


def is_inline(record: RequestRecord) -> bool:
    """Whether its task carries it."""
    return len(record.prompt_ids) <= INLINE_IDS_BYTES


def prefill_task(
    record: RequestRecord, place: PrefillPlace, *, is_recorded: bool = True
) -> Outgoing:
    """The task of a request, for the worker that was chosen or whichever pulls first.

    Args:
        is_recorded: the record is stored; else it must be inline.
    """
    task = PrefillTask(
        request_id=record.request_id,
        epoch=1,
        after_seq=0,
        reader=record.reader,
        record=record if is_inline(record) else None,
        kv_sources=place.sources,
        overtakes=place.overtakes,
        is_recorded=is_recorded,
    )
    return Outgoing(
        subject=subjects.prefill(record.served, place.worker),
        message=task,
        msg_id=f"{record.request_id}.prefill.1",
        epoch=1,
    )

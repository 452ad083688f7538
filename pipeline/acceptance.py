"""Admission's word to a reader that its request is in. Pure."""

from __future__ import annotations

from pipeline.prefix_hash import ID_BYTES
from pipeline.work import Outgoing
from schemas import subjects
from schemas.requests import RequestRecord
from schemas.tokens import Accepted


def accepted_of(
    record: RequestRecord,
    *,
    echo_text: str | None = None,
    asked_model: str = "",
    asked_max_tokens: int = 0,
) -> Accepted:
    """The word to a request's reader that it was accepted.

    Args:
        asked_model: what the client named; said where another answers.
        asked_max_tokens: before they were cut for lack of room; 0: they were not.
    """
    return Accepted(
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


def told_in_stream(word: Accepted, reader: str) -> Outgoing:
    """``word`` as one that is stored among the tokens of ``reader``."""
    return Outgoing(
        subject=subjects.token_stream(reader), message=word, msg_id=f"{word.request_id}.accepted"
    )

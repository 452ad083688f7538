"""What changes logits before temperature: bias, penalties, and what may not be said now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from schemas.errors import EngineFailed
from schemas.requests import SamplingParams
from workers.engine.api import ScheduledSequence

_FEW = 1024  # allowed ids of one row that are rather picked than the others forbidden


def adjust_logits(
    logits: Tensor, rows: Sequence[ScheduledSequence], eos_token_ids: frozenset[int]
) -> Tensor:
    """Apply logit bias, then penalties, then masks: ``min_tokens``, and the ids that a row allows.

    Args:
        logits: [num_rows, vocab_size], any float dtype; not changed.

    Returns:
        [num_rows, vocab_size] float32; ``logits`` itself when it is that and nothing applies.
    """
    adjusted = logits.float()
    is_copy = adjusted is not logits
    for number, row in enumerate(rows):
        banned = _banned_ids(row, eos_token_ids)
        is_masked = bool(banned) or row.allowed is not None
        if row.sampling.logit_bias or _has_penalty(row.sampling) or is_masked:
            if not is_copy:
                adjusted, is_copy = adjusted.clone(), True
            _adjust_row(adjusted[number], row, banned)
    return adjusted


def _adjust_row(logits: Tensor, row: ScheduledSequence, banned: frozenset[int]) -> None:
    """logits: [vocab_size] float32, changed in place. Ids outside the vocabulary change nothing."""
    bias = {i: value for i, value in row.sampling.logit_bias.items() if 0 <= i < len(logits)}
    if bias:
        logits[list(bias)] += torch.tensor(list(bias.values()))
    if _has_penalty(row.sampling):
        _penalize(logits, row)
    within = [token_id for token_id in banned if 0 <= token_id < len(logits)]
    if row.allowed is None:
        logits[within] = -torch.inf
    else:
        _keep_allowed(logits, row.allowed, within)


def _keep_allowed(logits: Tensor, allowed: bytes, banned: list[int]) -> None:
    """Forbid all but ``allowed``, and of these the ``banned``, unless that leaves none."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
    kept = np.zeros(len(logits), np.bool_)
    kept[: len(bits)] = bits[: len(logits)]
    if banned:
        left = kept.copy()
        left[banned] = False
        kept = left if left.any() else kept
    num_kept = int(np.count_nonzero(kept))
    if num_kept == 0:
        raise EngineFailed("the format allows no token that this model has")
    if num_kept <= _FEW:  # 12 us in place of 60
        ids = torch.from_numpy(np.flatnonzero(kept)).to(logits.device)
        values = logits[ids]
        logits.fill_(-torch.inf)
        logits[ids] = values
    else:
        logits.masked_fill_(torch.from_numpy(~kept).to(logits.device), -torch.inf)


def _penalize(logits: Tensor, row: ScheduledSequence) -> None:
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:  # of prompt and answer
        seen = torch.from_numpy(np.unique(np.asarray(row.token_ids, np.int64)))
        values = logits[seen]
        factor = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    answer = np.asarray(row.token_ids[row.num_prompt_tokens :], np.int64)
    if len(answer) and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(answer, return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[torch.from_numpy(ids)] -= torch.from_numpy(penalty.astype(np.float32))


def _has_penalty(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _banned_ids(row: ScheduledSequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """What would end the answer before ``min_tokens``."""
    sampling = row.sampling
    if row.token_number >= sampling.min_tokens:
        return frozenset()
    ends = frozenset(sampling.stop_token_ids)
    return ends if sampling.ignore_eos else ends | eos_token_ids

"""One prompt through two runners: the guard against a wrong compiler, processor or kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from schemas.requests import SamplingParams
from workers.engine.api import ScheduledSequence

_EDGES = (0, 9, 20, 21)  # a chunk, a chunk behind it, a decode
# Rounding gives 1e-10, 0.002 and (4-bit weights, against bf16) the same; a wrong kernel above 1.
_MOST_DIVERGENCE = {"float32": 1e-5, "bfloat16": 0.01, "q4": 0.01, "q4-exact": 1e-5}


class _ComputesLogits(Protocol):
    def logits(self, batch: Sequence[ScheduledSequence]) -> Tensor: ...


def num_blocks_needed(block_size: int) -> int:
    """Blocks of the pool that :func:`probe_logits` writes to."""
    return -(-_EDGES[-1] // block_size)


def probe_logits(runner: _ComputesLogits, *, block_size: int, vocab_size: int) -> Tensor:
    """The logits [n, vocab_size] of a fixed prompt at some positions. Blocks
    ``[0, num_blocks_needed)`` of the runner's pool are overwritten."""
    token_ids = [number * 37 % vocab_size for number in range(_EDGES[-1])]
    rows = [
        runner.logits(
            [
                ScheduledSequence(
                    token_ids=token_ids,
                    num_prompt_tokens=len(token_ids),
                    block_table=range(num_blocks_needed(block_size)),
                    start=start,
                    count=end - start,
                    sample=True,
                    sampling=SamplingParams(max_tokens=1, seed=0),
                    index=0,
                )
            ]
        )
        for start, end in pairwise(_EDGES)
    ]
    return torch.cat(rows).float()


def divergence(expected: Tensor, got: Tensor) -> float:
    """The mean Kullback-Leibler divergence of the distributions behind two [n, vocab_size] logits,
    in nats; not-a-number where either has one."""
    p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def agrees(expected: Tensor, got: Tensor, dtype: str) -> bool:
    """Whether two results of :func:`probe_logits` differ by no more than rounding in ``dtype``:
    of the KV layout, or its ``weights``."""
    return divergence(expected, got) <= _MOST_DIVERGENCE[dtype]

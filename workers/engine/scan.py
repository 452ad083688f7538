"""What sampling asks of a whole vocabulary: the likeliest, what all weigh, the first in order.

Nothing else in sampling looks at every logit, so this is what takes its time: torch answers it for
any runner, the native library for its own, several times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.candidates import Candidates, likeliest

RUN = 1024
"""Tokens whose weights are told as one sum."""

_SLAB = 8  # rows whose weights are made at a time, so that they stay in the processor's cache


@dataclass(frozen=True, slots=True)
class RunWeights:
    """What tokens weigh together: exp((logit - largest) / temperature), runs of ``RUN`` ids.

    Attributes:
        largest: [num_rows, 1] float32, the largest logit of each row.
        sums: [num_rows, num_runs] float64; the last run may have fewer ids.
    """

    largest: Tensor
    sums: Tensor


class Scan(Protocol):
    """Answers for rows of logits, [num_rows, vocab_size] float32 on the CPU. A row's answers do
    not depend on the others, bit for bit."""

    def largest(self, logits: Tensor) -> list[int]:
        """The id of each row's largest logit, the first of equals."""

    def weigh(self, logits: Tensor, temperatures: Tensor) -> RunWeights:
        """All tokens' weights. ``temperatures``: [num_rows, 1] float32, above 0."""

    def likeliest(self, logits: Tensor, at_least: int) -> Candidates:
        """As :func:`workers.engine.candidates.likeliest`."""


class TorchScan:
    """:class:`Scan` by torch."""

    def largest(self, logits: Tensor) -> list[int]:
        """See :class:`Scan`."""
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen

    def weigh(self, logits: Tensor, temperatures: Tensor) -> RunWeights:
        """See :class:`Scan`. One thread makes a run's sum, so it is the same in every batch."""
        slabs = list(_slabs(logits, temperatures))
        return RunWeights(
            torch.cat([slab.largest for slab in slabs]), torch.cat([slab.sums for slab in slabs])
        )

    def likeliest(self, logits: Tensor, at_least: int) -> Candidates:
        """See :class:`Scan`."""
        return likeliest(logits, at_least)


TORCH_SCAN = TorchScan()


def weights(logits: Tensor, largest: Tensor, temperatures: Tensor) -> Tensor:
    """exp((logit - largest) / temperature): probabilities up to a factor per row, float32."""
    return (logits - largest).div_(temperatures).exp_()


def _slabs(logits: Tensor, temperatures: Tensor) -> Iterator[RunWeights]:
    missing = -logits.shape[1] % RUN
    for first in range(0, len(logits), _SLAB):
        share = logits[first : first + _SLAB]
        largest = share.amax(-1, keepdim=True)
        all_weights = weights(share, largest, temperatures[first : first + _SLAB])
        padded = F.pad(all_weights, (0, missing)) if missing else all_weights  # pad always copies
        yield RunWeights(largest, padded.view(len(share), -1, RUN).sum(-1, dtype=torch.float64))

"""One step's numbers in one array, so that they are one copy to the device.

::

    token_ids[rows] positions[rows] owners[rows] | ends[n] starts_of_rows[n + 1] | logits_rows[m] |
    block_table[n, width]

``owners`` names each row's sequence; ``ends`` is how many tokens each sequence has in the cache
after the step. All int64, without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.engine.api import ScheduledSequence
from workers.engine.device.batch import Share
from workers.engine.sequence import num_blocks_for

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a step's arrays, and how its sequences are attended; equal ones can be replayed."""

    num_rows: int
    num_sequences: int
    width: int  # blocks per line of the table
    num_logits: int
    shares: tuple[Share, ...]
    max_q: int
    max_k: int
    num_keys: int | None  # of all sequences; None where the shape stands for many steps

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the arrays, in order."""
        rows, n = self.num_rows, self.num_sequences
        return (rows, rows, rows, n, n + 1, self.num_logits, n * self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The arrays as views of the one tensor, on any device."""

    token_ids: Tensor
    positions: Tensor
    owners: Tensor
    ends: Tensor
    first_rows: Tensor  # [n + 1]
    logits_rows: Tensor
    block_table: Tensor  # [n, width]

    @classmethod
    def of(cls, numbers: Tensor, shape: StepShape) -> StepInputs:
        """numbers: [sum(shape.sizes)] int64."""
        parts = torch.split(numbers, list(shape.sizes))
        ids, positions, owners, ends, first_rows, logits_rows, table = parts
        return cls(
            token_ids=ids,
            positions=positions,
            owners=owners,
            ends=ends,
            first_rows=first_rows,
            logits_rows=logits_rows,
            block_table=table.view(shape.num_sequences, shape.width),
        )


def pack_step(batch: Seq[ScheduledSequence], block_size: int) -> tuple[StepShape, Numbers]:
    """Decodes first, then chunks; logits for the sequences that sample, in batch order, and behind
    these for the positions that are ``scored``."""
    order = sorted(range(len(batch)), key=lambda number: batch[number].count > 1)
    packed = [batch[number] for number in order]
    counts = np.array([one.count for one in packed], np.int64)
    ends = np.array([one.start + one.count for one in packed], np.int64)
    first_rows = np.concatenate([[0], counts.cumsum()])
    logits_rows = _logits_rows(batch, order, first_rows[1:] - 1)
    width = num_blocks_for(int(ends.max()), block_size)
    shape = StepShape(
        num_rows=int(counts.sum()),
        num_sequences=len(batch),
        width=width,
        num_logits=len(logits_rows),
        shares=_shares(counts, ends, block_size),
        max_q=int(counts.max()),
        max_k=int(ends.max()),
        num_keys=int(ends.sum()),
    )
    numbers = np.concatenate(
        [
            [token for one in packed for token in one.token_ids[one.start : one.start + one.count]],
            *(np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)),
            np.repeat(np.arange(len(batch)), counts),
            ends,
            first_rows,
            logits_rows,
            *(_line(one, width, block_size) for one in packed),
        ],
        dtype=np.int64,
    )
    return shape, numbers


def pack_decodes(
    batch: Seq[ScheduledSequence], size: tuple[int, int], block_size: int, spare_block: int
) -> tuple[StepShape, Numbers]:
    """A step of decodes alone, padded to a bucket's (batch, width): a row of logits for each
    sequence, those that don't sample and padding included, in batch order."""
    num, width = size
    padding = num - len(batch)
    shape = StepShape(
        num_rows=num,
        num_sequences=num,
        width=width,
        num_logits=num,
        shares=(Share(first=0, last=num, first_row=0, num_queries=1, num_blocks=width),),
        max_q=1,
        max_k=width * block_size,
        num_keys=None,
    )
    table = np.full((num, width), spare_block, np.int64)
    for line, one in zip(table, batch, strict=False):  # padding keeps the spare block
        line[:] = _line(one, width, block_size)
    starts = np.array([one.start for one in batch] + [0] * padding, np.int64)
    numbers = np.concatenate(
        [
            [one.token_ids[one.start] for one in batch] + [0] * padding,
            starts,
            np.arange(num),
            starts + 1,
            np.arange(num + 1),
            np.arange(num),
            table.reshape(-1),
        ],
        dtype=np.int64,
    )
    return shape, numbers


def _logits_rows(batch: Seq[ScheduledSequence], order: list[int], last_rows: Numbers) -> Numbers:
    """In batch order; last_rows: [n], in packed order."""
    in_batch_order = np.empty_like(last_rows)
    in_batch_order[order] = last_rows
    scored = [
        np.asarray(one.scored) - one.start + last_row + 1 - one.count
        for one, last_row in zip(batch, in_batch_order, strict=True)
        if one.scores is not None
    ]
    return np.concatenate([in_batch_order[[one.sample for one in batch]], *scored])


def _line(one: ScheduledSequence, width: int, block_size: int) -> Numbers:
    """The blocks in use, the last repeated: a sequence never reads what is not its own."""
    num_blocks = num_blocks_for(one.start + one.count, block_size)
    blocks = np.asarray(one.block_table[:num_blocks], np.int64)
    return np.pad(blocks, (0, width - num_blocks), mode="edge")


def _shares(counts: Numbers, ends: Numbers, block_size: int) -> tuple[Share, ...]:
    """The decodes together, each chunk by itself."""
    num_decodes = int((counts == 1).sum())
    shares = []
    if num_decodes:
        width = num_blocks_for(int(ends[:num_decodes].max()), block_size)
        shares.append(
            Share(first=0, last=num_decodes, first_row=0, num_queries=1, num_blocks=width)
        )
    row = num_decodes
    for number in range(num_decodes, len(counts)):
        count, width = int(counts[number]), num_blocks_for(int(ends[number]), block_size)
        shares.append(
            Share(first=number, last=number + 1, first_row=row, num_queries=count, num_blocks=width)
        )
        row += count
    return tuple(shares)

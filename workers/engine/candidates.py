"""The likeliest tokens of each row, in order, without sorting a vocabulary.

A lower bound of the k-th largest logit is enough: lay a row out as a table of ``4 * k`` columns,
take the largest of each column, and of these the k-th. In k columns there is one logit or more
that reaches it, so at least k do, and for logits in no special order about 1.15 k. They are
collected with one comparison; all equals of the last one are among them, so what is left out is
strictly less likely, and what is collected is a true beginning of the order.

Measured for 32 rows of 49152, one thread: 1.7 ms, where ``topk(256)`` takes 6.2 and a sort 150. The
native library does the same, number for number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_COLUMNS_PER_TOKEN = 4
MAX_EXCESS = 8
"""A row has at most so many times ``at_least`` candidates, or none."""

_LOWEST = np.finfo(np.float32).min
_BEHIND_ALL = np.uint64(2**64 - 1)
_ID_BITS = np.uint64(2**32 - 1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens in order: logit descending, id ascending. Masked tokens (-inf) are never among them.

    Attributes:
        ids: [num_rows, width] int64; 0 behind a row's count.
        logits: [num_rows, width] float32; -inf behind a row's count.
        counts: [num_rows] int64: how many each row has; 0 for a row with too many equals.
        is_all: [num_rows]: whether no other token of the row may come.
    """

    ids: Tensor
    logits: Tensor
    counts: Tensor
    is_all: Tensor


def likeliest(logits: Tensor, at_least: int) -> Candidates:
    """The ``at_least`` likeliest tokens of each row and some more, or all where there are fewer.

    A row in which more than eight times ``at_least`` tokens reach the bound (equals) has none, so
    that it does not widen the table of the others.

    Args:
        logits: [num_rows, vocab_size] float32, on the CPU.
    """
    num_rows, vocab_size = logits.shape
    bounds = _bounds(logits, at_least)
    found = np.flatnonzero(logits.numpy() >= np.maximum(bounds, _LOWEST)[:, None])
    counts = np.bincount(found // vocab_size, minlength=num_rows)
    is_narrow = counts <= MAX_EXCESS * at_least
    found = found[np.repeat(is_narrow, counts)]
    counts = np.where(is_narrow, counts, 0)

    first = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(num_rows), counts)
    ids = found - rows * vocab_size
    places = np.arange(len(found)) - np.repeat(first, counts)
    keys = np.full((num_rows, max(1, int(counts.max()))), _BEHIND_ALL)
    keys[rows, places] = _keys(logits.numpy()[rows, ids], ids)
    keys.sort(axis=1)
    is_there = np.arange(keys.shape[1]) < counts[:, None]
    table = torch.from_numpy(np.where(is_there, keys & _ID_BITS, 0).astype(np.int64))
    return Candidates(
        ids=table,
        logits=logits.gather(1, table).masked_fill_(torch.from_numpy(~is_there), -torch.inf),
        counts=torch.from_numpy(counts),
        is_all=torch.from_numpy((bounds < _LOWEST) & is_narrow),
    )


def _keys(logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """[n]: integers in ascending order are logits in descending, ids in ascending order. (numpy
    sorts integers of 64 bits with vector instructions, 20 times faster than a stable sort.)"""
    bits = (logits + np.float32(0)).view(np.uint32)  # -0 is 0
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (~ascending).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)


def _bounds(logits: Tensor, at_least: int) -> npt.NDArray[np.float32]:
    """[num_rows]: a logit that ``at_least`` tokens of the row reach; -inf for all."""
    num_rows, vocab_size = logits.shape
    if at_least >= vocab_size:
        return np.full(num_rows, -np.inf, np.float32)
    num_columns = _COLUMNS_PER_TOKEN * at_least
    table_rows = vocab_size // num_columns
    largest = logits
    if table_rows > 1:  # else each logit would be the largest of its column
        table = logits[:, : table_rows * num_columns].view(num_rows, table_rows, num_columns)
        largest = table.amax(1)
    place = largest.shape[1] - at_least
    bounds: npt.NDArray[np.float32] = np.partition(largest.numpy(), place, axis=1)[:, place]
    return bounds

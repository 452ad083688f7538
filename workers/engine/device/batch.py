"""What attention must know of one step: who asks, and where the keys lie."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.engine.kv_pool import KvPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Sequences [first, last), with equally many queries each, which lie row by row."""

    first: int
    last: int
    first_row: int
    num_queries: int
    num_blocks: int  # of the longest


@dataclass(slots=True, kw_only=True)
class PagedBatch:
    """Queries of sequence i are rows [cu_q[i], cu_q[i + 1]) and its last tokens; its keys are the
    first ``seqused_k[i]`` tokens of the blocks in line i of the table.

    ``cu_q`` [n + 1], ``seqused_k`` [n], ``block_table`` [n, width]: int32, on the device.
    ``max_q`` and ``max_k`` are bounds; ``num_keys`` is the sum of ``seqused_k``, None in a step
    that is recorded to stand for many. ``shares`` cover all rows.
    """

    cu_q: Tensor
    seqused_k: Tensor
    block_table: Tensor
    max_q: int
    max_k: int
    num_keys: int | None
    shares: tuple[Share, ...]
    _packed: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def packed_rows(self, pool: KvPool) -> tuple[Tensor, Tensor]:
        """Where the keys of all sequences lie, one sequence after the other; made once per step.

        Returns:
            [num_keys, num_kv_heads] int64, rows of ``pool.vectors`` for the keys of layer 0; and
            [n + 1] int32, where in them each sequence begins.
        """
        if self._packed is None:
            self._packed = self._pack_rows(pool)
        return self._packed

    def _pack_rows(self, pool: KvPool) -> tuple[Tensor, Tensor]:
        assert self.num_keys is not None, "a recorded step has no fixed number of keys"
        layout, device = pool.layout, self.seqused_k.device
        cu_k = torch.zeros_like(self.cu_q)
        cu_k[1:] = self.seqused_k.cumsum(0)
        numbers = torch.arange(len(self.seqused_k), device=device)
        owners = numbers.repeat_interleave(self.seqused_k.long(), output_size=self.num_keys)
        positions = torch.arange(self.num_keys, device=device) - cu_k[owners]
        size = layout.block_size
        blocks = self.block_table[owners, positions // size].long()
        first = blocks * (layout.num_layers * 2 * layout.num_kv_heads)
        heads = first[:, None] + torch.arange(layout.num_kv_heads, device=device)
        return heads * size + (positions % size)[:, None], cu_k

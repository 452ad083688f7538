"""The KV pool as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.kv_layout import KvLayout


class KvPool:
    """Typed views of a flat byte pool. Nothing is copied.

    Args:
        slots: [num_blocks, layout.block_bytes] uint8; a view of a ``SharedPool``.
    """

    def __init__(self, slots: Tensor, layout: KvLayout) -> None:
        self.layout = layout
        items = slots.view(getattr(torch, layout.dtype))
        # One row per (block, layer, keys or values, head); and one per token in each of them.
        self.heads = items.view(-1, layout.block_size * layout.head_dim)
        self.vectors = items.view(-1, layout.head_dim)

    def gather(self, rows: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Copy keys and values of whole blocks out of the pool, in token order.

        Args:
            rows: [n, num_kv_heads, num_blocks] int64, numbers of ``heads`` for the keys of layer 0.

        Returns:
            keys and values, each [n, num_kv_heads, num_blocks * block_size, head_dim].
        """
        layout = self.layout
        n, num_heads, num_blocks = rows.shape
        shape = (n, num_heads, num_blocks * layout.block_size, layout.head_dim)
        first = rows.reshape(-1) + layer * 2 * layout.num_kv_heads
        keys = self.heads.index_select(0, first)
        values = self.heads.index_select(0, first + layout.num_kv_heads)
        return keys.view(shape), values.view(shape)

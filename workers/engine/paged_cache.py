"""The cache object that transformers' modules write to: keys and values go into the pool."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schemas.errors import ModelUnsupported
from workers.engine.kv_pool import KvPool


class PagedCache:
    """Writes one step's keys and values, layer after layer; how they are attended is a subclass's.

    Args:
        write_rows: [num_kv_heads * num_tokens] int64, rows of ``KvPool.vectors`` for the keys of
            layer 0. Layers differ by one added offset.
    """

    def __init__(self, pool: KvPool, write_rows: Tensor) -> None:
        self.pool = pool
        self._write_rows = write_rows
        self._pending: int | None = None  # the layer that wrote and has not attended yet

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's keys and values, [1, num_kv_heads, num_tokens, head_dim], into the
        pool; transformers' name and signature. Returns them as they came."""
        layout = self.pool.layout
        first = self._write_rows + layer_idx * 2 * layout.num_kv_heads * layout.block_size
        self.pool.vectors.index_copy_(0, first, keys.reshape(-1, layout.head_dim))
        first = first + layout.num_kv_heads * layout.block_size
        self.pool.vectors.index_copy_(0, first, values.reshape(-1, layout.head_dim))
        self._pending = layer_idx
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given to the model, never derived from its cache."""
        return 0

    def take_written_layer(self) -> int:
        """The layer whose update came last; it is attended once.

        Raises:
            ModelUnsupported: a layer attends to what another layer wrote.
        """
        if self._pending is None:
            raise ModelUnsupported("a layer shares another layer's keys and values", param="model")
        layer, self._pending = self._pending, None
        return layer

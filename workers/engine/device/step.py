"""One step's view of a pool on a device; the cache object that models write to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schemas.errors import ModelUnsupported
from workers.engine.attention import Scoring
from workers.engine.device.backends import Backend
from workers.engine.device.batch import PagedBatch
from workers.engine.device.inputs import StepInputs, StepShape
from workers.engine.kv_pool import KvPool


class DeviceStep:
    """Like :class:`workers.engine.paged_step.PagedStep`, without a number that the host must know:
    it can be recorded with one step's inputs and replayed with another's."""

    def __init__(
        self, pool: KvPool, shape: StepShape, inputs: StepInputs, backend: Backend
    ) -> None:
        self._pool = pool
        self._attend = backend.attend
        self._batch = PagedBatch(
            cu_q=inputs.first_rows.int(),
            seqused_k=inputs.ends.int(),
            block_table=inputs.block_table.int(),
            max_q=shape.max_q,
            max_k=shape.max_k,
            num_keys=shape.num_keys,
            shares=shape.shares,
        )
        self._write_rows = _rows_to_write(pool, inputs)
        self._pending: int | None = None  # the layer that wrote and has not attended yet

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's keys and values, [1, num_kv_heads, num_rows, head_dim], into the pool;
        transformers' name and signature. Returns them as they came."""
        layout = self._pool.layout
        first = self._write_rows + layer_idx * 2 * layout.num_kv_heads * layout.block_size
        self._pool.vectors.index_copy_(0, first, keys.reshape(-1, layout.head_dim))
        first = first + layout.num_kv_heads * layout.block_size
        self._pool.vectors.index_copy_(0, first, values.reshape(-1, layout.head_dim))
        self._pending = layer_idx
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given to the model, never derived from its cache."""
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the layer whose update came last; shapes as in ``paged_attention``.

        Raises:
            ModelUnsupported: a layer attends to what another layer wrote.
        """
        if self._pending is None:
            raise ModelUnsupported("a layer shares another layer's keys and values", param="model")
        layer, self._pending = self._pending, None
        rows = query[0].transpose(0, 1).contiguous()
        return self._attend(self._pool, rows, layer, self._batch, scoring)[None]


def _rows_to_write(pool: KvPool, inputs: StepInputs) -> Tensor:
    """[num_kv_heads * num_rows] rows of ``KvPool.vectors`` for the keys of layer 0."""
    layout = pool.layout
    size, num_heads = layout.block_size, layout.num_kv_heads
    blocks = inputs.block_table[inputs.owners, inputs.positions // size]
    heads = torch.arange(num_heads, device=blocks.device)[:, None]
    rows = (blocks * (layout.num_layers * 2 * num_heads) + heads) * size
    return (rows + inputs.positions % size).reshape(-1)

"""One step's view of a pool on a device; the cache object that models write to."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.attention import Scoring
from workers.engine.device.backends import Backend
from workers.engine.device.batch import PagedBatch
from workers.engine.device.inputs import StepInputs, StepShape
from workers.engine.kv_pool import KvPool
from workers.engine.paged_cache import PagedCache


class DeviceStep(PagedCache):
    """Like :class:`workers.engine.paged_step.PagedStep`, without a number that the host must know:
    it can be recorded with one step's inputs and replayed with another's."""

    def __init__(
        self, pool: KvPool, shape: StepShape, inputs: StepInputs, backend: Backend
    ) -> None:
        super().__init__(pool, _rows_to_write(pool, inputs))
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the layer whose update came last; shapes as in ``paged_attention``.

        Raises:
            ModelUnsupported: a layer attends to what another layer wrote.
        """
        layer = self.take_written_layer()
        rows = query[0].transpose(0, 1).contiguous()
        return self._attend(self.pool, rows, layer, self._batch, scoring)[None]


def _rows_to_write(pool: KvPool, inputs: StepInputs) -> Tensor:
    """[num_kv_heads * num_rows] rows of ``KvPool.vectors`` for the keys of layer 0."""
    layout = pool.layout
    size, num_heads = layout.block_size, layout.num_kv_heads
    blocks = inputs.block_table[inputs.owners, inputs.positions // size]
    heads = torch.arange(num_heads, device=blocks.device)[:, None]
    rows = (blocks * (layout.num_layers * 2 * num_heads) + heads) * size
    return (rows + inputs.positions % size).reshape(-1)

"""The torch runner: any decoder of transformers over the paged KV pool.

    order the batch -> one forward pass -> logits of the sampling rows -> sampler

It keeps nothing between steps but the model and the pool: what a sequence has computed lies in
its blocks, and all else comes with the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.engine.api import InSharedPool, Sampled, ScheduledSequence
from workers.engine.engine_info import engine_info
from workers.engine.forward import packed_logits
from workers.engine.kv_layout import KvLayout
from workers.engine.kv_pool import KvPool
from workers.engine.loader import LoadedModel
from workers.engine.paged_step import PagedStep, Span
from workers.engine.probe import probe_layout
from workers.engine.sampler import sample_and_score
from workers.engine.scan import TORCH_SCAN, Scan
from workers.engine.verdicts import check_attention_once


def layout_of(loaded: LoadedModel, *, block_size: int) -> KvLayout:
    """The layout of a model's blocks, found by a dry run and checked against transformers.

    Raises:
        ModelUnsupported: this engine can't serve the model.
    """
    facts = loaded.facts
    layout = probe_layout(loaded.model, revision=facts.revision, block_size=block_size)
    check_attention_once(loaded.model, layout)
    return layout


class TorchRunner(InSharedPool):
    """A :class:`workers.engine.api.Runner` for a model of transformers.

    Args:
        layout: of this model, by :func:`layout_of`, which also made its attention ours.
        slots: [num_blocks, layout.block_bytes] uint8, written in place; as of ``SharedPool``.

    One thread calls it. How many threads torch may use is the caller's decision.
    """

    def __init__(self, loaded: LoadedModel, layout: KvLayout, slots: npt.NDArray[np.uint8]) -> None:
        self._model = loaded.model
        self._slots = slots
        self._pool = KvPool(torch.from_numpy(slots), layout)
        self.info = engine_info("torch", loaded.facts, layout, len(slots))
        self.scan: Scan = TORCH_SCAN

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        """Compute the batch; one result per sequence with ``sample`` set, in batch order."""
        return sample_and_score(self.logits(batch), batch, self.info.eos_token_ids, self.scan)

    def logits(self, batch: Seq[ScheduledSequence]) -> Tensor:
        """Compute the batch up to the logits: [n, vocab_size], a row per sequence with
        ``sample`` set, in batch order, and behind these one per position that is ``scored``."""
        packed = sorted(range(len(batch)), key=lambda number: _packing_order(batch[number]))
        spans = [
            Span(batch[number].block_table, batch[number].start, batch[number].count)
            for number in packed
        ]
        ends = np.empty(len(batch), np.int64)
        ends[packed] = np.cumsum([span.count for span in spans])
        rows = ends[[sequence.sample for sequence in batch]] - 1
        scored = [
            np.asarray(one.scored) - one.start + end - one.count
            for one, end in zip(batch, ends, strict=True)
            if one.scores is not None
        ]
        token_ids = [
            token_id
            for number, span in zip(packed, spans, strict=True)
            for token_id in batch[number].token_ids[span.start : span.end]
        ]
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        return packed_logits(
            self._model,
            torch.tensor(token_ids, dtype=torch.int64),
            torch.from_numpy(positions),
            PagedStep(self._pool, spans),
            torch.from_numpy(np.concatenate([rows, *scored]) if scored else rows),
        )

    def copy_block(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another."""
        self._slots[target] = self._slots[source]


def _packing_order(sequence: ScheduledSequence) -> tuple[bool, int]:
    """Decodes first, the longest first; then chunks as they come."""
    if sequence.count == 1:
        return False, -sequence.start
    return True, 0

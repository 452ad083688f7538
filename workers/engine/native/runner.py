"""The native runner: one call of the library per step.

It keeps the packed weights and nothing about sequences: what was computed of them lies in their
blocks, in the layout of the general path. A worker of either path goes on where the other stopped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infra.model_folder import ModelFolder
from workers.engine.api import InSharedPool, Sampled, ScheduledSequence
from workers.engine.engine_info import engine_info
from workers.engine.kv_layout import KvLayout
from workers.engine.native.library import Batch, check
from workers.engine.native.rope import RopeTable
from workers.engine.native.scan import NativeScan
from workers.engine.native.weights import NativeModel
from workers.engine.sampler import sample_and_score
from workers.engine.scan import Scan


class NativeRunner(InSharedPool):
    """A :class:`workers.engine.api.Runner` for a model of the Llama family.

    What a sequence gets does not depend on the batch, on how its prompt was cut into chunks, or on
    the number of threads: bit for bit.

    Args:
        slots: [num_blocks, layout.block_bytes] uint8, written in place; as of ``SharedPool``.
    """

    def __init__(
        self,
        model: NativeModel,
        rope: RopeTable,
        facts: ModelFolder,
        layout: KvLayout,
        slots: npt.NDArray[np.uint8],
    ) -> None:
        self._model = model
        self._rope = rope
        self._slots = slots
        self.info = engine_info("native", facts, layout, len(slots))
        self.scan: Scan = NativeScan(model)

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        """Compute the batch; one result per sequence with ``sample`` set, in batch order."""
        return sample_and_score(self.logits(batch), batch, self.info.eos_token_ids, self.scan)

    def logits(self, batch: Seq[ScheduledSequence]) -> Tensor:
        """Compute the batch up to the logits: [n, vocab_size] float32, a row per sequence with
        ``sample`` set, in batch order, and behind these one per position that is ``scored``.

        Raises:
            IndexError: a token that is not in the vocabulary, or a block that is not in the pool.
            NativeError: out of memory.
        """
        num_rows = sum(sequence.count for sequence in batch)
        token_ids = np.fromiter(
            (
                token_id
                for sequence in batch
                for token_id in sequence.token_ids[sequence.start : sequence.start + sequence.count]
            ),
            np.int32,
            num_rows,
        )
        tables = np.concatenate([np.asarray(one.block_table, np.int32) for one in batch])
        self._check(batch, token_ids, tables)
        self._rope.cover(max(sequence.start + sequence.count for sequence in batch))
        spans = _spans(batch)
        num_wanted = sum(sequence.sample + len(sequence.scored) for sequence in batch)
        logits = torch.empty(num_wanted, self.info.vocab_size)
        call = Batch(
            num_rows=num_rows,
            num_spans=len(spans),
            token_ids=token_ids.ctypes.data,
            spans=spans.ctypes.data,
            block_tables=tables.ctypes.data,
            cosines=self._rope.cosines.data_ptr(),
            sines=self._rope.sines.data_ptr(),
            pool=self._slots.ctypes.data,
            logits=logits.data_ptr(),
        )
        check(self._model.functions.mesh_model_run(self._model.handle, ctypes.byref(call)))
        return logits

    def seconds(self) -> dict[str, float]:
        """What all steps so far have taken, by what was done: products ("linear"), "attention",
        and what is done "rows" by row, norms, rotations and gates."""
        times = self._model.times()
        return {"linear": times.linear, "attention": times.attention, "rows": times.rows}

    def _check(
        self,
        batch: Seq[ScheduledSequence],
        token_ids: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> None:
        """The library believes what it is told, so nothing may lead it out of its memory."""
        # As unsigned numbers what is negative is larger than any: one look at each.
        if token_ids.view(np.uint32).max() >= self.info.vocab_size:
            raise IndexError(f"a token id is not from 0 to {self.info.vocab_size - 1}")
        if tables.view(np.uint32).max() >= len(self._slots):
            raise IndexError(f"a block is not from 0 to {len(self._slots) - 1}")
        for one in batch:
            if one.start + one.count > len(one.block_table) * self.info.block_size:
                raise IndexError(
                    f"{len(one.block_table)} blocks don't reach {one.start + one.count}"
                )

    def copy_block(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another."""
        self._slots[target] = self._slots[source]


def _spans(batch: Seq[ScheduledSequence]) -> npt.NDArray[np.int32]:
    """[n, 5] int32: the fields of ``library.Span``. The library gives the logits of a span's last
    row, so every scored position is a span of its own: its keys and values are written before
    any row of the batch is attended, and no row's result depends on how rows are cut."""
    spans: list[tuple[int, int, int, int, int]] = []
    sampled, scored = 0, sum(sequence.sample for sequence in batch)
    first_row = first_block = 0
    for one in batch:
        rest, end = one.scored.stop, one.start + one.count
        for position in one.scored:
            spans.append((first_row + position - one.start, 1, position, first_block, scored))
            scored += 1
        if rest < end:
            logits_row = sampled if one.sample else -1
            spans.append((first_row + rest - one.start, end - rest, rest, first_block, logits_row))
        sampled += one.sample
        first_row += one.count
        first_block += len(one.block_table)
    return np.array(spans, np.int32)

"""The native runner: one call of the library per step.

It keeps the packed weights and nothing about sequences: what was computed of them lies in their
blocks, in the layout of the general path. A worker of either path goes on where the other stopped.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infra.model_folder import ModelFolder
from workers.engine.api import InSharedPool, Sampled, ScheduledSequence
from workers.engine.engine_info import engine_info
from workers.engine.kv_layout import KvLayout
from workers.engine.native.library import Batch, Span, check
from workers.engine.native.rope import RopeTable
from workers.engine.native.scan import NativeScan
from workers.engine.native.weights import NativeModel
from workers.engine.sampler import sample_and_score
from workers.engine.scan import Scan

_SPAN_FIELDS = len(Span._fields_)


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
        self._pool: int = slots.ctypes.data
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
        self._model.wake()  # takes its threads longer than what follows here
        info = self.info
        token_ids = _joined(
            [one.token_ids[one.start : one.start + one.count] for one in batch],
            "token ids",
            info.vocab_size,
        )
        tables = _joined([one.block_table for one in batch], "blocks", info.num_blocks)
        spans = _spans(batch, info.block_size)
        self._rope.cover(max([one.start + one.count for one in batch]))
        num_wanted = sum([one.sample + len(one.scored) for one in batch])
        logits = torch.empty(num_wanted, info.vocab_size)
        call = Batch(
            num_rows=len(token_ids),
            num_spans=len(spans) // _SPAN_FIELDS,
            token_ids=_address(token_ids),
            spans=_address(spans),
            block_tables=_address(tables),
            cosines=self._rope.cosines.data_ptr(),
            sines=self._rope.sines.data_ptr(),
            pool=self._pool,
            logits=logits.data_ptr(),
        )
        check(self._model.functions.mesh_model_run(self._model.handle, ctypes.byref(call)))
        return logits

    def seconds(self) -> dict[str, float]:
        """What all steps so far have taken, by what was done: products ("linear"), "attention",
        and what is done "rows" by row, norms, rotations and gates."""
        times = self._model.times()
        return {"linear": times.linear, "attention": times.attention, "rows": times.rows}

    def copy_block(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another."""
        self._slots[target] = self._slots[source]


# The library believes what it is told, so nothing may lead it out of its memory.


def _joined(parts: Iterable[Seq[int]], what: str, end: int) -> array[int]:
    """All parts behind each other. (Arrays, not numpy's: after a step reads all weights no code is
    in the cache, and of numpy's a great deal would have to come back.)

    Raises:
        IndexError: a number that is not from 0 to ``end`` - 1.
    """
    numbers = array("I")
    try:
        for part in parts:
            numbers.extend(part)
        if max(numbers) < end:
            return numbers
    except OverflowError:  # a negative one
        pass
    raise IndexError(f"{what} are not all from 0 to {end - 1}")


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _spans(batch: Seq[ScheduledSequence], block_size: int) -> array[int]:
    """The fields of one ``library.Span`` after the other. The library gives the logits of a span's
    last row, so every scored position is a span of its own: its keys and values are written before
    any row of the batch is attended, and no row's result depends on how rows are cut.

    Raises:
        IndexError: a sequence goes on behind its blocks.
    """
    spans = array("i")
    sampled, scored = 0, sum([sequence.sample for sequence in batch])
    first_row = first_block = 0
    for one in batch:
        rest, end = one.scored.stop, one.start + one.count
        if end > len(one.block_table) * block_size:
            raise IndexError(f"{len(one.block_table)} blocks don't reach {end}")
        for position in one.scored:
            spans.extend((first_row + position - one.start, 1, position, first_block, scored))
            scored += 1
        if rest < end:
            logits_row = sampled if one.sample else -1
            spans.extend((first_row + rest - one.start, end - rest, rest, first_block, logits_row))
        sampled += one.sample
        first_row += one.count
        first_block += len(one.block_table)
    return spans

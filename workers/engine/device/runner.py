"""The runner for a device with memory of its own.

Blocks are computed in a pool on the device. The shared pool is what other processes read: blocks
are copied there when a request is held (``export_blocks``), and from there when they were filled by
others (``import_blocks``). Slot b of the one is slot b of the other; the device has a spare one
more, for the padding of steps. To and from the host tier blocks go straight, on another stream.

    order the batch -> one copy of all numbers -> forward pass -> logits to the host -> sampler
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.engine.api import RunnerLost, Sampled, ScheduledSequence
from workers.engine.device.backends import Backend
from workers.engine.device.buckets import Buckets
from workers.engine.device.graphs import RECORDING, Graphs
from workers.engine.device.inputs import (
    Numbers,
    StepInputs,
    StepShape,
    pack_decodes,
    pack_step,
)
from workers.engine.device.select import current, device_name
from workers.engine.device.step import DeviceStep
from workers.engine.engine_info import engine_info
from workers.engine.forward import packed_logits
from workers.engine.kv_layout import KvLayout
from workers.engine.kv_pool import KvPool
from workers.engine.loader import LoadedModel
from workers.engine.sampler import sample_and_score
from workers.engine.scan import TORCH_SCAN, Scan
from workers.engine.sequence import num_blocks_for


class DeviceRunner:
    """A :class:`workers.engine.api.Runner` for a model of transformers on a device.

    Args:
        loaded: on the device; its attention is ours.
        shared: [num_blocks, layout.block_bytes] uint8, as of ``SharedPool``.
        decode: attention of steps of decodes alone; ``mixed``: of all others.
        max_batch: the most sequences of a step that is padded, and recorded where there is CUDA.

    One thread calls it at a time. On the device "cpu" it does the same, without graphs.

    Raises:
        OutOfMemoryError: the pool does not fit the device.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layout: KvLayout,
        shared: npt.NDArray[np.uint8],
        *,
        decode: Backend,
        mixed: Backend,
        max_batch: int,
    ) -> None:
        self._model = loaded.model
        self._device = loaded.model.device
        self._is_cuda = self._device.type == "cuda"
        self._shared = torch.from_numpy(shared)
        self._spare_block = len(shared)
        self._slots = torch.zeros(
            len(shared) + 1, layout.block_bytes, dtype=torch.uint8, device=self._device
        )
        self._pool = KvPool(self._slots, layout)
        self._decode = decode
        self._mixed = mixed
        self._buckets = Buckets(
            max_batch=max_batch,
            max_blocks=num_blocks_for(loaded.facts.context_length, layout.block_size),
            growth=2 if decode.reads_table else 4,
        )
        self._copies = torch.cuda.Stream(self._device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._graphs = (
            Graphs(self._forward, self._device) if self._is_cuda and decode.is_recordable else None
        )
        info = engine_info(self._device.type, loaded.facts, layout, len(shared))
        self.info = replace(info, device=device_name(self._device))
        self.scan: Scan = TORCH_SCAN

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        """Compute the batch; one result per sequence with ``sample`` set, in batch order."""
        return sample_and_score(self.logits(batch), batch, self.info.eos_token_ids, self.scan)

    def logits(self, batch: Seq[ScheduledSequence]) -> Tensor:
        """Compute the batch up to the logits: [n, vocab_size] on the host, a row per sequence with
        ``sample`` set, in batch order, and behind these one per position that is ``scored``. The
        one place in a step that waits for the device.

        Raises:
            RunnerLost: the device failed.
        """
        try:
            with current(self._device):
                return self._logits(batch)
        except (
            torch.AcceleratorError
        ) as error:  # what comes after fails as well: its context is lost
            raise RunnerLost(f"{self._device}: {error}") from error

    def _logits(self, batch: Seq[ScheduledSequence]) -> Tensor:
        size = self._bucket(batch)
        if size is None:
            return self._to_host(self._run(*pack_step(batch, self.info.block_size)))
        logits = self._run(*pack_decodes(batch, size, self.info.block_size, self._spare_block))
        rows = [number for number, sequence in enumerate(batch) if sequence.sample]
        host = self._to_host(logits[: len(batch)])
        return host if len(rows) == len(batch) else host[rows]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another, on the device."""
        self._slots[target] = self._slots[source]

    def export_blocks(self, blocks: Seq[int]) -> None:
        """Make blocks readable for others: device to shared pool. Waits for the copy."""
        numbers = torch.tensor(blocks, dtype=torch.int64)
        self._shared[numbers] = self._slots[numbers.to(self._device)].cpu()

    def import_blocks(self, blocks: Seq[int]) -> None:
        """Take over blocks that others filled: shared pool to device. Waits for the copy: they can
        be read on another stream from then on."""
        numbers = torch.tensor(blocks, dtype=torch.int64)
        self._slots[numbers.to(self._device)] = self._shared[numbers].to(self._device)
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def read_block(self, block: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy a block out, beside the step that runs; waits for the copy alone."""
        self._copy_beside(torch.from_numpy(into), self._slots[block])

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy a block in, beside the step that runs; waits for the copy alone."""
        self._copy_beside(self._slots[block], torch.from_numpy(data))

    def _copy_beside(self, into: Tensor, source: Tensor) -> None:
        if self._copies is None:
            into.copy_(source)
            return
        with RECORDING, torch.cuda.stream(self._copies):
            into.copy_(source)
            self._copies.synchronize()

    def _bucket(self, batch: Seq[ScheduledSequence]) -> tuple[int, int] | None:
        """What a step of decodes is padded to; None for other steps."""
        if any(one.count > 1 or one.scores is not None for one in batch):
            return None
        longest = max(sequence.start + 1 for sequence in batch)
        return self._buckets.size_for(len(batch), num_blocks_for(longest, self.info.block_size))

    def _run(self, shape: StepShape, numbers: Numbers) -> Tensor:
        """The logits, on the device."""
        on_host = torch.from_numpy(numbers)
        if self._is_cuda:
            on_host = on_host.pin_memory()  # from torch's cache of pinned memory
        is_padded = shape.num_keys is None
        if is_padded and self._graphs is not None:
            return self._graphs.run(on_host, shape)
        return self._forward(on_host.to(self._device, non_blocking=True), shape)

    def _forward(self, numbers: Tensor, shape: StepShape) -> Tensor:
        """One pass over inputs on the device; nothing in it looks at them."""
        inputs = StepInputs.of(numbers, shape)
        backend = self._decode if shape.max_q == 1 else self._mixed
        step = DeviceStep(self._pool, shape, inputs, backend)
        return packed_logits(
            self._model, inputs.token_ids, inputs.positions, step, inputs.logits_rows
        )

    def _to_host(self, logits: Tensor) -> Tensor:
        if not self._is_cuda:
            return logits
        host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        host.copy_(logits, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return host

"""Steps recorded as CUDA graphs, one per shape, and replayed with other numbers.

A recorded step reads its inputs from one tensor and leaves its logits in another; both stay where
they are. Shapes are few because steps are padded, see ``buckets``. All graphs share one memory
pool: only one runs at a time, and logits are copied to the host before the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from workers.engine.device.inputs import StepShape

Forward = Callable[[Tensor, StepShape], Tensor]
"""(numbers on the device, shape) -> logits [num_logits, vocab_size]."""

_WARM_UPS = 2  # libraries and Triton choose and compile kernels at the first; not recordable

_log = structlog.get_logger(__name__)

RECORDING = threading.Lock()  # while a graph is recorded, no other thread may ask the device


@dataclass(slots=True, kw_only=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    logits: Tensor


class Graphs:
    """Runs a forward pass from graphs; where it can't be recorded, as it is.

    Args:
        forward: must not depend on the host's numbers other than the shape.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward = forward
        self._device = device
        self._recorded: dict[StepShape, _Recorded] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._can_record = True

    def run(self, numbers: Tensor, shape: StepShape) -> Tensor:
        """As the forward pass. The logits stand until the next call.

        Args:
            numbers: pinned, on the host.
        """
        recorded = self._recorded.get(shape) or self._record(numbers, shape)
        if recorded is None:
            return self._forward(numbers.to(self._device, non_blocking=True), shape)
        recorded.numbers.copy_(numbers, non_blocking=True)
        recorded.graph.replay()
        return recorded.logits

    def _record(self, numbers: Tensor, shape: StepShape) -> _Recorded | None:
        """The warm-ups compute this very step: writing its KV more than once is harmless."""
        if not self._can_record:
            return None
        static = numbers.to(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._forward(static, shape)
            torch.cuda.current_stream(self._device).wait_stream(stream)
            with RECORDING, torch.cuda.graph(graph, pool=self._memory):
                logits = self._forward(static, shape)
        except RuntimeError as error:  # the model asks the device for a number, for instance
            self._can_record = False
            _log.warning("graphs_given_up", batch=shape.num_sequences, reason=str(error))
            return None
        _log.info("step_recorded", batch=shape.num_sequences, width=shape.width)
        self._recorded[shape] = _Recorded(graph=graph, numbers=static, logits=logits)
        return self._recorded[shape]

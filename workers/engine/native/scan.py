"""The vocabulary looked at by the library, with the threads that compute its steps."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.engine.candidates import MAX_EXCESS, Candidates
from workers.engine.native.library import LikeliestTokens, LogitRows, check
from workers.engine.native.library import RunWeights as RunWeightsOut
from workers.engine.native.weights import NativeModel
from workers.engine.scan import RUN, RunWeights


class NativeScan:
    """:class:`workers.engine.scan.Scan` by the library; called by the thread that runs the model.

    Not-a-number counts as a masked token. Weights below e**-87 of the largest count as none.
    """

    def __init__(self, model: NativeModel) -> None:
        self._model = model

    def largest(self, logits: Tensor) -> list[int]:
        """See ``Scan``."""
        logits = logits.contiguous()
        ids = (ctypes.c_int32 * len(logits))()
        function = self._model.functions.mesh_model_find_largest
        check(function(self._model.handle, ctypes.byref(_rows(logits)), ids))
        return list(ids)

    def weigh(self, logits: Tensor, temperatures: Tensor) -> RunWeights:
        """See ``Scan``."""
        logits, temperatures = logits.contiguous(), temperatures.contiguous()
        num_rows, vocab_size = logits.shape
        largest = torch.empty(num_rows, 1)
        sums = torch.empty(num_rows, -(-vocab_size // RUN), dtype=torch.float64)
        weights = RunWeightsOut(
            temperatures=temperatures.data_ptr(), largest=largest.data_ptr(), sums=sums.data_ptr()
        )
        function = self._model.functions.mesh_model_weigh_runs
        check(function(self._model.handle, ctypes.byref(_rows(logits)), ctypes.byref(weights)))
        return RunWeights(largest, sums)

    def likeliest(self, logits: Tensor, at_least: int) -> Candidates:
        """See ``Scan``."""
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        capacity = min(MAX_EXCESS * at_least, vocab_size)
        found = Candidates(
            ids=torch.empty(num_rows, capacity, dtype=torch.int64),
            logits=torch.empty(num_rows, capacity),
            counts=torch.empty(num_rows, dtype=torch.int64),
            is_all=torch.empty(num_rows, dtype=torch.bool),
        )
        tokens = LikeliestTokens(
            at_least=min(at_least, vocab_size),
            capacity=capacity,
            ids=found.ids.data_ptr(),
            logits=found.logits.data_ptr(),
            counts=found.counts.data_ptr(),
            is_all=found.is_all.data_ptr(),
        )
        function = self._model.functions.mesh_model_find_likeliest
        check(function(self._model.handle, ctypes.byref(_rows(logits)), ctypes.byref(tokens)))
        return Candidates(
            ids=found.ids[:, : tokens.width],
            logits=found.logits[:, : tokens.width],
            counts=found.counts,
            is_all=found.is_all,
        )


def _rows(logits: Tensor) -> LogitRows:
    """``logits``: contiguous; lives as long as the result is used."""
    return LogitRows(logits=logits.data_ptr(), num_rows=len(logits), vocab_size=logits.shape[1])

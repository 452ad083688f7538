"""Weights in blocks for the library: those of a GGUF file as they are, others quantised here.

Weights that don't come in blocks become Q4_1; the head, which is the embedding in many models and
decides between near tokens, becomes Q8_0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schemas.errors import ModelUnsupported
from workers.engine.gguf_blocks import Blocks, open_blocks
from workers.engine.native.library import Kind, NativeLibrary, check
from workers.engine.native.tensors import Tensors
from workers.engine.native.weights import Weights

GROUP = 32  # weights that share a scale
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_FAST = {"Q4_0": Kind.Q4_0, "Q4_1": Kind.Q4_1, "Q8_0": Kind.Q8_0}
_EXACT = {"Q4_0": Kind.EXACT_Q4_0, "Q4_1": Kind.EXACT_Q4_1, "Q8_0": Kind.EXACT_Q8_0}
_EIGHT_BITS = ("model.embed_tokens.weight", "lm_head.weight")


class QuantisedWeights:
    """A model's weights in blocks: its folder's, where it was converted from a GGUF file that has
    them, else made here, when they are asked for.

    Args:
        is_exact: multiply them by rows of floats, not by rows that are rounded to integers.

    Raises:
        ModelUnsupported: a tensor of the GGUF file is in blocks of another type.
    """

    def __init__(self, library: NativeLibrary, folder: Path, *, is_exact: bool) -> None:
        kept = open_blocks(folder)
        self._library = library
        self._blocks = dict(kept.blocks) if kept is not None else {}
        self._floats = dict(kept.floats) if kept is not None else {}
        self._kinds = _EXACT if is_exact else _FAST

    def put_into(self, model: Any) -> None:
        """Exchange what ``model`` holds for what the blocks stand for, so that it can tell what
        right answers are; a model in bf16 with a file's blocks holds that already.

        Raises:
            ModelUnsupported: rows that can't be cut into blocks; names the tensor.
        """
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                is_new = name not in self._blocks
                blocks = self._blocks_of(name, parameter)
                if is_new or parameter.dtype == torch.float32:
                    parameter.data.copy_(blocks.dequantise())
            elif name in self._floats:
                parameter.data.copy_(self._floats[name])

    def weights(self, name: str, tensors: Tensors) -> Weights:
        """The blocks of a parameter, which are kept no longer; its own tensor is let go.

        Raises:
            KeyError: there is no such parameter.
            ModelUnsupported: rows that can't be cut into blocks; names the tensor.
        """
        own = None if name in self._blocks else tensors.take(name)
        blocks = self._blocks_of(name, own)
        del self._blocks[name]
        tensors.drop(name)
        return Weights(
            kind=self._kinds[blocks.type_name],
            source=_FAST[blocks.type_name],
            rows=blocks.rows,
            num_inputs=blocks.rows.shape[1] // _BLOCK_BYTES[blocks.type_name] * GROUP,
        )

    def over(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """``tensors``, but for norms and biases that the file has more exactly."""
        return _FloatsFirst(self._floats, tensors, dtype)

    def _blocks_of(self, name: str, weights: Tensor | None) -> Blocks:
        found = self._blocks.get(name)
        if found is None:
            if weights is None:
                raise KeyError(name)
            found = self._blocks[name] = _quantise(self._library, name, weights)
        return found


class _FloatsFirst:
    def __init__(self, floats: Mapping[str, Tensor], tensors: Tensors, dtype: torch.dtype) -> None:
        self._floats = floats
        self._tensors = tensors
        self._dtype = dtype

    def take(self, name: str) -> Tensor | None:
        found = self._floats.get(name)
        return self._tensors.take(name) if found is None else found.to(self._dtype)

    def drop(self, name: str) -> None:
        self._tensors.drop(name)


def _quantise(library: NativeLibrary, name: str, weights: Tensor) -> Blocks:
    num_outputs, num_inputs = weights.shape
    if num_inputs % GROUP:
        raise ModelUnsupported(
            f"{name} has rows of {num_inputs}, no multiple of {GROUP}: q4 can't hold them",
            param="dtype",
        )
    type_name = "Q8_0" if name in _EIGHT_BITS else "Q4_1"
    num_groups = num_outputs * num_inputs // GROUP
    floats = weights.detach().float().contiguous()
    rows = torch.empty(
        num_outputs, num_inputs // GROUP * _BLOCK_BYTES[type_name], dtype=torch.uint8
    )
    check(
        library.functions.mesh_quantise(
            _FAST[type_name], floats.data_ptr(), num_groups, rows.data_ptr()
        )
    )
    return Blocks(type_name=type_name, rows=rows)

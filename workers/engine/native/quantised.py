"""Weights in blocks for the library: those of a GGUF file as they are, others quantised here.

Weights that don't come in blocks become Q4_1; the head, which is the embedding in many models and
decides between near tokens, becomes Q8_0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schemas.errors import ModelUnsupported
from workers.engine.gguf_blocks import Blocks, open_blocks
from workers.engine.native.library import Kind, NativeLibrary, check

GROUP = 32  # weights that share a scale
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_FAST = {"Q4_0": Kind.Q4_0, "Q4_1": Kind.Q4_1, "Q8_0": Kind.Q8_0}
_EXACT = {"Q4_0": Kind.EXACT_Q4_0, "Q4_1": Kind.EXACT_Q4_1, "Q8_0": Kind.EXACT_Q8_0}
_EIGHT_BITS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one module, as they are packed."""

    kind: Kind
    source: Kind  # what ``rows`` hold
    rows: Tensor  # [num_outputs, num_inputs], or bytes of blocks
    num_inputs: int
    bias: Tensor | None


class QuantisedWeights:
    """The blocks of a model's linear layers, found by module.

    Args:
        is_exact: multiply them by rows of floats, not by rows that are rounded to integers.
    """

    def __init__(self, model: Any, blocks: Mapping[str, Blocks], *, is_exact: bool) -> None:
        self._blocks = {}
        for name, module in model.named_modules():
            if f"{name}.weight" in blocks:
                self._blocks[id(module)] = blocks[f"{name}.weight"]
        if model.lm_head.weight is model.model.embed_tokens.weight:
            self._blocks[id(model.lm_head)] = blocks["model.embed_tokens.weight"]
        self._kinds = _EXACT if is_exact else _FAST

    def weights_of(self, module: Any) -> Weights | None:
        """A module's blocks and its bias; None when it has none."""
        found = self._blocks.get(id(module))
        if found is None:
            return None
        return Weights(
            kind=self._kinds[found.type_name],
            source=_FAST[found.type_name],
            rows=found.rows,
            num_inputs=found.rows.shape[1] // _BLOCK_BYTES[found.type_name] * GROUP,
            bias=getattr(module, "bias", None),
        )


def quantised_weights(
    library: NativeLibrary, model: Any, folder: Path, *, is_exact: bool
) -> QuantisedWeights:
    """A model's weights in blocks: its folder's, where it was converted from a GGUF file that has
    them, else made here. What ``model`` holds is exchanged for what the blocks stand for, so that
    it can tell what right answers are; a model in bf16 with a file's blocks holds that already.

    Raises:
        ModelUnsupported: a tensor of the GGUF file is in blocks of another type, or has rows that
            can't be cut into blocks; names the tensor.
    """
    kept = open_blocks(folder)
    blocks = dict(kept.blocks) if kept is not None else {}
    floats = kept.floats if kept is not None else {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            if name not in blocks:
                blocks[name] = _quantise(library, name, parameter)
                parameter.data.copy_(blocks[name].dequantise())
            elif parameter.dtype == torch.float32:
                parameter.data.copy_(blocks[name].dequantise())
        elif name in floats:
            parameter.data.copy_(floats[name])
    return QuantisedWeights(model, blocks, is_exact=is_exact)


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

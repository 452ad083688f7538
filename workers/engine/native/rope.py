"""Rotations of positions, as transformers computes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FIRST_POSITIONS = 2048


class RopeTable:
    """Cosines and sines by position, made by a model's own module: every variant (Llama 3's
    scaling, YaRN and its factor for scores) is exactly its own. Grows with the longest sequence.

    Args:
        rotary: the model's; called with positions, gives [1, n, head_dim] whose halves are equal.
    """

    def __init__(self, rotary: nn.Module, context_length: int) -> None:
        self._rotary = rotary
        self._context_length = context_length
        self.cosines = torch.empty(0, 0)  # [num_positions, head_dim / 2] float32
        self.sines = torch.empty(0, 0)
        self.cover(min(_FIRST_POSITIONS, context_length))

    def cover(self, num_positions: int) -> None:
        """Make sure that positions [0, num_positions) are there."""
        have = len(self.cosines)
        if num_positions <= have:
            return
        wanted = max(num_positions, min(2 * have, self._context_length))
        with torch.inference_mode():
            cosines, sines = self._rotary(torch.empty(0), torch.arange(wanted)[None])
        self.cosines, self.sines = _half(cosines), _half(sines)


def _half(values: Tensor) -> Tensor:
    return values[0, :, : values.shape[-1] // 2].float().contiguous()

"""Rotations of positions, as transformers computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_POSITIONS = 2048


class RopeTable:
    """Cosines and sines by position. Grows with the longest sequence.

    Args:
        inv_freq: [head_dim / 2], of a model's own module: every variant (Llama 3's scaling, YaRN
            and its factor for scores) is exactly its own.
        scaling: the factor that cosines and sines are multiplied by.
    """

    def __init__(self, inv_freq: Sequence[float], scaling: float, context_length: int) -> None:
        self._inv_freq = torch.tensor(inv_freq, dtype=torch.float32)
        self._scaling = scaling
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
        angles = torch.arange(wanted, dtype=torch.float32)[:, None] * self._inv_freq
        both = torch.cat((angles, angles), dim=-1)  # as there: the last bit depends on the shape
        self.cosines, self.sines = self._half(both.cos()), self._half(both.sin())

    def _half(self, values: Tensor) -> Tensor:
        return (values * self._scaling)[:, : len(self._inv_freq)].contiguous()

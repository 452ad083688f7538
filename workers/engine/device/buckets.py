"""Sizes to which steps of decodes are padded, so that few shapes occur: one graph each.

Batches are padded to the next of 1, 2, 4, 8, … and the largest; block tables to 16 blocks times a
power of ``growth``. What is added computes one token in a block that is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import ConfigError

_FIRST_WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The sizes.

    Args:
        max_batch: the most sequences of a step.
        max_blocks: the most blocks that one sequence has.
        growth: 2 where attention reads whole tables, more where it stops at a sequence's end.

    Raises:
        ConfigError: a size under 1, or a growth under 2.
    """

    max_batch: int
    max_blocks: int
    growth: int = 4

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.max_blocks < 1 or self.growth < 2:
            raise ConfigError("buckets hold at least one sequence of one block", param="device")

    def size_for(self, batch: int, num_blocks: int) -> tuple[int, int] | None:
        """The batch and the table's width for a step; None when it is larger than any."""
        if not 0 < batch <= self.max_batch or not 0 < num_blocks <= self.max_blocks:
            return None
        width = min(_FIRST_WIDTH, self.max_blocks)
        while width < num_blocks:
            width *= self.growth
        return (
            min(1 << (batch - 1).bit_length(), self.max_batch),
            min(width, self.max_blocks),
        )

"""One request's tokens inside a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadgen.simulate.decode_batch import StepLog
    from loadgen.simulate.extents import Extent


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A prompt and its answer; the names of its pieces stand for its tokens.

    ``num_computed`` of its ``num_tokens`` have their KV in the pool. Of its blocks ``num_private``
    are its own, ``num_shared`` it sees in ``extents``.
    """

    key: str
    age: int  # smaller is older
    pieces: tuple[bytes, ...]
    num_prompt: int
    num_output: int
    holds: bool  # its blocks stay after the first token, for another worker to read
    overtakes: bool = False
    num_tokens: int = 0  # prompt and answer so far
    num_computed: int = 0
    num_private: int = 0
    num_shared: int = 0
    num_registered: int = 0  # pieces of it that were made findable, or were
    extents: list[Extent] = field(default_factory=list)
    num_cached: int = -1  # prompt tokens found when it first ran; -1: it has not
    has_looked_below: bool = False  # into the host tier, before its turn
    is_coming: bool = False  # blocks of it are on their way from there
    joined_step: int = 0  # of the batch that it decodes in
    # Where its tokens came from: decode steps [first, end) of a worker, or one moment.
    segments: list[tuple[StepLog, int, int] | float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing."""
        return self.num_tokens - self.num_computed

    @property
    def num_missing(self) -> int:
        """Tokens that the answer has still to get."""
        return self.num_prompt + self.num_output - self.num_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that it has."""
        return self.num_private + self.num_shared

    @property
    def is_decoding(self) -> bool:
        """Whether one position is left, after others."""
        return self.num_tokens - self.num_computed == 1 and self.num_computed > 0

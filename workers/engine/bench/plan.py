"""What ``mesh bench engine`` is asked to measure; read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ConfigError

REFERENCES = ("bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What to measure.

    Raises:
        ConfigError: a value that can't be used; ``param`` is the name of the field.
    """

    folder: Path
    dtype: str = "auto"  # of our engine, as are kernels and device
    kernels: str = "auto"
    device: str = "auto"
    threads: int = 1
    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 250  # tokens that each decode has before it
    prompt_len: int = 512
    block_size: int = 16
    rounds: int = 3  # in each, all is measured; a peer too
    turns: int = 3  # of each of the things compared, in a round, at least
    least_s: float = 0.3  # likewise
    budget_s: float = 15.0  # for each of them in all rounds, after three turns
    references: tuple[str, ...] = REFERENCES  # dtypes of transformers

    def __post_init__(self) -> None:
        for name in ("threads", "context", "prompt_len", "block_size", "rounds", "turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", param=name)
        if not self.batches or min(self.batches) < 1:
            raise ConfigError("batches are numbers from 1 on", param="batches")
        for dtype in self.references:
            if dtype not in REFERENCES:
                raise ConfigError(
                    f"{dtype!r} is not one of {', '.join(REFERENCES)}", param="references"
                )

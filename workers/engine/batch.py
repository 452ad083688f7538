"""A step's batch on a runner, and who is to blame when that fails."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec
import structlog

from schemas.errors import EngineFailed
from workers.engine.api import Runner, RunnerLost, Sampled
from workers.engine.sequence import Sequence

_log = structlog.get_logger(__name__)


class Computed(msgspec.Struct):
    """Who was computed, with the token of each, None where none was to be sampled; and whose
    computing raised, with what."""

    batch: list[Sequence] = []
    tokens: Seq[Sampled | None] = []
    failures: list[tuple[Sequence, Exception]] = []

    def num_tokens(self) -> int:
        """Positions that were computed."""
        return sum([sequence.count for sequence in self.batch])

    def prefilled(self, num_tokens: int) -> list[tuple[int, int]]:
        """The positions ``[start, end)`` of each share, if these were mostly prefill."""
        if num_tokens < 8 * len(self.batch):
            return []
        return [(one.start, one.start + one.count) for one in self.batch]

    def keep(self, is_wanted: Callable[[Sequence], bool]) -> None:
        """Leave out whom nobody wants any more."""
        pairs = zip(self.batch, self.tokens, strict=True)
        kept = [(sequence, token) for sequence, token in pairs if is_wanted(sequence)]
        self.batch = [sequence for sequence, _ in kept]
        self.tokens = [token for _, token in kept]


def execute(runner: Runner, batch: list[Sequence]) -> Computed:
    """Run the batch. If that raises, run its sequences one by one to find the guilty ones:
    computing a position again writes the same KV, so nobody is harmed by the second run.

    Raises:
        RunnerLost: nothing can be computed any more.
    """
    if not batch:
        return Computed()
    try:
        return Computed(batch, _run(runner, batch))
    except RunnerLost:
        raise
    except Exception as error:
        keys = [sequence.group.key for sequence in batch]
        _log.error("batch_failed", keys=keys, exc_info=True)
        if len(batch) == 1:
            return Computed(failures=[(batch[0], error)])
    computed = Computed()
    for sequence in batch:
        alone = execute(runner, [sequence])
        computed.batch += alone.batch
        computed.tokens = [*computed.tokens, *alone.tokens]
        computed.failures += alone.failures
    return computed


def _run(runner: Runner, batch: Seq[Sequence]) -> Seq[Sampled | None]:
    sampled = runner.execute(batch)
    num_wanted = sum([sequence.sample for sequence in batch])
    if len(sampled) != num_wanted:
        raise EngineFailed(f"the runner gave {len(sampled)} tokens, not one per sample")
    if num_wanted == len(batch):
        return sampled
    tokens = iter(sampled)
    return [next(tokens) if sequence.sample else None for sequence in batch]

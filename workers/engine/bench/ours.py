"""Steps of one of our runners, without an engine's queue around them.

The pool is used by place: decodes first, each with blocks of its own, then one prompt::

    [0, max_batch * d)              d blocks per decode: its context and the next token
    [max_batch * d, num_blocks)     the prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from schemas.errors import ConfigError
from schemas.requests import SamplingParams
from workers.engine.api import Runner, ScheduledSequence
from workers.engine.scan import Scan
from workers.engine.sequence import num_blocks_for

_SHARE_TURNS = 5
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True)


@runtime_checkable
class LogitsRunner(Runner, Protocol):
    """A runner that shows its logits, and how it looks at them."""

    scan: Scan

    def logits(self, batch: Sequence[ScheduledSequence]) -> Tensor:
        """[n, vocab_size], a row per sequence with ``sample`` set, in batch order."""


@runtime_checkable
class PartsRunner(Protocol):
    """A runner that knows what its steps spend their time on."""

    def seconds(self) -> dict[str, float]:
        """Seconds of all steps so far, by part."""


class Workbench:
    """Steps to time.

    Args:
        runner: with a pool of ``num_blocks_needed`` blocks that nobody else uses.
        token_ids: of all prompts and contexts, at least as many as the longer of the two, plus 1.

    Raises:
        ConfigError: the runner shows no logits: it is a simulated one.
    """

    def __init__(
        self, runner: Runner, token_ids: Sequence[int], *, context: int, max_batch: int
    ) -> None:
        if not isinstance(runner, LogitsRunner):
            raise ConfigError("only an engine that computes logits can be measured", param="engine")
        self.runner = runner
        self._token_ids = list(token_ids)
        self._context = context
        self._num_decode_blocks = num_blocks_for(context + 1, runner.info.block_size)
        self._first_prompt_block = max_batch * self._num_decode_blocks
        self._fill(max_batch)

    @staticmethod
    def num_blocks_needed(
        *, context: int, prompt_len: int, max_batch: int, block_size: int = 16
    ) -> int:
        """How large the pool must be."""
        per_decode = num_blocks_for(context + 1, block_size)
        return max_batch * per_decode + num_blocks_for(prompt_len, block_size)

    def decode(self, batch: int) -> Callable[[], object]:
        """One step of ``batch`` sequences that have ``context`` tokens; greedy."""
        sequences = [
            self._sequence(self._decode_table(number), self._token_ids, self._context, 1)
            for number in range(batch)
        ]
        return lambda: self.runner.execute(sequences)

    def prefill(self, prompt_len: int) -> Callable[[], object]:
        """One step that computes a prompt from its beginning and samples one token."""
        sequence = self._sequence(self._prompt_table(prompt_len), self._token_ids, 0, prompt_len)
        return lambda: self.runner.execute([sequence])

    def shares(self, step: Callable[[], object]) -> dict[str, float]:
        """What a step spends on each of its parts, together 1; nothing for a runner that does not
        know. Runs it some times."""
        if not isinstance(self.runner, PartsRunner):
            return {}
        before = self.runner.seconds()
        for _ in range(_SHARE_TURNS):
            step()
        spent = {part: now - before[part] for part, now in self.runner.seconds().items()}
        return {part: value / sum(spent.values()) for part, value in spent.items()}

    def teacher_forced(self, token_ids: Sequence[int], *, batch: int = 8) -> list[Tensor]:
        """The logits behind each of ``token_ids``, [vocab_size] float32 each: the text is
        computed as a prompt, then each position again as a decode, ``batch`` at a time."""
        table = self._prompt_table(len(token_ids))
        self.runner.execute([self._sequence(table, token_ids, 0, len(token_ids))])
        rows: list[Tensor] = []
        for first in range(0, len(token_ids), batch):
            positions = range(first, min(first + batch, len(token_ids)))
            share = [self._sequence(table, token_ids, position, 1) for position in positions]
            rows += self.runner.logits(share).float().unbind(0)
        return rows

    def _fill(self, max_batch: int) -> None:
        """Give every decode its context: computed once, then copied."""
        first = self._decode_table(0)
        self.runner.execute([self._sequence(first, self._token_ids, 0, self._context)])
        for number in range(1, max_batch):
            for source, target in zip(first, self._decode_table(number), strict=True):
                self.runner.copy_block(source, target)

    def _decode_table(self, number: int) -> range:
        first = number * self._num_decode_blocks
        return range(first, first + self._num_decode_blocks)

    def _prompt_table(self, prompt_len: int) -> range:
        num_blocks = num_blocks_for(prompt_len, self.runner.info.block_size)
        return range(self._first_prompt_block, self._first_prompt_block + num_blocks)

    def _sequence(
        self, table: Sequence[int], token_ids: Sequence[int], start: int, count: int
    ) -> ScheduledSequence:
        return ScheduledSequence(
            token_ids=token_ids[: start + count],
            num_prompt_tokens=start + count,
            block_table=list(table),
            start=start,
            count=count,
            sample=True,
            sampling=GREEDY,
            index=0,
        )

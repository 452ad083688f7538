"""A batch of sequences that decode, without a look at each of them for each token.

All of them advance by one token per step, so a step needs sums alone: how many there are, how many
tokens of context together, and how many of them begin a new block. A run of steps in which nobody
comes or goes is therefore computed at once, whatever its length::

    step k of a run takes   a + k d      a: of the first;  d = context_ms * batch, what it grows by
    k steps take            k a + d k (k - 1) / 2
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from loadgen.simulate.sequence import Sequence
from pipeline.cost_model import decode_step_ms
from schemas.profiles import StepCosts


@dataclass(frozen=True, slots=True)
class Run:
    """``num_steps`` steps from ``start_s`` on; the first takes ``first_s``, each next one
    ``growth_s`` more."""

    start_s: float
    first_s: float
    growth_s: float
    num_steps: int

    def after_s(self, num_steps: int) -> float:
        """When so many of them are over."""
        grown = self.growth_s * num_steps * (num_steps - 1) / 2
        return self.start_s + num_steps * self.first_s + grown

    @property
    def end_s(self) -> float:
        """When all are over."""
        return self.after_s(self.num_steps)

    def num_over(self, now_s: float) -> int:
        """How many are over at ``now_s``."""
        left_s = now_s - self.start_s
        if left_s <= 0:
            return 0
        if self.growth_s <= 0:
            guess = left_s / self.first_s if self.first_s > 0 else self.num_steps
        else:
            b = self.first_s - self.growth_s / 2
            guess = (math.sqrt(b * b + 2 * self.growth_s * left_s) - b) / self.growth_s
        num = min(max(0, int(guess)), self.num_steps)
        while num < self.num_steps and self.after_s(num + 1) <= now_s:
            num += 1
        while num and self.after_s(num) > now_s:
            num -= 1
        return num

    def num_begun(self, now_s: float) -> int:
        """How many are over at ``now_s``, and the one that runs then."""
        num = self.num_over(now_s)
        return num if num == self.num_steps or self.after_s(num) >= now_s else num + 1


@dataclass(slots=True, eq=False)
class StepLog:
    """When each decode step of a worker ended."""

    _runs: list[Run] = field(default_factory=list)

    def note(self, run: Run) -> None:
        """These steps were made."""
        self._runs.append(run)

    def ends_s(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The end of each step, in order."""
        if not self._runs:
            return np.empty(0)
        parts = []
        for run in self._runs:
            if run.num_steps == 1:
                parts.append(np.array([run.end_s]))
                continue
            k = np.arange(1, run.num_steps + 1, dtype=np.float64)
            parts.append(run.start_s + k * run.first_s + run.growth_s * k * (k - 1) / 2)
        return np.concatenate(parts)


class DecodeBatch:
    """The sequences of one worker that generate a token with each step.

    Attributes:
        step: steps made so far; the next one has this number.
        context_tokens: of all together, as the next step sees them.
    """

    def __init__(self, costs: StepCosts, block_size: int) -> None:
        self.step = 0
        self.context_tokens = 0
        self.log = StepLog()
        self._costs = costs
        self._block_size = block_size
        self._members: dict[Sequence, None] = {}
        self._ends: list[tuple[int, int, Sequence]] = []  # when, nth to join; some have left since
        self._num_joined = 0
        self._phases = [0] * block_size  # how many begin a block at step -phase (mod block_size)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def join(self, sequence: Sequence) -> None:
        """It has one position left to compute, and takes part in the next step."""
        sequence.joined_step = self.step
        self._members[sequence] = None
        self.context_tokens += sequence.num_tokens
        self._phases[self._phase(sequence)] += 1
        end = self.step + sequence.num_missing
        self._num_joined += 1
        heapq.heappush(self._ends, (end, self._num_joined, sequence))

    def leave(self, sequence: Sequence) -> None:
        """It takes no part any more; its tokens are brought up to date."""
        del self._members[sequence]
        self._phases[self._phase(sequence)] -= 1
        made = self.step - sequence.joined_step
        if made:
            sequence.segments.append((self.log, sequence.joined_step, self.step))
        sequence.num_tokens += made
        sequence.num_computed += made
        sequence.joined_step = self.step
        self.context_tokens -= sequence.num_tokens

    def pop_ended(self) -> list[Sequence]:
        """Those whose last token the last step brought; they leave."""
        ended = []
        while self._ends and self._ends[0][0] <= self.step:
            end, _, sequence = heapq.heappop(self._ends)
            if sequence in self._members and self._end_of(sequence) == end:
                self.leave(sequence)
                ended.append(sequence)
        return ended

    def num_steps_to_end(self) -> int:
        """How many steps until somebody ends; only with members."""
        while True:
            end, _, sequence = self._ends[0]
            if sequence in self._members and self._end_of(sequence) == end:
                return end - self.step
            heapq.heappop(self._ends)

    def blocks_needed(self, num_steps: int) -> int:
        """New blocks that so many steps take."""
        size = self._block_size
        cycles, rest = divmod(num_steps, size)
        needed = cycles * len(self._members)
        return needed + sum(self._phases[-(self.step + k) % size] for k in range(rest))

    def num_steps_within(self, num_blocks: int, most: int) -> int:
        """How many steps, at most ``most``, can be made with so many new blocks."""
        if self.blocks_needed(most) <= num_blocks:
            return most
        steps = num_blocks // len(self._members) * self._block_size
        while self.blocks_needed(steps + 1) <= num_blocks:
            steps += 1
        return min(steps, most)

    def next_run(self, now_s: float, num_steps: int, extra_ms: float = 0.0) -> Run:
        """So many steps from now on, in which nobody comes or goes.

        Args:
            extra_ms: what the first one computes beside.
        """
        batch = len(self._members)
        first_ms = decode_step_ms(self._costs, batch, self.context_tokens) + extra_ms
        growth_ms = self._costs.decode_context_ms * batch
        return Run(now_s, first_ms / 1e3, growth_ms / 1e3, num_steps)

    def advance(self, run: Run) -> None:
        """The run was made."""
        self.log.note(run)
        self.step += run.num_steps
        self.context_tokens += len(self._members) * run.num_steps

    def youngest(self) -> Sequence | None:
        """Who came last."""
        return max(self._members, key=lambda one: one.age, default=None)

    def _end_of(self, sequence: Sequence) -> int:
        return sequence.joined_step + sequence.num_missing

    def _phase(self, sequence: Sequence) -> int:
        """Of a member: with step s it begins a block when s = -phase."""
        return (sequence.num_tokens - 1 - sequence.joined_step) % self._block_size

    def check_invariants(self) -> None:
        """Raise AssertionError when a sum is not what the members say."""
        tokens = sum(one.num_tokens + self.step - one.joined_step for one in self._members)
        assert tokens == self.context_tokens, "context tokens counted wrong"
        assert sum(self._phases) == len(self._members), "phases counted wrong"

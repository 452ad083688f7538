"""A decode worker in a moment to come: who will be there, in how much memory. Pure arithmetic.

    runs     the worker's own word: in its batch, or with its blocks in line for it
    handed   its tasks that it has not told of: who finds room has it at once, the others as those
             who run end
    coming   whose prefills will be over by then, evenly until then

One's KV comes in after the other's: the way is taken until that of all of them has come.

Answers take the mean length of those seen, at the present step time: a prediction for a pool, not
for each request (Mooncake, section 7). Who runs ends one after the other, as if begun at even
intervals; so after the time of one answer all of them have, and whoever came in meanwhile ends from
then on, an answer later than it came::

    ended   0 ──────────── runs ───┬── handed at once, then as they came in
            0                  one answer
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.cost_model import decode_step_ms
from pipeline.forecast import DecodeForecast
from schemas.profiles import StepCosts


class Group(NamedTuple):
    """Some sequences, and the tokens of all together."""

    num: float = 0.0
    tokens: float = 0.0

    @property
    def mean(self) -> float:
        """Tokens of each; 0 of nobody."""
        return self.tokens / self.num if self.num > 0 else 0.0

    def plus(self, other: Group) -> Group:
        """Both together."""
        return Group(self.num + other.num, self.tokens + other.tokens)

    def shared(self, num_workers: int) -> Group:
        """One worker's part of them, if there is a worker."""
        return Group(self.num / max(1, num_workers), self.tokens / max(1, num_workers))

    def less(self, num: float) -> Group:
        """Without ``num`` of them; below 0 is none."""
        if num <= 0 or self.num <= 0:
            return self
        left = max(0.0, self.num - num)
        return Group(left, self.tokens * left / self.num)


@dataclass(slots=True, kw_only=True)
class DecodeFlow:
    """One worker's sequences, before time passes.

    Args:
        used_tokens: of its memory: what it says, and what those who run still need for tokens that
            they have.
        total_tokens: of its memory; 0: it does not say.
        answer_tokens: of an answer; None: none has been seen, so no end is expected.
        way_ms: until the KV has come of those who run or were handed over.
        way_token_ms: that a token's KV takes.
    """

    costs: StepCosts | None
    runs: Group
    handed: Group
    coming: Group
    used_tokens: float
    total_tokens: int
    answer_tokens: float | None
    way_ms: float = 0.0
    way_token_ms: float = 0.0

    def after(self, passed_s: float) -> DecodeForecast:
        """When so much time has passed. Who finds no room makes no step longer, but is counted:
        ``free_tokens`` is below 0 then."""
        passed_ms = 1000 * max(0.0, passed_s)
        num_steps, ended = self._progress(passed_ms)
        running = self.runs.less(ended)
        handed = self.handed.less(ended - self.runs.num)
        coming = self.coming.less(ended - self.runs.num - self.handed.num)
        grown = running.num * num_steps
        context = running.tokens + grown + handed.tokens + coming.tokens
        used = self.used_tokens - self.runs.tokens + context
        num = running.num + handed.num + coming.num
        part = min(1.0, self.total_tokens / used) if self.total_tokens and used > 0 else 1.0
        num_sequences, context_tokens = math.ceil(num * part - 1e-9), round(context * part)
        return DecodeForecast(
            num_sequences=num_sequences,
            context_tokens=context_tokens,
            free_tokens=min(self.total_tokens, self.total_tokens - round(used)),
            step_ms=None
            if self.costs is None
            else decode_step_ms(self.costs, num_sequences, context_tokens),
            way_ms=self.way_ms + self.coming.tokens * self.way_token_ms - passed_ms,
            way_token_ms=self.way_token_ms,
        )

    def _progress(self, passed_ms: float) -> tuple[float, float]:
        """Steps that each one who stays will have made, and how many will have ended."""
        at_once = min(self.handed.num, self._num_fitting())
        num = self.runs.num + at_once
        context = self.runs.tokens + at_once * self.handed.mean
        step_ms = 0.0
        if self.costs is not None:
            step_ms = decode_step_ms(self.costs, max(1, round(num)), round(context))
        num_steps = passed_ms / step_ms if step_ms > 0 else 0.0
        if self.answer_tokens is None:
            return num_steps, 0.0
        answers = num_steps / max(1.0, self.answer_tokens)
        num_steps = min(num_steps, self.answer_tokens)
        if answers <= 1:
            return num_steps, self.runs.num * answers
        return num_steps, num + self._num_entered(at_once, answers)

    def _num_entered(self, at_once: float, answers: float) -> float:
        """Who has come in an answer's time before the end and earlier, but not at once."""
        waited = self.handed.num - at_once + self.coming.num * (answers - 1) / answers
        room = self._num_fitting() - at_once
        places = room + (self.runs.num + at_once + room) * (answers - 1)
        return min(waited, places)

    def _num_fitting(self) -> float:
        """How many of those who are yet to come would find room now."""
        each = max(self.handed.mean, self.coming.mean)
        if not self.total_tokens or each <= 0:
            return math.inf
        return max(0.0, self.total_tokens - self.used_tokens) / each

"""How likely a prompt's own tokens were, gathered while its chunks are computed.

The logits of position p score the token at p + 1, so the first token has no score, and the last
position, from which the answer goes on, scores none::

    positions   0    1    2    3
    tokens      t0   t1   t2   t3
    scores           s1   s2   s3      of the logits at 0, 1, 2
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from schemas.tokens import TokenLogprob
from workers.engine.api import Sampled

if TYPE_CHECKING:
    from workers.engine.output import Vocabulary


class PromptScores:
    """The scores of one prompt, position by position. A position that is computed again, after a
    preemption or a step that failed, is put again.
    """

    def __init__(self, prompt_ids: Seq[int]) -> None:
        self._first = Sampled(token_id=prompt_ids[0])
        self._scores: list[Sampled | None] = [None] * (len(prompt_ids) - 1)
        self._num_missing = len(self._scores)
        self._logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first has its score."""
        return self._num_missing == 0

    def put(self, position: int, score: Sampled) -> None:
        """The score of the prompt's token at ``position``, 1 or more."""
        self._num_missing -= self._scores[position - 1] is None
        self._scores[position - 1] = score

    def logprobs(self, vocabulary: Vocabulary) -> tuple[TokenLogprob, ...]:
        """One entry per token, as readers get them; made once, for all choices."""
        if not self._logprobs:
            found = [score for score in self._scores if score is not None]
            assert len(found) == len(self._scores), "a token was sampled before its prompt's end"
            self._logprobs = tuple(map(vocabulary.logprob, [self._first, *found]))
        return self._logprobs

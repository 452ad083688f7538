"""Deltas of a token stream into an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loadgen.chaos.answer import Answer
from schemas.tokens import TokenDelta

_DIGITS = 3  # of logprobs: what two orders of summing agree in


def take_deltas(answer: Answer, deltas: Sequence[TokenDelta]) -> None:
    """Note what came at one time."""
    answer.event_s.append(time.monotonic())
    for delta in deltas:
        answer.ids[delta.index] += delta.ids
        answer.texts[delta.index] += delta.text
        answer.logprobs[delta.index] += [
            (one.token_id, round(one.logprob, _DIGITS)) for one in delta.logprobs or ()
        ]

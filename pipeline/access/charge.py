"""How many tokens a request is charged, before it is known what it uses. Pure.

The rule is prompt + ``max_tokens``, for each of ``n`` choices. Before admission has tokenized, the
prompt is a guess that is too low rather than too high, so that nothing is refused that fits; with
admission's word the charge is made exact. An answer whose client named no ``max_tokens`` may fill
the whole context, and nearly never does: it is charged ``UNNAMED_TOKENS``, and what it uses beyond
that when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schemas.requests import InferenceRequest
from schemas.tokens import Accepted

UNNAMED_TOKENS = 1024
_LIKELY_SHARE = 8  # one part of so many
_CHARS_PER_TOKEN = 8  # twice what English text has


class Charge(NamedTuple):
    """Tokens that a request needs for certain, and others that it probably needs."""

    certain: int
    likely: int

    def within(self, limit: int) -> int:
        """What is charged. What is only likely takes a share of the limit at most, so that several
        such requests have room in it, and never makes a request one that can't fit."""
        likely = min(self.likely, limit // _LIKELY_SHARE)
        return min(self.certain + likely, max(self.certain, limit))


def first_charge(requests: Sequence[InferenceRequest]) -> Charge:
    """Of what the body says alone."""
    certain = likely = 0
    for request in requests:
        sampling = request.sampling
        if isinstance(request.prompt, tuple):
            certain += len(request.prompt)
        else:
            likely += num_chars(request) // _CHARS_PER_TOKEN
            certain += 1
        if sampling.max_tokens is None:
            likely += sampling.n * UNNAMED_TOKENS
        else:
            certain += sampling.n * sampling.max_tokens
    return Charge(certain, likely)


def exact_charge(requests: Sequence[InferenceRequest], accepted: Sequence[Accepted]) -> Charge:
    """With admission's word for each of ``requests``: prompts are counted."""
    certain = likely = 0
    for request, word in zip(requests, accepted, strict=True):
        n = request.sampling.n
        certain += word.prompt_tokens
        if request.sampling.max_tokens is None:
            likely += n * min(word.max_tokens, UNNAMED_TOKENS)
        else:
            certain += n * word.max_tokens
    return Charge(certain, likely)


def num_chars(request: InferenceRequest) -> int:
    """Characters of its text; 0 for token ids."""
    if isinstance(request.prompt, str):
        return len(request.prompt)
    total = 0
    for message in request.messages or ():
        content = message.content
        if isinstance(content, str):
            total += len(content)
        else:
            total += sum(len(part.get("text", "")) for part in content or ())
    return total

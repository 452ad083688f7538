"""Logprobs in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.openai import ChatLogprobs, CompletionLogprobs, LogprobEntry, TopLogprobEntry
from schemas.tokens import TokenLogprob

_LEAST = -9999.0  # stands for minus infinity, which JSON can't say; OpenAI's choice too
_PART_OF_CHARACTER = "\ufffd"


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _bytes(token: str) -> list[int] | None:
    return None if _PART_OF_CHARACTER in token else list(token.encode())


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
    """One entry per token, each with as many alternatives as were asked for."""
    return ChatLogprobs(
        content=[
            LogprobEntry(
                token=one.token,
                logprob=_finite(one.logprob),
                bytes=_bytes(one.token),
                top_logprobs=[
                    TopLogprobEntry(
                        token=top.token, logprob=_finite(top.logprob), bytes=_bytes(top.token)
                    )
                    for top in one.top
                ],
            )
            for one in tokens
        ]
    )


def completion_logprobs(tokens: Iterable[TokenLogprob], offset: int = 0) -> CompletionLogprobs:
    """Four parallel lists; ``offset`` is where the first token starts in the choice's text.

    The chosen token is always among its alternatives, so there may be one more than asked for.
    """
    found = list(tokens)
    offsets = []
    for one in found:
        offsets.append(offset)
        offset += len(one.token)
    return CompletionLogprobs(
        tokens=[one.token for one in found],
        token_logprobs=[_finite(one.logprob) for one in found],
        top_logprobs=[
            {top.token: _finite(top.logprob) for top in one.top} | {one.token: _finite(one.logprob)}
            for one in found
        ],
        text_offset=offsets,
    )

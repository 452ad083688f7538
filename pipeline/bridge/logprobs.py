"""Logprobs in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from schemas.openai import ChatLogprobs, CompletionLogprobs, LogprobEntry, TopLogprobEntry
from schemas.tokens import TokenLogprob, TopLogprob

_LEAST = -9999.0  # stands for minus infinity, which JSON can't say; OpenAI's choice too
_PART_OF_CHARACTER = "\ufffd"


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _bytes(one: TokenLogprob | TopLogprob) -> list[int] | None:
    if one.raw:
        return list(one.raw)
    return None if _PART_OF_CHARACTER in one.token else list(one.token.encode())


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
    """One entry per token, each with as many alternatives as were asked for."""
    return ChatLogprobs(
        content=[
            LogprobEntry(
                token=one.token,
                logprob=_finite(one.logprob),
                bytes=_bytes(one),
                top_logprobs=[
                    TopLogprobEntry(
                        token=top.token, logprob=_finite(top.logprob), bytes=_bytes(top)
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
        top_logprobs=[_alternatives(one) for one in found],
        text_offset=offsets,
    )


def echo_logprobs(prompt: Sequence[TokenLogprob], echo: str) -> CompletionLogprobs:
    """The same of a prompt's tokens, whose text is ``echo``; the first has no logprob."""
    return CompletionLogprobs(
        tokens=[one.token for one in prompt],
        token_logprobs=[None, *(_finite(one.logprob) for one in prompt[1:])],
        top_logprobs=[None, *(_alternatives(one) for one in prompt[1:])],
        text_offset=list(_places([one.token for one in prompt], echo)),
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The lists of both, one behind the other."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _alternatives(one: TokenLogprob) -> dict[str, float] | None:
    """By text, the token itself among them. Parts of characters all show as one text: a second of
    that is called ``token_id:<id>``, as vLLM does, so that the likeliest is never missing."""
    found: dict[str, float] = {}
    for top in one.top:
        is_taken = top.token in found or (top.token == one.token and top.token_id != one.token_id)
        name = f"token_id:{top.token_id}" if is_taken else top.token
        found[name] = _finite(top.logprob)
    return found | {one.token: _finite(one.logprob)}


def _places(tokens: Sequence[str], text: str) -> Iterator[int]:
    """Where each token begins in ``text``. Some don't stand there as they are called: special ones
    show nothing, parts of a character are no character, the first may have lost its blank. They
    are placed where the one before ended, and the next that is found tells how long they were."""
    end, slack = 0, 0
    for token in tokens:
        found = text.find(token, end, end + slack + len(token)) if token else end
        if found < 0:
            yield end
            slack += len(token)
        else:
            yield found
            end, slack = found + len(token), 0

"""Whole answers: what is no stream. Deltas are gathered, then put into OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeline.bridge.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    joined,
)
from schemas.errors import (
    InvalidRequest,
    MeshError,
    ModelNotFound,
    QueueFull,
)
from schemas.models import ModelCard
from schemas.openai import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ErrorAnswer,
    ErrorBody,
    ModelList,
    ModelObject,
    PromptTokensDetails,
    UsageBlock,
)
from schemas.requests import FinishReason
from schemas.tokens import TokenDelta, TokenLogprob, Usage

_OWNER = "inference-mesh"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What all events of a stream, or the whole answer, say of themselves."""

    id: str
    created: int
    model: str
    fingerprint: str = ""


def known_reason(reason: str) -> FinishReason:
    """``reason`` as clients know it."""
    return "length" if reason == "length" else "stop"


def usage_block(usage: Usage) -> UsageBlock:
    """Token counts in OpenAI's shape."""
    return UsageBlock(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def error_answer(error: MeshError) -> ErrorAnswer:
    """``error`` in OpenAI's shape."""
    if isinstance(error, InvalidRequest | ModelNotFound):
        kind = "invalid_request_error"
    elif isinstance(error, QueueFull):
        kind = "rate_limit_error"
    else:
        kind = "server_error"
    return ErrorAnswer(
        error=ErrorBody(message=error.message, type=kind, param=error.param, code=error.code)
    )


def model_object(card: ModelCard) -> ModelObject:
    """One model as ``/v1/models`` shows it."""
    return ModelObject(
        id=card.name,
        created=card.created_unix_s,
        owned_by=_OWNER,
        root=card.name,
        max_model_len=card.context_length,
    )


def model_list(cards: Sequence[ModelCard]) -> ModelList:
    """All models, by name."""
    return ModelList(data=[model_object(c) for c in sorted(cards, key=lambda c: c.name)])


class Gathered:
    """The choices of one answer while their deltas come in."""

    def __init__(self, echoes: Sequence[str]) -> None:
        self._echoes = echoes
        self._texts: list[list[str]] = [[echo] for echo in echoes]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in echoes]
        self._prompts: list[Sequence[TokenLogprob]] = [()] * len(echoes)

    def add(self, choice: int, delta: TokenDelta) -> None:
        """Take one delta, in order."""
        self._texts[choice].append(delta.text)
        self._logprobs[choice].extend(delta.logprobs or ())
        if delta.prompt_logprobs:
            self._prompts[choice] = delta.prompt_logprobs

    def chat(self, about: Identity, reasons: Sequence[str], usage: Usage) -> ChatCompletion:
        """The whole answer of chat; ``reasons`` has one finish reason per choice."""
        choices = [
            ChatChoice(
                index=i,
                message=AssistantMessage(content="".join(self._texts[i])),
                logprobs=chat_logprobs(self._logprobs[i]) if self._logprobs[i] else None,
                finish_reason=known_reason(reason),
            )
            for i, reason in enumerate(reasons)
        ]
        return ChatCompletion(
            id=about.id,
            created=about.created,
            model=about.model,
            choices=choices,
            usage=usage_block(usage),
            system_fingerprint=about.fingerprint,
        )

    def completion(self, about: Identity, reasons: Sequence[str], usage: Usage) -> Completion:
        """The whole answer of completions."""
        choices = [
            CompletionChoice(
                index=i,
                text="".join(self._texts[i]),
                logprobs=self._completion_logprobs(i),
                finish_reason=known_reason(reason),
            )
            for i, reason in enumerate(reasons)
        ]
        return Completion(
            id=about.id,
            created=about.created,
            model=about.model,
            choices=choices,
            usage=usage_block(usage),
            system_fingerprint=about.fingerprint,
        )

    def _completion_logprobs(self, choice: int) -> CompletionLogprobs | None:
        """Of the prompt, if asked for, and the answer."""
        echo, prompt = self._echoes[choice], self._prompts[choice]
        own = self._logprobs[choice]
        found = completion_logprobs(own, len(echo)) if own or prompt else None
        return joined(echo_logprobs(prompt, echo), found) if found and prompt else found

"""What the events of a stream are in chat and in completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pipeline.bridge.answers import known_reason
from pipeline.bridge.logprobs import chat_logprobs, completion_logprobs, echo_logprobs
from pipeline.bridge.sse import Events
from schemas.openai import ChatChunk, ChunkChoice, Completion, CompletionChoice, Delta, UsageBlock
from schemas.tokens import TokenDelta, TokenLogprob


class ChatEvents(Events):
    """``chat.completion.chunk`` events; the opening is the role."""

    def _chunk(self, choices: list[ChunkChoice], usage: UsageBlock | None = None) -> ChatChunk:
        about = self.identity
        return ChatChunk(
            id=about.id,
            created=about.created,
            model=about.model,
            system_fingerprint=about.fingerprint,
            choices=choices,
            usage=usage or self._usage_now,
        )

    def _opening(self, choice: int, echo: str, prompt: Sequence[TokenLogprob]) -> ChatChunk:
        return self._chunk([ChunkChoice(index=choice, delta=Delta(role="assistant", content=echo))])

    def _text(self, choice: int, delta: TokenDelta) -> ChatChunk:
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        return self._chunk(
            [ChunkChoice(index=choice, delta=Delta(content=delta.text), logprobs=logprobs)]
        )

    def _closing(self, choice: int, reason: str) -> ChatChunk:
        return self._chunk(
            [ChunkChoice(index=choice, delta=Delta(), finish_reason=known_reason(reason))]
        )

    def _last(self, usage: UsageBlock) -> ChatChunk:
        return self._chunk([], usage)


class CompletionEvents(Events):
    """``text_completion`` events; the opening is the echoed prompt, when there is one."""

    @cached_property
    def _offsets(self) -> list[int]:
        """Per choice, where its next token begins in its text."""
        return [len(echo) for echo in self._echoes]

    def _chunk(
        self, choices: list[CompletionChoice], usage: UsageBlock | None = None
    ) -> Completion:
        about = self.identity
        return Completion(
            id=about.id,
            created=about.created,
            model=about.model,
            system_fingerprint=about.fingerprint,
            choices=choices,
            usage=usage or self._usage_now,
        )

    def _opening(self, choice: int, echo: str, prompt: Sequence[TokenLogprob]) -> Completion | None:
        if not (echo or prompt):
            return None
        logprobs = echo_logprobs(prompt, echo) if prompt else None
        return self._chunk([CompletionChoice(index=choice, text=echo, logprobs=logprobs)])

    def _text(self, choice: int, delta: TokenDelta) -> Completion:
        logprobs = None
        if delta.logprobs:
            logprobs = completion_logprobs(delta.logprobs, self._offsets[choice])
            self._offsets[choice] += sum(len(token) for token in logprobs.tokens)
        return self._chunk([CompletionChoice(index=choice, text=delta.text, logprobs=logprobs)])

    def _closing(self, choice: int, reason: str) -> Completion:
        return self._chunk(
            [CompletionChoice(index=choice, text="", finish_reason=known_reason(reason))]
        )

    def _last(self, usage: UsageBlock) -> Completion:
        return self._chunk([], usage)

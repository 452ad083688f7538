"""What is asked: prompts of a given length, the same ones for the same seed.

Request ``k`` of a workload depends on (seed, k) alone, so two runs send the same prompts in
whatever order and at whatever speed they do it, and no prompt shares a prefix with another except
by chance. A second run with the same seed against the same mesh may find the first one's KV
blocks; the report counts such cached tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from schemas.requests import ChatMessage, InferenceRequest, SamplingParams

PromptKind = Literal["ids", "words"]

# Short and frequent, so that most tokenizers have one token for each with its leading blank.
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water been "
    "call who oil its now find long down day did get come made may part"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request to send: greedy, and exactly ``output_len`` tokens long (``ignore_eos``)."""

    number: int  # negative for warm-up
    request_id: str  # new in every run: a mesh answers an id only once
    model: str
    prompt: tuple[int, ...] | str  # token ids, or words
    is_chat: bool = False  # the words are one turn of a user
    input_len: int
    output_len: int
    seed: int
    tenant: str = ""  # of a trace: who asks

    def bus_message(self, deadline_unix_ms: int) -> InferenceRequest:
        """The request as admission takes it from the bus; the deadline is in broker time."""
        turn = None
        if self.is_chat and isinstance(self.prompt, str):
            turn = ChatMessage(role="user", content=self.prompt)
        return InferenceRequest(
            request_id=self.request_id,
            model=self.model,
            prompt=None if turn else self.prompt,
            messages=(turn,) if turn else None,
            sampling=SamplingParams(
                max_tokens=self.output_len,
                min_tokens=self.output_len,
                ignore_eos=True,
                temperature=0.0,
                seed=self.seed,
            ),
            deadline_unix_ms=deadline_unix_ms,
        )

    def http_body(self) -> bytes:
        """The request as ``/v1/completions`` or ``/v1/chat/completions`` takes it."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": self.output_len,
            "min_tokens": self.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        return msgspec.json.encode(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Independent prompts of one length.

    With ``kind="ids"`` a prompt is exactly ``input_len`` token ids, evenly distributed over
    ``[vocab_low, vocab_high)``. With ``"words"`` it is ``input_len`` common English words: about
    as many tokens.
    """

    model: str
    input_len: int
    output_len: int
    seed: int = 0
    kind: PromptKind = "ids"
    vocab_low: int = 1000
    vocab_high: int = 20000
    is_chat: bool = False  # words only

    def request(self, number: int) -> LoadRequest:
        """Request ``number``; negative numbers are prompts that no measured request has."""
        rng = np.random.default_rng([self.seed, number < 0, abs(number)])
        prompt: tuple[int, ...] | str
        if self.kind == "ids":
            prompt = tuple(rng.integers(self.vocab_low, self.vocab_high, self.input_len).tolist())
        else:
            picks = rng.integers(0, len(_WORDS), self.input_len).tolist()
            prompt = " ".join(_WORDS[pick] for pick in picks)
        return LoadRequest(
            number=number,
            request_id=secrets.token_hex(16),
            model=self.model,
            prompt=prompt,
            is_chat=self.is_chat,
            input_len=self.input_len,
            output_len=self.output_len,
            seed=int(rng.integers(0, 2**31)),
        )

    def requests(self) -> Iterator[LoadRequest]:
        """Requests 0, 1, 2, … without end."""
        number = 0
        while True:
            yield self.request(number)
            number += 1

    def warmup(self, num_requests: int) -> Iterator[LoadRequest]:
        """``num_requests`` requests of the same shape that are never measured."""
        for number in range(1, num_requests + 1):
            yield self.request(-number)

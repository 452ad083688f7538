"""The requests: every way of sampling whose state a take-over has to rebuild."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loadgen.chaos.answer import Answer
from schemas.requests import InferenceRequest, SamplingParams

_WORDS = (
    "the sea is wide and old ships go far over it while small birds cry in the grey morning wind "
    "that blows from the cold north where nobody lives but the white bear and his quiet friends"
).split()
_SHORT_CHARS = 40
_LONG_CHARS = 2400  # a prefill of 500 tokens
_CHARS_PER_TOKEN = 1.0  # the worst tokenizer: a token per character
_OVERHEAD_TOKENS = 8
_LASTING = 5  # times as many tokens as others


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of request; each time it is sent, it is the same but for its id and cache salt."""

    name: str
    prompt: str
    sampling: SamplingParams
    is_long: bool = False  # its prefill takes a while
    is_lasting: bool = False  # its answer does, too: nobody waits for it to its end

    def message(self, model: str, request_id: str, label: str, deadline: int) -> InferenceRequest:
        """For the bus; ``deadline`` in unix milliseconds. The salt keeps it from what is cached."""
        return InferenceRequest(
            request_id=request_id,
            model=model,
            prompt=self.prompt,
            sampling=self.sampling,
            deadline_unix_ms=deadline,
            label=label,
            cache_salt=label,
        )

    def http_body(self, model: str, label: str, *, is_mesh: bool) -> bytes:
        """For ``/v1/completions``, streamed with usage; without what only a mesh knows unless
        ``is_mesh``."""
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "n": sampling.n,
            "ignore_eos": sampling.ignore_eos,
        }
        if is_mesh:
            body["cache_salt"] = label
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.logprobs is not None:
            body["logprobs"] = sampling.logprobs
        for name in ("presence_penalty", "frequency_penalty"):
            if value := getattr(sampling, name):
                body[name] = value
        return msgspec.json.encode(body)


def make_cases(seed: int, context_length: int, num_tokens: int) -> list[Case]:
    """Greedy and seeded; plain, n > 1, penalties, logprobs, a long prompt.

    Args:
        context_length: of the model: prompts and answers fit in, whatever its tokenizer does.
        num_tokens: of most answers.
    """
    rng = random.Random(seed)
    room = (context_length - num_tokens - _OVERHEAD_TOKENS) * _CHARS_PER_TOKEN
    short, long = (int(min(room, chars)) for chars in (_SHORT_CHARS, _LONG_CHARS))
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    seeded = SamplingParams(
        max_tokens=num_tokens, temperature=0.9, seed=rng.randrange(2**31), ignore_eos=True
    )
    kinds = {
        "greedy": greedy,
        "seeded": seeded,
        "seeded-n3": replace_params(seeded, n=3),
        "greedy-n2": replace_params(greedy, n=2),
        "logprobs": replace_params(seeded, logprobs=2),
        "penalties": replace_params(seeded, presence_penalty=0.5, frequency_penalty=0.3),
        "eos": replace_params(seeded, ignore_eos=False),
    }
    shorts = [Case(name=n, prompt=_text(rng, short), sampling=s) for n, s in kinds.items()]
    longs = [
        Case(name=f"{one.name}-long", prompt=_text(rng, long), sampling=one.sampling, is_long=True)
        for one in shorts[:2]
    ]
    return [*longs, *shorts]


def lasting_case(seed: int, context_length: int, num_tokens: int) -> Case:
    """One whose client leaves: it has far to go still when that is heard, on a busy machine too.

    Args:
        context_length, num_tokens: as for :func:`make_cases`.
    """
    num_tokens = max(num_tokens, min(_LASTING * num_tokens, context_length // 2))
    [long, *_] = make_cases(seed, context_length, num_tokens)
    return replace(long, name="lasting", is_lasting=True)


def with_stop(case: Case, undisturbed: Answer) -> Case:
    """``case`` with a stop string that ends it after about two thirds of its answer; it begins
    and ends within a token, where the answer has text enough."""
    text = undisturbed.texts[0]
    start = 2 * len(text) // 3
    stop = text[start : start + 5]
    return replace(
        case, name=f"{case.name}-stop", sampling=replace_params(case.sampling, stop=(stop,))
    )


def replace_params(sampling: SamplingParams, **changes: Any) -> SamplingParams:
    """``sampling`` with some fields changed."""
    return msgspec.structs.replace(sampling, **changes)


def _text(rng: random.Random, num_chars: int) -> str:
    words: list[str] = []
    while sum(len(word) + 1 for word in words) < num_chars:
        words.append(rng.choice(_WORDS))
    return " ".join(words)[: max(1, num_chars)].strip()

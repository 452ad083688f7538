"""What sampling parameters may be, checked for HTTP and bus alike: a table, and what fits."""

from __future__ import annotations

import random
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import msgspec

from schemas.errors import ContextTooLong, InvalidRequest
from schemas.models import ModelCard
from schemas.requests import ResponseFormat, SamplingParams


class Range(NamedTuple):
    """Inclusive bounds of a number."""

    low: float
    high: float


RANGES: dict[str, Range] = {
    "max_tokens": Range(0, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0),
    "top_k": Range(0, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.01, 10.0),
    "seed": Range(-(2**63), 2**64 - 1),
    "logprobs": Range(0, 20),
    "prompt_logprobs": Range(0, 20),
    "n": Range(1, 64),
}
_ranged = attrgetter(*RANGES)
PRIORITY = Range(-(2**31), 2**31 - 1)
LOGIT_BIAS = Range(-100.0, 100.0)
# Logprobs of a prompt's tokens, alternatives included, over all choices. Those of a choice travel
# in one message of at most 8 MiB, which leaves 128 bytes for each; they take about 60.
MAX_PROMPT_LOGPROBS = 65_536
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_BIASED_TOKENS = 1024
# Compiling a schema takes 1 ms as a rule. The time grows with the square of the number of optional
# properties: the worst that was found took 1.8 s at 70 KiB and 0.2 s at this bound.
MAX_SCHEMA_BYTES = 32 * 1024


def check_number(field: str, value: float | None) -> None:
    """Raise InvalidRequest, naming ``field``, when ``value`` lies outside its range."""
    if value is not None:
        _check(field, value, RANGES[field])


def check_priority(value: int) -> None:
    """Raise InvalidRequest when ``value`` is no priority."""
    _check("priority", value, PRIORITY)


def _check(field: str, value: float, allowed: Range) -> None:
    low, high = allowed
    if not low <= value <= high:  # NaN is in no range
        raise InvalidRequest(f"{field} must be from {low} to {high}, not {value}", param=field)


def check_sampling(params: SamplingParams) -> None:
    """Check every field of ``params`` that needs no model.

    Raises:
        InvalidRequest: naming the field.
    """
    _check_ranges(_ranged(params))
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        raise InvalidRequest(
            "max_tokens must be at least 1, or 0 where only the prompt's logprobs are wanted "
            "(echo and logprobs)",
            param="max_tokens",
        )
    if params.top_p == 0:
        raise InvalidRequest("top_p must be over 0", param="top_p")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens may not be over max_tokens", param="min_tokens")
    check_stops(params.stop)
    check_schema_size(params.response_format)
    if len(params.stop_token_ids) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop ids", param="stop_token_ids")
    if len(params.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"at most {MAX_BIASED_TOKENS} tokens", param="logit_bias")
    for bias in params.logit_bias.values():
        if not LOGIT_BIAS.low <= bias <= LOGIT_BIAS.high:
            raise InvalidRequest("a bias must be from -100 to 100", param="logit_bias")


@lru_cache(256)
def _check_ranges(values: tuple[float | None, ...]) -> None:
    """Those of ``RANGES``. Clients ask for the same again and again, so it is checked once."""
    for field, value in zip(RANGES, values, strict=True):
        check_number(field, value)


def check_stops(stops: tuple[str, ...]) -> None:
    """Raise InvalidRequest unless ``stops`` are few, short and not empty."""
    if not stops:
        return
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings", param="stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_CHARS} characters", param="stop")


def check_schema_size(wanted: ResponseFormat | None) -> None:
    """Raise InvalidRequest when a schema is too large to be compiled."""
    if wanted is not None:
        size = len(wanted.json_schema.encode(errors="surrogatepass"))
        if size > MAX_SCHEMA_BYTES:
            raise InvalidRequest(
                f"a schema of {size} bytes is over {MAX_SCHEMA_BYTES}", param="response_format"
            )


def check_token_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InvalidRequest, naming ``field``, when an id is not in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(f"token ids are from 0 to {vocab_size - 1}", param=field)


def check_prompt_logprobs(params: SamplingParams, num_prompt: int) -> None:
    """Raise InvalidRequest when a prompt of so many tokens has more logprobs than fit a message."""
    if params.prompt_logprobs is None:
        return
    count = num_prompt * (1 + params.prompt_logprobs) * params.n
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{num_prompt} prompt tokens with {params.prompt_logprobs} alternatives each, for "
            f"n={params.n}, are {count} logprobs, over {MAX_PROMPT_LOGPROBS}: ask for fewer "
            "alternatives, or of a shorter prompt",
            param="logprobs",
        )


class SequenceLimit(NamedTuple):
    """How long prompt and answer together may be, and why."""

    tokens: int
    reason: str

    @classmethod
    def of(cls, card: ModelCard, held: int | None) -> SequenceLimit:
        """The context of ``card``, or what its workers' memory can hold where that is less."""
        if held is not None and held < card.context_length:
            return cls(held, f"the workers of {card.name} hold sequences of {held}")
        return cls(card.context_length, f"the context of {card.name} is {card.context_length}")

    def resolve(self, params: SamplingParams, num_prompt: int, prompt_field: str) -> SamplingParams:
        """``params`` with seed and ``max_tokens`` set.

        Raises:
            ContextTooLong: the prompt, or prompt and ``max_tokens``, do not fit.
            InvalidRequest: less fits than ``min_tokens``, or the prompt is too long for its
                logprobs.
        """
        room = self.tokens - num_prompt
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {num_prompt} tokens, {self.reason} and the answer needs one at "
                "least",
                param=prompt_field,
            )
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise ContextTooLong(
                f"{num_prompt} prompt tokens and max_tokens = {max_tokens} are too many: "
                f"{self.reason}",
                param="max_tokens",
            )
        if params.min_tokens > max_tokens:
            raise InvalidRequest("min_tokens may not be over max_tokens", param="min_tokens")
        check_prompt_logprobs(params, num_prompt)
        # No secret, so no question to the kernel: it must only differ from request to request.
        seed = random.getrandbits(63) if params.seed is None else params.seed % 2**64
        return msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed)

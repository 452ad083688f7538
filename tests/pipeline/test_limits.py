from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.limits import (
    MAX_BIASED_TOKENS,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    PRIORITY,
    RANGES,
    SequenceLimit,
    check_priority,
    check_sampling,
    check_token_ids,
)
from schemas.errors import InvalidRequest
from schemas.requests import SamplingParams

UNRANGED = {"logit_bias", "stop", "stop_token_ids", "ignore_eos", "response_format"}  # otherwise
each_field = pytest.mark.parametrize("field", RANGES)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def refused_field(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(params(**fields))
    assert not caught.value.retryable
    return caught.value.param


def just_over(field: str) -> tuple[float, float]:
    low, high = RANGES[field]
    if isinstance(low, int):
        return low - 1, int(high) + 1
    return math.nextafter(low, -math.inf), math.nextafter(high, math.inf)


def test_every_number_has_a_range() -> None:
    """A new sampling field is checked or listed here as checked otherwise."""
    assert {f.name for f in msgspec.structs.fields(SamplingParams)} == RANGES.keys() | UNRANGED


def test_defaults_are_allowed() -> None:
    """What nobody said anything about is in order."""
    check_sampling(params())


@each_field
def test_bounds_belong_to_the_range(field: str) -> None:
    """Both ends are allowed, but for top_p, where nothing would be left at 0. No answer at all may
    be asked for where the prompt's logprobs are."""
    low, high = RANGES[field]
    others = {"max_tokens": 2**31 - 1} if field == "min_tokens" else {}
    others |= {"prompt_logprobs": 0} if field == "max_tokens" else {}
    for value in (low, high):
        if (field, value) != ("top_p", 0.0):
            check_sampling(params(**{field: value}, **others))
    assert refused_field(top_p=0.0) == "top_p"


@each_field
def test_what_lies_outside_is_named(field: str) -> None:
    """The next number beyond either end, and one beyond every float."""
    for value in (*just_over(field), 10**400, -(10**400)):
        assert refused_field(**{field: value}) == field


@pytest.mark.parametrize("field", [f for f, r in RANGES.items() if isinstance(r.low, float)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_named(field: str, value: float) -> None:
    """NaN compares with nothing; it must not slip through."""
    assert refused_field(**{field: value}) == field


def test_min_tokens_may_not_be_over_max_tokens() -> None:
    """Equal is fine."""
    check_sampling(params(min_tokens=4, max_tokens=4))
    assert refused_field(min_tokens=5, max_tokens=4) == "min_tokens"


@pytest.mark.parametrize("bias", [-100.5, 100.5, math.nan, math.inf])
def test_biases_are_bounded(bias: float) -> None:
    """In value and in number."""
    assert refused_field(logit_bias={1: 0.0, 2: bias}) == "logit_bias"
    check_sampling(params(logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS), 100.0)))
    assert refused_field(logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0))


@pytest.mark.parametrize(
    ("num_prompt", "fields"),
    [
        (MAX_PROMPT_LOGPROBS, {"prompt_logprobs": 0}),
        (MAX_PROMPT_LOGPROBS // 6, {"prompt_logprobs": 5}),
        (MAX_PROMPT_LOGPROBS // 8, {"prompt_logprobs": 1, "n": 4}),
    ],
)
def test_a_prompts_logprobs_fit_a_message(num_prompt: int, fields: dict[str, Any]) -> None:
    """Tokens times alternatives times choices are bounded; without logprobs the prompt is not."""
    limit = SequenceLimit(2**20, "so it is here")
    assert limit.resolve(params(max_tokens=0, **fields), num_prompt, "prompt").max_tokens == 0
    limit.resolve(params(max_tokens=1), num_prompt + 1, "prompt")
    with pytest.raises(InvalidRequest, match="over 65536") as caught:
        limit.resolve(params(max_tokens=1, **fields), num_prompt + 1, "prompt")
    assert (caught.value.param, caught.value.http_status) == ("logprobs", 400)


def test_stops_are_few_short_and_not_empty() -> None:
    """Each costs time with every token."""
    check_sampling(params(stop=("x" * MAX_STOP_CHARS,) * MAX_STOPS))
    assert refused_field(stop=("x",) * (MAX_STOPS + 1)) == "stop"
    assert refused_field(stop=("x", "")) == "stop"
    assert refused_field(stop=("x" * (MAX_STOP_CHARS + 1),)) == "stop"
    assert refused_field(stop_token_ids=(1,) * (MAX_STOPS + 1)) == "stop_token_ids"


@given(st.lists(st.integers(-3, 12)), st.integers(1, 10))
def test_token_ids_lie_in_the_vocabulary(ids: list[int], vocab_size: int) -> None:
    """From 0 up to, not including, its size; the field is the one that was given."""
    if all(0 <= token_id < vocab_size for token_id in ids):
        check_token_ids("prompt", tuple(ids), vocab_size)
    else:
        with pytest.raises(InvalidRequest) as caught:
            check_token_ids("prompt", tuple(ids), vocab_size)
        assert caught.value.param == "prompt"


def test_priorities_fit_everywhere() -> None:
    """Any 32-bit number."""
    check_priority(int(PRIORITY.low))
    check_priority(int(PRIORITY.high))
    for value in (PRIORITY.low - 1, PRIORITY.high + 1, 10**400):
        with pytest.raises(InvalidRequest) as caught:
            check_priority(int(value))
        assert caught.value.param == "priority"

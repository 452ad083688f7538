"""What a request is charged before it is known what it uses."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.access.charge import UNNAMED_TOKENS, Charge, exact_charge, first_charge
from schemas.requests import ChatMessage, InferenceRequest, SamplingParams
from schemas.tokens import Accepted


def request(max_tokens: int | None, n: int = 1, **what: Any) -> InferenceRequest:
    sampling = SamplingParams(max_tokens=max_tokens, n=n)
    return InferenceRequest(request_id="r", model="m", sampling=sampling, **what)


def accepted(prompt_tokens: int, max_tokens: int) -> Accepted:
    return Accepted(
        request_id="r",
        model="m",
        revision="1",
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        admitted_unix_ms=0,
        deadline_unix_ms=0,
    )


def test_token_ids_and_max_tokens_are_certain() -> None:
    """Nothing is guessed where the body says it: both charges are one."""
    batch = [request(10, 2, prompt=(1, 2, 3)), request(10, 2, prompt=(4,))]
    assert first_charge(batch) == Charge(certain=4 + 40, likely=0)
    assert exact_charge(batch, [accepted(3, 10), accepted(1, 10)]) == Charge(44, 0)


def test_text_is_guessed_low_until_it_is_counted() -> None:
    """An eighth of its characters, in chat over all parts of all turns."""
    turns = (
        ChatMessage(role="system", content="x" * 80),
        ChatMessage(role="user", content=[{"type": "text", "text": "y" * 80}]),
        ChatMessage(role="assistant", content=None),
    )
    assert first_charge([request(5, messages=turns)]) == Charge(6, 20)
    assert first_charge([request(5, prompt="x" * 80)]) == Charge(6, 10)
    assert exact_charge([request(5, prompt="x" * 80)], [accepted(33, 5)]) == Charge(38, 0)


def test_an_answer_without_max_tokens_is_charged_as_a_usual_one() -> None:
    """Not the whole context, and never more than there is room for."""
    open_end = request(None, 2, prompt="hi")
    assert first_charge([open_end]) == Charge(1, 2 * UNNAMED_TOKENS)
    assert exact_charge([open_end], [accepted(3, 100_000)]) == Charge(3, 2 * UNNAMED_TOKENS)
    assert exact_charge([open_end], [accepted(3, 50)]) == Charge(3, 100)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_what_is_only_likely_never_makes_a_request_impossible(
    certain: int, likely: int, limit: int
) -> None:
    """A charge is over the limit only when what is certain is; guesses take an eighth of it."""
    charged = Charge(certain, likely).within(limit)
    assert (charged > limit) == (certain > limit)
    assert certain <= charged <= certain + min(likely, limit / 8)

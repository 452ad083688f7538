from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from pipeline.cost_model import (
    FREE,
    chunk_squares,
    decode_step_ms,
    guess_decode,
    guess_prefill,
    prefill_ms,
    prefill_step_ms,
    quadratic_cost,
    scaled,
)
from schemas.profiles import StepCosts

COSTS = StepCosts(
    prefill_base_ms=4.0,
    prefill_token_ms=0.5,
    prefill_square_ms=0.125,
    decode_base_ms=8.0,
    decode_context_ms=0.25,
    decode_sequence_ms=2.0,
)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_a_prompt_costs_the_same_however_it_is_cut(counts: list[int]) -> None:
    """Chunks add up to the whole prompt, but for the base, which each step costs."""
    total, cut, start = sum(counts), 0.0, 0
    for count in counts:
        cut += prefill_ms(COSTS, count, start)
        start += count
    assert cut == pytest.approx(prefill_ms(COSTS, total, num_steps=len(counts)))


def test_what_is_cached_is_free() -> None:
    """Only new tokens count, but they attend to the cached ones."""
    assert prefill_ms(COSTS, 0, 1000) == 0
    assert prefill_ms(COSTS, 2, 3) == 4 + 0.5 * 2 + 0.125 * (25 - 9)


def test_prompts_of_one_step_share_its_base() -> None:
    """``A + B * sum(p) + C * sum(p**2)``."""
    squares = chunk_squares(0, 3) + chunk_squares(0, 5)
    assert prefill_step_ms(COSTS, 8, squares) == 4 + 0.5 * 8 + 0.125 * (9 + 25)


def test_a_decode_step_costs_by_context_and_batch() -> None:
    """``A + B * sum(context) + C * batch``; no step, no cost."""
    assert decode_step_ms(COSTS, 3, 100) == 8 + 0.25 * 100 + 2 * 3
    assert decode_step_ms(COSTS, 0, 0) == 0


def test_scaled_costs_scale_every_step() -> None:
    """A worker twice as fast takes half as long, whatever the step."""
    fast = scaled(COSTS, 0.5)
    assert prefill_ms(fast, 7, 2) == prefill_ms(COSTS, 7, 2) / 2
    assert decode_step_ms(fast, 7, 20) == decode_step_ms(COSTS, 7, 20) / 2
    assert set(asdict(scaled(FREE, 3)).values()) == {0}


def test_one_part_is_guessed_from_the_other() -> None:
    """A prompt's token costs as a sequence of a decode step, and attends to half of the square."""
    assert prefill_ms(guess_prefill(COSTS), 4) == 8 + 2 * 4 + 0.25 * 16 / 2
    assert decode_step_ms(guess_decode(COSTS), 3, 100) == 4 + 2 * 0.125 * 100 + 0.5 * 3
    assert guess_decode(guess_prefill(COSTS)) == guess_prefill(COSTS)


def test_the_quadratic_cost_counts_uncached_tokens() -> None:
    """``2 p^2 + p m``."""
    assert quadratic_cost(10, 5) == 250

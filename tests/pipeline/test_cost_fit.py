from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from pipeline.cost_fit import (
    PoorSamples,
    StepSample,
    fit_costs,
    mean_error,
    predicted_ms,
    why_poor,
    with_part,
)
from pipeline.cost_model import FREE, chunk_squares, scaled
from schemas.profiles import StepCosts

COSTS = StepCosts(
    prefill_base_ms=18.1,
    prefill_token_ms=0.1,
    prefill_square_ms=7e-6,
    decode_base_ms=20.0,
    decode_context_ms=6e-4,
    decode_sequence_ms=0.04,
)
LENGTHS = (16, 64, 256, 512, 1024, 4096)
CACHED = (0, 512, 4096)
BATCHES = (1, 4, 16, 64)
CONTEXTS = (64, 512, 4096)


def timed(costs: StepCosts, shape: tuple[int, int, int, int], factor: float = 1.0) -> StepSample:
    return StepSample(*shape, predicted_ms(costs, StepSample(*shape, 0.0)) * factor)


PREFILLS = [(n, chunk_squares(c, c + n), 0, 0) for n in LENGTHS for c in CACHED]
DECODES = [(0, 0, batch * context, batch) for batch in BATCHES for context in CONTEXTS]
MIXED = [(n, chunk_squares(0, n), 300 * b, b) for n in LENGTHS for b in BATCHES]

coefficients = st.builds(
    StepCosts,
    prefill_base_ms=st.floats(0.1, 50),
    prefill_token_ms=st.floats(0.01, 5),
    prefill_square_ms=st.floats(1e-7, 1e-3),
    decode_base_ms=st.floats(0.1, 50),
    decode_context_ms=st.floats(1e-5, 1e-2),
    decode_sequence_ms=st.floats(0.01, 5),
)


@settings(max_examples=25, deadline=None)
@given(coefficients)
def test_exact_times_give_the_costs_back(costs: StepCosts) -> None:
    """Whatever the costs, what they say of steps leads back to them."""
    fit = fit_costs([timed(costs, shape) for shape in PREFILLS + DECODES + MIXED])
    assert asdict(fit.costs) == pytest.approx(asdict(costs), rel=1e-4)
    assert max(fit.prefill_error, fit.decode_error) < 1e-6


@settings(max_examples=15, deadline=None)
@given(coefficients, st.integers(0, 2**32))
def test_noise_costs_no_more_than_itself(costs: StepCosts, seed: int) -> None:
    """With 5 % of noise, steps that were not seen are predicted within 10 %."""
    rng = random.Random(seed)
    shapes = (PREFILLS + DECODES) * 3
    noisy = [timed(costs, shape, rng.uniform(0.95, 1.05)) for shape in shapes]
    fit = fit_costs(noisy)
    assert max(fit.prefill_error, fit.decode_error) < 0.05
    for shape in ((128, chunk_squares(128, 256), 0, 0), (0, 0, 8 * 1000, 8)):
        unseen = timed(costs, shape)
        assert predicted_ms(fit.costs, unseen) == pytest.approx(unseen.ms, rel=0.1)


def test_no_cost_is_below_zero() -> None:
    """Where the data would have a negative base, it is zero, and the rest as good as can be."""
    shapes = [(n, n * n, 0, 0) for n in LENGTHS]
    bent = [StepSample(*shape, 0.1 * shape[0] ** 1.5) for shape in shapes]
    fit = fit_costs(bent + [timed(COSTS, shape) for shape in DECODES])
    assert min(asdict(fit.costs).values()) >= 0
    assert fit.costs.prefill_square_ms > 0
    assert 0 < fit.prefill_error < 1


def test_a_few_steps_that_stood_still_do_not_count() -> None:
    """A machine that stops for a moment leaves outliers: the costs are those of the others."""
    samples = [timed(COSTS, shape) for shape in (PREFILLS + DECODES) * 2]
    stuck = [timed(COSTS, shape, 40.0) for shape in PREFILLS[:2] + DECODES[:2]]
    fit = fit_costs(samples + stuck)
    assert asdict(fit.costs) == pytest.approx(asdict(COSTS), rel=1e-3)


def test_the_error_is_the_mean_of_relative_errors() -> None:
    """Steps of one part alone count where there are such."""
    samples = [timed(COSTS, shape, 0.8) for shape in PREFILLS] + [timed(COSTS, MIXED[0], 9)]
    assert mean_error(COSTS, samples, "prefill") == pytest.approx(0.25)
    assert mean_error(COSTS, samples[-1:], "prefill") == pytest.approx(8 / 9)
    assert mean_error(COSTS, samples[:3], "decode") == 0


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "0 prefill steps were timed, 6 are needed; 0 decode steps"),
        (PREFILLS, "0 decode steps were timed"),
        (DECODES + PREFILLS[:5], "5 prefill steps were timed"),
        ([(300 + n, (300 + n) ** 2, 0, 0) for n in range(9)] + DECODES, "prompts of 300 to 308"),
        (PREFILLS + [(0, 0, 4 * n, 4) for n in range(30, 90)], "batches of 4 to 4"),
        (PREFILLS + [(0, 0, 300 * n, n) for n in range(1, 9)], "contexts of 300 to 300"),
    ],
)
def test_poor_samples_are_refused(samples: list[tuple[int, int, int, int]], reason: str) -> None:
    """Too few, or too much alike: the message says which part and what is missing."""
    with pytest.raises(PoorSamples, match=reason):
        fit_costs([timed(COSTS, shape) for shape in samples])


def test_a_part_that_was_not_seen_is_taken_from_elsewhere() -> None:
    """A prefill worker learns of prefill alone; steps that did both then tell it nothing."""
    slow = scaled(COSTS, 3.0)
    samples = [timed(slow, shape) for shape in PREFILLS] + [timed(COSTS, MIXED[0], 50)]
    fit = fit_costs(samples, others=COSTS)
    assert fit.parts == ("prefill",)
    assert asdict(fit.costs) == pytest.approx(asdict(with_part(COSTS, "prefill", slow)), rel=1e-4)
    with pytest.raises(PoorSamples, match="6 are needed"):
        fit_costs(samples[:2], others=COSTS)
    assert why_poor(samples, "prefill") == ""


def test_short_ones_cost_by_their_number() -> None:
    """Squares and contexts so small that only noise would tell of them have no coefficient, and
    need not differ."""
    rng = random.Random(1)
    prompts = [timed(COSTS, (n, n * n, 0, 0), rng.uniform(0.7, 1.4)) for n in range(20, 120, 5)]
    decodes = [timed(COSTS, (0, 0, 90 * n, n), rng.uniform(0.7, 1.4)) for n in range(1, 20)]
    costs = fit_costs(prompts + decodes).costs
    assert (costs.prefill_square_ms, costs.decode_context_ms) == (0, 0)
    assert predicted_ms(costs, prompts[9]) == pytest.approx(
        predicted_ms(COSTS, prompts[9]), rel=0.3
    )


def test_with_part_changes_one_part_alone() -> None:
    """The three coefficients of that part, no other."""
    changed = asdict(with_part(FREE, "decode", COSTS))
    assert {name for name, value in changed.items() if value} == {
        name for name in asdict(COSTS) if name.startswith("decode")
    }

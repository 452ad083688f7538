"""What requests and steps cost: the two cost models. Pure.

    fitted      milliseconds of one worker, from its ``StepCosts``
    quadratic   ``2 p^2 + p m`` without a unit, where nothing was measured: it orders requests

In both only prompt tokens count that must be computed: what a worker holds is free.
"""

from __future__ import annotations

from schemas.profiles import StepCosts


def prefill_ms(costs: StepCosts, num_new: int, num_cached: int = 0, *, num_steps: int = 1) -> float:
    """Milliseconds to compute ``num_new`` prompt tokens that follow ``num_cached`` others.

    Args:
        num_steps: in how many chunks.
    """
    if num_new <= 0:
        return 0.0
    end = num_cached + num_new
    squares = float(end * end - num_cached * num_cached)
    return (
        costs.prefill_base_ms * num_steps
        + costs.prefill_token_ms * num_new
        + costs.prefill_square_ms * squares
    )


def decode_step_ms(costs: StepCosts, num_sequences: int, context_tokens: int) -> float:
    """Milliseconds of one decode step.

    Args:
        context_tokens: of all sequences together.
    """
    if num_sequences <= 0:
        return 0.0
    return (
        costs.decode_base_ms
        + costs.decode_context_ms * context_tokens
        + costs.decode_sequence_ms * num_sequences
    )


def quadratic_cost(num_uncached: int, num_generated: int) -> float:
    """The cost model for workers that nothing is known of: ``2 p^2 + p m``."""
    return 2.0 * num_uncached**2 + float(num_uncached) * num_generated

"""What requests and steps cost: the two cost models. Pure.

    fitted      milliseconds of one worker, from its ``StepCosts``
    quadratic   ``2 p^2 + p m`` without a unit, where nothing was measured: it orders requests

In both only prompt tokens count that must be computed: what a worker holds is free. A chunk costs
what it adds to the whole, so that a prompt costs its tokens and squares once, however it is cut::

    0 ......... start ........ end           cached or computed before | this chunk
    token * (end - start) + square * (end^2 - start^2), and the base once per step
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.profiles import StepCosts

FREE: Final = StepCosts(
    prefill_base_ms=0.0,
    prefill_token_ms=0.0,
    prefill_square_ms=0.0,
    decode_base_ms=0.0,
    decode_context_ms=0.0,
    decode_sequence_ms=0.0,
)


def chunk_squares(start: int, end: int) -> int:
    """What the positions ``[start, end)`` add to the sum of squared prompt lengths."""
    return end * end - start * start


def prefill_step_ms(
    costs: StepCosts, num_tokens: int, num_squares: float, *, num_steps: int = 1
) -> float:
    """Milliseconds to compute chunks of prompts, together ``num_tokens`` long, in ``num_steps``.

    Args:
        num_squares: of all chunks, as :func:`chunk_squares` counts them.
    """
    if num_tokens <= 0:
        return 0.0
    return (
        costs.prefill_base_ms * num_steps
        + costs.prefill_token_ms * num_tokens
        + costs.prefill_square_ms * num_squares
    )


def prefill_ms(costs: StepCosts, num_new: int, num_cached: int = 0, *, num_steps: int = 1) -> float:
    """Milliseconds to compute ``num_new`` prompt tokens that follow ``num_cached`` others.

    Args:
        num_steps: in how many chunks.
    """
    end = num_cached + num_new
    squares = end * end - num_cached * num_cached
    return prefill_step_ms(costs, num_new, squares, num_steps=num_steps)


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


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    """The costs of a worker whose steps take ``factor`` times as long."""
    return StepCosts(**{name: ms * factor for name, ms in msgspec.structs.asdict(costs).items()})


def guess_prefill(costs: StepCosts) -> StepCosts:
    """With prefill costs made of the decode costs, for a worker that never computed a prompt: a
    token of it costs what a sequence of a decode step does, and so does its attention."""
    return msgspec.structs.replace(
        costs,
        prefill_base_ms=costs.decode_base_ms,
        prefill_token_ms=costs.decode_sequence_ms,
        prefill_square_ms=costs.decode_context_ms / 2,  # half of a prompt's square is attended to
    )


def guess_decode(costs: StepCosts) -> StepCosts:
    """The other way round, for a worker that only computes prompts."""
    return msgspec.structs.replace(
        costs,
        decode_base_ms=costs.prefill_base_ms,
        decode_context_ms=2 * costs.prefill_square_ms,
        decode_sequence_ms=costs.prefill_token_ms,
    )


def quadratic_cost(num_uncached: int, num_generated: int) -> float:
    """The cost model for workers that nothing is known of: ``2 p^2 + p m``."""
    return 2.0 * num_uncached**2 + float(num_uncached) * num_generated

"""Fits ``StepCosts`` to steps that were timed. Pure.

Least squares on the relative error, as DistServe fits its estimators, with no coefficient below
zero: a step of 5 ms counts as much as one of 5 s, and a slow outlier as little as it deserves. A
step that prefilled and decoded counts for both parts, so that a worker that does both at once is
fitted as it runs::

                    prefill                     decode
    a step          1    tokens    squares      1    context    batch
    costs, found    A    B         C            A'   B'         C'      all at once, or one part
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.cost_model import decode_step_ms, prefill_step_ms
from schemas.profiles import StepCosts

Part = Literal["prefill", "decode"]
PARTS: Final[tuple[Part, ...]] = ("prefill", "decode")

FEWEST_SAMPLES = 6  # of a part: twice its coefficients
_LEAST_SPREAD = 2.0  # largest ÷ smallest prompt or batch: below, base and slope can't be told apart
_LEAST_CONTEXT_SPREAD = 1.3  # the same of the context per sequence
# Prompts and contexts that are all shorter cost by their number, within noise: a coefficient of
# their squares, or of their context, would be that of the noise.
_LEAST_LENGTH = 256
_OUTLIER = 5.0  # times the median relative error: left out of the second, last fit
_LEAST_OUTLIER = 0.2

# Of the features, as they stand in StepCosts: base, number of tokens or sequences, length of them.
_COLUMNS: Final[dict[Part, tuple[int, int, int]]] = {"prefill": (0, 1, 2), "decode": (3, 5, 4)}
_NAMES: Final = StepCosts.__struct_fields__

_Floats = npt.NDArray[np.float64]


class PoorSamples(ValueError):
    """Too few steps, or too much alike, to tell coefficients from."""


class StepSample(NamedTuple):
    """One step: what it computed, and how long it took.

    ``num_squares``: of its chunks of prompts, as ``cost_model.chunk_squares`` counts them.
    ``context_tokens``: of its ``num_sequences`` decoding sequences together.
    """

    num_tokens: int
    num_squares: int
    context_tokens: int
    num_sequences: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """Costs, and the mean relative error of what they predict for the samples: 0.1 is 10 %.

    ``parts`` are those that were fitted; an error of another part is 0.
    """

    costs: StepCosts
    parts: tuple[Part, ...]
    prefill_error: float
    decode_error: float


def predicted_ms(costs: StepCosts, sample: StepSample) -> float:
    """How long the step should have taken."""
    prefill = prefill_step_ms(costs, sample.num_tokens, sample.num_squares)
    return prefill + decode_step_ms(costs, sample.num_sequences, sample.context_tokens)


def pace_of(
    costs: StepCosts, samples: Sequence[StepSample], part: Part, fewest: int = 1
) -> float | None:
    """How many times as long as predicted steps took that did nothing but ``part``: the median, or
    that of steps which did it as well where there are no such. None: fewer than ``fewest`` of
    them."""
    concerned = [one for one in samples if part in _parts_of(one)]
    alone = [one for one in concerned if len(_parts_of(one)) == 1] or concerned
    ratios = [one.ms / predicted_ms(costs, one) for one in alone if predicted_ms(costs, one) > 0]
    return statistics.median(ratios) if len(ratios) >= fewest else None


def with_part(costs: StepCosts, part: Part, source: StepCosts) -> StepCosts:
    """``costs`` with the coefficients of one part as ``source`` has them."""
    values = [getattr(costs, name) for name in _NAMES]
    for column in _COLUMNS[part]:
        values[column] = getattr(source, _NAMES[column])
    return StepCosts(**dict(zip(_NAMES, values, strict=True)))


def why_poor(samples: Sequence[StepSample], part: Part) -> str:
    """What is wrong with the samples of a part; "" when it can be fitted."""
    of_part = [one for one in samples if part in _parts_of(one)]
    if len(of_part) < FEWEST_SAMPLES:
        return f"{len(of_part)} {part} steps were timed, {FEWEST_SAMPLES} are needed"
    if part == "prefill":
        return _why_alike("prompts", [one.num_tokens for one in of_part], _LEAST_SPREAD)
    contexts = [one.context_tokens / one.num_sequences for one in of_part]
    reason = _why_alike("decode batches", [one.num_sequences for one in of_part], _LEAST_SPREAD)
    if max(contexts) < _LEAST_LENGTH:
        return reason
    return reason or _why_alike("contexts", contexts, _LEAST_CONTEXT_SPREAD)


def _why_alike(what: str, sizes: Sequence[float], spread: float) -> str:
    least, most = min(sizes), max(sizes)
    if most >= spread * least:
        return ""
    return (
        f"{what} of {least:.0f} to {most:.0f} are too much alike: the largest must be "
        f"{spread:g} times the smallest"
    )


def fit_costs(samples: Sequence[StepSample], others: StepCosts | None = None) -> CostFit:
    """The costs that predict ``samples`` best.

    Args:
        others: where a part, prefill or decode, has samples too poor to fit, it is taken from here,
            and steps that have to do with it are left out. None: both parts are to be fitted.

    Raises:
        PoorSamples: a part can't be fitted, or with ``others`` none; the message says why.
    """
    reasons = {part: why_poor(samples, part) for part in PARTS}
    parts = tuple(part for part in PARTS if not reasons[part])
    if not parts or (others is None and len(parts) < len(PARTS)):
        raise PoorSamples("; ".join(reason for reason in reasons.values() if reason))
    used = [one for one in samples if one.ms > 0 and set(_parts_of(one)) <= set(parts)]
    if not used:
        raise PoorSamples("every step both prefilled and decoded, one of which is not known")
    columns = [column for part in parts for column in _columns(used, part)]
    matrix: _Floats = _features(used)[:, columns]
    found = _least_squares(matrix)
    is_usual = _usual(used, np.abs(matrix @ found - 1))
    if not is_usual.all():
        found = _least_squares(matrix[is_usual])
    values = dict.fromkeys(_NAMES, 0.0)
    values |= {_NAMES[c]: float(value) for c, value in zip(columns, found, strict=True)}
    costs = StepCosts(**values)
    for part in PARTS:
        if part not in parts and others is not None:
            costs = with_part(costs, part, others)
    return CostFit(
        costs=costs,
        parts=parts,
        prefill_error=mean_error(costs, used, "prefill"),
        decode_error=mean_error(costs, used, "decode"),
    )


def _columns(samples: Sequence[StepSample], part: Part) -> tuple[int, ...]:
    """Of the features, those that can be told from the samples."""
    base, count, length = _COLUMNS[part]
    if part == "prefill":
        lengths = [one.num_squares / one.num_tokens for one in samples if one.num_tokens]
    else:
        lengths = [one.context_tokens / one.num_sequences for one in samples if one.num_sequences]
    return (base, count, length) if max(lengths) >= _LEAST_LENGTH else (base, count)


def mean_error(costs: StepCosts, samples: Sequence[StepSample], part: Part) -> float:
    """The mean of ``|predicted - measured| / measured`` over steps that did nothing but ``part``,
    or over those that did it as well where there are no such; 0 without any."""
    concerned = [one for one in samples if part in _parts_of(one)]
    alone = [one for one in concerned if len(_parts_of(one)) == 1] or concerned
    if not alone:
        return 0.0
    return math.fsum(abs(predicted_ms(costs, one) / one.ms - 1) for one in alone) / len(alone)


def _parts_of(sample: StepSample) -> tuple[Part, ...]:
    prefills, decodes = sample.num_tokens > 0, sample.num_sequences > 0
    return PARTS if prefills and decodes else ("prefill",) if prefills else ("decode",)


def _usual(samples: Sequence[StepSample], errors: _Floats) -> npt.NDArray[np.bool_]:
    """[n], which samples are near enough to what is usual for steps of their kind."""
    is_usual = np.ones(len(samples), np.bool_)
    kinds = [_parts_of(one) for one in samples]
    for kind in set(kinds):
        of_kind = np.array([one == kind for one in kinds])
        most = max(_OUTLIER * float(np.median(errors[of_kind])), _LEAST_OUTLIER)
        is_usual &= ~of_kind | (errors <= most)
    return is_usual


def _features(samples: Sequence[StepSample]) -> _Floats:
    """[n, 6], a row per step, divided by how long it took: what the costs times it should be 1."""
    tokens, squares, context, batch, ms = np.array(samples, np.float64).T
    columns = (tokens > 0, tokens, squares, batch > 0, context, batch)
    features: _Floats = np.column_stack(columns).astype(np.float64) / ms[:, None]
    return features


def _least_squares(matrix: _Floats) -> _Floats:
    """The ``x`` without negative entries for which ``matrix @ x`` is nearest to ones.

    With so few columns, every set of those that are not zero is tried: exact, a millisecond or two.

    Args:
        matrix: [n, k], k at most 6.
    """
    num_columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    joined = np.column_stack((matrix / scale, np.ones(len(matrix))))
    system: _Floats = np.linalg.qr(joined, mode="r")  # type: ignore[assignment]
    target = system[:, -1]
    best, best_rest = np.zeros(num_columns), float(np.linalg.norm(target))
    for size in range(1, num_columns + 1):
        for support in combinations(range(num_columns), size):
            chosen = system[:, list(support)]
            values = np.linalg.lstsq(chosen, target, rcond=None)[0]
            if (values < 0).any():
                continue
            rest = float(np.linalg.norm(chosen @ values - target))
            if rest < best_rest * (1 - 1e-9):
                best = np.zeros(num_columns)
                best[list(support)], best_rest = values, rest
    found: _Floats = best / scale
    return found

"""What this worker's steps cost: chosen, learned from those that it makes, or out of a profile.

::

    engine's thread    note()   every step
    any other          learn()  every few seconds: sorts the steps into buckets by their shapes,
                                and fits costs to what the buckets hold
    beats, Load        costs    the fit where it is good enough, else what was told before, at first
                                the profile, at the pace that was measured; else None

Buckets keep a worker that has decoded for an hour from forgetting what a prompt costs, and weigh
shapes alike that are rare and frequent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pipeline.cost_fit import (
    PARTS,
    CostFit,
    Part,
    PoorSamples,
    StepSample,
    fit_costs,
    pace_of,
    with_part,
)
from pipeline.cost_model import FREE, chunk_squares, guess_decode, guess_prefill, scaled
from schemas.profiles import StepCosts, WorkerProfile

if TYPE_CHECKING:
    from workers.engine.api import ScheduledSequence

_NEW = 1024  # steps that are not sorted yet
_KEPT = 8  # steps of one shape
_KEPT_MIXED = 64  # steps that prefill and decode, of all shapes together
_MIXED: Final = -1
_NOTHING: Final = (0, 0, 0, 0)
_MEMORY_S = 900.0  # older steps say nothing of what the machine does now
_LEARN_S = 2.0  # between two fits, each of which takes some milliseconds
_FEWEST_NEW = 4  # steps since the last fit: for another, and for a pace
_FEWEST = 12  # samples of a part: a handful of live steps, with their noise, tell too little
# A prompt, or the contexts of a batch, so large that it can't take what an empty step takes.
_LEAST_TOKENS, _LEAST_BATCH, _LEAST_GROWTH = 1024, 64, 0.02
_MOST_ERROR = 0.3  # mean relative error of a fit that is told to others
_MOST_PACE = 20.0  # a profile that is further off is not this worker's


# What a step computes: num_tokens, num_squares, context_tokens, num_sequences of a StepSample. One
# that was noted: its shape, seconds, and when. Plain tuples, for they are made at every step.
StepShape = tuple[int, int, int, int]
_Noted = tuple[StepShape, float, float]


def step_shape(batch: Sequence[ScheduledSequence]) -> StepShape:
    """Of a step: shares of one position that follows others are decodes."""
    starts = [one.start for one in batch if one.count == 1 and one.start]
    num_sequences, context = len(starts), sum(starts) + len(starts)
    if num_sequences == len(batch):
        return 0, 0, context, num_sequences
    chunks = [one for one in batch if one.count != 1 or not one.start]
    num_squares = sum(chunk_squares(one.start, one.start + one.count) for one in chunks)
    return sum(one.count for one in chunks), num_squares, context, num_sequences


class StepMeter:
    """The costs of one engine's steps. One thread notes, one at a time learns, any reads.

    Args:
        parts: what the worker does: its costs are known when these are.

    Attributes:
        costs: None: nothing is known. A part that is not among ``parts`` may be a guess.
        profile: the name of the profile that it began with; "" without one.
        pace: by part, how many times as long the steps since the last fit took as they should
            have by ``costs``.
    """

    def __init__(
        self, parts: Sequence[Part] = PARTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.parts = tuple(parts)
        self.costs: StepCosts | None = None
        self.profile = ""
        self.pace: dict[Part, float] = {}
        self._is_chosen = False
        self._base: StepCosts | None = None  # what is scaled where there is no fit
        self._clock = clock
        self._new: deque[_Noted] = deque(maxlen=_NEW)
        self._buckets: dict[int, deque[_Noted]] = {}
        self._num_noted = self._num_learned = 0
        self._learned_s = clock()

    @classmethod
    def of_known(cls, costs: StepCosts) -> StepMeter:
        """Of an engine whose costs are chosen: it has nothing to learn."""
        meter = cls()
        meter.costs = costs
        meter._is_chosen = True
        return meter

    def begin_with(self, profile: WorkerProfile) -> None:
        """Take the profile's costs until better ones are known."""
        self.profile = profile.name
        if not self._is_chosen:
            self._base = self.costs = profile.costs

    def note(self, shape: StepShape, seconds: float) -> None:
        """A step took so long. From the engine's thread; half a microsecond."""
        if not self.is_learning or shape == _NOTHING:
            return
        self._new.append((shape, seconds, self._clock()))
        self._num_noted += 1

    @property
    def is_learning(self) -> bool:
        """Whether it wants to know what steps take."""
        return not self._is_chosen

    @property
    def is_due(self) -> bool:
        """Whether it is time to learn, and there is something new."""
        has_news = self._num_noted - self._num_learned >= _FEWEST_NEW
        return has_news and self._clock() - self._learned_s >= _LEARN_S

    def learn(self) -> CostFit | None:
        """Fit ``costs`` to what was noted, in some milliseconds; None where that is not enough, or
        where the fit is too bad."""
        since_s, now_s = self._learned_s, self._clock()
        self._num_learned, self._learned_s = self._num_noted, now_s
        noted = self._sorted()
        if self.costs is not None:
            recent = _samples(noted, since_s)
            paces = {part: pace_of(self.costs, recent, part) for part in self.parts}
            self.pace = {part: pace for part, pace in paces.items() if pace is not None}
        samples = _samples(noted, now_s - _MEMORY_S)
        if self._base is not None:
            others = _paced(self._base, _samples(noted, since_s))
            fit = _good_fit(samples, others)
            self.costs = self._base = others if fit is None else fit.costs
            return fit
        fit = _good_fit(samples, FREE)
        if fit is not None and set(fit.parts) >= set(self.parts):
            self.costs = self._base = _with_guess(fit)
        return fit

    def samples(self) -> list[StepSample]:
        """All that was noted and is still kept. Where :meth:`learn` may be called."""
        return _samples(self._sorted(), 0.0)

    def _sorted(self) -> list[_Noted]:
        """Put what is new into its buckets; what all of them hold."""
        while self._new:
            noted = self._new.popleft()
            key = _bucket_of(*noted[0])
            if key not in self._buckets:
                kept = _KEPT_MIXED if key == _MIXED else _KEPT
                self._buckets[key] = deque(maxlen=kept)
            self._buckets[key].append(noted)
        return [one for bucket in self._buckets.values() for one in bucket]


def _paced(base: StepCosts, recent: Sequence[StepSample]) -> StepCosts:
    """``base``, each part at the pace of its steps, if there were some."""
    costs = base
    for part in PARTS:
        pace = pace_of(base, recent, part, _FEWEST_NEW)
        if pace is not None and 1 / _MOST_PACE < pace < _MOST_PACE:
            costs = with_part(costs, part, scaled(base, pace))
    return costs


def _with_guess(fit: CostFit) -> StepCosts:
    """What was fitted, and what was not by that: somebody will ask, and free it is not."""
    if "prefill" not in fit.parts:
        return guess_prefill(fit.costs)
    return fit.costs if "decode" in fit.parts else guess_decode(fit.costs)


def _good_fit(samples: Sequence[StepSample], others: StepCosts) -> CostFit | None:
    """A fit that is fit to be seen; a part that is not is one of ``others``. None: that holds for
    both, or no part can be fitted."""
    try:
        fit = fit_costs(samples, others)
    except PoorSamples:
        return None
    good = tuple(part for part in fit.parts if _is_good(fit, part, samples))
    costs = fit.costs
    for part in PARTS:
        if part not in good:
            costs = with_part(costs, part, others)
    return replace(fit, costs=costs, parts=good) if good else None


def _is_good(fit: CostFit, part: Part, samples: Sequence[StepSample]) -> bool:
    """Whether there were enough, it says what they took, and that much more takes longer."""
    costs = fit.costs
    if part == "prefill":
        count, error = sum(one.num_tokens > 0 for one in samples), fit.prefill_error
        base_ms, grows_ms = costs.prefill_base_ms, costs.prefill_token_ms * _LEAST_TOKENS
    else:
        count, error = sum(one.num_sequences > 0 for one in samples), fit.decode_error
        base_ms, grows_ms = costs.decode_base_ms, costs.decode_sequence_ms * _LEAST_BATCH
        grows_ms += costs.decode_context_ms * _LEAST_BATCH * _LEAST_TOKENS
    return count >= _FEWEST and error <= _MOST_ERROR and grows_ms > _LEAST_GROWTH * base_ms


def _samples(noted: Sequence[_Noted], since_s: float) -> list[StepSample]:
    return [StepSample(*shape, s * 1e3) for shape, s, at_s in noted if at_s >= since_s]


def _bucket_of(num_tokens: int, num_squares: int, context_tokens: int, num_sequences: int) -> int:
    """Steps of one bucket are within a factor of two of each other, in every respect."""
    if not num_sequences:
        return num_tokens.bit_length() << 16 | num_squares.bit_length()
    if num_tokens:
        return _MIXED
    return num_sequences.bit_length() << 8 | context_tokens.bit_length()

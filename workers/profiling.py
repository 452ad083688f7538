"""Measures what an engine's steps cost, over a grid of shapes: ``mesh profile``.

The engine itself makes the steps, scheduler, sampler and all, as it does for a mesh. What a step
has before it, a cached prefix or the context of a decode, is not computed: blocks are reserved for
it as for KV that another worker hands over, and stay as they are. Their content does not change how
long a step takes; each sequence has blocks of its own, so that none is read from a cache in which a
mesh would not find it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from pipeline.cost_fit import PARTS, CostFit, Part, PoorSamples, StepSample, fit_costs, why_poor
from schemas.errors import ConfigError
from schemas.profiles import StepCosts, WorkerProfile
from schemas.requests import SamplingParams
from workers.engine.api import EngineInfo, EngineRequest
from workers.engine.engine import Engine
from workers.own_profile import own_name
from workers.step_meter import StepMeter, StepShape

_SHORTEST = 16  # tokens of a prompt
_CACHED: Final = (256, 1024, 3072)
_CONTEXTS: Final = (64, 512, 2048)
_STEPS = 4  # of a decode point in one round, the first of which does not count
_KV_SHARE = 0.9  # of the pool that one point may take
_SEED = 7

Progress = Callable[[float, str], None]


class Point(NamedTuple):
    """What to time: a prompt of ``size`` new tokens after ``before`` others, or a decode step of
    ``size`` sequences with ``before`` tokens each."""

    part: Part
    size: int
    before: int

    @property
    def work(self) -> float:
        """How long it takes, in terms of the others."""
        return self.size * (1024 + self.before)

    @property
    def text(self) -> str:
        """For people."""
        if self.part == "prefill":
            return f"prompt of {self.size}, {self.before} cached"
        return f"decode of {self.size}, context {self.before}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The median time of each point, and the costs that predict them best."""

    points: dict[Point, StepSample]
    fit: CostFit
    num_steps: int
    seconds: float


def grid(engine: Engine) -> list[Point]:
    """Points that this engine can compute in one step each, small ones first."""
    info, limits = engine.info, engine.config
    room = int(_KV_SHARE * info.num_blocks) * info.block_size
    longest = min(info.max_sequence_tokens, room) - _STEPS - info.block_size  # before a step
    lengths = _doubling(_SHORTEST, limits.max_batch_tokens)
    batches = _doubling(1, limits.max_num_sequences)
    prefills = [
        Point("prefill", length, before)
        for length, before in product(lengths, (0, *_fitting(_CACHED, longest)))
        if length + before <= longest
    ]
    decodes = [
        Point("decode", batch, before)
        for batch, before in product(batches, _fitting(_CONTEXTS, longest))
        if batch * (before + _STEPS + info.block_size) <= room
    ]
    return prefills + decodes


def measure(
    engine: Engine, points: Sequence[Point], *, repeats: int, limit_s: float, progress: Progress
) -> Measured:
    """Time ``points`` by turns, ``repeats`` times, after a round that does not count: of all of
    them on a device that records and chooses kernels at first use, else of two.

    Args:
        limit_s: after so long nothing more is timed, once there is enough for a fit. Small points
            are timed first.
        progress: called with the share that is done, and with what comes now.

    Raises:
        ConfigError: the points are too few or too much alike for a fit.
    """
    started_s = time.monotonic()
    if not engine.info.device:  # pages that nobody has touched would be made within a step
        engine.pool.slots[: engine.info.num_blocks].fill(0)
    bench = _Bench(engine)
    times: dict[Point, list[StepSample]] = {point: [] for point in points}
    for point in points if engine.info.device else (points[0], points[-1]):
        progress(0.0, f"warm-up, {point.text}")
        bench.run(point)
    turns = product(range(repeats), sorted(points, key=lambda point: point.work))
    for number, (_, point) in enumerate(turns):
        if time.monotonic() - started_s > limit_s and _are_enough(times):
            break
        progress(number / (repeats * len(points)), point.text)
        times[point] += bench.run(point)
    progress(1.0, "")
    engine.check_invariants()
    found = {point: _median(samples) for point, samples in times.items() if samples}
    try:
        fit = fit_costs(list(found.values()))
    except PoorSamples as error:
        raise ConfigError(
            f"this engine's limits leave too little to measure: {error}", param="max_batch_tokens"
        ) from error
    return Measured(
        points=found,
        fit=fit,
        num_steps=sum(map(len, times.values())),
        seconds=time.monotonic() - started_s,
    )


def profile_of(
    measured: Measured, info: EngineInfo, served: str, num_threads: int, name: str = ""
) -> WorkerProfile:
    """What was measured, under the name by which workers like this one look for it, or another."""
    fit = measured.fit
    prompts = [point for point in measured.points if point.part == "prefill"]
    decodes = [point for point in measured.points if point.part == "decode"]
    return WorkerProfile(
        name=name or own_name(served, info, num_threads),
        costs=_rounded(fit.costs),
        hardware=info.device or f"{_processor()}, {num_threads} threads",
        engine=info.label,
        served=served,
        kv_tokens=info.num_blocks * info.block_size,
        kv_token_bytes=info.kv_token_bytes,
        prefill_error=round(fit.prefill_error, 4),
        decode_error=round(fit.decode_error, 4),
        source=f"mesh profile: {measured.num_steps} steps, {_ranges('prompts', prompts, 'cached')}"
        f", {_ranges('batches', decodes, 'context')}",
        measured_unix_s=int(time.time()),
    )


def _are_enough(times: Mapping[Point, Sequence[StepSample]]) -> bool:
    """Of what was timed so far."""
    medians = [_median(samples) for samples in times.values() if samples]
    return not any(why_poor(medians, part) for part in PARTS)


class _Steps(StepMeter):
    """Keeps every step."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[StepSample] = []

    def note(self, shape: StepShape, seconds: float) -> None:
        self.taken.append(StepSample(*shape, seconds * 1e3))

    def take(self) -> list[StepSample]:
        """Those since the last call."""
        taken, self.taken = self.taken, []
        return taken


class _Bench:
    """Lets an engine make steps of a given shape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(_SEED)
        self._steps = _Steps()
        engine.meter = self._steps

    def run(self, point: Point) -> list[StepSample]:
        """The steps of one point, once."""
        engine = self._engine
        is_prefill = point.part == "prefill"
        num_sequences = 1 if is_prefill else point.size
        keys = [f"profile-{number}" for number in range(num_sequences)]
        self._steps.take()
        for key in keys:
            self._add(key, point)
        for _ in range(1 if is_prefill else _STEPS):
            engine.step()
        for key in keys:
            engine.release(key)
        taken = self._steps.take()
        return taken if is_prefill else taken[1:]

    def _add(self, key: str, point: Point) -> None:
        engine, before = self._engine, point.before
        num_new = point.size if point.part == "prefill" else 1
        blocks: tuple[int, ...] = ()
        if before:
            found = engine.reserve(key, before)
            assert found is not None, "the grid fits the pool"
            blocks = found
        ids = self._rng.integers(0, engine.info.vocab_size, before + num_new).tolist()
        engine.add(
            EngineRequest(
                key=key,
                prompt_ids=tuple(ids),
                sampling=SamplingParams(
                    temperature=0.0, seed=0, max_tokens=_STEPS + 1, ignore_eos=True
                ),
                salt=key.encode(),
                imported_blocks=blocks,
                num_imported_tokens=before,
            )
        )


def _rounded(costs: StepCosts) -> StepCosts:
    """To six digits: more are noise, and look as if they were not."""
    values = msgspec.structs.asdict(costs)
    return StepCosts(**{name: float(f"{value:.6g}") for name, value in values.items()})


def _fitting(wanted: Sequence[int], longest: int) -> Sequence[int]:
    """Those that are at most ``longest``; shares of that where it is short."""
    return wanted if longest >= wanted[-1] else (longest // 8, longest // 4, longest // 2)


def _doubling(first: int, last: int) -> list[int]:
    """``first``, twice that, and so on; ``last`` at the end."""
    return [*_powers(first, last), last]


def _powers(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2


def _median(samples: Sequence[StepSample]) -> StepSample:
    """One step for all of them, which are alike."""
    return StepSample(
        num_tokens=samples[0].num_tokens,
        num_squares=samples[0].num_squares,
        context_tokens=round(statistics.mean(one.context_tokens for one in samples)),
        num_sequences=samples[0].num_sequences,
        ms=statistics.median(one.ms for one in samples),
    )


def _ranges(what: str, points: Sequence[Point], before: str) -> str:
    sizes, befores = {one.size for one in points}, {one.before for one in points}
    return f"{what} {min(sizes)} to {max(sizes)}, {before} {min(befores)} to {max(befores)}"


def _processor() -> str:
    """What Linux calls it; "CPU" where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    found = next((line for line in lines if line.startswith("model name")), "")
    return " ".join(found.partition(":")[2].split()) or "CPU"

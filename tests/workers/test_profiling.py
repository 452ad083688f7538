from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import asdict

from infra.transport.shm import SharedPool
from pipeline.profile_files import format_profile, parse_profile
from schemas.errors import ConfigError
from schemas.profiles import StepCosts
from tests.workers.engine.simulated_engines import StrictRunner, make_engine
from workers.engine.api import EngineInfo, Sampled, ScheduledSequence
from workers.engine.engine import Engine
from workers.engine.simulated import batch_ms
from workers.profiling import Point, grid, measure, profile_of

COSTS = StepCosts(
    prefill_base_ms=5.0,
    prefill_token_ms=0.5,
    prefill_square_ms=0.0,
    decode_base_ms=8.0,
    decode_context_ms=0.0,  # as of prompts: these are too short to tell
    decode_sequence_ms=2.0,
)


class TimedRunner(StrictRunner):
    """Takes the time of a cost model on a clock of its own."""

    def __init__(
        self, pool: SharedPool, info: EngineInfo, token_ids: Sequence[int], costs: StepCosts
    ) -> None:
        super().__init__(pool, info, token_ids, costs)
        self.now_s = 0.0

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[Sampled]:
        self.now_s += batch_ms(COSTS, batch) / 1e3
        return super().execute(batch)


def timed_engine(num_blocks: int = 200, **limits: int) -> Engine:
    engine = make_engine(num_blocks, runner_class=TimedRunner, **limits)  # type: ignore[arg-type]
    runner = engine.runner
    assert isinstance(runner, TimedRunner)
    engine.pace.clock = lambda: runner.now_s
    return engine


def nothing(share: float, text: str) -> None:
    assert 0 <= share <= 1


def test_an_engine_is_measured_as_it_is() -> None:
    """Its costs come out, from steps of the engine itself, and nothing is left in it."""
    engine = timed_engine(max_batch_tokens=64)
    points = grid(engine)
    measured = measure(engine, points, repeats=2, limit_s=60.0, progress=nothing)
    assert list(measured.points) == points
    assert asdict(measured.fit.costs) == pytest.approx(asdict(COSTS), rel=1e-3, abs=1e-9)
    assert measured.fit.parts == ("prefill", "decode")
    assert engine.blocks.counts().active == 0
    assert not engine.has_work()


def test_every_point_is_a_step_of_that_shape() -> None:
    """A prompt after what is cached costs its own tokens, a decode by batch and context."""
    engine = timed_engine(max_batch_tokens=64)
    points = [Point("prefill", 16, 0), Point("prefill", 32, 12), Point("decode", 4, 30)]
    points += grid(engine)
    found = measure(engine, points, repeats=1, limit_s=60.0, progress=nothing).points
    assert found[points[0]][:4] == (16, 256, 0, 0)
    assert found[points[1]][:4] == (32, 44**2 - 12**2, 0, 0)
    assert found[points[2]][:4] == (0, 0, 4 * (30 + 3), 4)


def test_the_grid_fits_the_engine() -> None:
    """No point is longer than the context, larger than a step, or more than the pool holds."""
    engine = timed_engine(40, max_batch_tokens=64)
    info, room = engine.info, 40 * engine.info.block_size
    points = grid(engine)
    assert {point.part for point in points} == {"prefill", "decode"}
    for part, size, before in points:
        new = 1 if part == "decode" else size
        assert new + before < info.max_sequence_tokens
        assert (size if part == "decode" else 1) * (before + new) <= room
    assert max(point.size for point in points if point.part == "prefill") == 64


def test_it_ends_in_time() -> None:
    """After the limit nothing more is timed than a fit needs, and that is what is cheap."""
    engine = timed_engine(max_batch_tokens=64)
    points = grid(engine)
    measured = measure(engine, points, repeats=50, limit_s=0.0, progress=nothing)
    assert set(measured.points) < set(points)
    assert asdict(measured.fit.costs) == pytest.approx(asdict(COSTS), rel=1e-3, abs=1e-9)
    assert max(point.size for point in measured.points if point.part == "prefill") < 64


def test_an_engine_without_a_batch_can_not_be_measured() -> None:
    """One sequence at a time says nothing of what a second one costs."""
    engine = timed_engine(max_batch_tokens=64, max_num_sequences=1)
    with pytest.raises(ConfigError, match="too little to measure: 3 decode steps were timed"):
        measure(engine, grid(engine), repeats=3, limit_s=60.0, progress=nothing)


def test_a_profile_says_what_was_measured() -> None:
    """Its name is the one that workers like this look for, and it can be kept in a file."""
    engine = timed_engine(max_batch_tokens=64)
    measured = measure(engine, grid(engine), repeats=1, limit_s=60.0, progress=nothing)
    made = profile_of(measured, engine.info, "tiny@1", 2)
    assert made.name == "tiny@1.simulated.cpu-2"
    assert (made.engine, made.served) == ("simulated", "tiny@1")
    assert (made.kv_tokens, made.kv_token_bytes) == (800, 8)
    assert made.hardware.endswith("2 threads")
    assert made.source.startswith("mesh profile: ")
    assert made.measured_unix_s > 0
    assert parse_profile(format_profile(made), "it") == made
    assert profile_of(measured, engine.info, "tiny@1", 2, "mine").name == "mine"

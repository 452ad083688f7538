from __future__ import annotations

import pytest
from msgspec.structs import asdict

from pipeline.cost_fit import StepSample, predicted_ms
from pipeline.cost_model import chunk_squares, guess_decode, scaled
from schemas.profiles import StepCosts, WorkerProfile
from tests.workers.engine.simulated_engines import engines, make_engine, request_of, run
from workers.step_meter import StepMeter, StepShape

COSTS = StepCosts(
    prefill_base_ms=5.0,
    prefill_token_ms=0.5,
    prefill_square_ms=1e-5,
    decode_base_ms=8.0,
    decode_context_ms=1e-3,
    decode_sequence_ms=2.0,
)
PREFILLS = [
    (n, chunk_squares(0, n), 0, 0) for n in (20, 30, 45, 60, 90, 120, 180, 250, 360, 500, 720, 1000)
]
DECODES = [(0, 0, n * context, n) for n in (1, 2, 4, 8) for context in (100, 200, 400)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def metered(meter: StepMeter, shapes: list[StepShape], costs: StepCosts = COSTS) -> None:
    for shape in shapes:
        meter.note(shape, predicted_ms(costs, StepSample(*shape, 0.0)) / 1e3)


def profile(costs: StepCosts) -> WorkerProfile:
    return WorkerProfile(name="class", costs=costs)


def test_a_worker_learns_its_costs_from_its_steps() -> None:
    """Nothing is told before enough is known; then the costs are those of the steps."""
    meter = StepMeter()
    metered(meter, PREFILLS)
    meter.learn()
    assert meter.costs is None, "half of what it does is not known"
    metered(meter, DECODES)
    fit = meter.learn()
    assert fit is not None
    assert max(fit.prefill_error, fit.decode_error) < 1e-6
    assert meter.costs is not None
    assert asdict(meter.costs) == pytest.approx(asdict(COSTS), rel=1e-3)


def test_a_prefill_worker_tells_what_it_does() -> None:
    """It need not know what a decode costs: that is a guess by what it does know, never free."""
    meter = StepMeter(("prefill",))
    metered(meter, PREFILLS)
    meter.learn()
    assert meter.costs is not None
    assert meter.costs.prefill_token_ms == pytest.approx(COSTS.prefill_token_ms, rel=1e-3)
    assert meter.costs == guess_decode(meter.costs)
    decoding = StepMeter(("decode",))
    metered(decoding, PREFILLS)
    decoding.learn()
    assert decoding.costs is None, "what it does it does not know yet"


def test_a_decode_worker_knows_prompts_once_it_has_computed_some() -> None:
    """Until then it guesses; the first few short rests that it is given teach it."""
    meter = StepMeter(("decode",))
    metered(meter, DECODES)
    meter.learn()
    assert meter.costs is not None
    assert meter.costs.prefill_token_ms == pytest.approx(COSTS.decode_sequence_ms, rel=1e-3)
    metered(meter, PREFILLS)
    meter.learn()
    assert asdict(meter.costs) == pytest.approx(asdict(COSTS), rel=1e-3)


def test_a_profile_counts_until_there_is_better() -> None:
    """From the first beat on; then at the pace of the steps, each part by its own; then a fit."""
    meter = StepMeter()
    meter.begin_with(profile(COSTS))
    assert (meter.costs, meter.profile) == (COSTS, "class")
    metered(meter, PREFILLS[5:6] * 4, scaled(COSTS, 2.0))
    metered(meter, DECODES[:1] * 4, scaled(COSTS, 0.5))
    assert meter.learn() is None
    assert meter.costs is not None
    assert meter.costs.prefill_token_ms == pytest.approx(2 * COSTS.prefill_token_ms)
    assert meter.costs.decode_base_ms == pytest.approx(0.5 * COSTS.decode_base_ms)
    assert meter.pace == {"prefill": pytest.approx(2.0), "decode": pytest.approx(0.5)}
    slow = scaled(COSTS, 3.0)
    metered(meter, (PREFILLS + DECODES) * 8, slow)
    assert meter.learn() is not None
    assert asdict(meter.costs) == pytest.approx(asdict(slow), rel=1e-3)


def test_a_profile_of_other_hardware_is_not_stretched() -> None:
    """Steps a hundred times as long as it says are no reason to believe it at another pace."""
    meter = StepMeter()
    meter.begin_with(profile(COSTS))
    metered(meter, PREFILLS[:1] * 4, scaled(COSTS, 100.0))
    meter.learn()
    assert meter.costs == COSTS


def test_costs_keep_pace_where_there_is_no_new_fit() -> None:
    """What was fitted once is told at the pace of the newest steps, if they fit no model; a step or
    two that took long change nothing."""
    meter = StepMeter(("prefill",))
    metered(meter, PREFILLS)
    meter.learn()
    metered(meter, PREFILLS[:2], scaled(COSTS, 9.0))
    meter.learn()
    assert meter.costs is not None
    assert meter.costs.prefill_token_ms == pytest.approx(COSTS.prefill_token_ms, rel=0.05)
    for number, shape in enumerate(PREFILLS * 8):
        metered(meter, [shape], scaled(COSTS, (1.0, 3.0, 9.0)[number % 3]))
    assert meter.learn() is None
    assert meter.costs.prefill_token_ms == pytest.approx(3 * COSTS.prefill_token_ms, rel=0.2)


def test_a_bad_fit_is_not_told() -> None:
    """Times that follow no such model give no costs; those of a profile stay at their pace."""
    meter, times = StepMeter(("decode",)), (1.0, 0.01, 0.5, 0.02, 0.9, 0.01) * 2
    for shape, seconds in zip(DECODES, times, strict=True):
        meter.note(shape, seconds)
    assert meter.learn() is None
    assert meter.costs is None


def test_a_fit_in_which_more_takes_no_longer_is_not_told() -> None:
    """So few sizes, and so much noise, that nothing but a base comes out."""
    meter = StepMeter(("decode",))
    for shape in DECODES:
        meter.note(shape, 0.02)
    assert meter.learn() is None
    assert meter.costs is None


def test_a_few_steps_are_not_enough() -> None:
    """However well they fit."""
    meter = StepMeter(("prefill",))
    metered(meter, PREFILLS[:11])
    assert meter.learn() is None
    metered(meter, PREFILLS[11:])
    assert meter.learn() is not None


def test_long_decoding_does_not_make_it_forget_prompts() -> None:
    """What is kept of one shape is bounded, and is not kept at the cost of other shapes."""
    meter = StepMeter()
    metered(meter, PREFILLS + DECODES)
    for _ in range(10):
        metered(meter, [(0, 0, 5000, 9)] * 500)
        metered(meter, [(100, 10_000, 5000, 9)] * 500)
        meter.learn()
    assert len(meter.samples()) <= len(PREFILLS) + len(DECODES) + 8 + 64
    fit = meter.learn()
    assert fit is not None
    assert fit.parts == ("prefill", "decode")


def test_it_learns_at_times_and_of_late() -> None:
    """A fit is due some seconds after the last one, if there were steps; those of an hour ago do
    not count any more."""
    clock = Clock()
    meter = StepMeter(clock=clock)
    metered(meter, PREFILLS + DECODES)
    assert not meter.is_due
    clock.now_s += 5
    assert meter.is_due
    meter.learn()
    clock.now_s += 5
    assert not meter.is_due, "nothing is new"
    clock.now_s += 3600
    slow = scaled(COSTS, 2.0)
    metered(meter, PREFILLS + DECODES, slow)
    meter.learn()
    assert meter.costs is not None
    assert asdict(meter.costs) == pytest.approx(asdict(slow), rel=1e-3)
    assert meter.pace == {"prefill": pytest.approx(2.0), "decode": pytest.approx(2.0)}


def test_chosen_costs_are_not_learned() -> None:
    """A simulated engine costs what it is told, however late its steps are."""
    meter = StepMeter.of_known(COSTS)
    metered(meter, PREFILLS + DECODES, scaled(COSTS, 9.0))
    assert meter.samples() == []
    meter.begin_with(profile(scaled(COSTS, 7.0)))
    assert (meter.costs, meter.profile) == (COSTS, "class")
    assert not meter.is_due


def test_an_engine_notes_its_steps() -> None:
    """Prompts by tokens and squares, chunk by chunk; decodes by batch and context; both at once."""
    engine = make_engine(max_batch_tokens=8, max_num_sequences=2)
    with engines(engine):
        engine.add(request_of("a", tuple(range(3, 15)), max_tokens=3))
        engine.step()
        engine.step()
        engine.add(request_of("b", tuple(range(40, 45)), max_tokens=1))
        run(engine)
        engine.step()  # with nothing to do: not noted
    noted = {one[:4] for one in engine.meter.samples()}
    assert noted == {
        (8, 64, 0, 0),
        (4, 144 - 64, 0, 0),
        (5, 25, 13, 1),
        (0, 0, 14, 1),
    }
    assert all(one.ms > 0 for one in engine.meter.samples())

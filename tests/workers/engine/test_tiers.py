"""An engine with a host tier below its pool: what comes back, and when."""

from __future__ import annotations

from functools import partial

from pipeline.prefix_hash import prefix_hashes
from schemas.requests import SamplingParams
from tests.workers.engine.simulated_engines import (
    BLOCK_SIZE,
    StrictRunner,
    expected_answer,
    make_engine,
    request_of,
    tokens_of,
)
from tests.workers.engine.test_thread import Listener, call, running
from tests.workers.engine.tiered_engines import TieredEngine, make_tiered
from workers.engine.api import EngineApi, EngineRequest, StepReport
from workers.kv.pace import Pace
from workers.kv.tiers import make_tiers


def prompt(stem: int, length: int = 24) -> tuple[int, ...]:
    return tuple(stem + position // 6 for position in range(length))


def answer(request: EngineRequest) -> list[int]:
    return expected_answer(request.prompt_ids, request.sampling)[0]


def serve(tiered: TieredEngine, request: EngineRequest) -> StepReport:
    """One request from its arrival to its end, alone."""
    tiered.engine.add(request)
    report = tiered.run()
    assert tokens_of(report, request.key) == answer(request)
    return report


def flood(tiered: TieredEngine, first: int = 100) -> None:
    """Requests that push everything else out of a pool of twelve blocks."""
    for number in range(4):
        serve(
            tiered, request_of(f"flood{first + number}", prompt(first + 10 * number), max_tokens=1)
        )


def test_what_the_pool_lost_comes_back_from_host_memory() -> None:
    """A prompt whose blocks were evicted is not computed again: all full blocks but the last
    token's come from the host tier, and the usage says so."""
    tiered = make_tiered(12, 64)
    serve(tiered, request_of("a", prompt(20), max_tokens=1))
    flood(tiered)
    assert tiered.engine.blocks.match(hashes_of(prompt(20))) == []
    report = serve(tiered, request_of("b", (*prompt(20), 5, 6), max_tokens=1))
    [finished] = report.finished
    assert (finished.num_cached_tokens, finished.num_host_tokens) == (24, 24)
    assert report.num_computed_tokens == 2
    assert tiered.tally.count("host", "hit") == 6
    assert tiered.tally.count("host", "promoted") == 6
    tiered.check_idle()


def hashes_of(prompt_ids: tuple[int, ...]) -> list[bytes]:
    return prefix_hashes(prompt_ids, BLOCK_SIZE, b"")


def test_device_and_host_hits_are_told_apart() -> None:
    """The beginning is still in the pool, the rest was evicted: each is counted where it was."""
    tiered = make_tiered(12, 64)
    serve(tiered, request_of("a", prompt(20), max_tokens=1))
    flood(tiered)
    serve(tiered, request_of("b", prompt(20, 9), max_tokens=1))  # brings two blocks
    report = serve(tiered, request_of("c", (*prompt(20), 5), max_tokens=1))
    [finished] = report.finished
    assert (finished.num_cached_tokens, finished.num_host_tokens) == (24, 16)


def test_a_flipped_bit_is_noticed_and_never_used() -> None:
    """Given a block of the host tier that changed: it is counted, forgotten, and computed, with
    all that comes after it; what comes before it is used."""
    tiered = make_tiered(12, 64)
    serve(tiered, request_of("a", prompt(20), max_tokens=1))
    flood(tiered)
    pin = tiered.host.pin(hashes_of(prompt(20)))
    tiered.host.unpin(pin)
    tiered.engine.pool.slots[pin.slots[2]][3] ^= 16
    report = serve(tiered, request_of("b", (*prompt(20), 5, 6), max_tokens=6))
    assert report.finished[0].num_host_tokens == 2 * BLOCK_SIZE
    assert tiered.tally.count("host", "corrupt") == 1
    tiered.check_idle()


def test_others_run_while_blocks_are_on_their_way() -> None:
    """The head of the line waits for its copy, and nobody behind it overtakes; what runs goes on;
    when the copy has ended, it starts."""
    tiered = make_tiered(30, 64)
    serve(tiered, request_of("a", prompt(20), max_tokens=1))
    for first in range(100, 180, 10):
        serve(tiered, request_of(str(first), prompt(first), max_tokens=1))
    engine = tiered.engine
    engine.add(request_of("runs", (7, 8, 9), max_tokens=20, ignore_eos=True))
    total = StepReport()
    tiered.step(total)
    waits = request_of("waits", (*prompt(20), 5), max_tokens=2, ignore_eos=True)
    engine.add(waits)
    engine.add(request_of("behind", (9, 9), max_tokens=2, ignore_eos=True))
    for _ in range(5):
        tiered.step(total)
    assert len(tokens_of(total, "runs")) == 6
    assert tokens_of(total, "waits") == tokens_of(total, "behind") == []
    assert engine.block_states().arriving == 6
    tiered.move()
    tiered.step(total)
    assert tokens_of(total, "waits") == answer(waits)[:1]
    tiered.run()
    tiered.check_idle()


def test_blocks_are_brought_before_their_turn() -> None:
    """Given a batch that is full: what those in line need is copied while they wait, once for
    both, so that they start at once when there is a place."""
    tiered = make_tiered(40, 64, max_num_sequences=1)
    serve(tiered, request_of("a", prompt(20), max_tokens=1))
    for first in range(100, 190, 10):
        serve(tiered, request_of(str(first), prompt(first), max_tokens=1))
    tiered.engine.add(request_of("runs", (7, 8, 9), max_tokens=4, ignore_eos=True))
    tiered.engine.add(request_of("next", (*prompt(20), 5), max_tokens=1))
    tiered.engine.add(request_of("third", (*prompt(20), 6), max_tokens=1))
    total = StepReport()
    tiered.step(total)
    assert tiered.move() > 0
    assert tiered.tally.count("host", "promoted") == 6
    while not tokens_of(total, "next"):
        tiered.step(total)  # and no copy is made any more
    tiered.run()
    assert tiered.tally.count("host", "promoted") == 6


def test_released_while_its_blocks_arrive() -> None:
    """A cancel gives nothing back too early: the slots that are being filled are nobody else's
    until the copy has ended; then they are cached."""
    tiered = make_tiered(12, 64)
    serve(tiered, request_of("a", prompt(20), max_tokens=1))
    flood(tiered)
    tiered.engine.add(request_of("b", (*prompt(20), 5), max_tokens=1))
    tiered.engine.step()
    assert tiered.engine.block_states().arriving == 6
    tiered.engine.release("b")
    tiered.check()
    assert tiered.engine.blocks.num_available == 6
    tiered.move()
    tiered.engine.collect()
    tiered.check_idle()
    assert len(tiered.engine.blocks.match(hashes_of(prompt(20)))) == 6


def overcommitted(tiered: TieredEngine | None) -> tuple[StepReport, int]:
    """Six answers of 16 tokens to prompts of 24 in a pool of 20 blocks: half of what they need."""
    engine = tiered.engine if tiered else make_engine(20, max_batch_tokens=64)
    requests = [
        request_of(str(number), prompt(20 + 9 * number), max_tokens=16, ignore_eos=True)
        for number in range(6)
    ]
    for request in requests:
        engine.add(request)
    total = StepReport()
    if tiered:
        total = tiered.run()
    else:
        while engine.has_work():
            report = engine.step()
            total.outputs += report.outputs
            total.num_computed_tokens += report.num_computed_tokens
    for request in requests:
        assert tokens_of(total, request.key) == answer(request)
    return total, engine.scheduler.num_preemptions


def test_a_preempted_sequence_comes_back_from_host_memory() -> None:
    """More sequences than the pool holds: those that are set back are spilled, and come back
    without being computed again, but for their last, partly full block."""
    tiered = make_tiered(20, 64, max_batch_tokens=64)
    with_tier, num_preemptions = overcommitted(tiered)
    without, _ = overcommitted(None)
    assert num_preemptions > 0
    assert tiered.tally.count("host", "promoted") > 0
    num_needed = 6 * (24 + 15)
    num_again = with_tier.num_computed_tokens - num_needed
    assert num_again <= num_preemptions * BLOCK_SIZE
    assert num_again < without.num_computed_tokens - num_needed
    tiered.check_idle()


def test_a_slot_that_was_needed_is_not_demoted() -> None:
    """A block that was overwritten before it could be copied is lost to the host tier, and
    counted; never is another's content kept under its name."""
    tiered = make_tiered(12, 64)
    engine = tiered.engine
    for number in range(4):
        engine.add(request_of(str(number), prompt(20 + 9 * number), max_tokens=1))
        while engine.has_work():
            engine.step()
    tiered.move()
    assert tiered.tally.count("device", "dropped") > 0
    for number in range(4):
        request = request_of(f"again{number}", (*prompt(20 + 9 * number), 5), max_tokens=3)
        serve(tiered, request)


def test_moving_that_takes_longer_than_computing_is_left() -> None:
    """Given copies that were seen to be slower than prefill: the prompt is computed."""
    tiered = make_tiered(12, 64)
    serve(tiered, request_of("a", prompt(20), max_tokens=1))
    flood(tiered)
    tiered.engine.pace.promotion.note(1, 10.0)
    tiered.engine.pace.prefill.observe([(0, 1000)], 0.1)
    report = serve(tiered, request_of("b", (*prompt(20), 5), max_tokens=1))
    assert report.finished[0].num_cached_tokens == 0
    assert tiered.tally.count("host", "promoted") == 0


def test_measured_speeds_decide() -> None:
    """Blocks are copied when that was measured to be faster, and to find out."""
    pace = Pace()
    assert pace.is_copying_faster(1, 16)
    for _ in range(50):
        pace.prefill.observe([(0, 100)], 1.0)  # 10 ms per token
    pace.promotion.note(10, 1.0)  # 100 ms per block
    assert pace.is_copying_faster(1, 16)
    assert not pace.is_copying_faster(1, 9)
    pace.prefill.observe([(0, 3)], 100.0)  # so few that it says nothing of prefill
    assert pace.is_copying_faster(1, 16)
    assert not pace.is_copying_faster(1, 9)


class LostRunner(StrictRunner):
    """Its memory can't be written beside a step."""

    def write_block(self, block: int, data: object) -> None:
        raise RuntimeError("no copy")


def test_a_copy_that_fails_is_computed() -> None:
    """What a device does not take in is computed; nothing is held for it."""
    engine = make_engine(12, num_host_blocks=64, runner_class=LostRunner)
    tiered = TieredEngine(engine, make_tiers(engine, evicted_share=0.5))
    serve(tiered, request_of("a", prompt(20), max_tokens=1))
    flood(tiered)
    report = serve(tiered, request_of("b", (*prompt(20), 5), max_tokens=4))
    assert report.finished[0].num_cached_tokens == 0
    tiered.check_idle()


def _add(request: EngineRequest, engine: EngineApi) -> None:
    engine.add(request)


def _has_finished(listener: Listener, count: int) -> bool:
    return len(listener.total.finished) == count or bool(listener.fatal)


async def test_an_engine_that_sleeps_is_woken_by_the_copy() -> None:
    """With its own thread for the copies: a request that waits for nothing else starts when they
    have ended, and the books are right when all is quiet."""
    engine = make_engine(12, num_host_blocks=64)
    tiers = make_tiers(engine, evicted_share=0.5)
    async with running(engine) as (thread, listener):
        tiers.start(lambda: thread.post(lambda engine: engine.collect()))
        try:
            requests = [
                request_of(f"{turn}.{stem}", (*prompt(stem), turn), max_tokens=2)
                for turn in range(3)
                for stem in (20, 40, 60, 80)
            ]
            for count, request in enumerate(requests, 1):
                await call(thread, partial(_add, request))
                await listener.wait_for(partial(_has_finished, listener, count))
                assert not listener.fatal
        finally:
            tiers.close()
    for request in requests:
        assert tokens_of(listener.total, request.key) == answer(request)
    engine.collect()
    engine.check_invariants()
    assert engine.blocks.counts().active == 0


def test_salts_share_nothing_in_any_tier() -> None:
    """The same prompt under another salt: no hit, in the pool or below it."""
    tiered = make_tiered(12, 64)
    serve(tiered, request_of("a", prompt(20), max_tokens=1, salt=b"one"))
    flood(tiered)
    sampling = SamplingParams(seed=1, max_tokens=1)
    request = EngineRequest(key="b", prompt_ids=prompt(20), sampling=sampling, salt=b"two")
    report = serve(tiered, request)
    assert report.finished[0].num_cached_tokens == 0
    assert tiered.tally.count("host", "hit") == 0

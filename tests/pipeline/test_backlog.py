"""How many requests may wait, and what the next one is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.bus import Bus
from pipeline.backlog import COUNT_S, MAX_RETRY_S, RATE_S, Backlog, Queue
from schemas import subjects
from schemas.errors import QueueFull
from tests.pipeline.rig import SERVED, claim, new_id, prefill_task, send


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_all_queues_of_a_model_count_and_no_others(bus: Bus) -> None:
    """Tasks for ``any`` and for single workers wait alike; another model's do not count."""
    for worker in ("any", "any", "w1"):
        await send(bus, subjects.prefill(SERVED, worker), prefill_task(new_id()))
    await send(bus, subjects.prefill("other@r1"), prefill_task(new_id()))
    backlog = Backlog(bus, 4)
    await backlog.enter(SERVED)
    with pytest.raises(QueueFull) as caught:
        await backlog.enter(SERVED)
    assert "4 requests" in caught.value.message
    assert caught.value.retry_after_s == 1.0, "nobody takes any: nothing is known"
    await backlog.enter("other@r1")


async def test_those_that_wait_for_their_turn_count(bus: Bus) -> None:
    """They are no tasks yet: here they are counted by whoever lets them wait, in other processes by
    the admissions without an ack, but for those that are at work."""
    num_here = 3
    backlog = Backlog(bus, 4, lambda served: num_here if served == SERVED else 0)
    await backlog.enter(SERVED)
    with pytest.raises(QueueFull):
        await backlog.enter(SERVED)
    await backlog.enter("other@r1")
    for _ in range(80):
        await bus.publish_stored(subjects.admission("tiny"), b"one more")
    with pytest.raises(QueueFull) as caught:
        await Backlog(bus, 16, lambda served: num_here).enter(SERVED)
    assert "16 requests" in caught.value.message
    await Backlog(bus, 16, lambda served: 0).enter(SERVED)


async def test_the_count_is_asked_for_again_after_a_second(bus: Bus) -> None:
    """Between two counts our own admissions are added; then the broker's word counts alone."""
    clock = Clock()
    backlog = Backlog(bus, 2, clock=clock)
    await backlog.enter(SERVED)
    await backlog.enter(SERVED)
    with pytest.raises(QueueFull):
        await backlog.enter(SERVED)
    clock.now_s += COUNT_S + 0.01
    await backlog.enter(SERVED)  # none of them is in the queue: they have been taken


async def test_the_pause_is_how_long_the_queue_takes_to_be_taken(bus: Bus) -> None:
    """30 waiting at 5 claims a second: 6 s. Later epochs take nothing out of the queue."""
    for _ in range(30):
        await send(bus, subjects.prefill(SERVED), prefill_task(new_id()))
    clock = Clock()
    backlog = Backlog(bus, 30, clock=clock)
    with pytest.raises(QueueFull):
        await backlog.enter(SERVED)
    for _ in range(5):
        backlog.note_claim(claim(new_id(), "w1"))
        backlog.note_claim(claim(new_id(), "w1", epoch=2))
    clock.now_s += 1.0
    assert backlog.full(SERVED).retry_after_s == pytest.approx(6.0)


@given(st.integers(0, 10_000), st.lists(st.floats(0, 1.0), max_size=50), st.floats(0, 2 * RATE_S))
def test_the_pause_is_bounded_and_grows_with_the_queue(
    num: int, gaps: list[float], later_s: float
) -> None:
    """From one second to a minute; never shorter for a longer queue; old claims are forgotten."""
    queue, now_s = Queue(), 50.0
    queue.count(num, now_s)
    for gap in gaps:
        now_s += gap
        queue.note_claim(now_s)
    now_s += later_s
    pause_s = queue.retry_after_s(now_s)
    assert 1.0 <= pause_s <= MAX_RETRY_S
    queue.count(num + 1, now_s)
    assert queue.retry_after_s(now_s) >= pause_s
    if later_s > RATE_S or not gaps:
        assert pause_s == 1.0

"""Two control processes on a real broker tell each other what they placed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from infra.bus import Bus
from infra.log import make_logger
from infra.task_scope import task_scope
from pipeline.placed_feed import PlacedFeed
from schemas import subjects
from schemas.control import Placed
from tests.conftest import Connect, Until
from tests.pipeline.rig import SERVED, LogLines


def placed(process: str, request_id: str) -> Placed:
    return Placed(
        process=process, request_id=request_id, served=SERVED, worker="w1", role="prefill"
    )


@contextlib.asynccontextmanager
async def feed(
    bus: Bus, process: str, heard: list[Placed], lines: LogLines | None = None
) -> AsyncIterator[PlacedFeed]:
    log = make_logger("test", stream=(lines or LogLines()).stream)
    one = PlacedFeed(bus, lambda placed, now_s: heard.append(placed), process, log)
    async with task_scope() as tasks:
        tasks.create_task(one.run(), name=process)
        yield one


async def test_each_hears_what_the_other_placed(connect: Connect, until: Until) -> None:
    """And nothing of its own: that it has counted already."""
    bus, other_bus = await connect("control"), await connect("control")
    heard: list[Placed] = []
    other_heard: list[Placed] = []
    async with feed(bus, "one", heard) as one, feed(other_bus, "two", other_heard) as two:

        def say() -> bool:
            one.say(placed("one", "request-1"))
            two.say(placed("two", "request-2"))
            return bool(heard and other_heard)

        await until(say)  # the first ones may come before the other listens
    assert {said.request_id for said in heard} == {"request-2"}
    assert {said.request_id for said in other_heard} == {"request-1"}


async def test_what_cannot_be_read_is_passed_over(connect: Connect, until: Until) -> None:
    """A newer peer's words: a line in the log, and the next one is heard."""
    bus, other_bus = await connect("control"), await connect("control")
    heard: list[Placed] = []
    lines = LogLines()
    async with feed(bus, "one", heard, lines), feed(other_bus, "two", []) as two:

        def is_heard() -> bool:
            two.say(placed("two", "request-1"))
            return bool(heard)

        await until(is_heard)
        await other_bus.publish(subjects.placed("two"), b"no message")
        await until(lambda: lines.events("placed_refused"))
        heard.clear()
        await until(is_heard)


async def test_unsaid_words_are_bounded(connect: Connect) -> None:
    """Nobody takes them while the bus is away: the newest are kept, nothing waits."""
    bus = await connect("control")
    log = make_logger("test", stream=LogLines().stream)
    one = PlacedFeed(bus, lambda placed, now_s: None, "one", log)
    for number in range(5000):
        one.say(placed("one", f"request-{number}"))
    assert one._unsaid.qsize() < 5000
    assert one._unsaid.get_nowait().request_id != "request-0"


async def test_nothing_is_said_to_nobody(connect: Connect) -> None:
    """A mesh has one control process, mostly: the broker would give it back to that alone."""
    bus = await connect("control")
    one = PlacedFeed(bus, lambda placed, now_s: None, "one", make_logger("test"))
    one.has_others = False
    one.say(placed("one", "request-1"))
    assert one._unsaid.empty()
    one.has_others = True
    one.say(placed("one", "request-2"))
    assert one._unsaid.get_nowait().request_id == "request-2"

"""Work that is attended: what ends it, and what is told of that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeline.alarms import Alarms
from pipeline.bridge.call import Call
from pipeline.bridge.errors import ShuttingDown
from schemas.errors import DeadlineExceeded, NoCapacity

LONG_S = 60.0


async def nobody(*_: Any) -> Any:
    raise AssertionError("nothing is received or sent")


def new_call() -> Call:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    return Call(scope, nobody, nobody, Alarms())


class Work:
    """Waits for ever, and says when it has begun."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()

    async def run(self) -> None:
        self.has_begun.set()
        await asyncio.Event().wait()


async def test_an_interrupt_ends_the_work_and_leaves_the_task_whole() -> None:
    """Its reason is raised, the first of several; the task that waited goes on as if never
    cancelled."""
    call, work = new_call(), Work()

    async def attend() -> int:
        with pytest.raises(ShuttingDown, match="first"):
            await call.attended(work.run(), LONG_S)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(attend())
        await work.has_begun.wait()
        call.interrupt(ShuttingDown("first"))
        call.interrupt(ShuttingDown("second"))
    assert task.result() == 0


async def test_who_ends_the_task_from_outside_is_not_taken_for_an_interrupt() -> None:
    """A server that cancels its tasks sees them cancelled, also when a reason came at the same
    moment."""
    for has_reason in (False, True):
        call, work = new_call(), Work()
        async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(call.attended(work.run(), LONG_S))
            await work.has_begun.wait()
            if has_reason:
                call.interrupt(ShuttingDown("the server shuts down"))
            task.cancel()
        assert task.cancelled()


async def test_the_first_of_two_alarms_says_why() -> None:
    """A wait within the work has its own time and words; once it is over, the work's count."""
    call = new_call()

    async def waits() -> None:
        call.interrupt_after(0.0, lambda: NoCapacity("nobody answers"))
        await asyncio.Event().wait()

    with pytest.raises(NoCapacity, match="nobody answers"):
        await call.attended(waits(), LONG_S)

    call = new_call()

    async def waited() -> None:
        call.interrupt_after(0.0, lambda: NoCapacity("nobody answers")).cancel()
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="no complete answer"):
        await call.attended(waited(), 0.0)


async def test_work_that_ends_is_interrupted_by_nothing() -> None:
    """Neither its alarm nor a late reason reaches the task afterwards."""
    call = new_call()
    await call.attended(asyncio.sleep(0), LONG_S)
    call.interrupt(ShuttingDown("too late"))
    await asyncio.sleep(0)

"""Buffers are handed out in the order of asking, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from infra.transport.ucx.turns import Turns


async def test_who_asks_first_is_served_first() -> None:
    """Also before somebody who asks when a buffer has just come back."""
    turns, served = Turns(1, 8), []
    buffer = await turns.take()

    async def take(name: str) -> None:
        mine = await turns.take()
        served.append(name)
        turns.give_back(mine)

    async with asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(take(name))
        await asyncio.sleep(0)
        turns.give_back(buffer)
        tasks.create_task(take("d"))
    assert served == list("abcd")


@pytest.mark.parametrize("has_come", [False, True])
async def test_a_turn_that_nobody_waits_for_goes_to_the_next(has_come: bool) -> None:
    """Cancelled before its buffer came, or in the same moment."""
    turns = Turns(1, 8)
    buffer = await turns.take()
    async with asyncio.TaskGroup() as tasks:
        leaves = tasks.create_task(turns.take())
        stays = tasks.create_task(turns.take())
        await asyncio.sleep(0)
        if has_come:
            turns.give_back(buffer)
            leaves.cancel()
        else:
            leaves.cancel()
            turns.give_back(buffer)
        assert await stays is buffer


async def test_at_the_end_nobody_waits() -> None:
    """Those who do are told, and so is who comes later."""
    turns = Turns(1, 8)
    await turns.take()
    waiting = asyncio.gather(turns.take(), turns.take(), return_exceptions=True)
    await asyncio.sleep(0)
    turns.end(KeyError("over"))
    assert [type(error) for error in await waiting] == [KeyError, KeyError]
    with pytest.raises(KeyError):
        await turns.take()

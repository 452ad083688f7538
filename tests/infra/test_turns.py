"""Work that comes in a heap."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from infra.turns import Turns


@given(st.integers(1, 5), st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_a_few_enter_per_turn_in_the_order_in_which_they_came(
    per_turn: int, heaps: list[int]
) -> None:
    """However many come in whichever turn: never more than so many, nobody is overtaken."""

    async def scenario() -> None:
        turns, turn, entered = Turns(per_turn), 0, []

        async def come(number: int) -> None:
            await turns.enter()
            entered.append((number, turn))

        coming, count = [], 0
        async with asyncio.TaskGroup() as tasks:
            for heap in heaps:
                for _ in range(heap):
                    coming.append(tasks.create_task(come(count)))
                    count += 1
                await asyncio.sleep(0)
                turn += 1
            while len(entered) < count:
                await asyncio.sleep(0)
                turn += 1
        assert [number for number, _ in entered] == list(range(count))
        when = [turn for _, turn in entered]
        assert all(when.count(turn) <= per_turn for turn in set(when))

    asyncio.run(scenario())


async def test_what_was_said_leaves_between_two_portions() -> None:
    """A callback that the first one scheduled runs before the last of the heap is let through."""
    turns, seen = Turns(2), []

    async def come(number: int) -> None:
        await turns.enter()
        seen.append(number)
        if number == 0:
            asyncio.get_running_loop().call_soon(seen.append, "said")

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(come(number))
    assert seen == [0, 1, "said", 2, 3]


async def test_who_is_cancelled_takes_no_place() -> None:
    """The others still come through, in their order."""
    turns, seen = Turns(1), []

    async def come(number: int) -> None:
        await turns.enter()
        seen.append(number)

    async with asyncio.TaskGroup() as tasks:
        coming = [tasks.create_task(come(number)) for number in range(4)]
        await asyncio.sleep(0)
        coming[1].cancel()
    assert seen == [0, 2, 3]

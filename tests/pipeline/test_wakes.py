import asyncio

from pipeline import wakes as module
from pipeline.wakes import Wakes


class Rounds:
    """A reader whose wakes are counted, and told apart by the turn of the loop they came in."""

    def __init__(self):
        self.count = 0
        self.woken = asyncio.Event()

    def wake(self):
        self.count += 1
        self.woken.set()

    async def wait(self):
        async with asyncio.timeout(30):
            await self.woken.wait()
        self.woken.clear()


async def test_a_token_alone_is_heard_of_in_the_next_turn():
    """Nothing rests that did nothing: the first wake needs no timer."""
    wakes, reader = Wakes(), Rounds()
    wakes.add(reader.wake)
    assert reader.count == 0
    await asyncio.sleep(0)
    assert reader.count == 1


async def test_tokens_that_come_together_wake_once():
    """A reader that is added again before its round is woken once for all of them."""
    wakes, one, other = Wakes(), Rounds(), Rounds()
    for _ in range(5):
        wakes.add(one.wake)
    wakes.add(other.wake)
    await one.wait()
    await other.wait()
    assert (one.count, other.count) == (1, 1)


async def test_after_a_long_round_tokens_wait_and_leave_together(monkeypatch):
    """What comes in the rest that follows a round is one round, which comes by itself."""
    clock = iter([0.0, 100.0, 100.0, 100.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(module, "LONGEST_S", 0.2)
    wakes, reader = Wakes(), Rounds()
    wakes.add(reader.wake)
    await reader.wait()
    await asyncio.sleep(0)  # the round is over
    assert wakes._next_s > asyncio.get_running_loop().time()
    for _ in range(3):
        wakes.add(reader.wake)
        await asyncio.sleep(0)
    await reader.wait()
    assert reader.count == 2


async def test_a_rest_is_in_proportion_and_bounded(monkeypatch):
    """Seven times what the round took, ten milliseconds at most."""
    for took_s, rest_s in ((0.001, 0.007), (5.0, module.LONGEST_S)):
        wakes, reader = Wakes(), Rounds()
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: 1000.0, raising=False)
        clock = iter([0.0, took_s])
        monkeypatch.setattr(module.time, "perf_counter", lambda clock=clock: next(clock))
        wakes._wake_all()
        wakes._rest()
        monkeypatch.undo()
        assert abs(wakes._next_s - 1000.0 - rest_s) < 1e-9
        assert reader.count == 0


async def test_what_is_added_in_a_round_comes_in_the_next_one():
    """After the rest, by itself; a wake that fails stops no later round."""
    wakes, reader = Wakes(), Rounds()

    def add():
        wakes.add(reader.wake)
        raise ArithmeticError("a bug")

    heard = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(context["exception"]))
    wakes.add(add)
    await asyncio.sleep(0)
    assert reader.count == 0
    await reader.wait()
    assert reader.count == 1
    assert [type(error) for error in heard] == [ArithmeticError]


async def test_who_is_put_off_is_woken_all_the_same(monkeypatch):
    """After two looks at most; who is put off meanwhile has time of its own, and then there is no
    timer left."""
    monkeypatch.setattr(module, "LONGEST_S", 0.001)
    wakes, one, other = Wakes(), Rounds(), Rounds()
    wakes.put_off(one.wake)
    wakes._look()
    assert one.count == 0, "not at the first look"
    wakes.put_off(other.wake)
    await one.wait()
    await other.wait()
    assert (one.count, other.count) == (1, 1)
    assert wakes._put_off == wakes._overdue == {}

import asyncio
import os
import signal

import pytest

from infra.bus import (
    WORK,
    Limits,
    NobodyListens,
    Placement,
    WorkPull,
    any_consumer,
    ensure_topology,
    next_attempt,
    reap,
    redeliver,
    waiting_work,
    worker_consumer,
)
from schemas import subjects
from schemas.errors import BusUnavailable, QueueFull
from schemas.headers import ATTEMPT

DEAD = subjects.decode("m@r", "dead")
ALIVE = subjects.decode("m@r", "alive")


def _to_alive(message):
    return Placement(subject=ALIVE, data=message.data, headers=next_attempt(message.headers))


async def _work_of_a_dead_worker(bus, times, until, taken=3, waiting=3):
    """``taken`` messages delivered to a worker that holds them, ``waiting`` more behind."""
    held = []
    pull = WorkPull(
        bus, worker_consumer("decode", "m@r", "dead", times), held.append, lambda: taken - len(held)
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pull.run())
        for number in range(taken + waiting):
            await bus.publish_stored(DEAD, str(number).encode(), msg_id=f"task-{number}")
        await until(lambda: len(held) == taken)
        running.cancel()
    return held


async def _take_all(bus, times, until, count, worker="alive"):
    got = []
    pull = WorkPull(
        bus, worker_consumer("decode", "m@r", worker, times), got.append, lambda: 500 - len(got)
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pull.run())
        await until(lambda: len(got) >= count)
        running.cancel()
    return got


async def test_delivered_and_waiting_work_moves_at_once(bus, times, until):
    """All of it is with the living worker long before ``ack_wait``, in order, with the attempt
    counted; the dead worker's late words mean nothing."""
    held = await _work_of_a_dead_worker(bus, times, until)
    async with asyncio.timeout(times.own_ack_wait_s / 2):
        assert await reap(bus, "decode", "m@r", "dead", _to_alive) == 6
    assert await waiting_work(bus) == {ALIVE: 6}
    with pytest.raises(NobodyListens):
        await held[0].ack_sync()
    await held[1].nak()
    await held[2].term("late")
    got = await _take_all(bus, times, until, 6)
    assert [int(message.data) for message in got] == list(range(6))
    assert {message.headers[ATTEMPT] for message in got} == {"2"}
    assert (await bus.api(f"CONSUMER.NAMES.{WORK}"))["consumers"] == ["decode-alive"]


async def test_two_routers_reap_together(connect, bus, times, until):
    """Each message is moved once, whoever moves it, and no consumer is left."""
    await _work_of_a_dead_worker(bus, times, until, taken=30, waiting=70)
    other = await connect("control")
    moved = await asyncio.gather(
        reap(bus, "decode", "m@r", "dead", _to_alive),
        reap(other, "decode", "m@r", "dead", _to_alive),
    )
    assert sum(moved) >= 100
    assert await waiting_work(bus) == {ALIVE: 100}
    got = await _take_all(bus, times, until, 100)
    assert sorted(int(message.data) for message in got) == list(range(100))


async def test_work_of_ended_requests_is_dropped(bus, times, until):
    """``place`` may say None: the message leaves the queue, the others move."""
    await _work_of_a_dead_worker(bus, times, until)

    def place(message):
        return None if int(message.data) % 2 else _to_alive(message)

    assert await reap(bus, "decode", "m@r", "dead", place) == 6
    assert await waiting_work(bus) == {ALIVE: 3}


async def test_nothing_to_reap(bus):
    """A worker that never had a consumer, or an empty queue: nothing happens, twice too."""
    assert await reap(bus, "decode", "m@r", "nobody", _to_alive) == 0
    assert await reap(bus, "decode", "m@r", "nobody", _to_alive) == 0
    assert (await bus.api(f"CONSUMER.NAMES.{WORK}"))["consumers"] == []


async def test_a_full_target_stops_it_and_loses_nothing(bus, times, until):
    """QueueFull comes out as itself; the same call goes on where it stopped."""
    await _work_of_a_dead_worker(bus, times, until, taken=0, waiting=3)
    await ensure_topology(bus, Limits(queue_msgs=3))
    for number in range(2):
        await bus.publish_stored(ALIVE, b"own", msg_id=f"own-{number}")
    with pytest.raises(QueueFull):
        await reap(bus, "decode", "m@r", "dead", _to_alive)
    assert await waiting_work(bus) == {ALIVE: 3, DEAD: 2}

    def elsewhere(message):
        return Placement(subject=subjects.decode("m@r"), data=message.data, headers={})

    assert await reap(bus, "decode", "m@r", "dead", elsewhere) == 2
    assert await waiting_work(bus) == {ALIVE: 3, subjects.decode("m@r"): 2}


async def test_the_broker_dies_while_reaping(broker, bus, times, until):
    """Broker killed between two copies and started again: calling again, if it must be, moves
    the rest, nothing is lost and nothing is there twice."""
    await _work_of_a_dead_worker(bus, times, until, taken=10, waiting=40)
    num_placed = 0

    def place(message):
        nonlocal num_placed
        num_placed += 1
        if num_placed == 20:
            os.kill(broker.pid, signal.SIGKILL)
        return _to_alive(message)

    async with asyncio.TaskGroup() as tasks:
        reaping = tasks.create_task(_reap_until_done(bus, place))
        assert await broker.wait() == -signal.SIGKILL
        await broker.restart()
        await reaping
    assert await waiting_work(bus) == {ALIVE: 50}
    got = await _take_all(bus, times, until, 50)
    assert sorted(int(message.data) for message in got) == list(range(50))


async def _reap_until_done(bus, place):
    while True:
        try:
            return await reap(bus, "decode", "m@r", "dead", place)
        except BusUnavailable:
            await bus.until_connected(5)


async def test_what_a_dead_process_held_of_a_shared_queue_comes_at_once(bus, times, until):
    """Long before ``ack_wait``, to whoever pulls; a shared consumer that nobody has is fine."""
    shared = any_consumer("decode", "m@r", times)
    assert await redeliver(bus, shared) == 0
    subject = subjects.decode("m@r")
    held, got = [], []
    dead = WorkPull(bus, shared, held.append, lambda: 2 - len(held))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(dead.run())
        for number in range(4):
            await bus.publish_stored(subject, str(number).encode(), msg_id=f"shared-{number}")
        await until(lambda: len(held) == 2)
        running.cancel()
    living = WorkPull(bus, shared, got.append, lambda: 100 - len(got))
    async with asyncio.timeout(times.ack_wait_s / 2), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(living.run())
        await until(lambda: len(got) == 2)
        for message in got:
            await message.ack_sync()
        assert await redeliver(bus, shared) == 2
        await until(lambda: len(got) == 4)
        running.cancel()
    assert sorted(message.data for message in got) == [b"0", b"1", b"2", b"3"]
    assert await redeliver(bus, shared) == 2

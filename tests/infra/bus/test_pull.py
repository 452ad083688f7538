import asyncio
import os
import signal
import time

import pytest

from infra.bus import (
    WORK,
    Limits,
    NobodyListens,
    WorkPull,
    any_consumer,
    ensure_topology,
    worker_consumer,
)
from infra.bus.topology import delete_consumer
from schemas import subjects
from tests.freezing import freeze

OWN = subjects.prefill("m@r", "w1")
ANY = subjects.prefill("m@r")


class Worker:
    """Takes messages into a list, up to ``room``."""

    def __init__(self, bus, config, room=8, **more):
        self.room = room
        self.taken = []
        self.pull = WorkPull(bus, config, self.taken.append, self.free, **more)

    def free(self):
        return self.room - len(self.taken)

    async def ack_all(self):
        while self.taken:
            await self.taken.pop(0).ack_sync()
        self.pull.poke()


async def _fill(bus, subject, *names):
    for name in names:
        await bus.publish_stored(subject, name.encode(), {"Mesh-A": name}, msg_id=name)


async def test_work_is_taken_and_gone_when_acked(bus, times, until):
    """A message comes with its data, headers and place, once, and leaves the stream at the ack."""
    worker = Worker(bus, worker_consumer("prefill", "m@r", "w1", times))
    await _fill(bus, OWN, "a", "b")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.pull.run())
        await until(lambda: len(worker.taken) == 2)
        first = worker.taken[0]
        assert (first.subject, first.data, first.num_delivered) == (OWN, b"a", 1)
        assert first.headers["Mesh-A"] == "a"
        assert worker.taken[1].stream_seq == first.stream_seq + 1
        await worker.ack_all()
        assert (await bus.api(f"STREAM.INFO.{WORK}"))["state"]["messages"] == 0
        worker.pull.stop()
        await running


async def test_never_more_than_there_is_room_for(bus, times, until):
    """With room for 3 three come; the next one comes when a slot is free."""
    worker = Worker(bus, any_consumer("prefill", "m@r", times), room=3)
    await _fill(bus, ANY, *"abcdef")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.pull.run())
        await until(lambda: len(worker.taken) == 3)
        await asyncio.sleep(2 * times.pull_expiry_s)  # pulls expire: no more are asked for
        assert len(worker.taken) == 3
        await worker.taken.pop(0).ack_sync()
        worker.pull.poke()
        await until(lambda: len(worker.taken) == 3)
        assert worker.taken[-1].data == b"d"
        running.cancel()


async def test_two_workers_share_a_queue(connect, bus, times, until):
    """Each message of the shared queue goes to one of them."""
    other = await connect("worker")
    workers = [Worker(b, any_consumer("prefill", "m@r", times), room=20) for b in (bus, other)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(worker.pull.run()) for worker in workers]
        await _fill(bus, ANY, *(f"m{i}" for i in range(20)))
        await until(lambda: sum(len(worker.taken) for worker in workers) == 20)
        names = sorted(message.data for worker in workers for message in worker.taken)
        assert names == sorted(f"m{i}".encode() for i in range(20))
        for task in running:
            task.cancel()


async def test_nak_delay_term_and_progress(bus, times, until):
    """Given back it comes again, counted; terminated it never does; in progress it stays."""
    worker = Worker(bus, worker_consumer("prefill", "m@r", "w1", times.scaled(0.25)))
    await _fill(bus, OWN, "a")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.pull.run())
        await until(lambda: worker.taken)
        started = time.monotonic()
        await worker.taken.pop().nak(0.2)
        await until(lambda: worker.taken)
        assert time.monotonic() - started >= 0.19
        assert worker.taken[0].num_delivered == 2
        ends = time.monotonic() + 1.5 * times.scaled(0.25).own_ack_wait_s
        while time.monotonic() < ends:
            await worker.taken[0].in_progress()
            await asyncio.sleep(0.05)
        assert len(worker.taken) == 1
        await worker.taken.pop().term("not usable")
        async with asyncio.timeout(60):
            while (await bus.api(f"STREAM.INFO.{WORK}"))["state"]["messages"]:
                pass
        running.cancel()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_killed_broker_loses_no_work(broker, bus, times, until, shared):
    """The restarted broker forgot the consumer: it is added again and everything comes."""
    config = (
        any_consumer("prefill", "m@r", times)
        if shared
        else worker_consumer("prefill", "m@r", "w1", times)
    )
    fenced = []
    worker = Worker(bus, config, room=100, on_fenced=None if shared else lambda: fenced.append(1))
    subject = ANY if shared else OWN
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.pull.run())
        await _fill(bus, subject, "a", "b")
        await until(lambda: len(worker.taken) == 2)
        await broker.restart()
        await bus.until_connected(5)
        await _fill(bus, subject, "c", "d")
        await until(lambda: {m.data for m in worker.taken} == {b"a", b"b", b"c", b"d"})
        await until(lambda: len(worker.taken) == 6)  # a and b were not acked: they come again
        assert not fenced
        running.cancel()


async def test_a_frozen_broker_only_delays_work(broker, bus, times, until):
    """SIGSTOP for less than it takes to notice: pulling goes on after the thaw."""
    worker = Worker(bus, any_consumer("prefill", "m@r", times))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.pull.run())
        await _fill(bus, ANY, "a")
        await until(lambda: len(worker.taken) == 1)
        freeze(broker.pid)
        await asyncio.sleep(4 * times.pull_expiry_s)
        os.kill(broker.pid, signal.SIGCONT)
        await _fill(bus, ANY, "b")
        await until(lambda: len(worker.taken) == 2)
        running.cancel()


async def test_a_worker_whose_consumer_was_taken_is_fenced(bus, times, until):
    """It is told, stops, does not come back under its name, and its acks mean nothing."""
    fenced = []
    config = worker_consumer("prefill", "m@r", "w1", times)
    worker = Worker(bus, config, on_fenced=lambda: fenced.append(1))
    await _fill(bus, OWN, "a")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.pull.run())
        await until(lambda: worker.taken)
        await delete_consumer(bus, WORK, config.name)
        await running
    assert fenced == [1]
    with pytest.raises(NobodyListens):
        await worker.taken[0].ack_sync()
    assert (await bus.api(f"STREAM.INFO.{WORK}"))["state"]["messages"] == 1
    assert (await bus.api(f"CONSUMER.NAMES.{WORK}"))["consumers"] == []


async def test_a_shared_consumer_that_was_deleted_is_added_again(bus, times, until):
    """Nobody owns the shared queue: deleting its consumer only interrupts."""
    config = any_consumer("prefill", "m@r", times)
    worker = Worker(bus, config)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.pull.run())
        await _fill(bus, ANY, "a")
        await until(lambda: worker.taken)
        await delete_consumer(bus, WORK, config.name)
        await _fill(bus, ANY, "b")
        await until(lambda: {m.data for m in worker.taken} == {b"a", b"b"})
        running.cancel()


async def test_after_stop_nothing_is_kept(connect, bus, times, until):
    """A stopped worker hands nothing to its callback and gives back what comes; others get it."""
    other = await connect("worker")
    config = any_consumer("prefill", "m@r", times)
    leaving, staying = Worker(other, config, room=50), Worker(bus, config, room=50)
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(leaving.pull.run())
        await _fill(bus, ANY, "a")
        await until(lambda: leaving.taken)
        leaving.pull.stop()
        running = tasks.create_task(staying.pull.run())
        await _fill(bus, ANY, *(f"m{i}" for i in range(10)))
        await until(lambda: len(staying.taken) == 10, timeout_s=times.ack_wait_s)
        await gone
        assert len(leaving.taken) == 1
        running.cancel()


async def test_topology_changes_settings_and_keeps_messages(bus, times):
    """Another process with other limits changes the stream in place; subjects are only added."""
    await _fill(bus, OWN, "a")
    info = (await bus.api(f"STREAM.INFO.{WORK}"))["config"]
    info["subjects"] = [*info["subjects"], "mesh.v1.newer.>"]
    await bus.api(f"STREAM.UPDATE.{WORK}", info)
    await ensure_topology(bus, Limits(queue_msgs=7))
    after = await bus.api(f"STREAM.INFO.{WORK}")
    assert after["config"]["max_msgs_per_subject"] == 7
    assert "mesh.v1.newer.>" in after["config"]["subjects"]
    assert after["state"]["messages"] == 1


async def test_processes_may_lay_the_topology_together(broker, connect):
    """Several at once on an empty broker: all succeed."""
    buses = [await connect("control") for _ in range(4)]
    async with asyncio.TaskGroup() as tasks:
        for each in buses:
            tasks.create_task(ensure_topology(each))
    names = (await buses[0].api("STREAM.NAMES"))["streams"]
    assert len(names) == 5


def test_consumer_names_are_legal_and_distinct(times):
    """Long model names give short names; own, shared and stage never meet."""
    long = subjects.served("org/" + "é" * 60, "main.1")
    configs = [
        worker_consumer("prefill", long, "w", times),
        worker_consumer("decode", long, "w", times),
        any_consumer("prefill", long, times),
        any_consumer("decode", long, times),
        any_consumer("prefill", long + "x", times),
    ]
    names = [config.name for config in configs]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 128 and not set(name) & set(".*>/\\ ") for name in names)
    with pytest.raises(ValueError, match="no workers"):
        any_consumer("admission", long, times)

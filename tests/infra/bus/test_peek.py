"""Looking into the work queue takes nothing from it."""

import asyncio

import msgspec

from infra.bus import WorkPull, drop, peek, waiting_work, worker_consumer
from schemas import subjects

PREFILL, DECODE = subjects.prefill("m@r", "w"), subjects.decode("m@r", "w")


async def test_all_is_seen_and_all_stays(bus, times, until):
    """In order, with bytes and headers as they were published, also what a worker holds; other
    subjects are not shown."""
    sent = []
    for number, subject in enumerate((PREFILL, DECODE, PREFILL)):
        data = msgspec.msgpack.encode({"n": number, "bytes": bytes(range(256))})
        headers = {"Mesh-Request": f"r{number}", "Odd": "a: b"}
        stored = await bus.publish_stored(subject, data, headers, msg_id=f"id-{number}")
        sent.append((stored.seq, subject, data, headers))
    held = []
    config = worker_consumer("prefill", "m@r", "w", times)
    pull = WorkPull(bus, config, held.append, lambda: 1 - len(held))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pull.run())
        await until(lambda: held)
        running.cancel()
    seen = [message async for message in peek(bus, f"{subjects.ROOT}.prefill.>")]
    assert [(one.seq, one.subject, one.data) for one in seen] == [
        sent[0][:3], sent[2][:3],
    ]  # fmt: skip
    for message, (_, _, _, headers) in zip(seen, (sent[0], sent[2]), strict=True):
        assert headers.items() <= message.headers.items()
    assert await waiting_work(bus) == {PREFILL: 2, DECODE: 1}


async def test_an_empty_queue_shows_nothing(bus):
    """Nor does one whose messages are of other subjects."""
    await bus.publish_stored(DECODE, b"x")
    assert [message async for message in peek(bus, f"{subjects.ROOT}.prefill.>")] == []


async def test_what_is_dropped_is_gone(bus):
    """Once; a second time says that it was not there."""
    stored = await bus.publish_stored(PREFILL, b"x")
    assert await drop(bus, stored.seq)
    assert not await drop(bus, stored.seq)
    assert not await drop(bus, 10_000)
    assert await waiting_work(bus) == {}

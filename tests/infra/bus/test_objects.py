import asyncio
import os

import nats
import pytest
from nats.js.errors import ObjectNotFoundError

from infra.bus import (
    OBJECTS_BUCKET,
    ObjectBox,
    ObjectMissing,
    WorkPull,
    any_consumer,
    load_payload,
    publish_work,
)
from infra.bus.connection import header_bytes
from schemas import subjects
from schemas.errors import PayloadTooLarge
from schemas.headers import OBJECT, WorkHeaders

HEADERS = WorkHeaders(
    schema="prefill-task/1", request_id="request-1", epoch=1, deadline_unix_ms=1, traceparent="tp"
)


async def _receive(bus, times, until, size):
    """Publish ``size`` random bytes as work and take them as a worker would."""
    payload = os.urandom(size)
    await publish_work(bus, subjects.prefill("m@r"), payload, HEADERS, "id-1")
    taken = []
    pull = WorkPull(
        bus, any_consumer("prefill", "m@r", times), taken.append, lambda: 1 - len(taken)
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pull.run())
        await until(lambda: taken, timeout_s=60)
        running.cancel()
    assert await load_payload(bus, taken[0]) == payload
    parsed = WorkHeaders.from_dict(taken[0].headers)
    assert (parsed.request_id, parsed.traceparent) == ("request-1", "tp")
    return taken[0]


async def test_twice_the_limit_arrives(bus, times, until):
    """A payload of twice the broker's limit travels by the object store, unchanged."""
    message = await _receive(bus, times, until, 2 * bus.max_payload)
    assert message.headers[OBJECT]
    assert message.data == b""


@pytest.mark.parametrize("over", [0, 1])
async def test_the_limit_counts_headers(bus, times, until, over):
    """To the byte: what fits with its headers goes inline, one byte more by the store."""
    room = bus.max_payload - header_bytes(HEADERS.to_dict("id-1"))
    message = await _receive(bus, times, until, room + over)
    assert (OBJECT in message.headers) == bool(over)


async def test_the_cap_is_said_as_too_large(bus):
    """Over the cap nothing is stored."""
    box = ObjectBox(bus, max_bytes=1000)
    with pytest.raises(PayloadTooLarge):
        await box.put(bytes(1001))
    assert await box.get(await box.put(b"")) == b""


async def test_an_object_that_is_gone_is_named(bus):
    """Never put, or with a chunk lost: ObjectMissing, never other bytes."""
    box = ObjectBox(bus)
    with pytest.raises(ObjectMissing, match="cafe"):
        await box.get("cafe")
    name = await box.put(os.urandom(2_500_000))
    purged = await bus.api(
        f"STREAM.PURGE.OBJ_{OBJECTS_BUCKET}", {"filter": f"$O.{OBJECTS_BUCKET}.C.{name}", "keep": 2}
    )
    assert purged["purged"] == 1
    with pytest.raises(ObjectMissing, match="lost parts"):
        await box.get(name)


async def test_any_client_of_object_stores_can_read_it(broker, bus):
    """The store is a NATS object store: nats-py's own client gets the same bytes."""
    data = os.urandom(2_500_000)
    name = await ObjectBox(bus).put(data)
    client = await nats.connect(broker.url("control"), inbox_prefix=b"_INBOX_control")
    try:
        store = await client.jetstream().object_store(OBJECTS_BUCKET)
        result = await store.get(name)
        assert result.data == data
        assert result.info.size == len(data)
        with pytest.raises(ObjectNotFoundError):
            await store.get("nothing")
    finally:
        await client.close()


async def test_a_worker_may_read_and_a_bridge_may_put(connect, bus):
    """The roles' permissions cover the claim check."""
    worker, bridge = await connect("worker"), await connect("bridge")
    data = os.urandom(1_500_000)
    assert await ObjectBox(worker).get(await ObjectBox(bridge).put(data)) == data
    assert await ObjectBox(bus).get(await ObjectBox(worker).put(data)) == data

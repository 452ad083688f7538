import pytest

from infra.bus import (
    TOKENS,
    BusForbidden,
    StreamReader,
    any_consumer,
    replay,
    worker_consumer,
)
from infra.bus.topology import ensure_consumer
from schemas import subjects

REQUEST = "request-1"


async def _all(messages):
    return [message async for message in messages]


async def test_a_client_reads_its_own_stream_and_no_other(connect, bus, until):
    """Live, replay and direct get of one's own stream work; of any other they are forbidden."""
    alice, client = await connect("alice"), await connect("client")
    chain = subjects.chain("alice.a", REQUEST)
    heard = []
    async with StreamReader(
        alice, subjects.reader_filter("alice.a"), lambda seq, subject, data: heard.append(data)
    ) as reader:
        await reader.start()
        await bus.publish_stored(chain, b"entry")
        await until(lambda: heard == [b"entry"])
    found = await _all(replay(alice, TOKENS, subjects.reader_filter("alice.a")))
    assert [message.data for message in found] == [b"entry"]
    assert await alice.last_message(TOKENS, chain) is not None

    with pytest.raises(BusForbidden):
        await client.subscribe(subjects.live(subjects.reader_filter("alice.a")), lambda m: None)
    with pytest.raises(BusForbidden):
        await client.subscribe("mesh.v1.live.>", lambda message: None)
    with pytest.raises(BusForbidden):
        await client.subscribe(subjects.token_stream("alice.a"), lambda message: None)
    with pytest.raises(BusForbidden):
        await _all(replay(client, TOKENS, subjects.reader_filter("alice.a")))
    with pytest.raises(BusForbidden):
        await _all(replay(client, TOKENS, ["mesh.v1.token-stream.>"]))
    with pytest.raises(BusForbidden):
        await client.last_message(TOKENS, chain)


async def test_a_filter_that_differs_from_its_call_is_refused(connect, bus):
    """A client can't ask for its own stream in the subject and another's in the body."""
    client = await connect("client")
    from infra.bus import BrokerRefused

    with pytest.raises(BrokerRefused) as refused:
        await client.api(
            f"CONSUMER.CREATE.{TOKENS}.x.mesh.v1.token-stream.client.>",
            {
                "stream_name": TOKENS,
                "config": {
                    "name": "x",
                    "filter_subject": "mesh.v1.token-stream.alice.>",
                    "deliver_subject": client.new_inbox(),
                },
            },
        )
    assert refused.value.err_code == 10131


async def test_a_client_cancels_its_own_requests_only(connect, bus):
    """It appends to chains of its own readers, and neither to others' nor to token streams."""
    client = await connect("client")
    await client.publish_stored(subjects.chain("client.x", REQUEST), b"cancelled")
    await client.publish_stored(subjects.admission("Model"), b"request")
    for forbidden in (
        subjects.chain("alice.x", REQUEST),
        subjects.token_stream("client.x"),
        subjects.request_record(REQUEST),
        subjects.prefill("m@r"),
    ):
        with pytest.raises(BusForbidden):
            await client.publish_stored(forbidden, b"x")


async def test_no_role_reads_anothers_answers(connect, bus):
    """Each role's inbox is its own."""
    roles = {role: await connect(role) for role in ("control", "worker", "bridge", "client")}
    for role, connection in roles.items():
        for other in roles:
            if other != role:
                with pytest.raises(BusForbidden):
                    await connection.subscribe(f"_INBOX_{other}.>", lambda message: None)


async def test_a_worker_has_what_it_needs(connect, bus, times):
    """Its own and the shared queue, chains, tokens, records, requeueing, beats, leases, cancels."""
    worker = await connect("worker")
    await ensure_consumer(worker, "MESH_WORK", worker_consumer("prefill", "m@r", "w1", times))
    await ensure_consumer(worker, "MESH_WORK", any_consumer("decode", "m@r", times))
    chain = subjects.chain("bridge.b", REQUEST)
    await worker.publish_stored(chain, b"claim", expect_last_subject_seq=0)
    await worker.publish_stored(subjects.token_stream("bridge.b"), b"tokens")
    for stored in (
        subjects.prefill("m@r", "w1"),
        subjects.decode("m@r"),
        subjects.kv_ready("m@r"),
        subjects.DEAD,
    ):
        await worker.publish_stored(stored, b"x")
    for said in (
        subjects.beat("p"),
        subjects.cancel("w2"),
        subjects.lease("w2"),
        subjects.kv_lend("w2"),
    ):
        await worker.publish(said, b"x")
        await worker.subscribe(said, lambda message: None)
    await worker.publish_stored(subjects.request_record(REQUEST), b"record")
    record = await worker.last_message(TOKENS, subjects.request_record(REQUEST))
    assert record is not None
    assert [m.data for m in await _all(replay(worker, TOKENS, chain))] == [b"claim"]
    with pytest.raises(BusForbidden):
        await worker.publish_stored(subjects.admission("Model"), b"x")


async def test_a_bridge_has_what_it_needs(connect, bus):
    """Requests in, its streams out, cancels, adoptions, records; no work, no tokens."""
    bridge = await connect("bridge")
    await bridge.publish_stored(subjects.admission("Model"), b"request")
    await bridge.publish_stored(subjects.chain("bridge.b", REQUEST), b"cancelled")
    await bridge.publish(subjects.cancel("w"), b"x")
    await bridge.publish(subjects.beat("p"), b"x")
    await bridge.subscribe(subjects.ALL_BEATS, lambda message: None)
    await bridge.publish(subjects.adopt("p"), b"x")
    await bridge.subscribe(subjects.ALL_ADOPTIONS, lambda message: None)
    await bus.publish_stored(subjects.request_record(REQUEST), b"record")
    record = await bridge.last_message(TOKENS, subjects.request_record(REQUEST))
    assert record is not None
    async with StreamReader(bridge, subjects.reader_filter("bridge.b"), lambda *_: None) as reader:
        await reader.start(1)
    for forbidden in (subjects.token_stream("bridge.b"), subjects.prefill("m@r")):
        with pytest.raises(BusForbidden):
            await bridge.publish_stored(forbidden, b"x")

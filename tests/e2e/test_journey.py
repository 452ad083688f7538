"""One request through the whole mesh, every process real, every subject observed."""

from __future__ import annotations

from typing import Any

import pytest

from schemas import subjects
from tests.e2e.harness import Mesh, ask
from tests.e2e.observer import Observer

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_request_walks_the_whole_mesh(simulated_mesh: Mesh) -> None:
    """Admission, prefill, kv-ready, decode and token stream, each message in its place.

    Two workers in two processes take part: the claims name both, and between the claims stands
    the handle by which the second one read the first one's blocks.
    """
    mesh = simulated_mesh
    async with mesh.client() as client, Observer.on(mesh.bus) as seen:
        request = mesh.request("The sea is", max_tokens=6, temperature=0.0, ignore_eos=True)
        answer = await ask(client, request)
        release = await seen.until("lease-release/1")
        await seen.until("stream-end/1")

    prefill, decode = mesh.beat_of("prefill-0"), mesh.beat_of("decode-0")
    tokens = subjects.token_stream(client.reader)
    chain = subjects.chain(client.reader, request.request_id)

    about = [message for message in seen.messages if message.request_id == request.request_id]
    # Routers tell each other of what they placed: no step of it, and heard at any time.
    steps = [(one.subject, one.tag) for one in about if one.tag != "placed/1"]
    # 1. The client publishes; admission writes the record and the task, then tells the client,
    #    while the prefill worker may be at it already.
    steps.remove((tokens, "accepted/1"))
    assert steps[:3] == [
        (subjects.admission("tiny"), "inference-request/1"),
        (subjects.request_record(request.request_id), "request-record/1"),
        (subjects.prefill(prefill.served), "prefill-task/1"),
    ]
    # 2. The prefill worker claims, publishes token 0, and offers its blocks.
    assert steps[3:6] == [
        (chain, "claim/1"),
        (tokens, "token-batch/1"),
        (subjects.kv_ready(prefill.served), "kv-ready/1"),
    ]
    # 3. The router picks the decode worker, which claims, generates, and ends the stream.
    assert steps[6:8] == [
        (subjects.decode(prefill.served), "decode-task/1"),
        (chain, "claim/1"),
    ]
    # Steps that are over go out together, so how many messages its tokens take is its own affair.
    assert steps[-1] == (chain, "stream-end/1")
    assert set(steps[8:-1]) == {(tokens, "token-batch/1")}

    claims = [message.fields for message in about if message.tag == "claim/1"]
    assert [(claim["epoch"], claim["worker"], claim["role"]) for claim in claims] == [
        (1, prefill.worker, "prefill"),
        (2, decode.worker, "decode"),
    ]
    batches: list[Any] = [one.fields for one in about if one.tag == "token-batch/1"]
    # A batch that is not confirmed in time is sent again: each token counts once.
    by = {
        delta.get("number", 0) + i: batch["worker"]
        for batch in batches
        for delta in batch["deltas"]
        for i in range(len(delta["ids"]))
    }
    assert [by[number] for number in sorted(by)] == [prefill.worker] + [decode.worker] * 5
    assert release.subject == subjects.lease(prefill.worker)
    assert len(answer.ids[0]) == 6
    await mesh.until_idle()


async def test_work_messages_carry_id_epoch_deadline_and_trace(simulated_mesh: Mesh) -> None:
    """Every work message can be judged by its headers alone, and the trace stays one."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    mesh = simulated_mesh
    async with mesh.client() as client, Observer.on(mesh.bus) as seen:
        request = mesh.request("The sea is", max_tokens=3, ignore_eos=True)
        stream = await client.submit(request, traceparent=trace)
        async for _ in stream:
            pass
    work = [message for message in seen.messages if "Mesh-Request" in message.headers]
    assert [(message.tag, message.headers["Mesh-Epoch"]) for message in work] == [
        ("inference-request/1", "0"),
        ("prefill-task/1", "1"),
        ("kv-ready/1", "1"),
        ("decode-task/1", "2"),
    ]
    for message in work:
        assert message.headers["Mesh-Schema"] == message.tag
        assert message.headers["Mesh-Request"] == request.request_id
        assert message.headers["traceparent"] == trace
        assert message.headers["Mesh-Deadline"] == work[0].headers["Mesh-Deadline"]

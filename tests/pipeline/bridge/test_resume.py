"""Streams read on through a bridge: from which event, by whom, and what is refused."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.times import Times
from pipeline.bridge.note import ReaderNote
from schemas.errors import EngineFailed, InvalidRequest, ReaderTooSlow
from schemas.requests import MAX_READER_NOTE_BYTES, InferenceRequest
from tests.pipeline.bridge.fake import (
    MODEL,
    FakeClient,
    House,
    Script,
    build,
    chat,
    completion,
    patient,
    say,
    served,
)
from tests.pipeline.bridge.test_leaving import WAIT_S, closed, gated, wire

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONGEST_S = Times().resume_window_s


def browser(house: House) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(house.bridge), base_url="http://mesh")


async def ask(house: House, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    headers = {"x-mesh-event-ids": "1"} | {k.replace("_", "-"): v for k, v in headers.items()}
    async with browser(house) as client:
        return await client.post(path, json=body, headers=headers)


async def resume(
    house: House, request_id: str, after: str | None = None, query: str = ""
) -> httpx.Response:
    headers = {} if after is None else {"Last-Event-ID": after}
    async with browser(house) as client:
        return await client.get(f"/v1/requests/{request_id}/events{query}", headers=headers)


def events(body: bytes) -> list[bytes]:
    """The events of a body, each with the empty line behind it."""
    return [part + b"\n\n" for part in body.split(b"\n\n")[:-1]]


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat(stream=True)),
    "usage": (CHAT, chat(stream=True, stream_options={"include_usage": True})),
    "usage all along": (
        CHAT,
        chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    ),
    "several choices": (CHAT, chat(stream=True, n=3)),
    "logprobs": (CHAT, chat(stream=True, logprobs=True, top_logprobs=2)),
    "completion": (COMPLETIONS, completion(stream=True)),
    "echo": (COMPLETIONS, completion(stream=True, echo=True, n=2)),
    "logprobs of a completion": (COMPLETIONS, completion(stream=True, logprobs=1)),
    "logprobs of prompt and completion": (
        COMPLETIONS,
        completion(stream=True, logprobs=1, echo=True, n=2),
    ),
    "logprobs of a prompt": (
        COMPLETIONS,
        completion(stream=True, logprobs=1, echo=True, max_tokens=0),
    ),
}


@pytest.mark.parametrize("case", BODIES)
async def test_any_bridge_writes_the_rest_of_the_same_bytes(case: str) -> None:
    """Cut after any event, what the first bridge wrote and what the second one writes are the
    undisturbed bytes."""
    path, body = BODIES[case]
    house = build()
    whole = (await ask(house, path, body)).content
    parts = events(whole)
    assert parts[-1] == b"data: [DONE]\n\n"
    (request_id,) = [request.request_id for request in house.client.requests]
    for k in range(len(parts)):
        rest = await resume(house, request_id, str(k))
        assert rest.status_code == 200
        assert rest.headers["content-type"].startswith("text/event-stream")
        assert rest.headers["x-mesh-request-id"] == request_id
        assert b"".join(parts[:k]) + rest.content == whole
    assert house.adopted == [request_id] * len(parts)


async def test_events_have_ids_when_they_may_be_needed() -> None:
    """With the header, or a window, or in a resumed stream; else not, for readers that take each
    event for one line."""
    house = build()
    plain = await ask(house, CHAT, chat(stream=True), x_mesh_event_ids="0")
    assert b"id:" not in plain.content.replace(b'"id":', b"")
    window = await ask(house, CHAT, chat(stream=True), x_mesh_event_ids="0",
                       x_mesh_resume_window="10")  # fmt: skip
    assert window.content.startswith(b"id: 1\ndata: ")
    assert window.headers["x-mesh-resume-window"] == "10"
    again = await resume(house, house.client.requests[0].request_id)
    assert again.content.startswith(b"id: 1\ndata: ")
    assert re.sub(rb"id: \d+\n", b"", again.content) == plain.content


async def test_where_to_go_on_from() -> None:
    """The header, which a browser that reconnects sends, counts more than its first address."""
    house = build()
    parts = events((await ask(house, CHAT, chat(stream=True))).content)
    request_id = house.client.requests[0].request_id
    for header, query, after in (
        (None, "", 0), ("", "", 0), (None, "?last_event_id=2", 2), ("3", "?last_event_id=2", 3),
        (None, "?last_event_id=", 0),
    ):  # fmt: skip
        rest = await resume(house, request_id, header, query)
        assert rest.content == b"".join(parts[after:])


@pytest.mark.parametrize("bad", ["-1", "x", "1.5", "9" * 13, "²"])
async def test_what_is_no_event_number_is_a_400(bad: str) -> None:
    """Nothing is read for it."""
    house = build()
    await ask(house, CHAT, chat(stream=True))
    rest = await resume(house, house.client.requests[0].request_id, query=f"?last_event_id={bad}")
    assert rest.status_code == 400
    assert rest.json()["error"]["param"] == "last_event_id"
    assert house.client.resumed == []


async def test_an_event_that_never_was_is_an_error_and_no_done() -> None:
    """A client that had more events than there are has mixed up its streams."""
    house = build()
    whole = await ask(house, CHAT, chat(stream=True))
    last = len(events(whole.content)) - 1
    rest = await resume(house, house.client.requests[0].request_id, str(last + 1))
    assert b"last_event_id" in rest.content
    assert b"[DONE]" not in rest.content
    assert b"id:" not in rest.content


@pytest.mark.parametrize("request_id", ["0" * 32, "no", "a.b", "*", "", "a/b", "x" * 300])
async def test_an_unknown_request_is_a_404(request_id: str) -> None:
    """Also what can be no id at all."""
    house = build()
    answer = await resume(house, request_id)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"


async def test_another_tenants_request_is_a_404() -> None:
    """The same answer as for one that is not there: an id tells nothing."""
    house = build()
    await ask(house, CHAT, chat(stream=True))
    stream = house.client.streams[0]
    stream.request = msgspec.structs.replace(stream.request, tenant="acme")
    request_id = stream.request_id
    answer, unknown = await resume(house, request_id), await resume(house, "0" * 32)
    assert answer.status_code == 404
    assert answer.content == unknown.content.replace(b"0" * 32, request_id.encode())


async def test_a_batch_can_not_be_resumed() -> None:
    """The events of several prompts have no one order."""
    house = build()
    await ask(house, COMPLETIONS, completion(prompt=["a", "b"], stream=True))
    answer = await resume(house, house.client.requests[1].request_id)
    assert answer.status_code == 400
    assert "batch of 2 prompts" in answer.json()["error"]["message"]


@pytest.mark.parametrize("note", [b"", b"\xff", b"\x80", b"\x81\xa6schema\xa7claim/1"])
async def test_a_request_from_the_bus_is_not_shown_as_events(note: bytes) -> None:
    """Nobody has said how."""
    house = build()
    await ask(house, CHAT, chat(stream=True))
    stream = house.client.streams[0]
    stream.request = msgspec.structs.replace(stream.request, reader_note=note)
    assert (await resume(house, stream.request_id)).status_code == 400


async def test_only_get_resumes() -> None:
    """The body is not needed again."""
    house = build()
    async with browser(house) as client:
        answer = await client.post(f"/v1/requests/{'0' * 32}/events")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET"


async def test_a_failed_request_fails_again_after_its_last_event() -> None:
    """The error has no number: whoever resumes after it hears it again."""

    def script(request: InferenceRequest) -> Script:
        return Script(steps=[*say(request).steps[:2], EngineFailed("it broke")], end=None)

    house = build(FakeClient(script))
    whole = events((await ask(house, CHAT, chat(stream=True))).content)
    assert [part.split(b"\n")[0] for part in whole[:-1]] == [b"id: 1", b"id: 2", b"id: 3"]
    assert whole[-1].startswith(b'data: {"error"')
    for k in (2, 3):
        rest = await resume(house, house.client.requests[0].request_id, str(k))
        assert rest.content == b"".join(whole[k:])


async def test_resumed_answers_do_not_count_as_new_ones() -> None:
    """Times are those of requests, not of readers; each reader has its log line."""
    house = build()
    await ask(house, CHAT, chat(stream=True))
    await resume(house, house.client.requests[0].request_id)
    for name in ("mesh_ttft_seconds_count", "mesh_e2e_seconds_count"):
        assert house.metrics.registry.get_sample_value(name) == 1
    assert house.count("stop") == 2


def test_a_note_is_small_whatever_the_model_is_called() -> None:
    """It travels with every message of the request."""
    note = ReaderNote(endpoint="completions", model="漢" * 255, created_unix_s=2**40)
    assert len(note.packed()) < MAX_READER_NOTE_BYTES / 2


@patient
@given(
    note=st.builds(
        ReaderNote, endpoint=st.sampled_from(["chat", "completions"]),
        model=st.text(st.characters(codec="utf-8"), max_size=255),
        created_unix_s=st.integers(0, 2**40), num_prompts=st.integers(1, 256),
        include_usage=st.booleans(), continuous_usage=st.booleans(),
    )
)  # fmt: skip
def test_a_note_comes_back_as_it_was(note: ReaderNote) -> None:
    """What one bridge packs another unpacks."""
    assert ReaderNote.unpacked(note.packed()) == note


def test_a_note_of_another_version_is_refused() -> None:
    """And says what to do instead."""
    with pytest.raises(InvalidRequest, match="on the bus"):
        ReaderNote.unpacked(b"\x81\xa6schema\xadbridge-note/9")


# Clients that leave and come back ----------------------------------------------------------------


@pytest.mark.parametrize("asked", ["10", "0.5", "99999"])
async def test_with_a_window_a_request_outlives_its_client(asked: str) -> None:
    """It is not cancelled when the connection closes, but when the window is over: as long as
    was asked for, up to the longest that there is."""
    house = build(gated(asyncio.Event()))
    async with served(house) as port:
        async with wire(port) as client:
            client.post(chat(stream=True), f"x-mesh-resume-window: {asked}\r\n")
            head = await client.until(b"Hello")
        assert await closed(house) == []
    (stream,) = house.client.streams
    assert stream.was_left
    assert house.windows.num_waiting == 1
    window_s = min(float(asked), LONGEST_S)
    assert f"x-mesh-resume-window: {window_s:g}".encode() in head
    left_s = house.windows._waiting[stream.request_id].since_s
    house.windows._now_s = lambda: left_s + window_s - 0.1
    await house.windows.beat()
    assert house.given_up == []
    house.windows._now_s = lambda: left_s + window_s + 0.1
    await house.windows.beat()
    assert house.given_up == [stream.request_id]


@pytest.mark.parametrize("bad", ["", "-1", "soon", "1e3", "nan", "5 s"])
async def test_a_window_that_is_no_time_is_a_400(bad: str) -> None:
    """Nothing is submitted."""
    house = build()
    answer = await ask(house, CHAT, chat(), x_mesh_resume_window=bad)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-mesh-resume-window"
    assert house.client.requests == []


@pytest.mark.parametrize("window", ["", "x-mesh-resume-window: 0\r\n"])
async def test_without_a_window_a_leaving_client_cancels_at_once(window: str) -> None:
    """A window of nothing is none."""
    house = build(gated(asyncio.Event()))
    async with served(house) as port:
        async with wire(port) as client:
            client.post(chat(stream=True), window)
            await client.until(b"Hello")
        assert await closed(house) == ["the client closed the connection"]
    assert house.windows.num_waiting == 0


async def test_who_was_told_no_id_is_not_waited_for() -> None:
    """An answer that had not begun can't be resumed: nobody knows its id."""
    house = build(gated(asyncio.Event()))
    async with served(house) as port:
        async with wire(port) as client:
            client.post(chat(), "x-mesh-resume-window: 10\r\n")
            await house.client.submitted.wait()
        assert await closed(house) == ["the client closed the connection"]


async def test_a_request_that_somebody_else_reads_is_not_cancelled() -> None:
    """The client may be back through another bridge before its old connection is seen to close."""
    house = build(gated(asyncio.Event()))
    async with served(house) as port:
        async with wire(port) as client:
            client.post(chat(stream=True))
            await client.until(b"Hello")
            house.windows.hear([house.client.requests[0].request_id])
        assert await closed(house) == []
    assert house.windows.num_waiting == 1


async def test_a_shutdown_leaves_what_has_a_window_to_the_mesh() -> None:
    """The client is told, and can go on through another bridge; nobody waits here any more."""
    house = build(gated(asyncio.Event()))
    async with served(house) as port, wire(port) as client:
        client.post(chat(stream=True), "x-mesh-resume-window: 10\r\n")
        await client.until(b"Hello")
        house.bridge.cut()
        last = await client.until(b"0\r\n\r\n")
        assert b'"code":"shutting_down"' in last
        assert b"id: 3" not in last
        assert await closed(house) == []
    assert house.windows.num_waiting == 0


async def test_a_resumed_reader_that_leaves_ends_nothing() -> None:
    """It stops to read and to announce; the request is not its to cancel."""
    house = build(gated(asyncio.Event()))
    async with served(house) as port, wire(port) as first:
        first.post(chat(stream=True))
        await first.until(b"Hello")
        request_id = house.client.requests[0].request_id
        async with wire(port) as second:
            second.writer.write(
                f"GET /v1/requests/{request_id}/events HTTP/1.1\r\nhost: x\r\n\r\n".encode()
            )
            await second.until(b"Hello")
            house.adopted.clear()
            await house.windows.beat()
            assert house.adopted == [request_id]
        async with asyncio.timeout(WAIT_S):
            await house.client.resumed[0].is_closed.wait()
        house.adopted.clear()
        await house.windows.beat()
        assert house.adopted == []
        assert house.client.resumed[0].cancelled == []
        assert house.client.streams[0].cancelled == []


async def test_a_reader_too_slow_is_cut_with_an_error() -> None:
    """What is on its way to it comes first, then the reason; no [DONE]."""

    def script(request: InferenceRequest) -> Script:
        return Script(steps=[say(request).steps[0], ReaderTooSlow("over 4096")], end=None)

    house = build(FakeClient(script))
    answer = await ask(house, CHAT, chat(stream=True), x_mesh_resume_window="10")
    parts = events(answer.content)
    assert b"Hello" in parts[-2]
    assert b'"code":"reader_too_slow"' in parts[-1]
    assert house.windows.num_waiting == 0
    assert house.client.streams[0].is_closed.is_set()
    assert not house.client.streams[0].was_left
    assert house.client.requests[0].model == MODEL

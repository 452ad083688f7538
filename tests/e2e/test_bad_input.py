"""What is wrong with a request is said to whoever sent it, and nothing else suffers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from infra.bus import DEAD
from pipeline.client import MeshClient, new_request_id
from schemas import subjects
from schemas.codec import decode
from schemas.control import DeadLetter
from schemas.errors import ContextTooLong, InvalidRequest, ModelNotFound
from tests.e2e.conftest import start_simulated
from tests.e2e.harness import Mesh, ask, mesh_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> AsyncIterator[Mesh]:
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as running:
        await running.start("bridge", "bridge", "--port", "0")
        await start_simulated(running, tiny_folder, speed=1000)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with mesh.client() as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{await mesh.bridge_port('bridge')}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as connected:
        yield connected


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, 400, "messages[0].role"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, 400, "messages"),
    ],
)
async def test_bad_fields_are_named(
    http: httpx.AsyncClient, change: dict[str, object], status: int, param: str
) -> None:
    """A caller's fault is a 4xx in OpenAI's shape that names the field."""
    answer = await http.post("/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"]


async def test_unknown_fields_are_ignored(http: httpx.AsyncClient) -> None:
    """What we do not know does not hurt."""
    answer = await http.post("/v1/chat/completions", json=CHAT | {"frobnicate": {"x": 1}})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": 3}'])
async def test_broken_json(http: httpx.AsyncClient, body: bytes) -> None:
    """Bytes that are no request get 400, never 5xx."""
    answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_five_megabytes_are_refused(http: httpx.AsyncClient) -> None:
    """A body over the limit gets 413."""
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "x" * 5_000_000}]})
    answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 413
    assert (await http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "nope"}, ModelNotFound),
        ({"prompt": (1, 2, 10**6)}, InvalidRequest),
        ({"prompt": tuple(range(3, 300)) * 3}, ContextTooLong),
    ],
)
async def test_refusals_reach_a_bus_client(
    mesh: Mesh, client: MeshClient, change: dict[str, object], error: type[Exception]
) -> None:
    """A client on the bus gets the same typed errors."""
    request = msgspec.structs.replace(mesh.request("hi", max_tokens=2), **change)
    stream = await client.submit(request)
    with pytest.raises(error):
        await stream.accepted()


async def test_json_over_the_bus(mesh: Mesh, client: MeshClient) -> None:
    """A plain NATS publish of JSON, without headers or tag, is answered on the request's own
    stream."""
    request_id = new_request_id()
    body = {"request_id": request_id, "model": "tiny", "prompt": "hello",
            "sampling": {"max_tokens": 3, "ignore_eos": True}}  # fmt: skip
    await client.bus.publish(subjects.admission("tiny"), json.dumps(body).encode())
    stream = None
    while stream is None:
        try:
            async with client.resume(request_id) as stream:
                assert sum([len(delta.ids) async for delta in stream]) == 3
        except InvalidRequest:
            continue  # not admitted yet


@pytest.mark.parametrize("stage", ["admission", "prefill", "kv-ready", "decode"])
@pytest.mark.parametrize(
    "data", [b"", b"\x81", b"\x81\xa6schema\xa9unknown/9", b"\xc1garbage", b'{"schema": 1}']
)
async def test_bytes_that_are_no_message(
    mesh: Mesh, client: MeshClient, stage: str, data: bytes
) -> None:
    """On every work subject: a dead letter that keeps the bytes, and the stage lives on."""
    served = mesh.beat_of("prefill-0").served
    subject = {
        "admission": subjects.admission("tiny"),
        "prefill": subjects.prefill(served),
        "kv-ready": subjects.kv_ready(served),
        "decode": subjects.decode(served),
    }[stage]
    before = await mesh.bus.last_message(DEAD, subjects.DEAD)
    await mesh.bus.publish_stored(subject, data)
    letter = await mesh.next_dead_letter(before.seq if before else 0)
    assert decode(letter.data, DeadLetter).payload == data
    assert decode(letter.data, DeadLetter).subject == subject
    answer = await ask(client, mesh.request("still here", max_tokens=2, ignore_eos=True))
    assert len(answer.ids[0]) == 2


async def test_a_prompt_over_the_brokers_limit(mesh: Mesh, client: MeshClient) -> None:
    """A request twice as large as any message may be travels by the object store; here it is
    refused for its length, which shows that admission has read it."""
    text = "x" * (2 * client.bus.max_payload)
    stream = await client.submit(mesh.request(text, max_tokens=2))
    with pytest.raises(ContextTooLong):
        await stream.accepted()

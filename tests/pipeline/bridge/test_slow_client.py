"""A client that reads slower than its answer comes: real sockets, a real broker, a played mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from infra.bus import Bus
from pipeline.claim_chain import ClaimChain
from pipeline.client import MeshClient
from pipeline.token_stream import TokenStream
from schemas import subjects
from schemas.codec import decode
from schemas.requests import InferenceRequest
from schemas.tokens import Accepted, Cancelled, TokenBatch, TokenDelta
from tests.conftest import Connect
from tests.pipeline.bridge.fake import MODEL, FakeClient, build, chat, served
from tests.pipeline.bridge.test_leaving import wire
from tests.pipeline.rig import claim, store, stream_end

LIMIT = 32
TEXT = "x" * 20_000  # so that sockets are full after a few tokens


@dataclass
class RealClient(FakeClient):
    """Submits to the bus."""

    mesh: MeshClient = field(kw_only=True)

    async def submit(self, request: InferenceRequest) -> TokenStream:  # type: ignore[override]
        return await self.mesh.submit(request)


@dataclass
class Played:
    """The mesh behind the bridge: what it hears, what it says."""

    bus: Bus
    reader: str
    asked: asyncio.Queue[InferenceRequest] = field(default_factory=asyncio.Queue)
    numbers: dict[str, int] = field(default_factory=dict)

    async def admit(self) -> str:
        """Take the next request; its id."""
        request_id = (await self.asked.get()).request_id
        accepted = Accepted(
            request_id=request_id, model=MODEL, revision="r1", prompt_tokens=1,
            max_tokens=9999, admitted_unix_ms=1, deadline_unix_ms=2**50,
        )  # fmt: skip
        await store(self.bus, subjects.token_stream(self.reader), accepted)
        await store(self.bus, subjects.chain(self.reader, request_id), claim(request_id, "w"))
        self.numbers[request_id] = 0
        return request_id

    async def say(self, request_id: str, text: str) -> None:
        number = self.numbers[request_id]
        self.numbers[request_id] += 1
        delta = TokenDelta(request_id=request_id, epoch=1, number=number, ids=(1,), text=text)
        batch = TokenBatch(worker="w", deltas=(delta,))
        await store(self.bus, subjects.token_stream(self.reader), batch)

    async def end(self, request_id: str) -> None:
        entry = stream_end(request_id, 1, self.numbers[request_id])
        await store(self.bus, subjects.chain(self.reader, request_id), entry)


@asynccontextmanager
async def mesh_behind(bus: Bus, connection: Bus) -> AsyncIterator[tuple[Played, int]]:
    """A played mesh and the port of a bridge in front of it."""
    async with MeshClient(connection, "bridge", "bridge-x-1", max_waiting=LIMIT) as client:
        played = Played(bus, client.reader)
        await bus.subscribe(
            subjects.admission(MODEL),
            lambda message: played.asked.put_nowait(decode(message.data, InferenceRequest)),
        )
        async with served(build(RealClient(mesh=client))) as port, asyncio.timeout(60):
            yield played, port


async def until_cut(played: Played, request_id: str) -> Cancelled:
    """Talk until the request is ended for its reader's slowness."""
    chain = ClaimChain(played.bus)
    while not (tip := await chain.tip(played.reader, request_id)).has_ended:
        await played.say(request_id, TEXT)
    assert isinstance(tip.entry, Cancelled)
    return tip.entry


async def test_a_slow_client_is_cut_with_an_error_and_delays_nobody(
    bus: Bus, connect: Connect
) -> None:
    """When its buffer is full its request is cancelled, at once; its client still gets what was
    on the way, and then the reason. Another client of the bridge has each token as it comes."""
    async with (
        mesh_behind(bus, await connect("bridge")) as (played, port),
        wire(port, receive_buffer=4096) as slow,
        wire(port) as quick,
    ):
        slow.post(chat(stream=True))
        slow_id = await played.admit()
        quick.post(chat(stream=True))
        quick_id = await played.admit()
        await played.say(quick_id, "before")
        await quick.until(b"before")
        entry = await until_cut(played, slow_id)
        assert entry.reason == "its reader is too slow"
        await played.say(quick_id, "after")
        await quick.until(b"after")
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            data = await slow.reader.read(65536)
            assert data, "closed before the end"
            body += data
        assert b'"code":"reader_too_slow"' in body
        assert b"[DONE]" not in body
        assert body.count(TEXT.encode()) >= 2
        await played.end(quick_id)
        await quick.until(b"[DONE]")

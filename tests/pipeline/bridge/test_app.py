"""The bridge as a role, on a real broker: a stand-in answers on the bus, a client asks by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest_asyncio

from infra.bus import Bus, EmbeddedBroker, Msg
from infra.config import BridgeConfig, BusConfig
from infra.health import Health
from infra.log import make_logger
from infra.metrics import Metrics
from infra.process import RoleContext
from infra.times import Times
from pipeline.bridge.app import serve_bridge
from pipeline.claim_chain import ClaimChain
from pipeline.registry import Registry
from schemas import subjects
from schemas.codec import Message, decode, encode
from schemas.requests import InferenceRequest
from schemas.tokens import Accepted, Cancelled, Claim, StreamEnd, TokenBatch, TokenDelta
from tests.pipeline.bridge.fake import CARD, WORDS, Log, chat, say

Connect = Callable[..., Awaitable[Bus]]
Until = Callable[..., Awaitable[None]]
CHAT = "/v1/chat/completions"


class StandIn:
    """Admission and worker in one: accepts, says ``WORDS``; after the first it waits for
    ``gate``."""

    def __init__(self, bus: Bus) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.chain = ClaimChain(bus)
        self.requests: asyncio.Queue[InferenceRequest] = asyncio.Queue(maxsize=100)
        self.seen: list[InferenceRequest] = []
        self.bus = bus

    def hear(self, message: Msg) -> None:
        self.requests.put_nowait(decode(message.data, InferenceRequest))

    async def run(self) -> None:
        while True:
            request = await self.requests.get()
            self.seen.append(request)
            await self._answer(request)

    async def _answer(self, request: InferenceRequest) -> None:
        accepted = Accepted(
            request_id=request.request_id,
            model=request.model,
            revision="r1",
            prompt_tokens=5,
            max_tokens=16,
            admitted_unix_ms=0,
            deadline_unix_ms=request.deadline_unix_ms or 0,
        )
        claim = Claim(
            request_id=request.request_id,
            epoch=1,
            worker="w",
            role="prefill",
            served=CARD.served,
            deadline_unix_ms=0,
        )
        reader = request.reader or ""
        await self._publish(reader, accepted)
        seq = await self.chain.append(reader, claim, 0)
        assert seq is not None
        script = say(request)
        for step in script.steps:
            deltas = tuple(one for one in step if isinstance(one, TokenDelta))  # type: ignore[union-attr]
            await self._publish(reader, TokenBatch(worker="w", deltas=deltas))
            await self.gate.wait()
        assert isinstance(script.end, StreamEnd)
        await self.chain.append(reader, script.end, seq)

    async def _publish(self, reader: str, message: Message) -> None:
        await self.bus.publish_stored(subjects.token_stream(reader), encode(message))


@dataclass
class Role:
    """A running bridge."""

    ctx: RoleContext
    http: httpx.AsyncClient
    mesh: StandIn
    serving: asyncio.Task[None]


Running = Callable[..., AbstractAsyncContextManager[Role]]


@pytest_asyncio.fixture
async def running(
    bus: Bus, connect: Connect, broker: EmbeddedBroker, times: Times, tmp_path: Path, until: Until
) -> Running:
    """``async with running() as role``: a bridge that is ready; it has drained afterwards.
    ``running(has_models=False)``: one that listens."""
    mesh = StandIn(bus)
    await bus.subscribe("mesh.v1.admission.>", mesh.hear)
    settings = BusConfig(nats_url=broker.url("bridge"), data=tmp_path)
    config = BridgeConfig(bus=settings, port=0, grace_s=5)
    log = Log()
    ctx = RoleContext(
        process="bridge-test-1234",
        kind="bridge",
        bus=await connect("bridge"),
        times=times,
        health=Health(),
        metrics=Metrics(),
        log=make_logger("bridge-test", stream=log),
    )

    @contextlib.asynccontextmanager
    async def run(*, has_models: bool = True) -> AsyncIterator[Role]:
        if has_models:
            await Registry(bus).register(CARD)
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(mesh.run())
            serving = tasks.create_task(serve_bridge(ctx, config))
            await until(lambda: ctx.health.is_ready if has_models else log.getvalue())
            port = json.loads(log.getvalue().splitlines()[0])["port"]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
                yield Role(ctx, http, mesh, serving)
            ctx.drain()
            mesh.gate.set()
            async with asyncio.timeout(60):
                await serving
            answering.cancel()

    return run


async def test_a_request_goes_over_the_bus_and_back(running: Running) -> None:
    """HTTP in, one InferenceRequest on the bus; tokens on the bus, an answer out."""
    async with running() as role:
        answer = await role.http.post(CHAT, json=chat(), headers={"x-mesh-deadline-ms": "60000"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "".join(WORDS)
        (request,) = role.mesh.seen
        assert request.reader == "bridge.bridge-test-1234"
        left_ms = (request.deadline_unix_ms or 0) - role.ctx.bus.now_unix_ms()
        assert 50_000 < left_ms <= 60_000
        streamed = await role.http.post(CHAT, json=chat(stream=True))
        assert streamed.text.endswith("data: [DONE]\n\n")


async def test_models_and_readiness_are_the_meshs(running: Running) -> None:
    """The registry's models; an unknown one never reaches the bus; ready with the role."""
    async with running() as role:
        assert (await role.http.get("/v1/models")).json()["data"][0]["id"] == CARD.name
        assert (await role.http.post(CHAT, json=chat(model="x"))).status_code == 404
        assert (await role.http.get("/ready")).status_code == 200
        assert role.mesh.seen == []


async def test_ready_means_that_there_is_a_model(running: Running, bus: Bus, until: Until) -> None:
    """A bridge that listens before the first control process has registered says so; once it is
    ready, a request is taken."""
    async with running(has_models=False) as role:
        early = await role.http.get("/ready")
        assert early.status_code == 503
        assert "models" in early.json()["failing"]
        await Registry(bus).register(CARD)
        await until(lambda: role.ctx.health.is_ready)
        assert (await role.http.get("/ready")).status_code == 200
        assert (await role.http.post(CHAT, json=chat())).status_code == 200


async def test_a_client_that_leaves_ends_the_request_on_its_chain(
    running: Running, until: Until
) -> None:
    """The chain's last entry is Cancelled, with the reason."""
    async with running() as role:
        role.mesh.gate.clear()
        async with role.http.stream("POST", CHAT, json=chat(stream=True)) as response:
            await anext(response.aiter_text())
        (request,) = role.mesh.seen
        ends: list[object] = []
        async with asyncio.timeout(60):
            while not ends:
                tip = await role.mesh.chain.tip(request.reader or "", request.request_id)
                ends += [tip.entry] if tip.has_ended else []
        assert ends == [
            Cancelled(request_id=request.request_id, reason="the client closed the connection")
        ]


async def test_a_drain_finishes_what_runs(running: Running) -> None:
    """After ``drain`` a running stream ends as usual and the role returns."""
    async with running() as role:
        role.mesh.gate.clear()
        async with role.http.stream("POST", CHAT, json=chat(stream=True)) as response:
            texts = response.aiter_text()
            received = await anext(texts)
            role.ctx.drain()
            role.mesh.gate.set()
            received += "".join([text async for text in texts])
        assert received.endswith("data: [DONE]\n\n")
        async with asyncio.timeout(60):
            await role.serving


async def test_without_a_bus_the_answer_is_503_at_once(
    running: Running, broker: EmbeddedBroker, until: Until
) -> None:
    """Nothing waits for a broker that is away; when it is back, requests are served again."""
    async with running() as role:
        await broker.kill()
        await until(lambda: not role.ctx.bus.is_connected)
        async with asyncio.timeout(60):
            answer = await role.http.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "bus_unavailable")
        assert answer.headers["retry-after"] == "1"
        await broker.restart()
        await until(lambda: role.ctx.bus.is_connected and role.mesh.bus.is_connected, 10)
        assert role.mesh.seen == []
        assert (await role.http.post(CHAT, json=chat())).status_code == 200

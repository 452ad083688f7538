"""The health routes, over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from infra.health import Health, health_app
from infra.http_server import bind, http_server
from infra.metrics import Metrics
from schemas.errors import ConfigError


@asynccontextmanager
async def served(health: Health) -> AsyncIterator[httpx.AsyncClient]:
    bound = bind("127.0.0.1", 0, key="port")
    base = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with (
        http_server(health_app("worker-a-1", health, Metrics()), bound),
        httpx.AsyncClient(base_url=base) as client,
    ):
        yield client


async def test_ready_names_what_is_missing_and_why() -> None:
    """503 with each failing check until all hold, then 200."""
    health = Health()
    health.set("model", False, "loading weights")
    health.set("bus", True)
    async with served(health) as client:
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["failing"] == {"model": "loading weights"}
        health.set("model", True)
        answer = await client.get("/ready")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ready", "process": "worker-a-1", "failing": {}}


async def test_a_process_without_checks_is_not_ready() -> None:
    """Nothing known is not good news."""
    async with served(Health()) as client:
        assert (await client.get("/ready")).status_code == 503


async def test_health_and_metrics() -> None:
    """/health answers while the loop runs; /metrics serves the process's registry."""
    async with served(Health()) as client:
        assert (await client.get("/health")).json()["status"] == "alive"
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "mesh_requests_admitted_total 0.0" in answer.text


def test_health_says_when_something_changed() -> None:
    """``changed`` is set by news only, so that a beat goes out at once, and only then."""
    health = Health()
    health.set("bus", False, "away")
    assert health.changed.is_set()
    health.changed.clear()
    health.set("bus", False, "away")
    assert not health.changed.is_set()
    health.set("bus", True)
    assert health.changed.is_set()
    assert health.reason == ""


def test_a_port_in_use_is_said_with_its_key() -> None:
    """A ConfigError, not a traceback out of the server."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use") as caught:
            bind("127.0.0.1", port, key="bridge.port")
        assert caught.value.param == "bridge.port"


def test_an_address_that_is_none_is_said_with_its_key() -> None:
    """So is a host of another machine."""
    with pytest.raises(ConfigError, match="can't be used") as caught:
        bind("192.0.2.1", 0, key="bridge.host")
    assert caught.value.param == "bridge.host"


async def test_leaving_closes_the_port_and_cuts_what_hangs() -> None:
    """After the block nothing listens, although a response never ends."""
    entered = asyncio.Event()

    async def hang(_: Request) -> PlainTextResponse:
        entered.set()
        await asyncio.Event().wait()
        return PlainTextResponse("never")

    bound = bind("127.0.0.1", 0, key="port")
    port = bound.getsockname()[1]
    async with httpx.AsyncClient() as client, asyncio.TaskGroup() as tasks:
        async with http_server(Starlette(routes=[Route("/", hang)]), bound, drain_s=1):
            hanging = tasks.create_task(_outcome(client, f"http://127.0.0.1:{port}/"))
            await entered.wait()
        assert await hanging in ("500", "broken")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def _outcome(client: httpx.AsyncClient, url: str) -> str:
    try:
        return str((await client.get(url)).status_code)
    except httpx.RemoteProtocolError:
        return "broken"

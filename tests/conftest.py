"""What tests of several parts share: a real broker each, connections that are closed, waiting."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from infra.bus import Bus, EmbeddedBroker, ensure_topology
from infra.times import Times

Connect = Callable[..., Awaitable[Bus]]
Until = Callable[..., Awaitable[None]]


@pytest.fixture(scope="module", autouse=True)
def _old_garbage() -> None:
    """What was there before is looked through once per module, and not, for half a second, with
    each ``gc.collect`` of its tests: torch and all that is imported are a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def times() -> Times:
    """The mesh's times, a quarter of the real ones."""
    return Times().scaled(0.25)


@pytest_asyncio.fixture
async def broker(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    """A nats-server of this test's own (40 ms), with the client users ``client`` and ``alice``."""
    async with EmbeddedBroker(tmp_path / "broker", clients=("client", "alice")) as running:
        yield running


@pytest_asyncio.fixture
async def connect(broker: EmbeddedBroker, times: Times) -> AsyncIterator[Connect]:
    """Connect to the broker as a user; closed at the end."""
    opened: list[Bus] = []

    async def connect_as(user: str, *, name: str = "") -> Bus:
        opened.append(await Bus.connect(broker.url(user), role=user, name=name, times=times))
        return opened[-1]

    yield connect_as
    for bus in opened:
        await bus.close()
    gc.collect()  # a transport dropped without care warns here, in the test that did it


@pytest_asyncio.fixture
async def bus(connect: Connect) -> Bus:
    """A connection as ``control``; the topology is there."""
    connection = await connect("control")
    await ensure_topology(connection)
    return connection


@pytest.fixture(scope="session")
def until() -> Until:
    """``await until(condition, timeout_s=60)``: wait until it holds; the test fails if it won't."""

    async def wait(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    return wait

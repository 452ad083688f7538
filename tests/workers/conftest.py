"""A workplace per test, and what must not be left of it."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from infra.bus import DEAD, TOKENS, WORK, Bus, EmbeddedBroker
from infra.times import Times
from schemas.requests import SamplingParams
from tests.conftest import Connect
from tests.workers.engine.simulated_engines import expected_answer
from tests.workers.workplace import Workplace, workplace


@pytest.fixture(scope="session")
def times() -> Times:
    """Fast beats, but a second of silence before anybody is dead: test machines are busy."""
    return Times(
        beat_s=0.1,
        dead_s=1.0,
        pull_expiry_s=0.05,
        ack_wait_s=1.2,
        lease_s=2.5,
        resume_window_s=3.0,
        duplicate_window_s=10.0,
        token_stream_age_s=900.0,
        ack_sample_s=0.02,
    )


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One nats-server per module, emptied for each test."""
    running = EmbeddedBroker(tmp_path_factory.mktemp("broker"), clients=("client", "alice"))
    asyncio.run(running.start())
    yield running
    asyncio.run(running.stop())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No file, socket, mapping or thread of a test outlives it."""
    expected_answer((10,), SamplingParams(max_tokens=1, seed=1))  # keeps a pool of its own
    gc.collect()
    before, threads = _open_files(), threading.active_count()
    yield
    gc.collect()
    assert _open_files() == before
    assert threading.active_count() <= threads


@pytest_asyncio.fixture
async def place(
    nothing_left: None, broker: EmbeddedBroker, bus: Bus, connect: Connect, tmp_path: Path
) -> AsyncIterator[Workplace]:
    """A real broker and nobody there yet. At the end all drain: no block is in use, no lease
    stands, nothing is owed, no task runs."""
    for stream in (WORK, TOKENS, DEAD):
        await bus.api(f"STREAM.PURGE.{stream}")
    async with workplace(broker, bus, connect, tmp_path) as made:
        yield made
    coros = [task.get_coro() for task in asyncio.all_tasks() - {asyncio.current_task()}]
    theirs = ("/nats/", "/infra/bus/client.py")  # connections are closed by another fixture
    ours = [coro for coro in coros if not any(t in coro.cr_code.co_filename for t in theirs)]
    assert not ours, "a task outlives its owner"


def _open_files() -> list[str]:
    """What our descriptors point at, without those of the test's own event loop."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # of the listing itself
    return sorted(link for link in found if "memfd" in link or "socket" in link)

"""A worker that could not do its work says so, takes nothing, and keeps nobody waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from infra.task_scope import task_scope
from infra.transport.handover import PoolDoor
from schemas.control import Beat
from schemas.errors import KvLost
from tests.workers.workplace import Worker, Workplace, until
from workers.service import serve

MAX_STEP_S = 0.3


@asynccontextmanager
async def serving(place: Workplace, name: str, role: str) -> AsyncIterator[Worker]:
    """A worker as its process runs it, readiness included, until it drains."""
    worker = await place.worker(name, role, starts=False)
    worker.config = replace(worker.config, max_step_s=MAX_STEP_S)
    async with task_scope() as tasks:
        served = tasks.create_task(serve(worker.ctx, worker.config, worker.host))
        await until(lambda: worker.ctx.health.is_ready)
        yield worker
        worker.ctx.drain()
        async with asyncio.timeout(60):
            await served


def beat(worker: Worker) -> Beat:
    return worker.ctx.beat()


async def test_a_worker_says_how_long_a_sequence_may_be(place: Workplace) -> None:
    """Its pool, less a block, when that is smaller than the context."""
    worker = await place.worker("b", "both", num_blocks=12)
    await until(lambda: worker.incarnations)
    info = worker.host.engine.info
    assert beat(worker).max_sequence_tokens == 11 * info.block_size < info.context_length
    large = replace(info, num_blocks=10**6)
    assert large.max_sequence_tokens == info.context_length


async def test_a_stuck_engine_gives_up_what_it_has(place: Workplace) -> None:
    """Not ready and under no worker id, so that others take its requests. When it moves again it
    is a new worker, and ready."""
    async with serving(place, "stuck", "both") as worker:
        old = beat(worker).worker
        worker.runner.close_after(3)
        record = await place.ask(max_tokens=12)
        await place.until_tokens(record, 1)
        await until(lambda: not worker.ctx.health.is_ready)
        assert worker.ctx.health.failing == {"engine": f"no step ended for {MAX_STEP_S:g} s"}
        await until(lambda: not beat(worker).worker)
        assert beat(worker).state == "starting"
        assert "engine" in beat(worker).reason
        worker.runner.open()
        await until(lambda: beat(worker).state == "ready" and beat(worker).worker)
        assert beat(worker).worker != old
        assert beat(worker).load.num_free_slots > 0


async def test_a_door_that_nobody_answers_is_not_ready(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two knocks without an answer: nothing new is taken, until one is answered again."""
    async with serving(place, "shut", "both") as worker:
        knock, is_shut = PoolDoor.knock, threading.Event()

        async def maybe(door: PoolDoor) -> None:
            if is_shut.is_set():
                raise KvLost("the pool can't be reached")
            await knock(door)

        monkeypatch.setattr(PoolDoor, "knock", maybe)
        is_shut.set()
        await until(lambda: not worker.ctx.health.is_ready)
        assert worker.ctx.health.failing == {"kv door": "the pool can't be reached"}
        await until(lambda: beat(worker).load.num_free_slots == 0)
        assert beat(worker).worker, "what runs goes on"
        is_shut.clear()
        await until(lambda: worker.ctx.health.is_ready)
        await until(lambda: beat(worker).load.num_free_slots > 0)

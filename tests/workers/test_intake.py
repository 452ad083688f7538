"""The way into our pool: whatever happens, blocks are used, or given back, and never both."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from infra.metrics import Metrics
from infra.transport.handover import PoolReader, host_identity
from infra.transport.reader import KvReader
from schemas.errors import ContextTooLong, KvLost, NoCapacity
from schemas.kv import KvHandle
from tests.workers.engine.simulated_engines import CONTEXT_LENGTH, make_engine, request_of
from tests.workers.workplace import GatedRunner, until
from workers.engine.engine import Engine
from workers.engine.thread import EngineThread
from workers.kv.intake import KvIntake


@dataclass
class Bench:
    """An intake over an engine whose steps can be held up."""

    engine: Engine
    thread: EngineThread
    intake: KvIntake
    runner: GatedRunner

    @property
    def num_used(self) -> int:
        return self.engine.blocks.counts().active

    async def until_free(self) -> None:
        await until(lambda: not self.num_used)

    @asynccontextmanager
    async def in_a_step(self) -> AsyncIterator[None]:
        """The engine computes something, and does nothing else."""
        self.runner.gate.clear()
        self.thread.post(lambda engine: engine.add(request_of("busy", (10,), max_tokens=1)))
        await until(lambda: self.runner.is_waiting)
        yield
        self.runner.open()


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    """At the end nothing is held and the books are right."""
    engine = make_engine(8, runner_class=GatedRunner)
    errors: list[Exception] = []
    thread = EngineThread(engine, lambda report: None, errors.append)
    reader = KvReader(PoolReader())
    intake = KvIntake(thread, engine.pool, engine.info, reader, Metrics())
    runner = engine.runner
    assert isinstance(runner, GatedRunner)
    thread.start()
    made = Bench(engine, thread, intake, runner)
    yield made
    runner.open()
    await made.until_free()
    engine.check_invariants()
    intake.close()
    await thread.stop()
    engine.pool.close()
    assert not errors


def handle_of(num_tokens: int = 8, **changes: object) -> KvHandle:
    """A handle of blocks that nobody has."""
    fields = {
        "lease_id": "lease",
        "secret": b"secret",
        "owner": "owner",
        "fingerprint": "test",
        "num_tokens": num_tokens,
        "blocks": b"",
        "generations": b"",
        "checksums": b"",
        "addresses": (),
        "expires_unix_ms": 0,
        **changes,
    }
    return KvHandle(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"fingerprint": "other"}, KvLost),
        ({"num_tokens": 0}, KvLost),
        ({"num_tokens": -5}, KvLost),
        ({"num_tokens": CONTEXT_LENGTH + 1}, KvLost),
        ({"num_tokens": CONTEXT_LENGTH}, ContextTooLong),  # 24 blocks, and there are 8
        ({}, KvLost),  # nowhere to be read
    ],
)
async def test_what_can_not_be_fetched_is_told_by_the_arrival(
    bench: Bench, changes: dict[str, object], error: type[Exception]
) -> None:
    """Never by ``fetch`` itself: the claim is made all the same, to give the request back."""
    arrival = await bench.intake.fetch("key", handle_of(**changes))  # type: ignore[arg-type]
    with pytest.raises(error):
        await arrival.is_there()
    bench.intake.release("key")


async def test_no_room_now_is_told_at_once(bench: Bench) -> None:
    """Nothing is reserved; later there is room."""
    await bench.thread.call(lambda engine: engine.reserve("other", 28))
    with pytest.raises(NoCapacity, match="no room"):
        await bench.intake.fetch("key", handle_of())
    bench.thread.release("other")
    assert (await bench.intake.fetch("key", handle_of())).num_tokens == 8
    bench.intake.release("key")


async def test_a_busy_engine_is_no_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes too long: another worker may be quicker, and nothing is held here."""
    monkeypatch.setattr("workers.kv.intake.RESERVE_S", 0.05)
    async with bench.in_a_step():
        with pytest.raises(NoCapacity, match="did not answer"):
            await bench.intake.fetch("key", handle_of())


async def test_an_engine_that_has_stopped_is_no_room(bench: Bench) -> None:
    """The process is at its end: the task is for another, the client hears nothing of it."""
    await bench.thread.stop()
    with pytest.raises(NoCapacity, match="at its end"):
        await bench.intake.fetch("key", handle_of())
    bench.intake.release("key")


@pytest.mark.parametrize("has_answered", [False, True])
async def test_who_is_cancelled_before_the_answer_holds_nothing(
    bench: Bench, has_answered: bool
) -> None:
    """Whether the blocks were reserved already or not: the answer reaches nobody."""
    async with asyncio.TaskGroup() as tasks:
        async with bench.in_a_step():
            fetching = tasks.create_task(bench.intake.fetch("key", handle_of()))
            await until(lambda: bench.thread._commands)
            if has_answered:
                bench.runner.open()
                deadline_s = time.monotonic() + 5
                while not bench.engine._reservations:  # the loop must not run meanwhile
                    assert time.monotonic() < deadline_s
                    time.sleep(0.001)  # noqa: ASYNC251
            fetching.cancel()
    assert fetching.cancelled()
    await bench.until_free()


async def test_blocks_stay_ours_while_they_are_filled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released in the middle of the copy: nobody else gets them before it has ended."""
    monkeypatch.setattr("workers.kv.intake.AT_ONCE_BYTES", 0)
    may_end, has_begun = threading.Event(), threading.Event()

    def read(*args: object) -> str:
        has_begun.set()
        assert may_end.wait(30)
        return "shm"

    monkeypatch.setattr(bench.intake._reader, "read", read)
    handle = handle_of(addresses=(f"shm://{host_identity()}/nobody",))
    arrival = await bench.intake.fetch("key", handle)
    await bench.intake.fetch("waits", handle)
    assert not await arrival.is_there(0.01)
    await until(has_begun.is_set)
    bench.intake.release("waits")
    await until(lambda: bench.num_used == 2)
    bench.intake.release("key")
    assert await bench.thread.call(lambda engine: engine.reserve("other", 28)) is None
    assert bench.num_used == 2
    may_end.set()
    await bench.until_free()

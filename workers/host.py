"""What lives as long as a worker's process: the engine with its thread, and its KV pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from infra.log import Logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from infra.transport.handover import PoolDoor
from schemas.control import Load
from schemas.errors import EngineFailed, QueueFull
from workers.engine.api import BlockStates, StepReport
from workers.engine.engine import Engine
from workers.engine.thread import EngineThread
from workers.kv.api import BlockEvents
from workers.kv.eviction import MAX_SHARE
from workers.kv.intake import KvIntake
from workers.kv.leases import LeaseBook
from workers.kv.tiers import Tiers, make_tiers
from workers.readiness import Readiness


def _nobody(report: StepReport) -> None:
    """Whoever wanted this is gone, and has had its requests released."""


@dataclass(slots=True, kw_only=True)
class Host:
    """An engine at work.

    ``listener`` gets its reports on the event loop; ``load`` is how busy it was when last asked,
    and ``blocks`` what its blocks were there for.
    """

    readiness: Readiness

    engine: Engine
    thread: EngineThread
    served: str
    leases: LeaseBook
    door: PoolDoor
    intake: KvIntake
    tiers: Tiers
    blocks: BlockStates
    listener: Callable[[StepReport], None] = _nobody
    load: Load = field(default_factory=Load)


@asynccontextmanager
async def running_host(
    engine: Engine,
    served: str,
    process: str,
    metrics: Metrics,
    log: Logger,
    *,
    events: BlockEvents | None = None,
    evicted_share: float = MAX_SHARE,
) -> AsyncIterator[Host]:
    """A host from its engine's thread to its pool's door; everything is closed at the end.

    Args:
        served: the ``<model@rev>`` under which it is served.
        process: a name that no other process of this host has.
        events: hears what the tiers hold; None: nobody does.
        evicted_share: of the host tier, the most that makes room for others at once.

    Raises:
        EngineFailed: the engine broke; it needs a new process.
    """
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_fatal(error: Exception) -> None:
        if not broken.done():
            broken.set_exception(EngineFailed(f"the engine broke: {error}"))

    tiers = make_tiers(engine, metrics, events=events, evicted_share=evicted_share)
    thread = EngineThread(engine, lambda report: host.listener(report), on_fatal)
    leases = LeaseBook()
    door = PoolDoor(engine.pool, process, leases.may_read, log)
    host = Host(
        engine=engine,
        thread=thread,
        served=served,
        leases=leases,
        door=door,
        readiness=Readiness(thread=thread, door=door),
        intake=KvIntake(thread, engine.pool, engine.info, metrics),
        tiers=tiers,
        blocks=engine.block_states(),
    )
    async with AsyncExitStack() as stack:
        stack.callback(engine.pool.close)
        stack.callback(tiers.close)
        stack.push_async_callback(thread.stop)
        stack.callback(host.intake.close)
        stack.callback(broken.cancel)
        thread.start()
        tiers.start(lambda: _collect(thread))
        tasks = await stack.enter_async_context(task_scope())
        tasks.create_task(_raise_when(broken), name="engine")
        tasks.create_task(host.door.run(), name="kv door")
        yield host


def _collect(thread: EngineThread) -> None:
    """Have the engine take in what was copied. One with so much to do looks by itself."""
    with contextlib.suppress(EngineFailed, QueueFull):
        thread.post(lambda engine: engine.collect())


async def _raise_when(broken: asyncio.Future[None]) -> None:
    await broken

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
from infra.transport.handover import PoolReader
from infra.transport.plan import SHM_ONLY, TransportPlan
from schemas.control import Load
from schemas.errors import EngineFailed, QueueFull
from workers.engine.api import BlockStates, StepReport
from workers.engine.engine import Engine
from workers.engine.thread import EngineThread
from workers.kv.disk import DiskPlan
from workers.kv.events import BlockLog
from workers.kv.eviction import MAX_SHARE
from workers.kv.intake import KvIntake
from workers.kv.leases import LeaseBook
from workers.kv.links import KvLinks, open_links
from workers.kv.prefetch import Prefetch
from workers.kv.prefix import make_prefetch
from workers.kv.tiers import Tiers, make_tiers
from workers.readiness import Readiness

_OnReport = Callable[[StepReport], None]
_OnFatal = Callable[[Exception], None]


def _nobody(report: StepReport) -> None:
    """Whoever wanted this is gone, and has had its requests released."""


@dataclass(slots=True, kw_only=True)
class Host:
    """An engine at work.

    ``prefetch`` brings prefixes to its host tier, if it has one.
    ``listener`` gets its reports on the event loop; ``load`` is how busy it was when last asked,
    and ``blocks`` what its blocks were there for. ``events`` has noted what its tiers hold.
    """

    readiness: Readiness

    engine: Engine
    thread: EngineThread
    served: str
    leases: LeaseBook
    links: KvLinks
    intake: KvIntake
    tiers: Tiers
    prefetch: Prefetch | None
    events: BlockLog
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
    evicted_share: float = MAX_SHARE,
    disk: DiskPlan | None = None,
    transports: TransportPlan = SHM_ONLY,
    pools: PoolReader | None = None,
    make_thread: Callable[[Engine, _OnReport, _OnFatal], EngineThread] = EngineThread,
) -> AsyncIterator[Host]:
    """A host from its engine's thread to its pool's door; everything is closed at the end.

    Args:
        served: the ``<model@rev>`` under which it is served.
        process: a name that no other process of this host has.
        evicted_share: of the host tier, and of the disk, the most that makes room for others at
            once.
        disk: where blocks are kept over restarts; None: nowhere.
        transports: how KV goes to other workers, and comes from them.
        pools: what reads from workers of this host, where several hosts share it.
        make_thread: makes what the engine's steps are made on.

    Raises:
        EngineFailed: the engine broke; it needs a new process.
        ConfigError: a transport can't work as it is set, or the disk's quota holds no block.
    """
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_fatal(error: Exception) -> None:
        if not broken.done():
            broken.set_exception(EngineFailed(f"the engine broke: {error}"))

    events = BlockLog()
    tiers = make_tiers(
        engine, metrics, events=events, evicted_share=evicted_share, disk=disk, log=log
    )
    thread = make_thread(engine, lambda report: host.listener(report), on_fatal)
    leases = LeaseBook()
    async with AsyncExitStack() as stack:
        stack.callback(engine.pool.close)
        stack.callback(tiers.close)
        stack.push_async_callback(thread.stop)
        stack.callback(broken.cancel)
        links = open_links(engine.pool, process, leases, transports, log, pools)
        async with links as open_ways, task_scope() as tasks:
            host = Host(
                engine=engine,
                thread=thread,
                served=served,
                leases=leases,
                links=open_ways,
                readiness=Readiness(thread=thread, door=open_ways),
                intake=KvIntake(thread, engine.pool, engine.info, open_ways.reader, metrics),
                tiers=tiers,
                prefetch=make_prefetch(engine, tiers, open_ways.reader, metrics, log),
                events=events,
                blocks=engine.block_states(),
            )
            stack.callback(host.intake.close)  # after the links: it waits for what they do
            if host.prefetch is not None:
                stack.callback(host.prefetch.close)
            thread.start()
            tiers.start(lambda: _collect(thread))
            tasks.create_task(_raise_when(broken), name="engine")
            yield host


def _collect(thread: EngineThread) -> None:
    """Have the engine take in what was copied. One with so much to do looks by itself."""
    with contextlib.suppress(EngineFailed, QueueFull):
        thread.post(lambda engine: engine.collect())


async def _raise_when(broken: asyncio.Future[None]) -> None:
    await broken

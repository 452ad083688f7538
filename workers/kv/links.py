"""The ways between a worker's KV pool and those of others, in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.log import Logger
from infra.task_scope import task_scope
from infra.transport.handover import PoolDoor, PoolReader
from infra.transport.plan import TransportPlan
from infra.transport.reader import KvReader
from infra.transport.shm import SharedPool
from workers.kv.leases import LeaseBook

if TYPE_CHECKING:
    from infra.transport.ucx.port import UcxPort


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLinks:
    """What :func:`open_links` opened.

    ``addresses`` are for handles; ``reader`` is for theirs.
    """

    addresses: tuple[str, ...]
    reader: KvReader
    door: PoolDoor | None
    port: UcxPort | None

    async def knock(self) -> None:
        """Find out whether a reader with a lease would be let in now.

        Raises:
            KvLost: not by every way.
        """
        for way in (self.door, self.port):
            if way is not None:
                await way.knock()


@asynccontextmanager
async def open_links(
    pool: SharedPool,
    process: str,
    leases: LeaseBook,
    plan: TransportPlan,
    log: Logger,
    pools: PoolReader | None = None,
) -> AsyncIterator[KvLinks]:
    """Serve ``pool`` to whoever has one of ``leases``, until the block ends; transfers over a
    network end then, too.

    Args:
        process: a name that no other process of this host has.
        pools: what reads on this host; None: a reader of its own.

    Raises:
        ConfigError: UCX can't work at the address that it was given.
    """
    if plan.lacks_ucx:
        log.warning("kv_ucx_missing", wanted="pip install 'inference-mesh[ucx]'")
    door = PoolDoor(pool, process, leases.may_read, log) if plan.shm else None
    port = await _open_port(pool, leases, plan, log) if plan.ucx_host else None
    ways = [way for way in (door, port) if way is not None]
    try:
        async with task_scope() as tasks:
            if door is not None:
                tasks.create_task(door.run(), name="kv door")
            if port is not None:
                tasks.create_task(port.until_ended(), name="kv ucx")
            yield KvLinks(
                addresses=tuple(way.address for way in ways),
                reader=KvReader((pools or PoolReader()) if plan.shm else None, port),
                door=door,
                port=port,
            )
    finally:
        if port is not None:
            await asyncio.to_thread(port.stop)


async def _open_port(
    pool: SharedPool, leases: LeaseBook, plan: TransportPlan, log: Logger
) -> UcxPort:
    def start() -> UcxPort:
        from infra.transport.ucx.port import UcxPort  # loads UCX: half a second

        port = UcxPort(pool, leases.may_read, plan.ucx_host, plan.ucx_port, log)
        port.start()
        return port

    port = await asyncio.to_thread(start)
    log.info("kv_ucx_opened", address=port.address)
    return port

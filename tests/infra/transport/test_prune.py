import asyncio
import secrets
import time

import structlog

from infra.task_scope import task_scope
from infra.transport.handover import PoolDoor, PoolReader, checksums
from infra.transport.shm import SharedPool
from schemas.codec import pack_ids
from schemas.kv import KvHandle


async def test_looking_for_dead_owners_neither_waits_nor_lets_go_of_living_ones() -> None:
    """It runs on the event loop: a second of waiting there would stop every stream."""
    asked: list[str] = []

    def may_read(lease_id: str, secret: bytes) -> bool:
        asked.append(lease_id)
        return True

    with SharedPool(4, 64) as pool, SharedPool(4, 64) as into:
        pool.slots[2] = 7
        log = structlog.get_logger("test")
        door = PoolDoor(pool, f"test-{secrets.token_hex(8)}", may_read, log)
        handle = KvHandle(
            lease_id="lease",
            secret=b"s",
            owner="owner",
            fingerprint="f",
            num_tokens=16,
            blocks=pack_ids([2]),
            generations=pack_ids([int(pool.generations[2])]),
            checksums=checksums(pool, [2]),
            addresses=(door.address,),
            expires_unix_ms=0,
        )
        reader = PoolReader()
        async with asyncio.timeout(60):
            async with task_scope() as tasks:
                tasks.create_task(door.run())
                await asyncio.sleep(0)  # the door listens
                await asyncio.to_thread(reader.read, handle, into, [1])
                began_s = time.monotonic()
                reader.prune()
                assert time.monotonic() - began_s < 10
                await asyncio.to_thread(reader.read, handle, into, [3])
                assert asked == ["lease"]  # still mapped: the second read asked nobody
            assert (into.slots[[1, 3]] == 7).all()
            reader.prune()
            assert not reader._mapped  # the door is gone, and with it the mapping
        reader.close()

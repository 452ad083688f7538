"""The other process of ``mesh bench kv``, section links: owns blocks and hands them out.

It says on stdout where its blocks are, then serves until its stdin ends. Over a raw socket it
sends as many bytes as it is asked for: what the transports are compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
import threading

import msgspec
import numpy as np
import structlog

from infra.task_scope import task_scope
from infra.transport.handover import PoolDoor, checksums
from infra.transport.shm import SharedPool
from schemas.codec import pack_ids
from schemas.kv import KvHandle

HOST = "127.0.0.1"
SECRET = b"of the bench only"


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner says of itself."""

    shm: KvHandle
    ucx: KvHandle
    tcp_port: int


async def serve(num_blocks: int, block_bytes: int) -> None:
    """Until stdin ends."""
    from infra.transport.ucx.port import UcxPort  # loads UCX

    log = structlog.get_logger("bench")
    with SharedPool(num_blocks, block_bytes) as pool:
        pool.slots[:] = np.frombuffer(secrets.token_bytes(block_bytes), np.uint8)
        pool.slots[:, :4] = np.arange(num_blocks, dtype="<u4")[:, None].view(np.uint8)
        door = PoolDoor(pool, f"bench-{secrets.token_hex(8)}", _may_read, log)
        port = UcxPort(pool, _may_read, HOST, 0, log)
        port.start()
        with contextlib.ExitStack() as stack:
            stack.callback(port.stop)
            raw = stack.enter_context(socket.create_server((HOST, 0)))
            threading.Thread(target=_send_raw, args=(raw, pool), daemon=True).start()
            async with task_scope() as tasks:
                tasks.create_task(door.run())
                await asyncio.sleep(0)  # it listens
                where = Where(
                    shm=_handle(pool, door.address),
                    ucx=_handle(pool, port.address),
                    tcp_port=raw.getsockname()[1],
                )
                print(msgspec.json.encode(where).decode(), flush=True)
                await asyncio.to_thread(sys.stdin.read)


def _may_read(_: str, secret: bytes) -> bool:
    return secret == SECRET


def _handle(pool: SharedPool, address: str) -> KvHandle:
    slots = list(range(pool.num_blocks))
    return KvHandle(
        lease_id="bench",
        secret=SECRET,
        owner="bench",
        fingerprint="",
        num_tokens=16 * len(slots),
        blocks=pack_ids(slots),
        generations=pack_ids(pool.generations.tolist()),
        checksums=checksums(pool, slots),
        addresses=(address,),
        expires_unix_ms=0,
    )


def _send_raw(listener: socket.socket, pool: SharedPool) -> None:
    """One guest: for each byte it sends, it gets the pool."""
    guest, _ = listener.accept()
    with guest:
        while guest.recv(1):
            guest.sendall(pool.slots.reshape(-1).data)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))

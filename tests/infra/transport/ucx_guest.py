"""A reader in a process of its own, told on stdin what to do, a line at a time.

begin {handle}     read it, with block b into slot b; answered when the first block is there
end                wait for what was begun: right, wrong, or what was lost
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from infra.log import make_logger
from infra.transport.shm import SharedPool
from infra.transport.ucx.port import UcxPort
from schemas.codec import unpack_ids
from schemas.errors import KvLost
from schemas.kv import KvHandle
from tests.infra.transport.ucx_owners import PATIENCE_S, holds


def read(port: UcxPort, into: SharedPool, handle: KvHandle) -> str:
    blocks = unpack_ids(handle.blocks)
    try:
        port.read(handle.addresses[0], handle, into, blocks, PATIENCE_S)
    except KvLost as error:
        return f"lost: {error.message}"
    return "right" if holds(into, blocks, blocks) else "wrong"


def main() -> None:
    num_blocks, block_bytes, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    reading: Future[str] | None = None
    with SharedPool(num_blocks, block_bytes) as into, ThreadPoolExecutor(1) as threads:
        port = UcxPort(
            into, lambda lease_id, secret: False, host, 0, make_logger("guest", stream=sys.stderr)
        )
        port.start()
        print("open", flush=True)
        for line in sys.stdin:
            word, _, fact = line.partition(" ")
            if word == "begin":
                into.slots[:] = 0
                handle = msgspec.json.decode(fact, type=KvHandle)
                reading = threads.submit(read, port, into, handle)
                while not reading.done() and not into.slots[unpack_ids(handle.blocks)[0]].any():
                    time.sleep(0.001)
                print("begun", flush=True)
            else:
                assert reading is not None
                print(reading.result(), flush=True)
        port.stop()


if __name__ == "__main__":
    main()

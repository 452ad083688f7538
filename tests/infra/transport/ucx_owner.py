"""An owner of blocks in a process of its own, told on stdin what to do, a line at a time.

    handle 3,0,9       the handle of these blocks, as JSON
    touch 2            recycle a slot;  flip 2   a bit of it
    end                the lease is over;  stand   it stands again
    at 5 die           what happens when its door is asked for the 5th time from now on:
                       die, stop (frozen from outside until it is continued), or end
    slow 0.05          how long it thinks before each answer

Every line is answered with one.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec
import numpy as np

from infra.log import make_logger
from infra.transport.handover import checksums
from infra.transport.shm import SharedPool
from infra.transport.ucx.port import UcxPort
from schemas.codec import pack_ids
from schemas.kv import KvHandle

SECRET = b"0123456789abcdef"


def content_of(slot: int, block_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What lies in a slot: [block_bytes] uint8, another in each."""
    return np.random.default_rng(slot).integers(0, 256, block_bytes, np.uint8)


class Owner:
    """A pool, its port, and what it was told."""

    def __init__(self, num_blocks: int, block_bytes: int, host: str) -> None:
        self.pool = SharedPool(num_blocks, block_bytes)
        for slot in range(num_blocks):
            self.pool.slots[slot] = content_of(slot, block_bytes)
        self.stands = True
        self.thinks_s = 0.0
        self.num_left = 0
        self.deed = ""
        log = make_logger("owner", stream=sys.stderr)
        self.port = UcxPort(self.pool, self.may_read, host, 0, log)

    def may_read(self, lease_id: str, secret: bytes) -> bool:
        time.sleep(self.thinks_s)
        if self.num_left:
            self.num_left -= 1
            if not self.num_left:
                self.do(self.deed)
        return self.stands and secret == SECRET

    def do(self, deed: str) -> None:
        if deed == "end":
            self.stands = False
        else:
            os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[deed])

    def handle(self, blocks: list[int]) -> KvHandle:
        return KvHandle(
            lease_id="lease",
            secret=SECRET,
            owner="owner",
            fingerprint="f",
            num_tokens=len(blocks),
            blocks=pack_ids(blocks),
            generations=pack_ids(self.pool.generations[blocks].tolist()),
            checksums=checksums(self.pool, blocks),
            addresses=(self.port.address,),
            expires_unix_ms=0,
        )

    def obey(self, line: str) -> str:
        word, *facts = line.split()
        if word == "handle":
            blocks = [int(slot) for slot in facts[0].split(",")]
            return msgspec.json.encode(self.handle(blocks)).decode()
        if word == "touch":
            self.pool.touch(int(facts[0]))
        elif word == "flip":
            self.pool.slots[int(facts[0]), -1] ^= 1
        elif word == "at":
            self.num_left, self.deed = int(facts[0]), facts[1]
        elif word == "slow":
            self.thinks_s = float(facts[0])
        else:
            self.stands = {"end": False, "stand": True}[word]
        return "done"


def main() -> None:
    owner = Owner(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    owner.port.start()
    print("open", flush=True)
    for line in sys.stdin:
        print(owner.obey(line), flush=True)
    owner.port.stop()


if __name__ == "__main__":
    main()

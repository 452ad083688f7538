"""Owners in processes of their own, for tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from infra.transport.shm import SharedPool
from schemas.kv import KvHandle
from tests.infra.transport.ucx_owner import content_of

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0


class Child:
    """A process that answers each line with one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, line: str) -> str:
        """Say it, and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().rstrip("\n")
        assert answer, "the process ended"
        return answer

    def handle(self, blocks: Sequence[int]) -> KvHandle:
        answer = self.tell("handle " + ",".join(map(str, blocks)))
        return msgspec.json.decode(answer, type=KvHandle)


@contextlib.contextmanager
def child(module: str, *arguments: object, within: Sequence[str] = ()) -> Iterator[Child]:
    """One that runs ``module``; ended with the block.

    Args:
        within: a command that runs it elsewhere, such as ``ip netns exec``.
    """
    command = [*within, sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            started = Child(process)
            assert started.hear() == "open"
            yield started
        finally:
            process.kill()


def owner_process(
    num_blocks: int, block_bytes: int, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> contextlib.AbstractContextManager[Child]:
    """See ``ucx_owner``."""
    return child("tests.infra.transport.ucx_owner", num_blocks, block_bytes, host, within=within)


def holds(into: SharedPool, slots: Sequence[int], blocks: Sequence[int]) -> bool:
    """Whether our slots hold what an owner's blocks do."""
    return all(
        np.array_equal(into.slots[slot], content_of(block, into.block_bytes))
        for slot, block in zip(slots, blocks, strict=True)
    )

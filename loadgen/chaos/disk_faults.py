"""Faults of the disk on which a worker keeps KV blocks.

Each has a worker of its own with such a disk, of both roles: blocks are saved from the first prompt
to the last token. Whatever the disk does, answers are right and come in time: blocks are computed.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import ClassVar

from infra.children import Child
from loadgen.chaos.fault import Scene, Stream, register
from loadgen.chaos.mesh import NotWhole, Target, until
from loadgen.chaos.own_mesh import Starter
from loadgen.chaos.own_worker import OwnWorkerFault

_POINTS = ("mid-prefill", "decoding")
_LASTS_S = 4.0
_BACK_S = 30.0


class BadDisk(OwnWorkerFault):
    """The disk goes bad in the middle of what runs, and later is well again."""

    points = _POINTS
    disk: ClassVar[str]  # see ``loadgen.chaos.bad_disk``

    def start(self, starter: Starter) -> Child:
        """See :class:`OwnWorkerFault`."""
        return starter.start_worker_with_bad_disk(self.disk)

    def affects(self, scene: Scene, target: Target | None, stream: Stream) -> bool:
        """Nobody has to wait for anything."""
        return False

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        assert target is not None, "chosen before"
        scene.mesh.send(target, signal.SIGUSR1)

    async def heal(self, scene: Scene) -> None:
        """Well again, if the worker still lives."""
        await asyncio.sleep(_LASTS_S * scene.time_scale)
        target = scene.mesh.process(self._process)
        if target is not None:
            scene.mesh.send(target, signal.SIGUSR1)


@register
class DiskFull(BadDisk):
    """Nothing can be written to a worker's KV disk."""

    name = "disk-full"
    disk = "full"


@register
class DiskSlow(BadDisk):
    """Every read and write of a worker's KV disk takes seconds."""

    name = "disk-slow"
    disk = "slow"


@register
class DiskCorrupt(OwnWorkerFault):
    """A bit flips in every file of a worker's KV disk; the worker is killed and comes back."""

    name = "disk-corrupt"
    points = _POINTS

    def start(self, starter: Starter) -> Child:
        """See :class:`OwnWorkerFault`."""
        return starter.start_worker_with_disk()

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        assert target is not None, "chosen before"
        assert scene.starter is not None, "asked before"
        flip_all(scene.starter.kv_disk, scene.rng.random())
        scene.mesh.send(target, signal.SIGKILL)

    async def heal(self, scene: Scene) -> None:
        """It has read its directory back, and serves.

        Raises:
            NotWhole: it does not come back.
        """
        worker, since_s = self._worker, time.monotonic()
        assert worker is not None, "started before"

        def is_back() -> bool:
            is_new = worker.process_id != self._process
            return is_new and scene.mesh.is_ready(worker.process_id, since_s)

        if not await until(is_back, _BACK_S):
            raise NotWhole(f"{worker.spec.name} did not come back within {_BACK_S:.0f} s")


def flip_all(folder: Path, place: float) -> int:
    """Flip a bit in every block file below ``folder``, at a ``place`` from 0 (its beginning) to 1;
    how many there were. The worker may take some away meanwhile."""
    num_flipped = 0
    for path in folder.glob("**/*.kv"):
        try:
            with path.open("r+b") as file:
                size = file.seek(0, 2)
                file.seek(int(place * size))
                byte = file.read(1)
                file.seek(int(place * size))
                file.write(bytes([byte[0] ^ 1]))
        except FileNotFoundError:
            continue
        num_flipped += 1
    return num_flipped

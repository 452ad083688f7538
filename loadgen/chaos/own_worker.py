"""A fault that needs a worker of its own, which is started for it and drains afterwards."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod

from infra.children import Child
from loadgen.chaos.fault import Fault, Scene, Stream
from loadgen.chaos.mesh import NotWhole, Target, until
from loadgen.chaos.own_mesh import Starter

_START_S = 30.0


class OwnWorkerFault(Fault):
    """Strikes that worker. Its program, and what a signal does to it, is the fault's affair."""

    def __init__(self) -> None:
        self._worker: Child | None = None
        self._process = ""

    @abstractmethod
    def start(self, starter: Starter) -> Child:
        """Start the worker."""

    def why_not(self, scene: Scene) -> str:
        """See :class:`Fault`."""
        return "" if scene.starter else "needs a worker of its own, in a mesh of its own"

    async def prepare(self, scene: Scene) -> None:
        """Start the worker, and wait until it is ready."""
        assert scene.starter is not None, "asked before"
        mesh, since_s = scene.mesh, time.monotonic()
        self._worker = worker = self.start(scene.starter)
        if not await until(lambda: mesh.is_ready(worker.process_id, since_s), _START_S):
            raise NotWhole(f"{worker.spec.name} was not ready within {_START_S:.0f} s")
        self._process = worker.process_id

    def choose(self, scene: Scene, marked: Stream) -> Target | None:
        """See :class:`Fault`."""
        target = scene.mesh.process(self._process)
        if target is None:
            raise NotWhole(f"{self._process} is gone")
        return target

    def affects(self, scene: Scene, target: Target | None, stream: Stream) -> bool:
        """See :class:`Fault`."""
        return target is not None and stream.trace.depends_on(target.worker)

    async def end(self, scene: Scene) -> None:
        """The worker drains and goes."""
        if self._worker is not None:
            self._worker.stop()
            with contextlib.suppress(TimeoutError):
                await self._worker.ended(time.monotonic() + _START_S)

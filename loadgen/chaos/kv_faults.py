"""Faults of the ways on which KV blocks travel."""

from __future__ import annotations

import asyncio
import os
import shutil
from urllib.parse import urlsplit

import psutil

from loadgen.chaos.fault import Fault, Scene, Stream, register
from loadgen.chaos.mesh import NotWhole, Target

CUT_S = 1.0
_AGAIN_S = 0.05
_COMMAND_S = 10.0
_BROKER_PORT = 4222


@register
class CutUcx(Fault):
    """The UCX connections of a prefill worker are cut for a second, as often as they come back.

    Whoever reads its blocks loses them and has them computed again; its bus and its health port
    are left alone.
    """

    name = "cut-ucx"
    role = "prefill"
    points = ("kv-ready", "mid-transfer", "decoding")

    def __init__(self) -> None:
        self._cut_off: Target | None = None

    def why_not(self, scene: Scene) -> str:
        """See :class:`Fault`."""
        if scene.starter is None or "ucx" not in scene.starter.settings.kv_transports:
            return "needs a mesh of its own, with --kv-transports ucx"
        if os.geteuid() != 0 or shutil.which("ss") is None:
            return "needs root and the command ss, which cuts connections"
        return ""

    def choose(self, scene: Scene, marked: Stream) -> Target | None:
        """See :class:`Fault`."""
        found = scene.mesh.worker(marked.trace.prefiller)
        if found is None:
            beats = scene.mesh.present("worker", "prefill")
            if not beats:
                raise NotWhole("no prefill worker is ready")
            found = scene.mesh.target(scene.rng.choice(beats))
        return found

    def affects(self, scene: Scene, target: Target | None, stream: Stream) -> bool:
        """See :class:`Fault`."""
        return (
            target is not None
            and not stream.trace.has_ended
            and stream.trace.prefiller == target.worker
        )

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        assert target is not None, "chosen before"
        self._cut_off = target
        await self._cut(scene)

    async def heal(self, scene: Scene) -> None:
        """Until the time is over, whatever connects again is cut again."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + CUT_S * scene.time_scale
        while loop.time() < ends_s:
            await asyncio.sleep(_AGAIN_S)
            await self._cut(scene)

    async def _cut(self, scene: Scene) -> None:
        assert self._cut_off is not None, "injected before"
        pairs = _connections(self._cut_off.pid, urlsplit(scene.control_nats_url).port)
        if not pairs:
            return
        each = (f"( sport = :{ours} and dport = :{theirs} )" for ours, theirs in pairs)
        async with asyncio.timeout(_COMMAND_S):
            cutting = await asyncio.create_subprocess_exec(
                "ss", "-K", "-t", " or ".join(each),
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            await cutting.wait()


def _connections(pid: int, broker_port: int | None) -> list[tuple[int, int]]:
    """Ports, ours and theirs, of a worker's connections, but for that to the broker."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [
        (one.laddr.port, one.raddr.port)
        for one in found
        if one.status == psutil.CONN_ESTABLISHED and one.raddr.port != (broker_port or _BROKER_PORT)
    ]

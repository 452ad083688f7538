"""What can be broken: every kind of fault that there is; ``FAULTS`` finds it by name."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import msgspec

from infra.children import Child
from loadgen.chaos import disk_faults, kv_faults
from loadgen.chaos.fault import ALL_POINTS, FAULTS, Fault, Scene, Stream, register
from loadgen.chaos.mesh import NotWhole, Target
from loadgen.chaos.own_mesh import Starter
from loadgen.chaos.own_worker import OwnWorkerFault

__all__ = ["FAULTS", "disk_faults", "kv_faults"]

FREEZE_S = 10.0
ONE_BACK_S = 3.0
LIMP_S = 12.0  # a lease lasts for 10
_STOPPED_S = 0.8  # dead is who is silent for 1.5, and a beat may just have been due
_MOVING_S = 0.1
_START_S = 30.0

# -- a signal to one process ---------------------------------------------------------------------

_POINTS_OF = {
    "prefill": ("queued", "mid-prefill", "kv-ready", "mid-transfer"),
    "decode": ("queued", "mid-transfer", "decoding", "last-token"),
    "control": ("queued", "mid-prefill", "kv-ready", "decoding"),
    "bridge": ("queued", "mid-prefill", "decoding", "last-token"),
    "broker": ALL_POINTS,
}
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM}


class Signalled(Fault):
    """A signal to the one process that matters most to the marked request."""

    signal: ClassVar[signal.Signals]

    def choose(self, scene: Scene, marked: Stream) -> Target | None:
        """See :class:`Fault`."""
        mesh, trace = scene.mesh, marked.trace
        found: Target | None = None
        if self.role == "broker":
            return mesh.broker
        if self.role == "bridge":
            found = mesh.bridge(marked.home() or scene.rng.choice(mesh.bridges))
        elif self.role == "prefill":
            found = mesh.worker(trace.prefiller if trace.claim else trace.placed)
        elif self.role == "decode":
            owner = trace.claim.worker if trace.is_claimed_by("decode") and trace.claim else ""
            found = mesh.worker(trace.placed if trace.waits_for == "decode" else owner)
        return found or self._any(scene)

    def _any(self, scene: Scene) -> Target:
        kind = self.role if self.role in ("control", "bridge") else "worker"
        beats = scene.mesh.present(kind, "" if kind == self.role else self.role)
        if not beats:
            raise NotWhole(f"no {self.role} is ready")
        return scene.mesh.target(scene.rng.choice(beats))

    def affects(self, scene: Scene, target: Target | None, stream: Stream) -> bool:
        """See :class:`Fault`."""
        if stream.trace.has_ended or target is None:
            return False
        if self.role == "broker":
            return True
        if self.role == "control":  # admission and hand-over need it
            return not stream.trace.is_claimed_by("decode")
        if self.role == "bridge":
            home = stream.home()
            return bool(home) and scene.mesh.bridge(home) == target
        return stream.trace.depends_on(target.worker)

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        assert target is not None, "chosen before"
        scene.mesh.send(target, self.signal)

    async def heal(self, scene: Scene) -> None:
        """A frozen process wakes after ten seconds."""
        if self.signal == signal.SIGSTOP:
            await asyncio.sleep(FREEZE_S * scene.time_scale)
            scene.mesh.wake_all()


for _kind in _SIGNALS:
    for _role, _points in _POINTS_OF.items():
        register(
            type(
                f"{_kind.title()}{_role.title()}",
                (Signalled,),
                {
                    "__doc__": f"{_SIGNALS[_kind].name} of a {_role} process.",
                    "name": f"{_kind}-{_role}",
                    "role": _role,
                    "kind": _kind,
                    "signal": _SIGNALS[_kind],
                    "points": _points,
                },
            )
        )


FAULTS["freeze-broker"].kind = "freeze-broker"
FAULTS["freeze-broker"].from_thaw = True


@register
class LimpDecode(Signalled):
    """A decode worker that hardly gets on: stopped most of the time, never for so long that it
    counts as dead. What it reads is read slowly, past the end of leases that nobody extends."""

    name = "limp-decode"
    role = "decode"
    points = ("queued", "mid-transfer", "decoding")
    signal = signal.SIGSTOP
    _target: Target | None = None

    def affects(self, scene: Scene, target: Target | None, stream: Stream) -> bool:
        """See :class:`Fault`. Its streams go on, slowly."""
        return False

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        self._target = target
        await super().inject(scene, target, marked)

    async def heal(self, scene: Scene) -> None:
        """For longer than a lease lasts."""
        assert self._target is not None, "struck before"
        for _ in range(round(LIMP_S / (_STOPPED_S + _MOVING_S))):
            await asyncio.sleep(_STOPPED_S * scene.time_scale)
            scene.mesh.send(self._target, signal.SIGCONT)
            await asyncio.sleep(_MOVING_S * scene.time_scale)
            scene.mesh.send(self._target, signal.SIGSTOP)
        scene.mesh.wake_all()


# -- all workers ---------------------------------------------------------------------------------


class AllWorkers(Fault):
    """Every worker at once."""

    role = "workers"

    def affects(self, scene: Scene, target: Target | None, stream: Stream) -> bool:
        """See :class:`Fault`."""
        return not stream.trace.has_ended

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        for beat in scene.mesh.present("worker"):
            scene.mesh.send(scene.mesh.target(beat), self.number)

    number: ClassVar[signal.Signals]


@register
class KillWorkers(AllWorkers):
    """SIGKILL of all; whoever supervises brings them back, which takes seconds."""

    name = "kill-workers"
    number = signal.SIGKILL


@register
class FreezeWorkers(AllWorkers):
    """SIGSTOP of all; one of each role wakes after three seconds, the others after ten."""

    name = "freeze-workers"
    number = signal.SIGSTOP

    async def heal(self, scene: Scene) -> None:
        """See :class:`Fault`."""
        await asyncio.sleep(ONE_BACK_S * scene.time_scale)
        for target in scene.mesh.stopped_of_each_role():
            scene.mesh.send(target, signal.SIGCONT)
        await asyncio.sleep((FREEZE_S - ONE_BACK_S) * scene.time_scale)
        scene.mesh.wake_all()


# -- clients -------------------------------------------------------------------------------------


@register
class ClientLeaves(Fault):
    """The marked request's client goes away: the request must end, and its blocks be freed."""

    name = "client-leaves"
    client_stays = False

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        assert marked.task is not None, "started"
        marked.left_s = time.monotonic()
        marked.task.cancel()


@register
class SlowReader(Fault):
    """Two clients that ask for much and read nothing: one of a bridge, one of the broker."""

    name = "slow-reader"
    points = ("decoding",)
    _LASTS_S: ClassVar[float] = 3.0

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        bridge, broker = urlsplit(scene.mesh.bridges[0]), urlsplit(scene.client_nats_url)
        sampling = {"max_tokens": 400, "n": 4, "logprobs": 5, "stream": True, "ignore_eos": True}
        body = _json({"model": scene.model, "prompt": "slow", **sampling})
        await self._open(
            bridge.hostname or "", bridge.port or 80,
            b"POST /v1/completions HTTP/1.1\r\nHost: mesh\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        )  # fmt: skip
        user, password = unquote(broker.username or ""), unquote(broker.password or "")
        login = _json({"user": user, "pass": password, "verbose": False, "pedantic": False})
        await self._open(
            broker.hostname or "", broker.port or 4222,
            b"CONNECT %b\r\nSUB mesh.v1.live.token-stream.%b.> 1\r\n" % (login, user.encode()),
        )  # fmt: skip

    async def _open(self, host: str, port: int, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        self._sockets.append(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with asyncio.timeout(_START_S):
            await loop.sock_connect(sock, (host, port))
            await loop.sock_sendall(sock, data)

    async def heal(self, scene: Scene) -> None:
        """They stay for a while, then go: the request of the first is cancelled with it."""
        await asyncio.sleep(self._LASTS_S * scene.time_scale)

    async def end(self, scene: Scene) -> None:
        """See :class:`Fault`."""
        for sock in self._sockets:
            sock.close()


# -- clocks --------------------------------------------------------------------------------------


@register
class ClockJump(OwnWorkerFault):
    """The wall clock of a worker jumps by an hour and, later, back.

    A decode worker of our own runs with a clock that can be moved: see
    ``loadgen.chaos.jumping_clock``. Deadlines are broker time plus a monotonic clock, so nothing
    may happen at all.
    """

    name = "clock-jump"
    points = ("queued", "mid-transfer", "decoding")

    def start(self, starter: Starter) -> Child:
        """See :class:`OwnWorkerFault`."""
        return starter.start_worker_with_jumping_clock()

    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """See :class:`Fault`."""
        assert target is not None, "chosen before"
        scene.mesh.send(target, signal.SIGUSR1)

    async def heal(self, scene: Scene) -> None:
        """Back again, in the middle of what runs."""
        await asyncio.sleep(1.0 * scene.time_scale)
        target = scene.mesh.process(self._process)
        if target is not None:
            scene.mesh.send(target, signal.SIGUSR1)


def _json(content: dict[str, object]) -> bytes:
    return msgspec.json.encode(content)

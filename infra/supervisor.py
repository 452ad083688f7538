"""``mesh up``: a broker, one control process, workers and a bridge, kept alive as one.

    lock the data directory, check the port
    make every model's folder                 in a child: this process never imports torch
    broker                                    embedded, unless a URL was given
    control, workers, bridge                  children, see infra/children.py
    ready: all beat "ready"                   URL and a curl line
    Ctrl-C: bridge, workers, control, broker  in this order; twice: SIGKILL

When a child dies its last beat is repeated with the state "gone", so that the router needn't wait
for three missed beats. It is started again, also after an orderly drain (``mesh drain``), unless
the order said that it is to stay down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from dataclasses import replace

import msgspec

from infra.backoff import Backoff
from infra.bus import Bus, EmbeddedBroker, Msg, ensure_topology
from infra.children import Child, ChildFailed, describe_exit, stop_in_order
from infra.config import UpConfig
from infra.console import UpConsole
from infra.data_lock import data_lock
from infra.mesh_file import RunningMesh, mesh_file
from infra.parse import ModelSource
from infra.prepare_models import prepare_models
from infra.public_port import PublicPort
from infra.pulse import until_next_s
from infra.task_scope import task_scope
from infra.times import Times
from infra.up_plan import mesh_command, plan
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Beat, Drain
from schemas.errors import BusUnavailable, SchemaError

Url = Callable[[str], str]
_STOP_ORDER = ("bridge", "worker", "control")
_REFRESH_S = 0.5


class Supervisor:
    """One run of ``mesh up``.

    Args:
        command: what starts a role, followed by its name and flags.
    """

    def __init__(self, config: UpConfig, console: UpConsole, command: tuple[str, ...]) -> None:
        self._config = config
        self._command = command
        self._console = console
        self._children: list[Child] = []
        self._beats: dict[str, Beat] = {}  # by process id
        self._ready: dict[str, str] = {}  # by name: the process id last seen ready
        self._stay_down: set[str] = set()  # process ids that were told not to come back
        self._down: set[str] = set()  # names of children that obeyed
        self._changed = asyncio.Event()  # a beat, a death or a signal: look again
        self._stopping = asyncio.Event()
        self._task = asyncio.current_task()
        self._failure: ChildFailed | None = None
        self._bus: Bus | None = None
        self._port: PublicPort

    async def run(self) -> None:
        """Start everything, stay until a signal comes, stop everything.

        Raises:
            ConfigError: port or data directory in use, and what else can be mended by asking
                differently.
            ChildFailed: a child can't start; its own words are in the message.
        """
        port = self._port = PublicPort(self._config.bridge, self._config.num_bridges)
        self._config = replace(self._config, bridge=replace(self._config.bridge, port=port.port))
        with closing(port), self._signals(), data_lock(self._config.bus.data):
            try:
                models = await prepare_models(self._command, self._config, self._console.progress)
                self._console.spin("starting the broker")
                async with self._broker() as url, await self._connect(url) as bus:
                    self._bus = bus
                    await ensure_topology(bus, self._config.control.limits)
                    await bus.subscribe(subjects.ALL_BEATS, self._on_beat)
                    await bus.subscribe(subjects.ALL_ORDERS, self._on_order)
                    await self._run_children(models, url)
            finally:
                self._console.close()
        if self._failure is not None:
            raise self._failure

    # -- life ----------------------------------------------------------------------------------

    async def _run_children(self, models: tuple[ModelSource, ...], url: Url) -> None:
        logs = self._config.bus.data / "logs"
        self._children = [
            Child(spec, logs, say=self._console.say, on_death=self._on_death)
            for spec in plan(self._command, self._config, models, url, self._port.fd)
        ]
        async with task_scope() as tasks:
            for child in self._children:
                tasks.create_task(child.run(), name=child.spec.name)
            try:
                await self._until_ready()
                if not self._stopping.is_set():
                    self._console.greet(self._config)
                    with mesh_file(self._config.bus.data, self._where(url)):
                        await self._until_stopped()
            finally:
                await self._drain()

    async def _until_ready(self) -> None:
        while not self._stopping.is_set() and self._num_ready < len(self._children):
            self._note_ready()
            await self._wait_change()

    @property
    def _num_ready(self) -> int:
        """Children that have been ready, or are not to be."""
        return len(self._ready.keys() | self._down)

    async def _until_stopped(self) -> None:
        while not self._stopping.is_set():
            self._note_ready()
            await self._wait_change()

    def _where(self, url: Url) -> RunningMesh:
        bridge = self._config.bridge
        address = f"{bridge.scheme}://{bridge.host}:{bridge.port}"
        return RunningMesh(url=address, nats_url=url("client"), pid=os.getpid())

    async def _wait_change(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_next_s(_REFRESH_S, time.monotonic())):
                await self._changed.wait()
        self._changed.clear()

    async def _drain(self) -> None:
        self._port.close()
        self._console.close()
        self._console.say("stopping (Ctrl-C again kills)" if not self._failure else "stopping")
        stages = [[c for c in self._children if c.spec.kind == kind] for kind in _STOP_ORDER]
        await stop_in_order(stages, time.monotonic() + self._config.drain_s)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGINT: self._on_signal, signal.SIGTERM: self._on_signal}
        if self._config.bridge.tls_cert:
            handlers[signal.SIGHUP] = self._on_hangup
        elif signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup had it so
            handlers[signal.SIGHUP] = self._on_signal
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _on_hangup(self) -> None:
        """The bridges read their certificate again."""
        for child in self._children:
            if child.spec.kind == "bridge":
                child.send(signal.SIGHUP)

    def _on_signal(self) -> None:
        if not self._children:
            assert self._task is not None, "runs in a task"
            self._task.cancel()  # nothing to drain yet
        elif self._stopping.is_set():
            for child in self._children:
                child.stop(signal.SIGKILL)
        self._stopping.set()
        self._changed.set()

    # -- broker --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _broker(self) -> AsyncGenerator[Url, None]:
        given = self._config.bus.nats_url
        if given:
            yield lambda role: given
            return
        async with EmbeddedBroker(self._config.bus.data) as broker, task_scope() as tasks:
            self._console.say(f"{'broker':<16} ready  pid {broker.pid}, port {broker.port}")
            tasks.create_task(self._keep_broker(broker), name="broker watch")
            yield broker.url

    async def _keep_broker(self, broker: EmbeddedBroker) -> None:
        backoff = Backoff()
        while True:
            started_s = time.monotonic()
            code = await broker.wait()
            wait_s = backoff.after(time.monotonic() - started_s)
            self._console.say(f"broker {describe_exit(code)}; starting again in {wait_s:.1f} s")
            await asyncio.sleep(wait_s)
            await broker.restart()

    async def _connect(self, url: Url) -> Bus:
        times = Times().scaled(self._config.bus.time_scale)
        return await Bus.connect(url("control"), role="control", name="supervisor", times=times)

    # -- children ------------------------------------------------------------------------------

    def _on_beat(self, message: Msg) -> None:
        with contextlib.suppress(SchemaError):  # of a newer mesh on the same broker
            beat = decode(message.data, Beat)
            before = self._beats.get(beat.process)
            self._beats[beat.process] = beat
            if before is None or (before.state, before.reason) != (beat.state, beat.reason):
                self._changed.set()

    def _on_order(self, message: Msg) -> None:
        with contextlib.suppress(SchemaError):  # of a newer mesh on the same broker
            order = decode(message.data, Drain)
            if order.stay_down:
                self._stay_down.add(order.process)

    async def _on_death(self, child: Child, code: int) -> bool:
        """Tell the mesh; False when it is to stay down, or starting again would change nothing."""
        beat = self._beats.pop(child.process_id, None) or Beat(
            process=child.process_id,
            kind=child.spec.kind,  # type: ignore[arg-type]
            state="gone",
            host=socket.gethostname(),
            pid=0,
            started_unix_ms=0,
        )
        assert self._bus is not None, "children run while the bus is there"
        with contextlib.suppress(BusUnavailable):  # then three missed beats say it
            gone = msgspec.structs.replace(beat, state="gone")
            await self._bus.publish(subjects.beat(gone.process), encode(gone))
        self._changed.set()
        if child.process_id in self._stay_down:
            self._stay_down.discard(child.process_id)
            self._down.add(child.spec.name)
            if all(c.spec.name in self._down for c in self._children if c.spec.kind == "bridge"):
                self._port.close()  # nobody will come to take what waits there
            self._console.say(f"{child.spec.name} {describe_exit(code)}; it stays down")
            return False
        if code > 0 and child.spec.name not in self._ready:
            words = child.last_words or f"see {child.log}"
            self._failure = ChildFailed(f"{child.spec.name} can't start: {words}")
            self._stopping.set()
            return False
        return True

    def _note_ready(self) -> None:
        """Say who became ready, and show whom we wait for."""
        waiting = []
        for child in self._children:
            if child.spec.name in self._down:
                continue
            beat = self._beats.get(child.process_id)
            if beat is None or beat.state != "ready":
                reason = f" ({beat.reason})" if beat and beat.reason else ""
                waiting.append(f"{child.spec.name}{reason}")
            elif self._ready.get(child.spec.name) != child.process_id:
                self._console.ready(child.spec.name, beat, again=child.spec.name in self._ready)
                self._ready[child.spec.name] = child.process_id
        self._console.spin(f"waiting for {', '.join(waiting)}" if waiting else "")


def run_up(config: UpConfig) -> None:
    """``mesh up`` until it has stopped; errors as :meth:`Supervisor.run`.

    Raises:
        CancelledError: stopped by a signal before there was anything to drain.
    """

    async def run() -> None:
        await Supervisor(config, UpConsole(), mesh_command()).run()

    asyncio.run(run())

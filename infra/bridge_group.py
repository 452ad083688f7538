"""``mesh bridge --processes N``: several bridges behind one port, kept alive as one.

Each is a process as ``mesh bridge`` starts it, with an identity, a reader and a health port of its
own; they take connections from one socket (``infra/public_port.py``). SIGTERM drains them all,
SIGHUP reaches them where it reads a certificate again. One that dies is started again, unless it
was drained to stay down (``mesh drain --stay-down``).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator

from infra.bus import Bus, Msg
from infra.children import Child, ChildFailed, describe_exit, stop_in_order
from infra.config import BridgeConfig
from infra.failure import EXIT_USAGE, first_mesh_error, report
from infra.log import Logger, set_up_process
from infra.process import new_process_id
from infra.public_port import PublicPort
from infra.task_scope import task_scope
from infra.times import Times
from infra.up_plan import mesh_command, plan_bridges
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Beat, Drain
from schemas.errors import BusUnavailable, MeshError, SchemaError

_HARD_EXIT_S = 2.0  # beyond the grace time of the bridges themselves


class BridgeGroup:
    """One run of several bridges.

    Args:
        command: what starts a role, followed by its name and flags.
    """

    def __init__(self, config: BridgeConfig, command: tuple[str, ...], log: Logger) -> None:
        self._config = config
        self._command = command
        self._log = log
        self._children: list[Child] = []
        self._stay_down: set[str] = set()  # process ids that were told not to come back
        self._num_down = 0
        self._stopping = asyncio.Event()
        self._failure: ChildFailed | None = None
        self._bus: Bus

    async def run(self) -> None:
        """Start them, stay until a signal comes or all were drained to stay down, drain the rest.

        Raises:
            ConfigError: port or broker can't be used.
            ChildFailed: they can't start as they are configured; the words are the bridge's.
        """
        url = self._config.bus.url("bridge")
        port = PublicPort(self._config, self._config.processes)
        times = Times().scaled(self._config.bus.time_scale)
        name = f"{self._config.name}-group"
        with contextlib.closing(port), self._signals():
            async with await Bus.connect(url, role="bridge", name=name, times=times) as self._bus:
                await self._bus.subscribe(subjects.ALL_ORDERS, self._on_order)
                specs = plan_bridges(
                    self._command, self._config, self._config.processes, lambda _: url, port.fd
                )
                self._children = [
                    Child(spec, None, say=self._say, on_death=self._on_death) for spec in specs
                ]
                await self._run_children(port)
        if self._failure is not None:
            raise self._failure

    async def _run_children(self, port: PublicPort) -> None:
        async with task_scope() as tasks:
            for child in self._children:
                tasks.create_task(child.run(), name=child.spec.name)
            self._log.info("bridges_started", port=port.port, processes=len(self._children))
            try:
                await self._stopping.wait()
            finally:
                port.close()
                ends_s = time.monotonic() + self._config.grace_s + _HARD_EXIT_S
                await stop_in_order([self._children], ends_s)

    def _say(self, line: str) -> None:
        self._log.info("bridge_said", line=line)

    # -- what may happen -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: self._on_stop,
            signal.SIGINT: self._on_stop,
            signal.SIGHUP: self._on_hangup if self._config.tls_cert else self._on_stop,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _on_stop(self) -> None:
        if self._stopping.is_set():
            for child in self._children:
                child.stop(signal.SIGKILL)
        self._stopping.set()

    def _on_hangup(self) -> None:
        for child in self._children:
            child.send(signal.SIGHUP)

    def _on_order(self, message: Msg) -> None:
        with contextlib.suppress(SchemaError):  # of a newer mesh on the same broker
            order = decode(message.data, Drain)
            if order.stay_down:
                self._stay_down.add(order.process)

    async def _on_death(self, child: Child, code: int) -> bool:
        """Tell the mesh; False when it is to stay down, or starting again would change nothing."""
        gone = Beat(
            process=child.process_id,
            kind="bridge",
            state="gone",
            host=socket.gethostname(),
            pid=0,
            started_unix_ms=0,
        )
        with contextlib.suppress(BusUnavailable):  # then three missed beats say it
            await self._bus.publish(subjects.beat(gone.process), encode(gone))
        self._log.warning("bridge_ended", bridge=child.process_id, how=describe_exit(code))
        if child.process_id in self._stay_down:
            self._num_down += 1
            if self._num_down == len(self._children):
                self._stopping.set()
            return False
        if code == EXIT_USAGE:
            self._failure = ChildFailed(f"{child.spec.name} can't start: {child.last_words}")
            self._stopping.set()
            return False
        return True


def run_bridge_group(config: BridgeConfig) -> int:
    """Run ``config.processes`` bridges until they have stopped.

    Returns:
        The exit code: 0 after a drain, 2 for settings that can't be used, else 1.
    """
    log = set_up_process(
        new_process_id("bridge", f"{config.name}-group"),
        level=config.bus.log_level,
        format=config.bus.log_format,
        echo=None,
    )

    async def run() -> None:
        await BridgeGroup(config, mesh_command(), log).run()

    try:
        asyncio.run(run())
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        return report("mesh bridge", ours)
    return 0

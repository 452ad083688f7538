"""One process of the mesh: what every role has around its own work.

run_process   logging, event loop, exit code
├── bus       connected, topology ensured
├── health    /health, /ready, /metrics
├── beats     every ``times.beat_s``, at once when something changes, "gone" at the end
├── signals   the first SIGTERM or SIGINT drains, the second or the end of the grace time ends;
│             a Drain on the bus is a first one
└── body      the role; given a RoleContext, it returns when it has drained
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from infra.bus.connection import Bus, Msg
from infra.bus.errors import BrokerRefused
from infra.bus.names import MODELS
from infra.bus.topology import ensure_topology
from infra.config import ControlConfig, RoleConfig
from infra.failure import EXIT_FAILED, EXIT_INTERRUPTED, first_mesh_error, report
from infra.file_limit import raise_file_limit
from infra.garbage import collect_rarely
from infra.health import Health, health_app
from infra.http_server import bind, http_server
from infra.lifeline import NONCE, SUPERVISOR_PID, follow_supervisor, is_orphan
from infra.log import Logger, set_up_process
from infra.metrics import Metrics
from infra.pulse import until_next_s
from infra.task_scope import task_scope
from infra.times import Times
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Beat, Drain, ProcessState
from schemas.errors import BusUnavailable, MeshError, SchemaError

Kind = Literal["control", "worker", "bridge"]

_FAILED_EXIT_S = 5.0
_ORPHAN_GRACE_S = 2.0  # the broker went with the supervisor, as a rule: there is nobody to tell
_HARD_EXIT_S = 1.0  # between asking a drain to stop and the kernel's alarm


async def find_nothing_out() -> None:
    """Nothing to find out before a beat."""


@dataclass(slots=True, kw_only=True)
class RoleContext:
    """What a role's body works with.

    The body calls :meth:`ready` once it serves, may set further checks on ``health``, replaces
    ``describe`` to add its own facts to each beat and ``before_beat`` to find them out, starts
    helpers in ``tasks``, and returns some time after ``draining`` is set. Helpers that still run
    then are cancelled.
    """

    process: str  # <kind>-<name>-<nonce>: never used twice
    kind: Kind
    bus: Bus
    times: Times
    health: Health
    metrics: Metrics
    log: Logger
    tasks: asyncio.TaskGroup = field(init=False)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    describe: Callable[[Beat], Beat] = lambda beat: beat
    before_beat: Callable[[], Awaitable[None]] = find_nothing_out  # or beats come late
    health_port: int = 0
    host: str = field(default_factory=socket.gethostname)
    started_unix_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    def ready(self) -> None:
        """Say that the role serves from now on."""
        self.health.set(self.kind, True)

    def drain(self) -> None:
        """Ask the body to finish what it has and return."""
        self.draining.set()
        self.health.set(self.kind, False, "draining")

    def beat(self, state: ProcessState | None = None) -> Beat:
        """The next heartbeat."""
        if state is None and self.draining.is_set():
            state = "draining"
        base = Beat(
            process=self.process,
            kind=self.kind,
            state=state or ("ready" if self.health.is_ready else "starting"),
            host=self.host,
            pid=os.getpid(),
            started_unix_ms=self.started_unix_ms,
            health_port=self.health_port,
            reason=self.health.reason,
        )
        return self.describe(base)


Body = Callable[[RoleContext], Awaitable[None]]


def new_process_id(kind: str, name: str) -> str:
    """``<kind>-<name>-<nonce>``; a supervisor may have chosen the nonce for its child."""
    return f"{kind}-{name}-{os.environ.get(NONCE) or secrets.token_hex(4)}"


class _Signals:
    """The first SIGTERM or SIGINT drains, and so does an order over the bus; a second signal, or
    the end of the grace time, cancels the body; if that does not help, the kernel's alarm ends
    the process."""

    def __init__(self, ctx: RoleContext, grace_s: float, task: asyncio.Task[object]) -> None:
        self._ctx = ctx
        self._grace_s = grace_s
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number.name)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def on_order(self, message: Msg) -> None:
        """A Drain on the bus; it may come twice."""
        try:
            order = decode(message.data, Drain)
        except SchemaError as error:
            self._ctx.log.warning("order_refused", reason=error.message)
            return
        if order.process == self._ctx.process and not self._ctx.draining.is_set():
            self._drain("order")

    def _on_signal(self, name: str) -> None:
        if self._ctx.draining.is_set():
            self._cut(f"second {name}")
        else:
            self._drain(name)

    def _drain(self, cause: str) -> None:
        if is_orphan():
            self._grace_s = min(self._grace_s, _ORPHAN_GRACE_S)
        self._ctx.log.info("drain_started", cause=cause, grace_s=self._grace_s)
        self._ctx.drain()
        self._timer = self._loop.call_later(self._grace_s, self._cut, "grace time over")
        # A loop that no longer runs can't call _cut; SIGALRM has the kernel's default action.
        signal.setitimer(signal.ITIMER_REAL, self._grace_s + _HARD_EXIT_S)

    def _cut(self, reason: str) -> None:
        self._ctx.log.warning("drain_cut_short", reason=reason)
        signal.setitimer(signal.ITIMER_REAL, _HARD_EXIT_S)
        self._task.cancel()


async def beat_for_ever(ctx: RoleContext) -> None:
    """Say every ``times.beat_s`` how ``ctx`` is, and at once when that changes."""
    while True:
        ctx.health.set("bus", ctx.bus.is_connected, "broker not reachable")
        ctx.health.changed.clear()
        await ctx.before_beat()
        await say_beat(ctx, ctx.beat())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_until_beat_s(ctx.times)):
                await ctx.health.changed.wait()


def _until_beat_s(times: Times) -> float:
    return until_next_s(times.beat_s, asyncio.get_running_loop().time())


async def _watch(ctx: RoleContext) -> None:
    """Count reconnects; end the process when the connection is closed for good."""
    closed = asyncio.Event()
    ctx.bus.on_closed.append(closed.set)
    ctx.bus.on_reconnected.append(ctx.metrics.bus_reconnects.inc)
    await closed.wait()
    raise BusUnavailable(f"the connection to {ctx.bus.where} was closed for good")


async def say_beat(ctx: RoleContext, beat: Beat) -> None:
    """Say it once, if the bus is there."""
    with contextlib.suppress(BusUnavailable):  # the next beat tries again
        await ctx.bus.publish(subjects.beat(ctx.process), encode(beat))


async def _run_body(ctx: RoleContext, body: Body, config: RoleConfig) -> None:
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    with _Signals(ctx, config.grace_s, task) as signals:
        await ctx.bus.subscribe(subjects.control(ctx.process), signals.on_order)
        await _find_topology(ctx, config)
        async with task_scope() as ctx.tasks:
            await body(ctx)


async def _find_topology(ctx: RoleContext, config: RoleConfig) -> None:
    """Control makes the streams; no other role may, so the others wait until they are there."""
    if isinstance(config, ControlConfig):
        await ensure_topology(ctx.bus, config.limits)
        return
    while not ctx.draining.is_set():
        try:
            await ctx.bus.api(f"STREAM.INFO.{MODELS}")
            await ctx.bus.sync_clock()
        except (BrokerRefused, BusUnavailable):
            ctx.health.set("streams", False, "not made yet; a control process makes them")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ctx.times.beat_s):
                    await ctx.draining.wait()
        else:
            ctx.health.set("streams", True)
            return


async def _serve(process: str, kind: Kind, config: RoleConfig, body: Body, log: Logger) -> None:
    times = Times().scaled(config.bus.time_scale)
    bound = bind(config.health_host, config.health_port, key=f"{kind}.health_port")
    bus = await Bus.connect(config.bus.url(kind), role=kind, name=process, times=times)
    try:
        ctx = RoleContext(
            process=process,
            kind=kind,
            bus=bus,
            times=times,
            health=Health(),
            metrics=Metrics(process_facts=True),
            log=log,
            health_port=bound.getsockname()[1],
        )
        ctx.health.set(kind, False, "starting")
        try:
            async with (
                task_scope() as tasks,
                http_server(health_app(process, ctx.health, ctx.metrics), bound),
            ):
                tasks.create_task(beat_for_ever(ctx), name="beats")
                tasks.create_task(_watch(ctx), name="bus watch")
                await _run_body(ctx, body, config)
        finally:  # when no other beat can follow
            await say_beat(ctx, ctx.beat("gone"))
    finally:
        bound.close()
        await bus.close()


def run_process(kind: Kind, config: RoleConfig, body: Body) -> int:
    """Run ``body`` as a process of its own until it returns.

    Returns:
        The exit code: 0 after a drain, 2 for settings that can't be used, else 1. An error of
        ours is one line on stderr; anything else is a bug and keeps its traceback.
    """
    faulthandler.enable()
    raise_file_limit()
    collect_rarely()
    process = new_process_id(kind, config.name)
    is_child = SUPERVISOR_PID in os.environ
    log = set_up_process(
        process,
        level=config.bus.log_level,
        format=config.bus.log_format,
        echo=sys.stderr if is_child else None,
    )
    try:
        follow_supervisor()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(process, kind, config, body, log))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # before the role's own handlers were there
    except asyncio.CancelledError:
        return EXIT_FAILED  # a drain that was cut short, and said so
    except (MeshError, BaseExceptionGroup) as error:
        # Threads of a body that failed must not keep the process: the kernel ends it then.
        signal.setitimer(signal.ITIMER_REAL, _FAILED_EXIT_S)
        ours = first_mesh_error(error)
        if ours is None:
            log.critical("process_crashed", exc_info=True)
            raise
        log.error("process_failed", code=ours.code, reason=ours.message, key=ours.param)
        return report(f"mesh {kind}", ours)
    log.info("process_ended")
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform != "linux":
        return None
    import uvloop

    return uvloop.new_event_loop

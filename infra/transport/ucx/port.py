"""UCX of one process: its door and its reader, on a thread with an event loop of its own.

Neither the engine's thread nor the process's event loop ever waits for it. While nothing moves,
the thread sleeps.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait

from infra.log import Logger
from infra.task_scope import task_scope
from infra.transport.shm import SharedPool
from infra.transport.ucx.door import MayRead, UcxDoor
from infra.transport.ucx.link import UcxContext
from infra.transport.ucx.reader import SCHEME, UcxReader
from schemas.errors import ConfigError, KvLost
from schemas.kv import KvHandle

_ANSWER_S = 2.0


class UcxPort:
    """The way in and out over UCX.

    Args:
        pool: what the door serves.
        may_read: whether (lease id, secret) name a lease that stands; called on our thread.
        host: a numeric address of this machine, on whose interface UCX works.
        port: of the TCP listener; 0 takes any free one.

    Raises:
        ConfigError: not an address of ours, or the port is taken.
    """

    def __init__(
        self, pool: SharedPool, may_read: MayRead, host: str, port: int, log: Logger
    ) -> None:
        self._context = UcxContext(host)
        self._listener = _bind(host, port)
        self._door = UcxDoor(pool, may_read, self._context, self._listener, log)
        self._reader = UcxReader(self._context)
        self._thread = threading.Thread(target=self._run, name="kv-ucx")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._is_up = threading.Event()
        self.ended: Future[None] = Future()  # holds what broke it, if it broke

    @property
    def address(self) -> str:
        """For handles."""
        host, port = self._listener.getsockname()[:2]
        return f"{SCHEME}[{host}]:{port}" if ":" in host else f"{SCHEME}{host}:{port}"

    def start(self) -> None:
        """Serve and read from now on."""
        self.ended.set_running_or_notify_cancel()  # who waits for it can't cancel it
        self._thread.start()
        self._is_up.wait()
        if self.ended.done():
            self.ended.result()

    def stop(self) -> None:
        """End every transfer; wait for the thread."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._stopping.set)
            except RuntimeError:
                pass  # it has broken: the loop is closed
            self._thread.join()
        self._listener.close()

    def read(
        self,
        address: str,
        handle: KvHandle,
        into: SharedPool,
        slots: Sequence[int],
        timeout_s: float,
    ) -> None:
        """:meth:`UcxReader.read`, for another thread, which waits."""
        loop = self._loop
        if loop is None or self.ended.done():
            raise KvLost("UCX is not at work here")
        read = self._reader.read(address, handle, into, slots, timeout_s)
        try:
            reading = asyncio.run_coroutine_threadsafe(read, loop)
        except RuntimeError as error:
            read.close()
            raise KvLost("UCX was stopped") from error
        wait((reading, self.ended), return_when=FIRST_COMPLETED)
        if not reading.done():  # it came too late for a loop that has ended
            raise KvLost("UCX was stopped")
        try:
            reading.result()
        except CancelledError as error:
            raise KvLost("UCX was stopped") from error

    async def until_ended(self) -> None:
        """Wait until it is stopped.

        Raises:
            Exception: what broke it.
        """
        await asyncio.wrap_future(self.ended)

    async def knock(self) -> None:
        """Find out whether our loop goes round.

        Raises:
            KvLost: not within some seconds.
        """
        loop = self._loop
        if loop is None or self.ended.done():
            raise KvLost("UCX is not at work here")
        going_round = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await asyncio.wrap_future(going_round)
        except TimeoutError as error:
            raise KvLost(f"the loop of UCX did not go round in {_ANSWER_S:.0f} s") from error

    def prune(self) -> None:
        """Let go of owners that are silent. Does not wait."""
        loop = self._loop
        if loop is not None and not self.ended.done():
            loop.call_soon_threadsafe(self._reader.prune)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        finally:
            self._is_up.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with task_scope() as tasks:
            tasks.create_task(self._door.run(), name="kv ucx door")
            tasks.create_task(self._reader.run(), name="kv ucx reader")
            await asyncio.sleep(0)  # both have begun
            self._is_up.set()
            await self._stopping.wait()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port} can't be listened at: {error.strerror}", param="worker.kv_ucx_port"
        ) from error
    return listener

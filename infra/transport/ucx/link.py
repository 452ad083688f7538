"""UCX of one connection, driven by an event loop.

Each connection has a UCX worker of its own: whatever went wrong on it ends with it, and once it is
closed nothing of UCX writes into its buffers any more. A worker that has nothing to do sleeps: its
file descriptor wakes the loop.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

for _name, _value in {
    "UCX_LOG_LEVEL": "fatal",  # it writes to stdout; what fails comes back as an error, and is told
    "UCX_HANDLE_ERRORS": "none",  # signals are not its own
}.items():
    os.environ.setdefault(_name, _value)  # read when the library is loaded

import ucxx._lib.libucxx as ucx_api  # noqa: E402
from ucxx._lib.arr import Array  # noqa: E402

from infra.transport.ucx.wire import Bytes  # noqa: E402
from schemas.errors import ConfigError, KvLost  # noqa: E402

_ROUNDS = 64  # of progress before others have their turn
_CLOSE_ROUNDS = 10_000  # of progress, at most, for what was cancelled to end
_SETTINGS = {
    "TLS": "^posix,sysv,cma,xpmem,knem",  # memory of this host is read without UCX
}
_TCP_SETTINGS = {
    "RNDV_THRESH": "inf",  # a rendezvous would be in fragments, too, and ask before each
    "TCP_TX_SEG_SIZE": "128k",
    "TCP_RX_SEG_SIZE": "128k",  # of 8 KiB and 64 KiB: a fifth of the processor time less
}


class UcxContext:
    """UCX in this process, on the devices behind ``host``.

    Raises:
        ConfigError: no network interface has this address, or UCX can't use it.
    """

    def __init__(self, host: str) -> None:
        settings = dict(_SETTINGS)
        if device := _tcp_device(host):
            settings |= {"NET_DEVICES": device, **_TCP_SETTINGS}
        chosen = {key: value for key, value in settings.items() if f"UCX_{key}" not in os.environ}
        features = (ucx_api.Feature.TAG, ucx_api.Feature.WAKEUP)
        try:
            self.context = ucx_api.UCXContext(chosen, features)
        except ucx_api.UCXError as error:
            raise ConfigError(f"UCX: {error}", param="worker.kv_ucx_host") from error


def _tcp_device(host: str) -> str:
    """The interface with this address, for TCP; "" where there is RDMA, of which UCX knows more."""
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == host for address in addresses)
    ]
    if not names:
        raise ConfigError(f"no interface has the address {host}", param="worker.kv_ucx_host")
    has_rdma = Path("/sys/class/infiniband").is_dir() and any(
        Path("/sys/class/infiniband").iterdir()
    )
    return "" if has_rdma and names[0] != "lo" else names[0]


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    request: Any
    buffer: Bytes  # lives until UCX is done with it
    ended: asyncio.Future[None]


class UcxLink:
    """One end of a connection. Of one event loop, never another thread's."""

    def __init__(self, context: UcxContext) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker = ucx_api.UCXWorker(context.context)
        self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None
        self._under_way: list[_UnderWay] = []
        self._descriptor: int = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self._progress)
        self._is_due = False  # that _progress is called soon
        self._is_closed = False

    @property
    def address(self) -> bytes:
        """Of this end, for ``connect`` of the other."""
        return bytes(self._worker.address)

    @property
    def num_under_way(self) -> int:
        """Messages that have not ended."""
        return len(self._under_way)

    def connect(self, address: bytes) -> None:
        """To the other end. Returns at once.

        Raises:
            KvLost: it can't be reached from here.
        """
        try:
            there = ucx_api.UCXAddress.create_from_buffer(address)
            # With its watch over the peer: without, closing waits for a frozen one.
            self._endpoint = ucx_api.UCXEndpoint.create_from_worker_address(
                self._worker, there, True
            )
        except (ucx_api.UCXError, IndexError) as error:
            raise KvLost(f"UCX can't connect: {error}") from error
        self._progress()

    def send(self, message: Bytes, tag: int) -> asyncio.Future[None]:
        """Send ``message``; the future ends when its memory may be written again.

        Raises:
            KvLost: of the future, too: the connection is at its end.
        """
        self._check_open()
        return self._begin(self._endpoint.tag_send, message, tag)

    def receive(self, message: Bytes, tag: int) -> asyncio.Future[None]:
        """Fill ``message``, or its beginning, with what is sent under ``tag``.

        Raises:
            KvLost: of the future, too: the connection is at its end.
        """
        self._check_open()
        return self._begin(self._worker.tag_recv, message, tag)

    def close(self, reason: str = "the connection was closed") -> None:
        """End everything that is under way; no buffer is touched afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
        self._cancel()
        for one in self._under_way:
            _fail(one.ended, KvLost(reason))
        self._under_way.clear()
        self._endpoint = None
        self._worker = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise KvLost("the connection is closed")

    def _begin(self, operation: Any, message: Bytes, tag: int) -> asyncio.Future[None]:
        ended: asyncio.Future[None] = self._loop.create_future()
        try:
            request = operation(Array(message), ucx_api.UCXXTag(tag))
        except ucx_api.UCXError as error:
            raise KvLost(f"UCX: {error}") from error
        self._under_way.append(_UnderWay(request, message, ended))
        self._progress()
        return ended

    def _progress(self) -> None:
        """Let UCX work, tell what has ended, and sleep again when there is nothing left to do."""
        if self._is_closed:
            return
        for _ in range(_ROUNDS):
            if not self._worker.progress_once():
                is_asleep = self._worker.arm()
                break
        else:
            is_asleep = False
        self._settle()
        if not (is_asleep or self._is_due):
            self._is_due = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        self._progress()

    def _settle(self) -> None:
        ended = [one for one in self._under_way if one.request.completed]
        if not ended:
            return
        self._under_way = [one for one in self._under_way if one not in ended]
        for one in ended:
            try:
                one.request.check_error()
            except ucx_api.UCXError as error:
                _fail(one.ended, KvLost(f"UCX: {error}"))
            else:
                if not one.ended.done():
                    one.ended.set_result(None)

    def _cancel(self) -> None:
        self._worker.cancel_inflight_requests()
        if self._endpoint is not None:
            self._endpoint.close_blocking()
        for _ in range(_CLOSE_ROUNDS):
            if all(one.request.completed for one in self._under_way):
                break
            self._worker.progress_once()


def _fail(future: asyncio.Future[None], error: KvLost) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # nobody may be waiting any more

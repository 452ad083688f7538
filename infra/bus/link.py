"""One process's connection to the broker: what is said once and heard once.

It is endless: after the first connect it comes back by itself whenever the broker does. Nothing is
buffered in between: while the broker is away every call fails at once with
:class:`BusUnavailable`, and what must be heard all the same is repeated by whoever said it
(``Bus.publish_stored`` under a message id, :class:`TokenWriter`, :class:`WorkPull`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import nats.errors
import structlog

from infra.bus.calls import Call, PendingCalls, has_no_responders
from infra.bus.client import PersistentClient, open_client, places
from infra.bus.clock import BrokerClock
from infra.bus.errors import BusForbidden, NobodyListens, from_answer
from infra.bus.headers import header_block_of, header_bytes
from infra.bus.subscription import BusSubscription
from infra.bus.wire import Msg
from infra.times import Times
from schemas.errors import BusUnavailable, MeshError, PayloadTooLarge, SchemaError

MAX_UNSENT_BYTES = 32 << 20  # what may wait for a broker that reads slowly
_DENIED = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]+)"')

log = structlog.get_logger("bus")


class Link:
    """A connection; make one with :meth:`connect`.

    The lists ``on_error`` (takes the exception), ``on_disconnected``, ``on_reconnected`` and
    ``on_closed`` hold callbacks that must return at once; add and remove at will.
    """

    def __init__(self, *, role: str, times: Times, where: str) -> None:
        self.role = role
        self.where = where  # host:port, …: for messages, without credentials
        self.on_error: list[Callable[[Exception], None]] = []
        self.on_disconnected: list[Callable[[], None]] = []
        self.on_reconnected: list[Callable[[], None]] = []
        self.on_closed: list[Callable[[], None]] = []
        self._client = PersistentClient()
        self._events = _Events(self)
        self._times = times
        self._up = asyncio.Event()
        self._calls = PendingCalls("", self._late)
        self._denied: dict[str, BusForbidden | None] = {}  # subscriptions being made, lower case
        self._clock = BrokerClock(self.api)
        self._is_leaving = False

    @classmethod
    async def connect(
        cls,
        urls: str | Sequence[str],
        *,
        role: str,
        name: str = "",
        user: str | None = None,
        password: str | None = None,
        times: Times | None = None,
    ) -> Self:
        """Connect and learn the broker's time.

        Args:
            urls: ``nats://user:password@host:port``, one or several of a cluster (a list, or
                with commas between).
            role: the broker user; its answers come to ``_INBOX_<role>``, which no other may read.
            name: how the connection is called in the broker's lists.
            user: in place of the one in the url, with ``password``.

        Raises:
            BusUnavailable: not reached within ``times.connect_timeout_s``, or refused (wrong
                credentials, at once); the message says where and why.
        """
        urls = urls.split(",") if isinstance(urls, str) else list(urls)
        times = times or Times()
        bus = cls(role=role, times=times, where=places(urls))
        bus._client = await open_client(
            urls,
            bus._events,
            role=role,
            name=name or role,
            user=user,
            password=password,
            timeout_s=times.connect_timeout_s,
        )
        bus._up.set()
        bus._calls = PendingCalls(bus._client.new_inbox(), bus._late)
        try:
            await bus.subscribe(f"{bus._calls.inbox}.*", bus._calls.answer)
            await bus._first_clock()
        except MeshError:
            await bus.close()
            raise
        return bus

    async def close(self) -> None:
        """Leave; nothing reconnects after this."""
        self._is_leaving = True
        await self._client.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- state ---------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """The connection stands, as far as is known (a frozen broker shows after 3 s)."""
        return self._client.is_connected

    @property
    def num_reconnects(self) -> int:
        """How often the connection was made anew. Raised before anything can be said on the new
        one, and so before ``on_reconnected`` tells."""
        return int(self._client.stats["reconnects"])

    @property
    def max_payload(self) -> int:
        """The broker's limit for payload and headers together, in bytes."""
        return self._client.max_payload

    @property
    def server_id(self) -> str:
        """Another one after a reconnect: another broker process, without the old one's memory."""
        return str(self._client._server_info.get("server_id", ""))

    @property
    def times(self) -> Times:
        """The mesh's times."""
        return self._times

    def fits(self, data: bytes, headers: Mapping[str, str] | None = None) -> bool:
        """Whether one message can carry this."""
        return len(data) + header_bytes(headers) <= self.max_payload

    def check_fits(self, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """PayloadTooLarge unless :meth:`fits`."""
        self._check_size(len(data) + header_bytes(headers))

    def _check_size(self, size: int) -> None:
        if size > self.max_payload:
            raise PayloadTooLarge(f"{size} bytes, and the bus takes {self.max_payload}")

    def now_unix_ms(self) -> int:
        """The broker's time: deadlines are in it."""
        return self._clock.now_unix_ms()

    def new_inbox(self) -> str:
        """A subject that nobody else uses or may read."""
        return self._client.new_inbox()

    async def until_connected(self, timeout_s: float) -> bool:
        """Wait for the connection; False when it did not come in time."""
        if self.is_connected:
            return True
        self._up.clear()  # the library's callback may be still to come
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        return self.is_connected

    async def _first_clock(self) -> None:
        """A cluster that has just lost a server may answer late: asked for as long as a connection
        may take. After that our own clock stands in, as before there are streams."""
        ends_s = time.monotonic() + self.times.connect_timeout_s
        while True:
            try:
                await self.sync_clock()
                return
            except BusUnavailable as error:
                if time.monotonic() >= ends_s:
                    log.warning("bus_clock_kept", reason=str(error))
                    return
            await self.until_connected(1.0)

    async def sync_clock(self) -> None:
        """Take the broker's time anew. Before the topology exists the local clock stands in.

        Raises:
            BusUnavailable: no answer.
        """
        await self._clock.sync()

    # -- speaking ------------------------------------------------------------------------------

    def say(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        """Say it once; whether anybody hears is not known. Returns without waiting.

        Raises:
            BusUnavailable: not connected, or the broker reads too slowly.
            PayloadTooLarge: over :attr:`max_payload`.
            SchemaError: no subject.
        """
        self._say(subject, data, header_block_of(headers), reply)

    async def publish(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        """As :meth:`say`, for those who wait anyhow."""
        self._say(subject, data, header_block_of(headers), reply)

    def when_written(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the kernel has what was just said, so that the broker gets it even
        if this process is killed then; never when it does not take it at once."""
        self._client.when_written(callback)

    def hurry(self) -> None:
        """Write what was said now, not with all that is said in this turn of the loop."""
        self._client.write_pending()

    def _say(self, subject: str, data: bytes, head: bytes, reply: str) -> None:
        """See :meth:`say`; ``head`` is of :func:`header_block_of`."""
        client = self._client
        if not client.is_connected:
            raise BusUnavailable(f"the bus at {self.where} is away")
        if client.pending_data_size > MAX_UNSENT_BYTES:
            raise BusUnavailable(f"the bus at {self.where} does not keep up")
        self._check_size(len(data) + len(head))
        try:
            client.say(subject, data, reply, head)
        except nats.errors.BadSubjectError as error:
            raise _unsayable(subject) from error
        except nats.errors.Error as error:
            raise BusUnavailable(f"the bus at {self.where} is away: {error}") from error

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Msg:
        """Ask and wait for one answer.

        Raises:
            BusUnavailable: as :meth:`say`; or no answer in time, or the connection broke
                (the question may have been heard).
            NobodyListens: nothing answers on this subject.
            BusForbidden: our user may not publish there.
        """
        timeout_s = self._times.call_timeout_s if timeout_s is None else timeout_s
        message = await self._ask(subject, data, header_block_of(headers), timeout_s)
        if has_no_responders(message):
            raise NobodyListens(f"nobody listens on {subject}")
        return message

    def ask(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None, timeout_s: float
    ) -> asyncio.Future[Msg]:
        """Ask without waiting. What is returned brings the answer, or the error that stands for
        one (:meth:`request` says which; that nobody listens is an answer here, see
        ``has_no_responders``); whoever asks looks at it in any case.

        Raises:
            BusUnavailable, PayloadTooLarge, SchemaError: not asked, as :meth:`say`.
        """
        call = self._calls.begin(subject, timeout_s)
        try:
            self._say(subject, data, header_block_of(headers), call.reply)
        except BaseException:
            self._calls.give_up(call)
            raise
        return call.future

    async def _ask(self, subject: str, data: bytes, head: bytes, timeout_s: float) -> Msg:
        """The answer, whatever it is."""
        call = self._calls.begin(subject, timeout_s)
        try:
            self._say(subject, data, head, call.reply)
            return await call.future
        except BaseException:
            self._calls.give_up(call)
            raise

    def _late(self, call: Call) -> BusUnavailable:
        return BusUnavailable(
            f"no answer from the bus at {self.where} on {call.subject} in {call.timeout_s:.3g} s"
        )

    async def api(self, verb: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream ``$JS.API.<verb>``.

        Raises:
            BusUnavailable, BusForbidden: as :meth:`request`.
            BrokerRefused: the answer is an error (or one of those in ``infra.bus.errors``).
        """
        message = await self.request(f"$JS.API.{verb}", json.dumps(body).encode() if body else b"")
        answer: dict[str, Any] = json.loads(message.data)
        if "error" in answer:
            raise from_answer(answer["error"], verb)
        return answer

    # -- hearing -------------------------------------------------------------------------------

    async def subscribe(
        self,
        subject: str,
        callback: Callable[[Msg], None],
        *,
        queue: str = "",
    ) -> BusSubscription:
        """Call ``callback`` for each message, in order of arrival; it must return at once, for
        nothing else is read from the broker meanwhile.

        When this returns the broker knows the subscription (while the broker is away: will know it
        before anything else is said). Of all subscriptions with the same ``queue``, one gets each
        message.

        Raises:
            BusForbidden: our user may not read there.
        """
        key = subject.lower()
        self._denied[key] = None
        try:
            subscription = await self._client.subscribe_direct(subject, queue, callback)
            if self.is_connected:
                # A refusal comes before the pong; without one it is made at the reconnect.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._times.call_timeout_s):
                        await self._client.round_trip()
        except nats.errors.ConnectionClosedError as error:
            raise BusUnavailable(f"the connection to {self.where} was closed") from error
        finally:
            denied = self._denied.pop(key, None)
        made = BusSubscription(subscription)
        if denied is not None:
            await made.unsubscribe()
            raise denied
        return made

    def _forbid(self, subject: str, error: Exception) -> None:
        log.error("bus_forbidden", role=self.role, reason=str(error))
        refused = BusForbidden(f"broker user {self.role!r}: {error}")
        self._calls.fail_subject(subject, refused)
        if subject in self._denied:
            self._denied[subject] = refused


def _unsayable(subject: str) -> SchemaError:
    return SchemaError(f"{subject!r} can't be published to", param="subject")


class _Events:
    """What the client tells, for :class:`Link` and whoever listens to it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def failed(self, error: Exception) -> None:
        denied = _DENIED.search(str(error).lower())
        if denied is not None:
            self._link._forbid(denied.group(1), error)
        self._tell(error)

    def crashed(self, error: Exception) -> None:
        log.error("bus_callback_failed", exc_info=error)
        self._tell(error)

    def _tell(self, error: Exception) -> None:
        for callback in list(self._link.on_error):
            callback(error)

    async def disconnected(self) -> None:
        self._link._up.clear()
        self._link._calls.fail_all(BusUnavailable(f"the connection to {self._link.where} broke"))
        if not self._link._is_leaving:
            log.warning("bus_disconnected", where=self._link.where)
        for callback in list(self._link.on_disconnected):
            callback()

    async def reconnected(self) -> None:
        self._link._up.set()
        log.info("bus_reconnected", where=self._link.where)
        for callback in list(self._link.on_reconnected):
            callback()
        try:
            await self._link.sync_clock()
        except MeshError as error:
            log.warning("bus_clock_kept", reason=str(error))

    async def closed(self) -> None:
        self._link._up.clear()
        for callback in list(self._link.on_closed):
            callback()

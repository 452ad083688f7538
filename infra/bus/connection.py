"""One process's connection to the broker.

It is endless: after the first connect it comes back by itself whenever the broker does. Nothing is
buffered in between: while the broker is away every call fails at once with
:class:`BusUnavailable`, and what must be heard all the same is repeated by whoever said it
(``publish_stored`` under a message id, :class:`TokenWriter`, :class:`WorkPull`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import nats.errors
import structlog
from nats.aio.subscription import Subscription

from infra.bus.calls import PendingCalls, has_no_responders, status_of
from infra.bus.client import PersistentClient, open_client, places
from infra.bus.errors import (
    AnotherInFlight,
    BrokerRefused,
    BusForbidden,
    NobodyListens,
    WrongLastSequence,
    from_answer,
)
from infra.bus.message import Stored, StoredMessage, from_direct_get, parse_time_ms
from infra.bus.names import DEAD, TOKENS
from infra.bus.wire import Msg as Msg
from infra.bus.wire import header_block
from infra.times import Times
from schemas.errors import BusUnavailable, MeshError, PayloadTooLarge, SchemaError
from schemas.headers import MSG_ID

MAX_UNSENT_BYTES = 32 << 20  # what may wait for a broker that reads slowly
_RETRY_S = 0.02  # between two tries of one publish
_NO_MESSAGE = "404"
_STREAM_NOT_FOUND = 10059
_EXPECT_SEQ = "Nats-Expected-Last-Subject-Sequence"
_DENIED = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]+)"')
# Any stream's info carries the broker's time; this one's says nothing of anybody's requests.
_CLOCK = f"STREAM.INFO.{DEAD}"

log = structlog.get_logger("bus")


def header_bytes(headers: Mapping[str, str] | None) -> int:
    """What headers add to a message on the wire; the broker's limit counts them."""
    if not headers:
        return 0
    return 12 + sum(_num_bytes(k) + _num_bytes(v) + 4 for k, v in headers.items())


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class Bus:
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
        self._calls = PendingCalls("")
        self._denied: dict[str, BusForbidden | None] = {}  # subscriptions being made, lower case
        self._clock_ms = time.time() * 1000 - time.monotonic() * 1000
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
    ) -> Bus:
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
        bus._calls = PendingCalls(bus._client.new_inbox())
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

    async def __aenter__(self) -> Bus:
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
        return int(time.monotonic() * 1000 + self._clock_ms)

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
        before_ms = time.monotonic() * 1000
        try:
            answer = await self.api(_CLOCK)
        except BrokerRefused as error:
            if error.err_code != _STREAM_NOT_FOUND:
                raise
            return
        middle_ms = (before_ms + time.monotonic() * 1000) / 2
        self._clock_ms = parse_time_ms(answer["ts"]) - middle_ms

    # -- speaking ------------------------------------------------------------------------------

    async def publish(
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
        client = self._client
        if not client.is_connected:
            raise BusUnavailable(f"the bus at {self.where} is away")
        if client.pending_data_size > MAX_UNSENT_BYTES:
            raise BusUnavailable(f"the bus at {self.where} does not keep up")
        try:
            head = header_block(headers) if headers else b""
            self._check_size(len(data) + len(head))
            client.say(subject, data, reply, head)
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
            raise SchemaError(f"{subject!r} can't be published to", param="subject") from error
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
            BusUnavailable: as :meth:`publish`; or no answer in time, or the connection broke
                (the question may have been heard).
            NobodyListens: nothing answers on this subject.
            BusForbidden: our user may not publish there.
        """
        timeout_s = self._times.call_timeout_s if timeout_s is None else timeout_s

        def late() -> BusUnavailable:
            return BusUnavailable(
                f"no answer from the bus at {self.where} on {subject} in {timeout_s:.3g} s"
            )

        reply, future = self._calls.begin(subject, timeout_s, late)
        try:
            await self.publish(subject, data, headers, reply)
            message = await future
        finally:
            self._calls.end(reply)
        if has_no_responders(message):
            raise NobodyListens(f"nobody listens on {subject}")
        return message

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

    async def publish_stored(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        msg_id: str | None = None,
        expect_last_subject_seq: int | None = None,
        timeout_s: float = 5.0,
        through_outage: bool = False,
    ) -> Stored:
        """Publish, and return when a stream has it.

        Args:
            msg_id: makes repeats harmless, so an attempt without an answer is repeated until
                ``timeout_s`` is over. Without it there is one attempt.
            expect_last_subject_seq: store only if this is the sequence of the subject's last
                message (0: there is none). With ``msg_id`` a repeat that finds our own message
                at the end of the subject (in ``MESH_TOKENS``) has won.
            through_outage: wait for a broker that is away at the start, too; else that fails at
                once and certainly nothing was stored.

        Raises:
            WrongLastSequence: not stored, another message came first.
            QueueFull: not stored, the subject or the stream is at its limit.
            PayloadTooLarge: not stored.
            BusUnavailable: not confirmed in time: it may be stored now or later.
            BusForbidden: our user may not publish there.
        """
        wire = dict(headers or {})
        if msg_id is not None:
            wire[MSG_ID] = msg_id
        if expect_last_subject_seq is not None:
            wire[_EXPECT_SEQ] = str(expect_last_subject_seq)
        if through_outage:
            await self.until_connected(timeout_s)
        elif not self.is_connected:
            raise BusUnavailable(f"the bus at {self.where} is away")
        return await self._until_stored(subject, data, wire, timeout_s)

    async def _until_stored(
        self,
        subject: str,
        data: bytes,
        wire: dict[str, str],
        timeout_s: float,
        *,
        is_repeat: bool = False,
    ) -> Stored:
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        while True:
            left_s = max(ends - loop.time(), _RETRY_S)
            attempt_s = min(self._times.call_timeout_s, left_s)
            try:
                return _stored(await self.request(subject, data, wire, attempt_s), subject)
            except WrongLastSequence as error:
                # The broker compares sequences before it looks for repeats of a message id.
                if not is_repeat:
                    raise
                last = await self.last_message(TOKENS, subject, at_least_seq=error.last_seq)
                if last is None or last.headers.get(MSG_ID) != wire[MSG_ID]:
                    raise
                return Stored(seq=last.seq, duplicate=True)
            except AnotherInFlight:  # certainly not stored: no repeat, whatever follows
                if loop.time() + _RETRY_S >= ends:
                    raise
            except BusUnavailable:
                if MSG_ID not in wire or loop.time() + _RETRY_S >= ends:
                    raise
                is_repeat = True
            await asyncio.sleep(_RETRY_S)
            await self.until_connected(ends - loop.time())

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

    async def last_message(
        self, stream: str, subject: str, *, at_least_seq: int = 0
    ) -> StoredMessage | None:
        """The last message of ``subject`` in ``stream``; None when there is none.

        Args:
            at_least_seq: known to be stored. Any server of a cluster may answer, and some a
                moment late: they are asked again.

        Raises:
            BusUnavailable, BusForbidden: as :meth:`request`.
        """
        ends = time.monotonic() + self._times.call_timeout_s
        while True:
            last = await self._last_message(stream, subject)
            if (last.seq if last else 0) >= at_least_seq:
                return last
            if time.monotonic() > ends:
                raise BusUnavailable(f"{subject}: message {at_least_seq} can't be read yet")
            await asyncio.sleep(_RETRY_S)

    async def _last_message(self, stream: str, subject: str) -> StoredMessage | None:
        message = await self.request(f"$JS.API.DIRECT.GET.{stream}.{subject}")
        status = status_of(message)
        if status == _NO_MESSAGE:
            return None
        if status is not None and "Nats-Sequence" not in (message.headers or {}):
            raise BusUnavailable(f"direct get of {subject}: status {status}")
        return from_direct_get(message)

    def _forbid(self, subject: str, error: Exception) -> None:
        log.error("bus_forbidden", role=self.role, reason=str(error))
        refused = BusForbidden(f"broker user {self.role!r}: {error}")
        self._calls.fail_subject(subject, refused)
        if subject in self._denied:
            self._denied[subject] = refused


class BusSubscription:
    """What :meth:`Bus.subscribe` made."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        """Stop; nothing is delivered after this. Twice does nothing."""
        with contextlib.suppress(
            nats.errors.BadSubscriptionError, nats.errors.ConnectionClosedError
        ):
            await self._subscription.unsubscribe()


def _stored(message: Msg, subject: str) -> Stored:
    answer = msgspec.json.decode(message.data)
    if "error" in answer:
        raise from_answer(answer["error"], subject)
    return Stored(seq=answer["seq"], duplicate=bool(answer.get("duplicate")))


class _Events:
    """What the client tells, for :class:`Bus` and whoever listens to it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def failed(self, error: Exception) -> None:
        denied = _DENIED.search(str(error).lower())
        if denied is not None:
            self._bus._forbid(denied.group(1), error)
        elif not isinstance(error, OSError | nats.errors.Error | TimeoutError):
            log.error("bus_callback_failed", exc_info=error)
        for callback in list(self._bus.on_error):
            callback(error)

    async def disconnected(self) -> None:
        self._bus._up.clear()
        self._bus._calls.fail_all(BusUnavailable(f"the connection to {self._bus.where} broke"))
        if not self._bus._is_leaving:
            log.warning("bus_disconnected", where=self._bus.where)
        for callback in list(self._bus.on_disconnected):
            callback()

    async def reconnected(self) -> None:
        self._bus._up.set()
        log.info("bus_reconnected", where=self._bus.where)
        for callback in list(self._bus.on_reconnected):
            callback()
        try:
            await self._bus.sync_clock()
        except MeshError as error:
            log.warning("bus_clock_kept", reason=str(error))

    async def closed(self) -> None:
        self._bus._up.clear()
        for callback in list(self._bus.on_closed):
            callback()

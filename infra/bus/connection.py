"""One process's connection to the broker, with what its streams add: told that something is
stored, and the last that was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from infra.bus.calls import has_no_responders, status_of
from infra.bus.errors import (
    AnotherInFlight,
    NobodyListens,
    WrongLastSequence,
    from_answer,
)
from infra.bus.headers import header_block_of
from infra.bus.headers import header_bytes as header_bytes
from infra.bus.link import Link
from infra.bus.message import Stored, StoredMessage, from_direct_get
from infra.bus.names import TOKENS
from infra.bus.subscription import BusSubscription as BusSubscription
from infra.bus.wire import Msg as Msg
from schemas.errors import BusUnavailable
from schemas.headers import MSG_ID

_RETRY_S = 0.02  # between two tries of one publish
_NO_MESSAGE = "404"
_EXPECT_SEQ = "Nats-Expected-Last-Subject-Sequence"


class Bus(Link):
    """A connection; make one with :meth:`connect`."""

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
        wire = dict(headers or ())
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
        wire: Mapping[str, str],
        timeout_s: float,
        *,
        is_repeat: bool = False,
    ) -> Stored:
        head = header_block_of(wire)
        ends_s = time.monotonic() + timeout_s
        attempt_s = min(self._times.call_timeout_s, max(timeout_s, _RETRY_S))
        while True:
            try:
                return _stored(await self._ask(subject, data, head, attempt_s), subject)
            except WrongLastSequence as error:
                # The broker compares sequences before it looks for repeats of a message id.
                if not is_repeat:
                    raise
                last = await self.last_message(TOKENS, subject, at_least_seq=error.last_seq)
                if last is None or last.headers.get(MSG_ID) != wire[MSG_ID]:
                    raise
                return Stored(seq=last.seq, duplicate=True)
            except AnotherInFlight:  # certainly not stored: no repeat, whatever follows
                if time.monotonic() + _RETRY_S >= ends_s:
                    raise
            except BusUnavailable:
                if MSG_ID not in wire or time.monotonic() + _RETRY_S >= ends_s:
                    raise
                is_repeat = True
            await asyncio.sleep(_RETRY_S)
            await self.until_connected(ends_s - time.monotonic())
            attempt_s = min(attempt_s, max(ends_s - time.monotonic(), _RETRY_S))

    async def publish_row(
        self,
        row: Sequence[tuple[str, bytes, int]],
        on_written: Callable[[], None] | None = None,
    ) -> list[Stored | WrongLastSequence]:
        """Publish messages one right behind the other, and return when a stream has told of each.

        Args:
            row: per message its subject, its bytes, and the sequence of the subject's last message
                (0: there is none): if that is another the message is not stored, whatever becomes
                of the others.
            on_written: of all of them, see :meth:`when_written`.

        Raises:
            BusUnavailable: some are not confirmed in time: they may be stored now or later.
            QueueFull, PayloadTooLarge, BusForbidden: one was not stored; the others may be.
        """
        timeout_s, calls = self._times.call_timeout_s, list[asyncio.Future[Msg]]()
        try:
            for subject, data, seq in row:
                calls.append(self.ask(subject, data, {_EXPECT_SEQ: str(seq)}, timeout_s))
            if on_written is not None:
                self.when_written(on_written)
            return [
                _stored_or_not(await call, subject)
                for call, (subject, _, _) in zip(calls, row, strict=True)
            ]
        finally:
            for call in calls:
                if not call.cancel() and not call.cancelled():
                    call.exception()  # of what follows on one that has failed

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


class _Answer(msgspec.Struct, frozen=True):
    seq: int = 0
    duplicate: bool = False
    error: dict[str, Any] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def _stored_or_not(message: Msg, subject: str) -> Stored | WrongLastSequence:
    try:
        return _stored(message, subject)
    except WrongLastSequence as error:
        return error


def _stored(message: Msg, subject: str) -> Stored:
    if has_no_responders(message):
        raise NobodyListens(f"no stream takes {subject}")
    answer = _decode_answer(message.data)
    if answer.error is not None:
        raise from_answer(answer.error, subject)
    return Stored(seq=answer.seq, duplicate=answer.duplicate)

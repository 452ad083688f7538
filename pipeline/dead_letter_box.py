"""The stream of dead letters for a person: look, publish again, throw away.

What is published again is the message as it was, under a new message id and as a first attempt.
Who may say what for a request is still decided by its record and claim chain:

    admission           a request that was told of its end gets a new id, so that it is a new one
    prefill, decode,    again only while the request lives and nobody else has taken it on since
    kv-ready
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from infra.bus import DEAD, Bus, StoredMessage, replay
from infra.bus.errors import BrokerRefused
from pipeline.claim_chain import ClaimChain
from pipeline.dead_letters import words_of
from schemas import subjects
from schemas.codec import decode, decode_json, encode, is_json
from schemas.control import DeadLetter
from schemas.decode import DecodeTask
from schemas.errors import InvalidRequest, SchemaError
from schemas.headers import ATTEMPT, OBJECT, REQUEST, TRACEPARENT
from schemas.kv import KvReady
from schemas.prefill import PrefillTask
from schemas.requests import InferenceRequest, RequestRecord

_NO_MESSAGE = 10057
_ADMISSION = f"{subjects.ROOT}.admission."
_Task = PrefillTask | DecodeTask | KvReady | RequestRecord  # the last: of a poisonous request


@dataclass(frozen=True, slots=True, kw_only=True)
class FiledLetter:
    """A dead letter and its place in the stream, by which it is named."""

    seq: int
    letter: DeadLetter

    @property
    def request_id(self) -> str:
        """Of the request that it is about; empty when that can't be told."""
        named = self.letter.headers.get(REQUEST) or words_of(self.letter.payload).request_id
        return named if isinstance(named, str) else ""

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the payload was cut off."""
        return len(self.letter.payload) >= self.letter.payload_bytes


class DeadLetterBox:
    """The letters that the stream keeps; needs the rights of control."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._chain = ClaimChain(bus)

    async def letters(self) -> AsyncIterator[FiledLetter]:
        """All of them, oldest first; those of a newer version are passed over.

        Raises:
            BusUnavailable: not all could be read.
        """
        async with aclosing(replay(self._bus, DEAD, subjects.DEAD)) as stored:
            async for message in stored:
                if (filed := _filed(message)) is not None:
                    yield filed

    async def get(self, seq: int) -> FiledLetter:
        """One of them.

        Raises:
            InvalidRequest: there is none of this number.
            BusUnavailable: it can't be read now.
        """
        found = replay(self._bus, DEAD, subjects.DEAD, start_seq=seq, until_seq=seq + 1)
        async with aclosing(found) as stored:
            async for message in stored:
                if (filed := _filed(message)) is not None:
                    return filed
        raise InvalidRequest(f"there is no dead letter {seq}", param="id")

    async def drop(self, seq: int) -> None:
        """Delete one, bytes and all.

        Raises:
            InvalidRequest: there is none of this number.
            BusUnavailable: not known to be deleted.
        """
        try:
            await self._bus.api(f"STREAM.MSG.DELETE.{DEAD}", {"seq": seq})
        except BrokerRefused as error:
            if error.err_code != _NO_MESSAGE:
                raise
            raise InvalidRequest(f"there is no dead letter {seq}", param="id") from error

    async def retry(self, filed: FiledLetter) -> str:
        """Publish the message again and drop the letter.

        Returns:
            The id of the request that it is about now; empty when nobody can tell.

        Raises:
            InvalidRequest: nothing would come of it; the message says why.
            BusUnavailable, QueueFull: not known to be published.
        """
        if not filed.is_whole:
            kept, whole = len(filed.letter.payload), filed.letter.payload_bytes
            raise InvalidRequest(f"only {kept} of its {whole} bytes were kept", param="id")
        if filed.letter.subject.startswith(_ADMISSION):
            request_id = await self._admit_again(filed)
        else:
            request_id = await self._do_again(filed)
        await self.drop(filed.seq)
        return request_id

    async def _admit_again(self, filed: FiledLetter) -> str:
        letter = filed.letter
        try:
            request = first = _request(letter.payload)
        except SchemaError:  # a newer control process may understand it
            await self._publish(letter, letter.payload, _kept_headers(letter))
            return filed.request_id
        if await self._is_known(request):
            request = msgspec.structs.replace(request, request_id=secrets.token_hex(16))
        deadline = request.deadline_unix_ms
        if deadline is not None and deadline <= self._bus.now_unix_ms():
            request = msgspec.structs.replace(request, deadline_unix_ms=None)
        trace = letter.headers.get(TRACEPARENT)
        data = letter.payload if request == first else encode(request)
        await self._publish(letter, data, {TRACEPARENT: trace} if trace else {})
        return request.request_id

    async def _is_known(self, request: InferenceRequest) -> bool:
        """Whether something was said of the request already: its id can't be used again."""
        reader = request.reader or subjects.default_reader(request.request_id)
        async with asyncio.TaskGroup() as tasks:
            tip = tasks.create_task(self._chain.tip(reader, request.request_id))
            record = tasks.create_task(self._chain.record(request.request_id))
        return tip.result().seq > 0 or record.result() is not None

    async def _do_again(self, filed: FiledLetter) -> str:
        letter = filed.letter
        task: _Task = decode(letter.payload, _Task)  # type: ignore[arg-type]  # a union
        about = f"request {task.request_id}"
        if await self._chain.record(task.request_id) is None:
            raise InvalidRequest(f"{about} is no longer stored", param="id")
        tip = await self._chain.tip(task.reader, task.request_id)
        if tip.has_ended:
            assert tip.entry is not None, "an end is an entry"
            how = type(tip.entry).__name__
            raise InvalidRequest(f"{about} has ended ({how}): its client was told", param="id")
        if isinstance(task, RequestRecord) or tip.seq != task.after_seq:
            raise InvalidRequest(f"{about} has gone on without this message", param="id")
        await self._publish(letter, letter.payload, _kept_headers(letter))
        return task.request_id

    async def _publish(self, letter: DeadLetter, data: bytes, headers: dict[str, str]) -> None:
        msg_id = f"retry-{secrets.token_hex(16)}"
        await self._bus.publish_stored(letter.subject, data, headers, msg_id=msg_id)


def _filed(message: StoredMessage) -> FiledLetter | None:
    try:
        return FiledLetter(seq=message.seq, letter=decode(message.data, DeadLetter))
    except SchemaError:
        return None


def _request(payload: bytes) -> InferenceRequest:
    request = (decode_json if is_json(payload) else decode)(payload, InferenceRequest)
    subjects.check_request_id(request.request_id)
    if request.reader is not None:
        subjects.check_reader(request.reader)
    return request


def _kept_headers(letter: DeadLetter) -> dict[str, str]:
    """The message's own headers: no longer the broker's, nor a first message's attempts; the
    payload does not lie in the object store any more."""
    return {
        name: value
        for name, value in letter.headers.items()
        if not name.startswith("Nats-") and name not in (ATTEMPT, OBJECT)
    }

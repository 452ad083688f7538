"""Messages that no stage could use: kept whole, and their clients told where they are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from infra.bus import Bus, WorkMessage
from pipeline.claim_chain import ClaimChain
from schemas import subjects
from schemas.codec import encode, is_json
from schemas.control import DeadLetter
from schemas.errors import MeshError, SchemaError
from schemas.headers import REQUEST

_MAX_PAYLOAD = 512 * 1024  # of a dead letter; what is longer is cut
_MAX_HEADERS = 32
_MAX_HEADER_CHARS = 1024


class KnownRequest(NamedTuple):
    """Whom to tell about a message that can't be decoded."""

    request_id: str
    reader: str


async def bury(
    bus: Bus, message: WorkMessage, data: bytes, error: MeshError, stage: str, process: str
) -> None:
    """Store a dead letter; parts over the limits above, or the broker's, are cut.

    Raises:
        BusUnavailable: not stored; the message must stay where it is.
    """
    headers = list(message.headers.items())[:_MAX_HEADERS]
    letter = DeadLetter(
        subject=message.subject,
        reason=error.message,
        code=error.code,
        payload=data[: min(_MAX_PAYLOAD, bus.max_payload // 2)],
        headers={name: value[:_MAX_HEADER_CHARS] for name, value in headers},
        stage=stage,
        process=process,
        unix_ms=bus.now_unix_ms(),
        payload_bytes=len(data),
    )
    await bus.publish_stored(
        subjects.DEAD, encode(letter), msg_id=f"dead.{message.subject}.{message.stream_seq}"
    )


async def known_request(
    chain: ClaimChain, headers: Mapping[str, str], data: bytes
) -> KnownRequest | None:
    """The request behind an undecodable message, by its header or the words that even a wrong
    admission message may carry; its reader, by its record, those words or the default. None when
    nobody can be told."""
    words = words_of(data)
    request_id = headers.get(REQUEST) or words.request_id
    if not isinstance(request_id, str):
        return None
    try:
        found = await chain.record(subjects.check_request_id(request_id))
    except SchemaError:
        return None
    if found is not None:
        return KnownRequest(request_id, found[1].reader)
    try:
        return KnownRequest(request_id, subjects.check_reader(str(words.reader)))
    except SchemaError:
        return KnownRequest(request_id, subjects.default_reader(request_id))


class Words(msgspec.Struct):
    """What may be read of a message that is wrong elsewhere, whatever it is."""

    request_id: Any = None
    reader: Any = None


def words_of(data: bytes) -> Words:
    """The names in a message of ours, or in what was meant to be one."""
    decode = msgspec.json.decode if is_json(data) else msgspec.msgpack.decode
    try:
        return decode(data, type=Words)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Words()

"""Messages that no stage could use: kept whole, and their clients told where they are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from infra.bus import Bus, WorkMessage
from pipeline.claim_chain import ClaimChain
from schemas import subjects
from schemas.codec import encode
from schemas.control import DeadLetter
from schemas.errors import MeshError, SchemaError
from schemas.headers import REQUEST

_MAX_PAYLOAD = 512 * 1024  # of a dead letter; what is longer is cut


class KnownRequest(NamedTuple):
    """Whom to tell about a message that can't be decoded."""

    request_id: str
    reader: str


async def bury(
    bus: Bus, message: WorkMessage, data: bytes, error: MeshError, stage: str, process: str
) -> None:
    """Store a dead letter.

    Raises:
        BusUnavailable: not stored; the message must stay where it is.
    """
    letter = DeadLetter(
        subject=message.subject,
        reason=error.message,
        code=error.code,
        payload=data[:_MAX_PAYLOAD],
        headers=dict(message.headers),
        stage=stage,
        process=process,
        unix_ms=bus.now_unix_ms(),
    )
    await bus.publish_stored(
        subjects.DEAD, encode(letter), msg_id=f"dead.{message.subject}.{message.stream_seq}"
    )


async def known_request(
    chain: ClaimChain, headers: Mapping[str, str], data: bytes
) -> KnownRequest | None:
    """The request behind an undecodable message: by its header and record, or by the two words
    that even a wrong admission message may carry. None when nobody can be told."""
    request_id = headers.get(REQUEST)
    try:
        if request_id is not None:
            found = await chain.record(subjects.check_request_id(request_id))
            if found is not None:
                return KnownRequest(request_id, found[1].reader)
        return _sniff(data, request_id)
    except SchemaError:
        return None


def _sniff(data: bytes, request_id: str | None) -> KnownRequest | None:
    decoder = msgspec.json if data.lstrip()[:1] == b"{" else msgspec.msgpack
    try:
        found = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(found, dict):
        return None
    request_id = request_id or found.get("request_id")
    if not isinstance(request_id, str):
        return None
    reader = found.get("reader")
    subjects.check_request_id(request_id)
    if not isinstance(reader, str):
        reader = subjects.default_reader(request_id)
    return KnownRequest(request_id, subjects.check_reader(reader))

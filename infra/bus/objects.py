"""Payloads too large for a message: they go to the object store, and the message names them.

The store is a NATS object store (any client of one can read it): the chunks of an object on one
subject, then its description, with which the object begins to exist. The bucket forgets objects
after ``token_stream_age_s``, longer than any request may take.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets

import msgspec

from infra.bus.connection import Bus
from infra.bus.errors import ObjectMissing
from infra.bus.message import Stored
from infra.bus.names import OBJECTS, OBJECTS_BUCKET
from infra.bus.pull import WorkMessage
from infra.bus.replay import replay
from schemas.errors import PayloadTooLarge
from schemas.headers import OBJECT, WorkHeaders

MAX_OBJECT_BYTES = 64 << 20
_CHUNK_BYTES = 1_000_000  # 2 MB go out in 5 ms with these, in 9 ms with chunks of 128 KiB
_HEADER_ROOM = 1024
_ROLLUP = {"Nats-Rollup": "sub"}


class ObjectBox:
    """The object store ``mesh_objects``, by names that can't be guessed."""

    def __init__(self, bus: Bus, *, max_bytes: int = MAX_OBJECT_BYTES) -> None:
        self._bus = bus
        self._max_bytes = max_bytes

    async def put(self, data: bytes) -> str:
        """Store ``data``; its name.

        Raises:
            PayloadTooLarge: over ``max_bytes``; nothing was stored.
            QueueFull: the store is full.
            BusUnavailable: not stored.
        """
        if len(data) > self._max_bytes:
            raise PayloadTooLarge(
                f"{len(data)} bytes, and the object store takes {self._max_bytes}"
            )
        name = secrets.token_hex(16)
        size = min(_CHUNK_BYTES, self._bus.max_payload - _HEADER_ROOM)
        chunks = [data[start : start + size] for start in range(0, len(data), size)]
        for number, chunk in enumerate(chunks):
            await self._bus.publish_stored(_chunks(name), chunk, msg_id=f"{name}-{number}")
        description = {
            "name": name,
            "bucket": OBJECTS_BUCKET,
            "nuid": name,
            "size": len(data),
            "chunks": len(chunks),
            "digest": f"SHA-256={_digest(data)}",
            "options": {"max_chunk_size": size},
        }
        await self._bus.publish_stored(
            _description(name), json.dumps(description).encode(), _ROLLUP, msg_id=name
        )
        return name

    async def get(self, name: str) -> bytes:
        """The bytes of ``name``, checked against their digest.

        Raises:
            ObjectMissing: no such object any more, or parts of it are gone.
            PayloadTooLarge: over ``max_bytes``; nothing was read.
            BusUnavailable: not read.
        """
        described = await self._bus.last_message(OBJECTS, _description(name))
        if described is None:
            raise ObjectMissing(f"object {name} is not in the store")
        nuid, size, digest = _described(name, described.data)
        if size > self._max_bytes:
            raise PayloadTooLarge(f"object {name} has {size} bytes, over {self._max_bytes}")
        parts = [message.data async for message in replay(self._bus, OBJECTS, _chunks(nuid))]
        data = b"".join(parts)
        if digest != f"SHA-256={_digest(data)}":
            raise ObjectMissing(f"object {name} has lost parts: {len(data)} bytes are left")
        return data


async def publish_work(
    bus: Bus, subject: str, payload: bytes, headers: WorkHeaders, msg_id: str
) -> Stored:
    """Publish a work message and return when it is stored; a large payload goes by the object box.

    Raises:
        PayloadTooLarge: too large even for the object store; nothing was published.
        QueueFull, BusUnavailable, BusForbidden: as :meth:`Bus.publish_stored`.
    """
    try:
        return await bus.publish_stored(subject, payload, headers.to_dict(msg_id), msg_id=msg_id)
    except PayloadTooLarge:
        name = await ObjectBox(bus).put(payload)
    headers = msgspec.structs.replace(headers, object_name=name)
    return await bus.publish_stored(subject, b"", headers.to_dict(msg_id), msg_id=msg_id)


async def load_payload(bus: Bus, message: WorkMessage) -> bytes:
    """The payload of a work message, wherever it lies.

    Raises:
        ObjectMissing, PayloadTooLarge, BusUnavailable: as :meth:`ObjectBox.get`.
    """
    name = message.headers.get(OBJECT)
    return message.data if name is None else await ObjectBox(bus).get(name)


def _described(name: str, data: bytes) -> tuple[str, int, str]:
    """Where the chunks of an object lie, their size and digest; any client may have put it."""
    try:
        found = json.loads(data)
        nuid, size, digest = str(found["nuid"]), int(found["size"]), str(found["digest"])
    except (ValueError, TypeError, KeyError) as error:
        raise ObjectMissing(f"object {name} has no usable description") from error
    if not nuid.isalnum():
        raise ObjectMissing(f"object {name} has no usable description")
    return nuid, size, digest


def _chunks(nuid: str) -> str:
    return f"$O.{OBJECTS_BUCKET}.C.{nuid}"


def _description(name: str) -> str:
    return f"$O.{OBJECTS_BUCKET}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()

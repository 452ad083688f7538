"""Looking at what lies in the work queue, without taking anything from it.

A second consumer may not read what another one reads of a work queue; single messages can be
asked for by sequence. Half a millisecond each: for looks that are rare.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

from infra.bus.connection import Bus
from infra.bus.errors import BrokerRefused
from infra.bus.message import StoredMessage, parse_time_ms
from infra.bus.names import WORK

_NO_MESSAGE = 10037
_NOT_DELETED = 10057


async def peek(bus: Bus, subject_filter: str) -> AsyncIterator[StoredMessage]:
    """Every message of ``subject_filter`` in the work queue, oldest first, delivered ones too.

    Raises:
        BusUnavailable, BusForbidden, BrokerRefused: as :meth:`Bus.api`.
    """
    seq = 0
    while True:
        wanted = {"seq": seq + 1, "next_by_subj": subject_filter}
        try:
            answer = await bus.api(f"STREAM.MSG.GET.{WORK}", wanted)
        except BrokerRefused as error:
            if error.err_code == _NO_MESSAGE:
                return
            raise
        message = _stored(answer["message"])
        seq = message.seq
        yield message


async def drop(bus: Bus, seq: int) -> bool:
    """Delete one message of the work queue; False when it is there no more.

    Raises:
        BusUnavailable, BusForbidden, BrokerRefused: as :meth:`Bus.api`.
    """
    try:
        await bus.api(f"STREAM.MSG.DELETE.{WORK}", {"seq": seq, "no_erase": True})
    except BrokerRefused as error:
        if error.err_code == _NOT_DELETED:
            return False
        raise
    return True


def _stored(found: dict[str, Any]) -> StoredMessage:
    return StoredMessage(
        seq=int(found["seq"]),
        subject=found["subject"],
        data=base64.b64decode(found.get("data", "")),
        headers=_headers(base64.b64decode(found.get("hdrs", "")).decode(errors="replace")),
        unix_ms=parse_time_ms(found["time"]),
    )


def _headers(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.split("\r\n")[1:])
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}

"""A message as a stream keeps it, and the words in its acknowledgement subject."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from infra.bus.wire import Msg

NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """One message of a stream; ``seq`` is its place in the stream's order."""

    seq: int
    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    unix_ms: int = 0  # when it was stored, broker time


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The broker's word that a message is in a stream.

    ``duplicate``: it was there already, at ``seq``, under the same message id.
    """

    seq: int
    duplicate: bool = False


class Delivery(NamedTuple):
    """What the reply subject of a delivered message says:

    $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>
    $JS.ACK.<domain>.<account>.<stream>.<consumer>.… and one more token, on newer brokers
    """

    num_delivered: int
    stream_seq: int
    consumer_seq: int
    unix_ms: int
    num_pending: int

    @classmethod
    def of(cls, reply: str) -> Delivery:
        """Parse; ``reply`` is that of a message which a consumer delivered."""
        tokens = reply.split(".")
        first = 4 if len(tokens) == 9 else 6
        delivered, stream_seq, consumer_seq, ns, pending = map(int, tokens[first : first + 5])
        return cls(delivered, stream_seq, consumer_seq, ns // 1_000_000, pending)


def from_delivery(message: Msg) -> StoredMessage:
    """A message that a consumer delivered, as the stream has it."""
    delivery = Delivery.of(message.reply)
    return StoredMessage(
        seq=delivery.stream_seq,
        subject=message.subject,
        data=message.data,
        headers=message.headers or NO_HEADERS,
        unix_ms=delivery.unix_ms,
    )


def from_direct_get(message: Msg) -> StoredMessage:
    """The answer to a direct get, as the stream has it."""
    headers = message.headers or {}
    return StoredMessage(
        seq=int(headers["Nats-Sequence"]),
        subject=headers["Nats-Subject"],
        data=message.data,
        headers={k: v for k, v in headers.items() if k not in _DIRECT_GET_HEADERS},
        unix_ms=parse_time_ms(headers["Nats-Time-Stamp"]),
    )


_DIRECT_GET_HEADERS = frozenset(
    ("Nats-Sequence", "Nats-Subject", "Nats-Stream", "Nats-Time-Stamp", "Nats-Last-Sequence")
)


def parse_time_ms(text: str) -> int:
    """An RFC 3339 time with up to nine decimals, in ms since 1970."""
    whole, _, rest = text.removesuffix("Z").partition(".")
    seconds = datetime.fromisoformat(whole + "+00:00").timestamp()
    return int(seconds) * 1000 + int(rest.ljust(3, "0")[:3])

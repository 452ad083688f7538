"""What a stage's handler is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from infra.bus import DirectMessage, WorkMessage
from schemas import subjects
from schemas.codec import Message, decode, tag_of
from schemas.decode import DecodeTask
from schemas.errors import SchemaError
from schemas.headers import REQUEST, SCHEMA, WorkHeaders
from schemas.kv import KvReady
from schemas.prefill import PrefillTask

T = TypeVar("T", bound=Message)
Task = TypeVar("Task", bound=PrefillTask | DecodeTask | KvReady)


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A message to store before the ack.

    ``msg_id`` makes the broker drop a repeat: <request>.<stage>.<epoch>. Work messages carry
    headers (``epoch`` is set); messages to readers carry none.
    """

    subject: str
    message: Message
    msg_id: str
    epoch: int | None = None

    def headers(self, of: WorkHeaders) -> WorkHeaders:
        """Those of a work message which follows on one with the headers ``of``."""
        assert self.epoch is not None, "a message to a reader has none"
        return WorkHeaders(
            schema=tag_of(type(self.message)),
            request_id=of.request_id,
            epoch=self.epoch,
            deadline_unix_ms=of.deadline_unix_ms,
            traceparent=of.traceparent,
        )


class Handled(msgspec.Struct, frozen=True, kw_only=True):
    """The regular end of a message. ``outcome`` is a word for log and metrics.

    ``answer`` is for a message that came directly, and told to who said it after all else is done.

    A message that must wait for something has ``then``: it is called once ``publish`` is stored,
    and what it returns counts instead. Meanwhile the message stays un-acked, so nothing is lost
    with this process, and takes no place from those that are worked on. It may be cancelled: the
    message is given back.
    """

    outcome: str
    publish: tuple[Outgoing, ...] = ()
    answer: Message | None = None
    then: Callable[[], Awaitable[Handled]] | None = None


class Work(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A decoded work message with its checked headers."""

    subject: str
    message: T
    headers: WorkHeaders
    is_direct: bool = False  # said without the queue: nothing has been promised to anybody


Handler = Callable[[Work[T]], Awaitable[Handled]]
Parser = Callable[[WorkMessage, bytes], Work[T]]


def parse_as(kind: type[Task]) -> Parser[Task]:
    """The parser of a work message that carries our headers and one message class."""
    tag = tag_of(kind)

    def parse(message: WorkMessage, data: bytes) -> Work[Task]:
        headers = WorkHeaders.from_dict(message.headers)
        if headers.schema != tag:
            raise SchemaError(f"header says {headers.schema!r}, not {tag!r}", param=SCHEMA)
        task = decode(data, kind)
        if subjects.check_request_id(task.request_id) != headers.request_id:
            raise SchemaError("header and body name two requests", param=REQUEST)
        subjects.check_reader(task.reader)
        is_direct = isinstance(message, DirectMessage)
        return Work(subject=message.subject, message=task, headers=headers, is_direct=is_direct)

    return parse

"""Headers of a work message: what a stage must know before it decodes the payload."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from schemas.errors import SchemaError

SCHEMA = "Mesh-Schema"
REQUEST = "Mesh-Request"
EPOCH = "Mesh-Epoch"
DEADLINE = "Mesh-Deadline"
ATTEMPT = "Mesh-Attempt"
OBJECT = "Mesh-Object"
TRACEPARENT = "traceparent"
MSG_ID = "Nats-Msg-Id"


class WorkHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """The headers of one work message, checked.

    ``object_name`` is set when the payload lies in the object store and the message is empty.
    """

    schema: str
    request_id: str
    epoch: int
    deadline_unix_ms: int
    attempt: int = 1
    traceparent: str = ""
    object_name: str = ""

    def to_dict(self, msg_id: str | None = None) -> dict[str, str]:
        """As NATS headers; ``msg_id`` makes the broker drop a repeat."""
        headers = {
            SCHEMA: self.schema,
            REQUEST: self.request_id,
            EPOCH: str(self.epoch),
            DEADLINE: str(self.deadline_unix_ms),
        }
        if self.attempt != 1:
            headers[ATTEMPT] = str(self.attempt)
        if self.traceparent:
            headers[TRACEPARENT] = self.traceparent
        if self.object_name:
            headers[OBJECT] = self.object_name
        if msg_id:
            headers[MSG_ID] = msg_id
        return headers

    @classmethod
    def from_dict(cls, headers: Mapping[str, str] | None) -> WorkHeaders:
        """Parse; a missing required header or a word that is no number is a SchemaError."""
        headers = headers or {}
        return cls(
            schema=_text(headers, SCHEMA),
            request_id=_text(headers, REQUEST),
            epoch=_number(headers, EPOCH),
            deadline_unix_ms=_number(headers, DEADLINE),
            attempt=_number(headers, ATTEMPT, default="1"),
            traceparent=headers.get(TRACEPARENT, ""),
            object_name=headers.get(OBJECT, ""),
        )


def _text(headers: Mapping[str, str], name: str) -> str:
    try:
        return headers[name]
    except KeyError:
        raise SchemaError(f"header {name} is missing", param=name) from None


def _number(headers: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = headers.get(name, default) if default is not None else _text(headers, name)
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise SchemaError(f"header {name} is no number: {text!r}", param=name)
    return int(text)

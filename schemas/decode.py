"""What a decode worker receives."""

from __future__ import annotations

from schemas.codec import Message
from schemas.kv import KvReady


class DecodeTask(Message, frozen=True, kw_only=True, tag="decode-task/1"):
    """Pull the blocks of ``ready.handle``, claim ``epoch`` after ``after_seq``, go on decoding."""

    request_id: str
    epoch: int
    after_seq: int
    reader: str
    ready: KvReady

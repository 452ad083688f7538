"""What a prefill worker receives."""

from __future__ import annotations

from schemas.codec import Message
from schemas.kv import KvSource
from schemas.requests import RequestRecord


class PrefillTask(Message, frozen=True, kw_only=True, tag="prefill-task/1"):
    """Compute the KV of the prompt (and of tokens that exist already), publish the next token.

    Whoever takes it claims ``epoch`` on top of the chain entry at ``after_seq`` (0: an empty
    chain). Any other state of the chain means that the task is out of date.
    """

    request_id: str
    epoch: int
    after_seq: int
    reader: str
    record: RequestRecord | None = None  # None: read it at mesh.v1.request.<id>
    kv_sources: tuple[KvSource, ...] = ()  # who has how much of the prompt's KV, most first
    overtakes: bool = False  # goes before prompts of others that wait in the worker
    is_recorded: bool = True  # False: ``record`` is not stored; whoever claims stores it before

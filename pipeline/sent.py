"""Tasks that were placed and that no beat has told of. Pure.

    named     lies at one worker: counts in that worker's row of the pool's table
    shared    lies in the pool's shared queue: whoever has room first will have it

A task leaves the account when its request ended, was placed elsewhere, or a beat tells of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from pipeline.pool_table import PoolTable


class Sent(msgspec.Struct, kw_only=True):
    """A request that is on its way to a worker, or there since its last beat."""

    served: str
    role: str
    sent_s: float
    num_tokens: int  # of its prompt
    prefill_ms: float = 0.0
    claimed_s: float | None = None

    def is_told(self, load_s: float) -> bool:
        """Whether a load that was measured at ``load_s`` counts it."""
        return self.claimed_s is not None and self.claimed_s <= load_s


@dataclass(slots=True)
class SharedLine:
    """Decodes in a pool's shared queue; ``num_tokens`` of all together."""

    sent: dict[str, Sent] = field(default_factory=dict)  # by request
    num_tokens: int = 0

    def __len__(self) -> int:
        return len(self.sent)

    @property
    def oldest(self) -> str:
        """Who is here longest; there is somebody."""
        return next(iter(self.sent))

    @property
    def oldest_s(self) -> float:
        """When that one was sent; infinite when nobody is here."""
        return self.sent[self.oldest].sent_s if self.sent else math.inf

    def add(self, request_id: str, sent: Sent) -> None:
        """One more; a repeat is none."""
        if request_id not in self.sent:
            self.sent[request_id] = sent
            self.num_tokens += sent.num_tokens

    def remove(self, request_id: str) -> None:
        """Some worker has it, or it ended; who is not here is nothing."""
        sent = self.sent.pop(request_id, None)
        if sent is not None:
            self.num_tokens -= sent.num_tokens

    def check_invariants(self) -> None:
        """Raise AssertionError when a sum is not that of its tasks."""
        assert self.num_tokens == sum(one.num_tokens for one in self.sent.values())


def count(table: PoolTable, row: int, sent: Sent, now_s: float) -> None:
    """Put one that no beat has told of into its worker's row."""
    table.add("since", row, 1)
    if sent.claimed_s is None or sent.claimed_s > table.heard_s(row):
        table.add("slots", row, -1)
    if sent.role == "prefill":
        table.add("since_prompts", row, sent.num_tokens)
        table.set("wait_ms", row, table.wait_ms(row, now_s) + sent.prefill_ms)
        table.set("wait_s", row, now_s)
    else:
        _count_decode(table, row, sent, 1)


def discount(table: PoolTable, row: int, sent: Sent, now_s: float) -> None:
    """Take one out of its worker's row again that nobody has claimed."""
    table.add("since", row, -1)
    table.add("slots", row, 1)
    if sent.role == "prefill":
        table.add("since_prompts", row, -sent.num_tokens)
        table.set("wait_ms", row, max(0.0, table.wait_ms(row, now_s) - sent.prefill_ms))
        table.set("wait_s", row, now_s)
    else:
        _count_decode(table, row, sent, -1)


def _count_decode(table: PoolTable, row: int, sent: Sent, num: int) -> None:
    table.add("num_since", row, num)
    table.add("since_tokens", row, num * sent.num_tokens)
    table.add("free_tokens", row, -num * sent.num_tokens)

"""Asking other workers for blocks: the reader's side of ``mesh.v1.kv-lend``.

ask       -> a handle on the first of the blocks that were asked for, or none
renew     while the blocks are still being read
release   when they were read, or could not be used
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from infra.bus import Bus
from infra.log import Logger
from schemas import subjects
from schemas.codec import decode, encode
from schemas.errors import BusUnavailable, KvLost, PayloadTooLarge, SchemaError
from schemas.kv import KvHandle, KvLend, KvLent, LeaseRelease, LeaseRenew
from workers.kv.api import BlockName

MAX_BLOCKS = 8192  # of one question: 128 KiB of hashes, and as much again in the answer


class Lenders(Protocol):
    """Other workers, asked by name."""

    async def ask(self, owner: str, blocks: Sequence[BlockName], timeout_s: float) -> KvLent:
        """What ``owner`` lends of ``blocks``.

        Raises:
            KvLost: no answer within ``timeout_s``, or one that is none.
        """

    async def renew(self, handle: KvHandle) -> None:
        """Ask the owner to let the lease stand longer. What is not heard shows in the blocks."""

    async def release(self, handle: KvHandle, *, ok: bool) -> None:
        """Give a lease back. What is not heard expires."""


class BusLenders:
    """Asks over the bus, in the name of one worker id."""

    def __init__(self, bus: Bus, worker: str, fingerprint: str, log: Logger) -> None:
        self._bus = bus
        self._worker = worker
        self._fingerprint = fingerprint
        self._log = log

    async def ask(self, owner: str, blocks: Sequence[BlockName], timeout_s: float) -> KvLent:
        """See :class:`Lenders`."""
        asked = blocks[:MAX_BLOCKS]
        question = KvLend(
            reader=self._worker,
            fingerprint=self._fingerprint,
            parent=asked[0].parent,
            hashes=b"".join(block.block_hash for block in asked),
            deadline_unix_ms=self._bus.now_unix_ms() + int(timeout_s * 1000),
        )
        try:
            subject = subjects.kv_lend(owner)
            answer = await self._bus.request(subject, encode(question), timeout_s=timeout_s)
            lent = decode(answer.data, KvLent)
        except (BusUnavailable, PayloadTooLarge, SchemaError) as error:
            raise KvLost(f"{owner} lends nothing: {error.message}") from error
        if lent.handle is not None and not 0 < lent.num_blocks <= len(asked):
            raise KvLost(f"{owner} lends {lent.num_blocks} blocks of {len(asked)}")
        return lent

    async def renew(self, handle: KvHandle) -> None:
        """See :class:`Lenders`."""
        await self._tell(handle, LeaseRenew(lease_id=handle.lease_id, secret=handle.secret))

    async def release(self, handle: KvHandle, *, ok: bool) -> None:
        """See :class:`Lenders`."""
        release = LeaseRelease(lease_id=handle.lease_id, secret=handle.secret, ok=ok)
        await self._tell(handle, release)

    async def _tell(self, handle: KvHandle, message: LeaseRelease | LeaseRenew) -> None:
        try:
            await self._bus.publish(subjects.lease(handle.owner), encode(message))
        except BusUnavailable:
            self._log.info("lease_left_to_expire", lease_id=handle.lease_id)

"""Claiming requests, and giving claimed ones back.

What a worker claimed it owes: the request ends under its hands, or is given back as a prefill
task of the next epoch. A worker that dies in between is found by the router.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from infra.bus import TOKENS, Bus, replay
from infra.log import Logger
from pipeline.claim_chain import ClaimChain
from pipeline.ownership import RequestView
from pipeline.takeover import publish_prefill
from schemas import subjects
from schemas.codec import unpack_ids
from schemas.errors import BusUnavailable, MeshError, Poisoned
from schemas.kv import KvHandle
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from schemas.tokens import Claim, StreamError, TokenBatch, decode_chain_entry, decode_stream_message

POISON_EPOCHS = 3  # so many epochs in a row without a token, and nobody tries again
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A request that this worker owns under ``epoch``.

    ``tokens`` and ``finished`` are what its stream held when it was claimed, per choice.
    """

    record: RequestRecord
    epoch: int
    seq: int  # of the claim
    role: str
    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[str, ...]
    traceparent: str = ""

    @property
    def key(self) -> str:
        """Its name in the engine."""
        return f"{self.record.request_id}.{self.epoch}"

    @property
    def reader(self) -> str:
        """Where its tokens go."""
        return self.record.reader

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(unpack_ids(self.record.prompt_ids))


class Claims:
    """Claims in the name of one worker id."""

    def __init__(self, bus: Bus, chain: ClaimChain, worker: str, log: Logger) -> None:
        self.chain = chain
        self.worker = worker
        self._bus = bus
        self._log = log

    async def claim(self, record: RequestRecord, epoch: int, after_seq: int, role: str) -> int:
        """Append our claim.

        Returns:
            Its sequence, or 0 when the chain has gone on: the task is out of date.
        """
        claim = Claim(
            request_id=record.request_id,
            epoch=epoch,
            worker=self.worker,
            role=role,
            served=record.served,
            deadline_unix_ms=record.deadline_unix_ms,
        )
        return await self.chain.append(record.reader, claim, after_seq) or 0

    async def view(self, record: RequestRecord, until_seq: int) -> RequestView:
        """The request as its stream tells it up to, and with, our claim at ``until_seq``."""
        view = RequestView(record.request_id)
        found = await self.chain.record(record.request_id)
        filters = [
            subjects.token_stream(record.reader),
            subjects.chain(record.reader, record.request_id),
        ]
        stored = replay(
            self._bus,
            TOKENS,
            filters,
            start_seq=found[0] if found else 1,
            until_seq=until_seq + 1,
        )
        async with contextlib.aclosing(stored) as messages:
            async for message in messages:
                if message.subject == filters[1]:
                    view.apply_entry(message.seq, decode_chain_entry(message.data))
                    continue
                batch = decode_stream_message(message.data)
                for delta in batch.deltas if isinstance(batch, TokenBatch) else ():
                    if delta.request_id == record.request_id:
                        view.apply_delta(delta)
        return view

    def check_poison(self, view: RequestView) -> None:
        """Raise Poisoned when the request has cost several workers their epoch for nothing."""
        if view.epochs_without_token >= POISON_EPOCHS:
            raise Poisoned(f"{view.epochs_without_token} epochs in a row brought no token")

    async def still_ours(self, claimed: Claimed) -> bool:
        """Whether our claim is the chain's last entry."""
        tip = await self.chain.tip(claimed.reader, claimed.record.request_id)
        return tip.seq == claimed.seq

    async def give_back(self, claimed: Claimed, reason: str) -> None:
        """Place a claimed request again, through outages, until its deadline."""
        task = PrefillTask(
            request_id=claimed.record.request_id,
            epoch=claimed.epoch + 1,
            after_seq=claimed.seq,
            reader=claimed.reader,
        )
        deadline = claimed.record.deadline_unix_ms
        while self._bus.now_unix_ms() < deadline:
            try:
                await publish_prefill(
                    self._bus, served=claimed.record.served, task=task, deadline_unix_ms=deadline
                )
            except BusUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            self._log.warning(
                "request_given_back",
                request_id=claimed.record.request_id,
                epoch=claimed.epoch,
                reason=reason,
            )
            return

    async def fail(self, claimed: Claimed, error: MeshError) -> None:
        """End a claimed request with an error, through outages, until its deadline."""
        entry = StreamError(
            request_id=claimed.record.request_id, epoch=claimed.epoch, error=error.info
        )
        while self._bus.now_unix_ms() < claimed.record.deadline_unix_ms:
            try:
                await self.chain.append(claimed.reader, entry, claimed.seq)
            except BusUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            return


def lease_subject(handle: KvHandle) -> str:
    """Where a handle's owner hears of its release."""
    return subjects.lease(handle.owner)

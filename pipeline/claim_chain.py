"""The claim chain of a request on the bus: append by compare-and-set, read its last entry.

The chain lies at ``mesh.v1.token-stream.<reader>.claim.<id>``; what its entries mean is decided
in ``pipeline/ownership.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.bus import Bus, WrongLastSequence
from infra.bus.names import TOKENS
from schemas import subjects
from schemas.codec import decode, encode
from schemas.requests import RequestRecord
from schemas.tokens import ChainEntry, Claim, decode_chain_entry

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTip:
    """The last entry of a chain; an empty chain has sequence 0 and no entry."""

    seq: int
    entry: ChainEntry | None

    @property
    def has_ended(self) -> bool:
        """Whether the request is over: nobody appends after this entry."""
        return self.entry is not None and not isinstance(self.entry, Claim)


class ClaimChain:
    """Appends to and reads the chains of requests.

    Every call is bounded by the bus's own time-outs and raises BusUnavailable beyond them.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def append(self, reader: str, entry: ChainEntry, after_seq: int) -> int | None:
        """Append ``entry`` when the chain's last entry is the one at ``after_seq``.

        Returns:
            The sequence of the new entry, or None when somebody else was first.
        """
        try:
            stored = await self._bus.publish_stored(
                subjects.chain(reader, entry.request_id),
                encode(entry),
                expect_last_subject_seq=after_seq,
            )
        except WrongLastSequence:
            return await self._own_lost_ack(reader, entry, after_seq)
        return stored.seq

    async def tip(self, reader: str, request_id: str) -> ChainTip:
        """The chain's last entry now."""
        last = await self._bus.last_message(TOKENS, subjects.chain(reader, request_id))
        if last is None:
            return ChainTip(seq=0, entry=None)
        return ChainTip(seq=last.seq, entry=decode_chain_entry(last.data))

    async def end(self, reader: str, entry: ChainEntry) -> ChainTip:
        """Append the terminal ``entry`` on top of whatever the chain holds, unless it has ended.

        Returns:
            The tip afterwards: ``entry`` itself, or the terminal entry that was there first.
        """
        for _ in range(_ATTEMPTS):
            tip = await self.tip(reader, entry.request_id)
            if tip.has_ended:
                return tip
            seq = await self.append(reader, entry, tip.seq)
            if seq is not None:
                return ChainTip(seq=seq, entry=entry)
        return await self.tip(reader, entry.request_id)

    async def record(self, request_id: str) -> tuple[int, RequestRecord] | None:
        """The admitted request and its stream sequence, while the stream still has it."""
        last = await self._bus.last_message(TOKENS, subjects.request_record(request_id))
        return None if last is None else (last.seq, decode(last.data, RequestRecord))

    async def _own_lost_ack(self, reader: str, entry: ChainEntry, after_seq: int) -> int | None:
        """An append whose answer was lost looks like a conflict when it is tried again."""
        tip = await self.tip(reader, entry.request_id)
        return tip.seq if tip.seq > after_seq and tip.entry == entry else None

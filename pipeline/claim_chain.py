"""The claim chain of a request on the bus: append by compare-and-set, read its last entry.

The chain lies at ``mesh.v1.token-stream.<reader>.claim.<id>``; what its entries mean is decided
in ``pipeline/ownership.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infra.bus import Bus, WrongLastSequence
from infra.bus.names import TOKENS
from schemas import subjects
from schemas.codec import decode, encode
from schemas.errors import BusUnavailable, InvalidRequest, SchemaError
from schemas.requests import RequestRecord
from schemas.tokens import ChainEntry, Claim, decode_chain_entry

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTip:
    """The last entry of a chain; an empty chain has sequence 0 and no entry.

    An entry that can't be read has its sequence only. A client may write to its own chains, and
    harms nobody but itself with it.
    """

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

        BusUnavailable leaves open whether it was stored. Who must know calls again with the same
        entry: one that lies right after ``after_seq`` already counts as this call's.

        Returns:
            The sequence of the new entry, or None when somebody else was first.
        """
        try:
            stored = await self._bus.publish_stored(
                subjects.chain(reader, entry.request_id),
                encode(entry),
                expect_last_subject_seq=after_seq,
            )
        except WrongLastSequence as error:
            return await self._seq_of(reader, entry, after_seq, error)
        return stored.seq

    async def _seq_of(
        self, reader: str, entry: ChainEntry, after_seq: int, error: WrongLastSequence
    ) -> int | None:
        """Where ``entry`` lies if it is what makes it come twice."""
        tip = await self.tip(reader, entry.request_id, at_least_seq=error.last_seq)
        return tip.seq if tip.seq > after_seq and tip.entry == entry else None

    async def open(
        self,
        record: RequestRecord,
        claim: Claim,
        on_written: Callable[[], None] | None = None,
    ) -> tuple[int | None, RequestRecord]:
        """Write a request's record and, right behind it, the first entry of its chain: two calls
        in the time of one. Any repeat is harmless, as of :meth:`append` and :meth:`write_record`.

        Args:
            on_written: told when both are on their way, see :meth:`Bus.when_written`.

        Returns:
            The sequence of the claim, None when somebody else was first; and the record that
            stands, which is not ``record`` if another was written before.

        Raises:
            InvalidRequest: the id is in use, by another reader.
        """
        chain = subjects.chain(record.reader, claim.request_id)
        written, claimed = await self._bus.publish_row(
            (
                (subjects.request_record(record.request_id), encode(record), 0),
                (chain, encode(claim), 0),
            ),
            on_written,
        )
        seq: int | None
        if isinstance(claimed, WrongLastSequence):
            seq = await self._seq_of(record.reader, claim, 0, claimed)
        else:
            seq = claimed.seq
        if isinstance(written, WrongLastSequence):
            record = await self._standing(record, written)
        return seq, record

    async def tip(self, reader: str, request_id: str, *, at_least_seq: int = 0) -> ChainTip:
        """The chain's last entry now, which is known to be ``at_least_seq``."""
        chain = subjects.chain(reader, request_id)
        last = await self._bus.last_message(TOKENS, chain, at_least_seq=at_least_seq)
        if last is None:
            return ChainTip(seq=0, entry=None)
        try:
            return ChainTip(seq=last.seq, entry=decode_chain_entry(last.data))
        except SchemaError:
            return ChainTip(seq=last.seq, entry=None)

    async def end(self, reader: str, entry: ChainEntry) -> ChainTip:
        """Append the terminal ``entry`` on top of whatever the chain holds, unless it has ended.

        Returns:
            The tip afterwards: ``entry`` itself, or the terminal entry that was there first.

        Raises:
            BusUnavailable: not known to be ended; the same call again is harmless.
        """
        for _ in range(_ATTEMPTS):
            tip = await self.tip(reader, entry.request_id)
            if tip.has_ended:
                return tip
            seq = await self.append(reader, entry, tip.seq)
            if seq is not None:
                return ChainTip(seq=seq, entry=entry)
        raise BusUnavailable(f"the chain of {entry.request_id} grows faster than it can be ended")

    async def write_record(self, record: RequestRecord) -> RequestRecord:
        """Write an admitted request, once.

        Returns:
            The record that stands: ``record``, or another that was written before.

        Raises:
            InvalidRequest: the id is in use, by another reader.
        """
        try:
            await self._bus.publish_stored(
                subjects.request_record(record.request_id),
                encode(record),
                expect_last_subject_seq=0,
            )
        except WrongLastSequence as error:
            return await self._standing(record, error)
        return record

    async def _standing(self, record: RequestRecord, error: WrongLastSequence) -> RequestRecord:
        found = await self.record(record.request_id, at_least_seq=error.last_seq)
        if found is None or found[1].reader != record.reader:
            raise InvalidRequest("this request id is in use", param="request_id")
        return record if found[1] == record else found[1]

    async def record(
        self, request_id: str, *, at_least_seq: int = 0
    ) -> tuple[int, RequestRecord] | None:
        """The admitted request and its stream sequence, while the stream still has it."""
        subject = subjects.request_record(request_id)
        last = await self._bus.last_message(TOKENS, subject, at_least_seq=at_least_seq)
        return None if last is None else (last.seq, decode(last.data, RequestRecord))

"""Asking an owner: whatever it answers, or does not, is a loan or KvLost."""

from __future__ import annotations

import pytest
import structlog

from schemas.codec import decode, encode
from schemas.errors import BusUnavailable, KvLost
from schemas.kv import KvLend, KvLent, LeaseRelease, LeaseRenew
from tests.workers.kv.fakes import FakeLenders, FakeTier, chain_of
from workers.kv.borrowing import MAX_BLOCKS, BusLenders

BLOCKS = chain_of(5)


class Bus:
    """Gives one answer, and keeps what was said."""

    def __init__(self, answer: bytes | Exception = b"") -> None:
        self.given = answer
        self.asked: list[KvLend] = []
        self.said: list[tuple[str, bytes]] = []

    def now_unix_ms(self) -> int:
        return 1000

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Bus:
        assert subject == "mesh.v1.kv-lend.owner"
        self.asked.append(decode(data, KvLend))
        if isinstance(self.given, Exception):
            raise self.given
        return self

    @property
    def data(self) -> bytes:
        assert isinstance(self.given, bytes)
        return self.given

    async def publish(self, subject: str, data: bytes) -> None:
        if isinstance(self.given, Exception):
            raise self.given
        self.said.append((subject, data))


def lenders_on(bus: Bus) -> BusLenders:
    return BusLenders(bus, "reader", "layout", structlog.get_logger("test"))  # type: ignore[arg-type]


async def loan() -> KvLent:
    tier = FakeTier()
    tier.put(BLOCKS)
    lent = await FakeLenders({"owner": tier}).ask("owner", BLOCKS, 1.0)
    tier.memory.close()
    return lent


async def test_a_question_names_the_blocks_and_what_is_before_them() -> None:
    """So that the owner may look for them on its disk; and until when an answer is of use."""
    bus = Bus(encode(KvLent(num_blocks=0, reason="absent")))
    lent = await lenders_on(bus).ask("owner", BLOCKS[1:], 0.5)
    assert lent == KvLent(num_blocks=0, reason="absent")
    (asked,) = bus.asked
    assert asked.parent == BLOCKS[0].block_hash
    assert asked.hashes == b"".join(block.block_hash for block in BLOCKS[1:])
    assert (asked.reader, asked.fingerprint, asked.deadline_unix_ms) == ("reader", "layout", 1500)


@pytest.mark.parametrize(
    "answer", [BusUnavailable("away"), b"", b"\xc1", encode(KvLent(num_blocks=2))[:-3]]
)
async def test_no_answer_and_no_message_are_lost(answer: bytes | Exception) -> None:
    """Nobody listens, the bus is away, or the words mean nothing."""
    with pytest.raises(KvLost):
        await lenders_on(Bus(answer)).ask("owner", BLOCKS, 0.5)


@pytest.mark.parametrize("num_blocks", [0, -1, 6])
async def test_more_than_was_asked_for_is_no_loan(num_blocks: int) -> None:
    """Nor is less than one block."""
    lent = await loan()
    answer = encode(KvLent(num_blocks=num_blocks, handle=lent.handle))
    with pytest.raises(KvLost):
        await lenders_on(Bus(answer)).ask("owner", BLOCKS, 0.5)


async def test_a_question_is_bounded() -> None:
    """A prompt of any length makes a message that the bus takes."""
    bus = Bus(encode(KvLent(num_blocks=0, reason="absent")))
    await lenders_on(bus).ask("owner", BLOCKS * MAX_BLOCKS, 0.5)
    assert len(bus.asked[0].hashes) == 16 * MAX_BLOCKS


async def test_the_owner_hears_that_a_lease_is_used_and_when_it_is_not() -> None:
    """On the subject of its leases; a bus that is away is no error of the reader's."""
    handle = (await loan()).handle
    assert handle is not None
    bus = Bus()
    await lenders_on(bus).renew(handle)
    await lenders_on(bus).release(handle, ok=False)
    assert [subject for subject, _ in bus.said] == ["mesh.v1.lease.owner"] * 2
    assert decode(bus.said[0][1], LeaseRenew).lease_id == handle.lease_id
    assert not decode(bus.said[1][1], LeaseRelease).ok
    await lenders_on(Bus(BusUnavailable("away"))).release(handle, ok=True)

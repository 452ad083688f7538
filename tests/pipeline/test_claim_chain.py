from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from infra.bus import Bus, EmbeddedBroker
from pipeline.claim_chain import ClaimChain
from schemas import subjects
from schemas.codec import encode
from schemas.errors import BusUnavailable, InvalidRequest, SchemaError
from schemas.tokens import Cancelled, Expired
from tests.conftest import Connect, Until
from tests.pipeline.rig import READER, claim, new_id, record, store


@pytest.fixture
def chain(bus: Bus) -> ClaimChain:
    return ClaimChain(bus)


async def test_only_one_claim_follows_an_entry(chain: ClaimChain) -> None:
    """Of many that build upon the same entry one is stored; the others learn of it."""
    request_id = new_id()
    claims = [claim(request_id, f"w{n}") for n in range(8)]
    seqs = await asyncio.gather(*(chain.append(READER, one, 0) for one in claims))
    (winner,) = [n for n, seq in enumerate(seqs) if seq is not None]
    tip = await chain.tip(READER, request_id)
    assert (tip.seq, tip.entry, tip.has_ended) == (seqs[winner], claims[winner], False)
    assert await chain.append(READER, claim(request_id, "late", epoch=2), 0) is None
    assert await chain.append(READER, claim(request_id, "next", epoch=2), tip.seq) is not None


async def test_an_empty_chain_has_no_tip(chain: ClaimChain) -> None:
    """Sequence 0: what the first claim builds upon."""
    tip = await chain.tip(READER, new_id())
    assert (tip.seq, tip.entry, tip.has_ended) == (0, None, False)


async def test_an_append_of_unknown_fate_may_be_made_again(chain: ClaimChain) -> None:
    """The answer was lost, the entry wasn't: the same append finds it, and another's does not."""
    request_id = new_id()
    mine = claim(request_id, "w1")
    seq = await chain.append(READER, mine, 0)
    assert await chain.append(READER, mine, 0) == seq
    assert await chain.append(READER, claim(request_id, "w2"), 0) is None


async def test_a_request_ends_once(chain: ClaimChain) -> None:
    """Ends race; the first stands, and everybody is told which it was."""
    request_id = new_id()
    await chain.append(READER, claim(request_id, "w1"), 0)
    ends = [Cancelled(request_id=request_id, reason=str(n)) for n in range(4)]
    tips = await asyncio.gather(*(chain.end(READER, one) for one in ends))
    assert len({tip.seq for tip in tips}) == 1
    assert len({encode(tip.entry) for tip in tips if tip.entry}) == 1
    assert all(tip.has_ended for tip in tips)
    assert await chain.end(READER, Expired(request_id=request_id)) == tips[0]


async def test_a_request_ends_whoever_claims_it_meanwhile(chain: ClaimChain) -> None:
    """An end that loses against claims is appended on top of them."""
    request_id = new_id()

    async def claim_five_times() -> None:
        seq: int | None = 0
        for epoch in range(1, 6):
            if seq is not None:
                seq = await chain.append(READER, claim(request_id, "w", epoch=epoch), seq)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(claim_five_times())
        ending = tasks.create_task(chain.end(READER, Cancelled(request_id=request_id)))
    assert ending.result().has_ended
    assert await chain.tip(READER, request_id) == ending.result()


async def test_an_end_that_never_wins_says_so(
    chain: ClaimChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain that grows under every attempt is not reported as ended."""
    request_id = new_id()

    async def beaten(*_: object) -> None:
        return None

    monkeypatch.setattr(chain, "append", beaten)
    with pytest.raises(BusUnavailable):
        await chain.end(READER, Cancelled(request_id=request_id))


async def test_an_entry_that_can_not_be_read_counts_for_its_place_only(
    chain: ClaimChain, bus: Bus, connect: Connect
) -> None:
    """A client wrote rubbish on its own chain: the request can still be ended, and is not claimed
    by who did not see the rubbish."""
    request_id = new_id()
    client = await connect("client")
    seq = await chain.append(READER, claim(request_id, "w1"), 0)
    assert seq
    await client.publish_stored(subjects.chain(READER, request_id), b"\xc1 rubbish")
    tip = await chain.tip(READER, request_id)
    assert (tip.seq > seq, tip.entry, tip.has_ended) == (True, None, False)
    assert await chain.append(READER, claim(request_id, "w2", epoch=2), seq) is None
    assert (await chain.end(READER, Expired(request_id=request_id))).has_ended


async def test_records_are_read_by_id(chain: ClaimChain, bus: Bus) -> None:
    """The admitted request and where it lies; None when there is none."""
    written = record(new_id())
    seq = await store(bus, subjects.request_record(written.request_id), written)
    assert await chain.record(written.request_id) == (seq, written)
    assert await chain.record(new_id()) is None
    with pytest.raises(SchemaError):
        await chain.record("no.id")


async def test_a_request_is_written_with_its_first_claim(chain: ClaimChain, bus: Bus) -> None:
    """The record comes first in the stream; the same again finds both."""
    request_id = new_id()
    told, mine = record(request_id), claim(request_id, "w1")
    seq, stands = await chain.open(told, mine)
    assert stands is told
    found, tip = await chain.record(request_id), await chain.tip(READER, request_id)
    assert found is not None
    assert (found[1], tip.seq, tip.entry) == (told, seq, mine)
    assert found[0] < tip.seq
    assert await chain.open(told, mine) == (seq, told)
    assert await chain.open(told, claim(request_id, "w2")) == (None, told)
    assert await chain.record(request_id) == found


async def test_the_record_that_was_written_first_stands(chain: ClaimChain) -> None:
    """Whoever comes later learns of it, and may have the claim all the same."""
    request_id = new_id()
    first, other = record(request_id), replace(record(request_id), label="another")
    assert await chain.write_record(first) is first
    assert await chain.write_record(first) is first
    assert await chain.write_record(other) == first
    seq, stands = await chain.open(other, claim(request_id, "w1"))
    assert stands == first
    assert (await chain.tip(READER, request_id)).seq == seq


async def test_an_id_is_one_readers(chain: ClaimChain) -> None:
    """Another's request of this id is refused, whoever writes it."""
    request_id = new_id()
    theirs = replace(record(request_id), reader="alice.tests")
    await chain.write_record(record(request_id))
    for call in (chain.write_record(theirs), chain.open(theirs, claim(request_id, "w1"))):
        with pytest.raises(InvalidRequest) as caught:
            await call
        assert caught.value.param == "request_id"


async def test_without_a_broker_nothing_is_known(
    chain: ClaimChain, bus: Bus, broker: EmbeddedBroker, until: Until
) -> None:
    """Every call says so, at once."""
    await broker.kill()
    await until(lambda: not bus.is_connected)
    request_id = new_id()
    for call in (
        chain.tip(READER, request_id),
        chain.append(READER, claim(request_id, "w"), 0),
        chain.end(READER, Expired(request_id=request_id)),
        chain.record(request_id),
    ):
        with pytest.raises(BusUnavailable):
            await call

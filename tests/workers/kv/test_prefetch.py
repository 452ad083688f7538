"""Prefixes that are brought: what is worth it, once, checked; of what fails nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio
import structlog

from infra.metrics import Metrics
from pipeline.prefix_hash import request_salt
from schemas.codec import pack_ids
from schemas.kv import KvLent, KvSource
from schemas.requests import RequestRecord, SamplingParams
from tests.workers.kv.fakes import (
    BLOCK_BYTES,
    FakeDisk,
    FakeEngine,
    FakeLenders,
    FakeReader,
    FakeTier,
)
from tests.workers.workplace import until
from workers.engine.api import EngineInfo
from workers.kv.api import BlockName
from workers.kv.prefetch import Bringing, Brought, Prefetch
from workers.kv.prompt import prompt_of

BLOCK_SIZE = 4
INFO = EngineInfo(
    kind="simulated",
    context_length=4096,
    vocab_size=300,
    eos_token_ids=frozenset(),
    block_size=BLOCK_SIZE,
    num_blocks=64,
    block_bytes=BLOCK_BYTES,
    fingerprint="test",
)


def record_of(num_tokens: int = 41, **fields: object) -> RequestRecord:
    """A request whose prompt has ten full blocks and a token."""
    return RequestRecord(
        request_id="0" * 32,
        model="tiny",
        revision="1",
        served="tiny@1",
        prompt_ids=pack_ids(list(range(num_tokens))),
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        reader="client.tests",
        admitted_unix_ms=0,
        deadline_unix_ms=0,
    )


@dataclass
class Place:
    """Us, and two other workers."""

    tier: FakeTier
    disk: FakeDisk
    owners: dict[str, FakeTier]
    lenders: FakeLenders
    reader: FakeReader
    prefetch: Prefetch
    metrics: Metrics
    engine: FakeEngine
    blocks: tuple[BlockName, ...]

    def outcomes(self, source: str = "remote") -> dict[str, int]:
        found = {}
        for metric in self.metrics.kv_fetches.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total") and sample.labels["source"] == source:
                    found[sample.labels["outcome"]] = int(sample.value)
        return found

    async def bring(
        self, *sources: tuple[str, int], record: RequestRecord | None = None
    ) -> Brought:
        hints = [KvSource(worker=name, num_blocks=count, tier="host") for name, count in sources]
        return await self.prefetch.bring(record or record_of(), hints, self.lenders)


@pytest_asyncio.fixture
async def place() -> AsyncIterator[Place]:
    """At the end nothing is pinned, half filled, lent or under way."""
    tier, engine = FakeTier(), FakeEngine()
    disk = FakeDisk(tier)
    owners = {"a": FakeTier(), "b": FakeTier()}
    lenders, reader, metrics = FakeLenders(owners), FakeReader(owners), Metrics()
    log = structlog.get_logger("test")
    prefetch = Prefetch(tier, disk, reader, engine, INFO, metrics, log)
    blocks = prompt_of(record_of(), INFO).blocks
    made = Place(tier, disk, owners, lenders, reader, prefetch, metrics, engine, blocks)
    yield made
    reader.gate.set()
    await until(lambda: not tier.filling)
    for one in (tier, *owners.values()):
        one.check_idle()
    assert not lenders.leases
    assert not prefetch._under_way
    prefetch.close()
    for one in (tier, *owners.values()):
        one.memory.close()


def test_the_blocks_of_a_prompt_are_those_that_the_engine_looks_for() -> None:
    """Ten of 41 tokens; nine of 40, since the last token is always computed; none where the
    prompt's own logprobs are wanted."""
    prompt = prompt_of(record_of(), INFO)
    assert len(prompt.blocks) == 10
    assert prompt.blocks[0].parent == request_salt(record_of(), "test")
    assert [b.parent for b in prompt.blocks[1:]] == [b.block_hash for b in prompt.blocks[:-1]]
    assert len(prompt_of(record_of(40), INFO).blocks) == 9
    assert prompt_of(record_of(prompt_logprobs=1), INFO).blocks == ()


async def test_what_another_has_is_read_and_held(place: Place) -> None:
    """Blocks are here, pinned until the engine has them, and the owner's lease is released."""
    place.owners["a"].put(place.blocks)
    brought = await place.bring(("a", 10))
    assert brought.num_remote_tokens == 40
    assert place.tier.num_leading([b.block_hash for b in place.blocks]) == 10
    assert place.lenders.ended == [("a", True)]
    assert [len(pin.slots) for pin in place.tier.pins] == [10]
    brought.let_go()
    brought.let_go()
    assert place.outcomes() == {"fetched": 1}


async def test_only_what_is_missing_is_read(place: Place) -> None:
    """Two blocks on the device, three in the host tier: five are fetched."""
    place.engine.cached |= {block.block_hash for block in place.blocks[:2]}
    place.tier.put(place.blocks[2:5])
    place.owners["a"].put(place.blocks)
    brought = await place.bring(("a", 10))
    assert brought.num_remote_tokens == 20
    brought.let_go()


async def test_the_disk_and_another_each_give_their_part(place: Place) -> None:
    """What the disk has comes from there, what is beyond from the other."""
    place.disk.blocks = {block.block_hash for block in place.blocks[:6]}
    place.owners["a"].put(place.blocks)
    for _ in range(60):  # a slow link: the disk's part is better had from the disk
        place.prefetch.links.observe("a", BLOCK_BYTES, 0.001, 0.1)
    brought = await place.bring(("a", 10))
    assert (brought.num_disk_tokens, brought.num_remote_tokens) == (24, 16)
    brought.let_go()


async def test_nothing_is_asked_where_computing_is_faster(place: Place) -> None:
    """A model that is fast enough: not even a question."""
    place.engine.token_s = 1e-9
    place.owners["a"].put(place.blocks)
    (await place.bring(("a", 10))).let_go()
    assert place.lenders.asked == []


async def test_an_index_that_is_out_of_date_costs_a_question(place: Place) -> None:
    """The owner has evicted them: another is asked; it is asked again for other prompts."""
    place.owners["b"].put(place.blocks[:7])
    place.prefetch.links.observe("a", 10**9, 0.0, 0.01)  # the faster one comes first
    brought = await place.bring(("a", 10), ("b", 7))
    assert place.lenders.asked == ["a", "b"]
    assert brought.num_remote_tokens == 28
    assert not place.prefetch.links.is_left_alone("a", 0.0)
    brought.let_go()


async def test_a_dead_owner_is_not_asked_twice(place: Place) -> None:
    """No answer: computed; the next prompt does not wait for the same owner."""
    place.lenders.dead = {"a"}
    for _ in range(2):
        brought = await place.bring(("a", 10))
        assert brought.num_remote_tokens == 0
        brought.let_go()
    assert place.lenders.asked == ["a"]
    assert place.outcomes() == {"late": 1}


async def test_a_flipped_bit_is_noticed(place: Place) -> None:
    """Nothing of it is used, the lease is given back as a nack."""
    place.owners["a"].put(place.blocks)
    slot = place.owners["a"].slots[place.blocks[4].block_hash]
    place.owners["a"].memory.slots[slot, 3] ^= 1
    brought = await place.bring(("a", 10))
    assert brought.num_remote_tokens == 0
    assert place.tier.num_leading([b.block_hash for b in place.blocks]) == 0
    assert place.lenders.ended == [("a", False)]
    assert place.outcomes() == {"lost": 1}
    brought.let_go()


async def test_a_block_that_the_disk_lost_ends_its_part(place: Place) -> None:
    """Those before it are used, it and those behind it computed."""
    place.disk.blocks = {block.block_hash for block in place.blocks}
    place.disk.broken = {place.blocks[6].block_hash}
    brought = await place.bring()
    assert brought.num_disk_tokens == 24
    brought.let_go()


async def test_a_slow_read_is_given_up_and_its_slots_wait_for_its_end(place: Place) -> None:
    """After half of what computing takes: the request goes on, and nobody else gets the slots
    into which the read still writes."""
    place.owners["a"].put(place.blocks)
    place.reader.gate.clear()
    place.engine.token_s = 0.01
    brought = await place.bring(("a", 10))
    assert brought.num_remote_tokens == 0
    assert len(place.tier.filling) == 10
    assert place.lenders.ended == [("a", False)]
    assert place.outcomes() == {"late": 1}
    brought.let_go()
    place.reader.gate.set()
    await until(lambda: not place.tier.filling)


async def test_a_reader_that_is_still_at_it_renews(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease does not run out under a slow reader that says so."""
    monkeypatch.setattr("workers.kv.fetching.RENEW_S", 0.001)
    place.owners["a"].put(place.blocks)
    place.reader.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        bringing = tasks.create_task(place.bring(("a", 10)))
        await until(lambda: place.lenders.num_renewed > 2)
        place.reader.gate.set()
    assert bringing.result().num_remote_tokens == 40
    bringing.result().let_go()


async def test_two_prompts_with_one_beginning_fetch_it_once(place: Place) -> None:
    """The second waits for the first's read, and finds the blocks."""
    place.owners["a"].put(place.blocks)
    place.reader.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(place.bring(("a", 10))) for _ in range(2)]
        await until(place.reader.is_reading.is_set)
        place.reader.gate.set()
    assert [one.result().num_remote_tokens for one in both] == [40, 0]
    assert place.reader.num_reads == 1
    assert [len(pin.slots) for pin in place.tier.pins] == [10, 10]
    for one in both:
        one.result().let_go()


@pytest.mark.parametrize("waits", [False, True])
async def test_who_is_dropped_in_the_middle_leaves_nothing(place: Place, waits: bool) -> None:
    """Cancelled while it reads, or while it waits for another's read, or when it has ended: pins,
    slots and leases are given back, and the other gets on."""
    place.owners["a"].put(place.blocks)
    place.reader.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        reads = Bringing(tasks.create_task(place.bring(("a", 10))))
        await until(place.reader.is_reading.is_set)
        other = Bringing(tasks.create_task(place.bring(("a", 10))))
        await asyncio.sleep(0)
        (other if waits else reads).drop()
        place.reader.gate.set()
        brought = await (reads if waits else other).complete()
        (reads if waits else other).drop()
    assert brought.num_remote_tokens in (0, 40)


async def test_without_room_it_is_computed(place: Place) -> None:
    """The host tier is full of pinned blocks: no read, the lease goes back at once."""
    place.owners["a"].put(place.blocks)
    place.tier.free.clear()
    held = place.tier.memory.num_blocks
    brought = await place.bring(("a", 10))
    assert place.outcomes() == {"no_room": 1}
    assert place.reader.num_reads == 0
    assert not place.prefetch.links.is_left_alone("a", 0.0)
    brought.let_go()
    place.tier.free.extend(range(held))


async def test_a_bug_in_a_reader_is_no_bug_of_the_request(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised: counted, given back, computed."""

    def read(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(place.reader, "read", read)
    place.owners["a"].put(place.blocks)
    (await place.bring(("a", 10))).let_go()
    assert place.outcomes() == {"failed": 1}


@pytest.mark.parametrize(
    "lie",
    [{"fingerprint": "other"}, {"blocks": b"abc"}, {"generations": b""}, {"checksums": b"123"}],
    ids=lambda lie: next(iter(lie)),
)
async def test_a_handle_that_contradicts_itself_is_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch, lie: dict[str, object]
) -> None:
    """Another layout, or not one slot, generation and checksum per block: nothing is read."""
    ask = place.lenders.ask

    async def lying(owner: str, blocks: Sequence[BlockName], timeout_s: float) -> KvLent:
        lent = await ask(owner, blocks, timeout_s)
        assert lent.handle is not None
        return KvLent(
            num_blocks=lent.num_blocks, handle=msgspec.structs.replace(lent.handle, **lie)
        )

    monkeypatch.setattr(place.lenders, "ask", lying)
    place.owners["a"].put(place.blocks)
    (await place.bring(("a", 10))).let_go()
    assert place.reader.num_reads == 0
    assert place.outcomes() == {"lost": 1}

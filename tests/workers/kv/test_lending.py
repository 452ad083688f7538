"""The owner's side: what only its disk has comes up first; who leaves lends nothing new."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
import structlog

from infra.metrics import Metrics
from infra.task_scope import task_scope
from schemas.errors import KvLost
from tests.workers.kv.fakes import FakeTier, chain_of
from tests.workers.kv.test_lending_machine import LoopBus
from tests.workers.workplace import until
from workers.kv.api import BlockName
from workers.kv.borrowing import BusLenders
from workers.kv.handles import PoolFacts
from workers.kv.leases import LeaseBook
from workers.kv.lending import Lending, LentTier

BLOCKS = chain_of(6)


@dataclass
class Owner:
    """A worker with a disk, and somebody who asks it."""

    tier: FakeTier
    on_disk: list[BlockName] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    bus: LoopBus = field(default_factory=LoopBus)
    leases: LeaseBook = field(default_factory=LeaseBook)

    async def load(self, blocks: Sequence[BlockName], timeout_s: float) -> int:
        self.loads.append(timeout_s)
        found = [block for block in blocks if block in self.on_disk]
        self.tier.put(found)
        return len(found)

    def __post_init__(self) -> None:
        log = structlog.get_logger("test")
        facts = PoolFacts(memory=self.tier.memory, fingerprint="test", addresses=())
        tier = LentTier(host=self.tier, num_slots=64, block_size=4, load=self.load)
        self.lending = Lending(self.bus, "owner", tier, facts, self.leases, Metrics(), log)  # type: ignore[arg-type]
        self.lenders = BusLenders(self.bus, "reader", "test", log)  # type: ignore[arg-type]

    def end_all(self) -> None:
        for lease in self.leases.take_all():
            lease.on_end(lease, "expired")


@pytest_asyncio.fixture
async def owner() -> AsyncIterator[Owner]:
    """At the end nothing is pinned."""
    tier = FakeTier()
    made = Owner(tier)
    async with task_scope() as tasks:
        tasks.create_task(made.lending.run())
        await until(lambda: made.bus.heard)
        yield made
        made.end_all()
        made.lending.check_invariants()
        tier.check_idle()
    tier.memory.close()


async def test_what_only_the_disk_has_comes_up_first(owner: Owner) -> None:
    """Two blocks in memory, three more on disk: all five are lent; the disk has half of the time,
    the other half is for reading."""
    owner.tier.put(BLOCKS[:2])
    owner.on_disk = BLOCKS[2:5]
    lent = await owner.lenders.ask("owner", BLOCKS, 2.0)
    assert lent.num_blocks == 5
    assert owner.loads == [1.0]
    assert lent.handle is not None
    assert lent.handle.num_tokens == 20


async def test_the_disk_is_not_asked_for_what_is_in_memory(owner: Owner) -> None:
    """Nor when nobody waits for the answer any more."""
    owner.tier.put(BLOCKS[:3])
    assert (await owner.lenders.ask("owner", BLOCKS[:3], 2.0)).num_blocks == 3
    assert (await owner.lenders.ask("owner", BLOCKS, 0.0)).num_blocks == 3
    assert owner.loads == []


async def test_another_layout_gets_nothing(owner: Owner) -> None:
    """Blocks that it could not read are not pinned for it."""
    owner.tier.put(BLOCKS)
    other = BusLenders(owner.bus, "reader", "other", structlog.get_logger("test"))  # type: ignore[arg-type]
    assert (await other.ask("owner", BLOCKS, 1.0)).reason == "other_layout"


async def test_who_leaves_lends_nothing_new(owner: Owner) -> None:
    """With no loan out it leaves at once."""
    owner.tier.put(BLOCKS)
    await owner.lending.leave()
    assert (await owner.lenders.ask("owner", BLOCKS, 1.0)).reason == "leaving"


async def test_an_answer_that_does_not_arrive_costs_a_lease_at_most(owner: Owner) -> None:
    """The reader never learned of it; its pin ends with the lease."""
    owner.tier.put(BLOCKS)
    owner.bus.lost = "answer"
    with pytest.raises(KvLost):
        await owner.lenders.ask("owner", BLOCKS, 1.0)
    assert owner.lending.num_lent == 1

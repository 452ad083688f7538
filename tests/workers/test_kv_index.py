"""What real workers say they hold, and what of it real requests find."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from infra.log import make_logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from pipeline.fleet import Fleet
from pipeline.index_feed import IndexFeed
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from schemas import subjects
from schemas.codec import encode
from schemas.requests import RequestRecord
from tests.pipeline.rig import LogLines
from tests.workers.workplace import Workplace, until

NUM_BLOCKS = 5  # full ones of PROMPT


@dataclass(slots=True)
class Listener:
    """A control process, as far as the index is concerned."""

    place: Workplace
    fleet: Fleet = field(default_factory=lambda: Fleet(1e9, time.monotonic()))
    index: RadixIndex = field(default_factory=lambda: RadixIndex(10_000))
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def prefixes(self) -> Prefixes:
        return Prefixes(self.index, self.fleet, self.metrics)

    async def run(self) -> None:
        log = make_logger("test", stream=LogLines().stream)
        feed = IndexFeed(self.place.bus, self.index, self.fleet, self.metrics, log)
        async with task_scope() as tasks:
            tasks.create_task(feed.run())
            while True:
                for worker in self.place.workers.values():
                    if worker.incarnations:
                        beat = worker.ctx.beat("ready")
                        self.fleet.hear(beat, time.monotonic())
                        feed.hear_beat(beat)
                await asyncio.sleep(self.place.bus.times.beat_s)

    def found(self, record: RequestRecord) -> dict[str, int]:
        return {worker: match.num_blocks for worker, match in self.prefixes.find(record).items()}

    def is_true(self) -> bool:
        """Whether the index holds what the workers at work hold, and nothing else."""
        held = {w.now.worker: w.host.events.held() for w in self.place.workers.values()}
        return all(self.index.held_by(worker) == blocks for worker, blocks in held.items()) and (
            set(self.index.workers) == {worker for worker, blocks in held.items() if blocks}
        )


@asynccontextmanager
async def listening(place: Workplace) -> AsyncIterator[Listener]:
    async with task_scope() as tasks:
        listener = Listener(place)
        tasks.create_task(listener.run())
        yield listener


async def ask(place: Workplace, **facts: Any) -> RequestRecord:
    """A request like any other, but for ``facts``."""
    like = await place.record()
    record = msgspec.structs.replace(like, request_id=secrets.token_hex(16), **facts)
    await place.bus.publish_stored(
        subjects.request_record(record.request_id), encode(record), expect_last_subject_seq=0
    )
    await place.place(record)
    return record


async def num_cached(place: Workplace, record: RequestRecord) -> int:
    return (await place.answer(record)).end.usage.cached_tokens


async def test_a_worker_says_what_it_has_computed(place: Workplace) -> None:
    """Prompt and answer, by the hashes that admission would look for."""
    worker = await place.worker("w", "both")
    async with listening(place) as listener:
        record = await ask(place)
        assert listener.found(record) == {}
        await place.answer(record)
        await until(lambda: listener.is_true() and listener.index.workers)
        assert listener.found(record) == {worker.now.worker: NUM_BLOCKS}
        assert len(worker.host.events.held()) > NUM_BLOCKS  # of the answer, too


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"cache_salt": "s"}, {"revision": "2"}], ids=lambda one: str(one)
)
async def test_same_prompt_and_another_identity_shares_nothing(
    place: Workplace, other: dict[str, str]
) -> None:
    """Two tenants, two salts, two revisions: nobody is told of the other's blocks, and by the
    worker's own count none of them is used. The same identity finds all of its own."""
    worker = await place.worker("w", "both")
    async with listening(place) as listener:
        first = await ask(place, tenant="a")
        assert await num_cached(place, first) == 0
        again = await ask(place, tenant="a")
        assert await num_cached(place, again) == NUM_BLOCKS * 4
        await until(listener.is_true)
        assert listener.found(again) == {worker.now.worker: NUM_BLOCKS}
        stranger = msgspec.structs.replace(again, **{"tenant": "a", **other})
        assert listener.found(stranger) == {}
        foreign = await ask(place, **{"tenant": "a", **other})
        assert await num_cached(place, foreign) == 0


async def test_evicted_blocks_are_not_promised(place: Workplace) -> None:
    """A small pool that forgets what it held says so."""
    await place.worker("w", "both", num_blocks=16)
    async with listening(place) as listener:
        first = await ask(place)
        await place.answer(first)
        for number in range(4):
            await place.answer(await place.ask(range(100 + 30 * number, 130 + 30 * number)))
        await until(lambda: listener.is_true() and listener.found(first) == {})
        listener.index.check_invariants()


async def test_a_fenced_worker_comes_back_with_what_it_holds(place: Workplace) -> None:
    """Under its new id everything that the process kept can be found, and nothing under the old."""
    worker = await place.worker("w", "both")
    async with listening(place) as listener:
        record = await ask(place)
        await place.answer(record)
        await until(listener.is_true)
        old = worker.now.worker
        worker.now._fence()
        await until(lambda: worker.now.worker != old and listener.is_true())
        assert listener.found(record) == {worker.now.worker: NUM_BLOCKS}
        again = await ask(place)
        assert await num_cached(place, again) == NUM_BLOCKS * 4


async def test_one_that_listens_late_knows_as_much(place: Workplace) -> None:
    """A control process that starts after everything was computed."""
    for name in ("p", "d"):
        await place.worker(name, {"p": "prefill", "d": "decode"}[name])
    place.start_router()
    record = await ask(place)
    await place.answer(record)
    async with listening(place) as listener, listening(place) as other:
        await until(lambda: listener.is_true() and other.is_true())
        assert listener.found(record) == other.found(record)
        assert listener.found(record)[place.workers["p"].now.worker] == NUM_BLOCKS

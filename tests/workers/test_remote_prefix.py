"""A prefix that one worker has and another needs: real broker, real shared memory, no model.

Every answer is compared with that of one engine which computes the request alone, and at the end
nobody holds anything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from schemas.codec import unpack_ids
from schemas.kv import KvLend, KvSource
from schemas.requests import RequestRecord
from tests.workers.test_prefill_decode import same
from tests.workers.workplace import Answer, Worker, Workplace, until
from workers.kv.api import Pin
from workers.kv.lending import Lending
from workers.kv.pace import PrefillSpeed
from workers.kv.prompt import Prompt, prompt_of

PROMPT = tuple(range(10, 51))  # ten blocks and a token of the eleventh
NUM_BLOCKS = 10


async def worker(place: Workplace, name: str, role: str = "both", **fields: int) -> Worker:
    """A worker with a host tier that takes everything for worth fetching, and waiting for."""
    made = await place.worker(name, role, num_host_blocks=64, **fields)  # type: ignore[arg-type]
    made.engine.pace.prefill = PrefillSpeed(2.0)
    return made


def prompt_at(made: Worker, record: RequestRecord) -> Prompt:
    return prompt_of(record, made.engine.info)


def num_held(made: Worker, record: RequestRecord) -> int:
    """How many blocks of a request's prompt its host tier has."""
    assert made.host.tiers.host is not None
    hashes = [block.block_hash for block in prompt_at(made, record).blocks]
    return made.host.tiers.host.num_leading(hashes)


def source(made: Worker, num_blocks: int = NUM_BLOCKS) -> KvSource:
    return KvSource(worker=made.now.worker, num_blocks=num_blocks)


async def computed_by(place: Workplace, owner: Worker) -> RequestRecord:
    """A request that ``owner`` has answered, its blocks in the host tier."""
    record = await place.record(PROMPT, max_tokens=4)
    await place.place(record, worker=owner.now.worker)
    same(record, await place.answer(record), PROMPT)
    await until(lambda: num_held(owner, record) == NUM_BLOCKS)
    return record


async def ask(
    place: Workplace, at: Worker, *sources: KvSource, prompt: Sequence[int] = PROMPT
) -> Answer:
    """The same prompt again, elsewhere; the answer is checked."""
    record = await place.record(prompt, max_tokens=4)
    await place.place(record, worker=at.now.worker, kv_sources=sources)
    answer = await place.answer(record)
    same(record, answer, prompt)
    return answer


def fetches(made: Worker) -> dict[str, int]:
    """Fetches from other workers by outcome."""
    samples = [s for metric in made.ctx.metrics.kv_fetches.collect() for s in metric.samples]
    return {s.labels["outcome"]: int(s.value) for s in samples if s.name.endswith("_total")}


def is_free(made: Worker) -> bool:
    """Nothing of its host tier is pinned or half filled."""
    assert made.host.tiers.host is not None
    counts = made.host.tiers.host.counts()
    return not counts.pinned and not counts.filling and not len(made.host.leases)


@asynccontextmanager
async def pair(place: Workplace) -> AsyncIterator[tuple[Worker, Worker]]:
    """An owner and a reader; at the end nothing is pinned at either, and the books are right."""
    owner, reader = await worker(place, "a"), await worker(place, "b")
    await until(lambda: owner.incarnations and reader.incarnations)
    yield owner, reader
    for made in (owner, reader):
        await until(lambda made=made: is_free(made))
        assert made.host.tiers.host is not None
        made.host.tiers.host.check_invariants()
        lending = made.now._lending
        assert lending is not None
        lending.check_invariants()


async def test_what_another_has_is_fetched_and_not_computed(place: Workplace) -> None:
    """All full blocks come from the other: they count as cached, and one token is computed."""
    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        answer = await ask(place, reader, source(owner))
        assert answer.end.usage.cached_tokens == 40
        assert fetches(reader) == {"fetched": 1}
        by_source = reader.ctx.metrics.prompt_source_tokens
        assert by_source.labels("remote")._value.get() == 40
        assert by_source.labels("computed")._value.get() == 1
        assert owner.ctx.metrics.leases_ended.labels("released")._value.get() == 1


async def test_a_prefix_is_of_use_to_prompts_that_go_on_otherwise(place: Workplace) -> None:
    """Twenty tokens in common: five blocks are fetched, the rest is computed."""
    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        other = PROMPT[:22] + tuple(range(100, 120))
        answer = await ask(place, reader, source(owner, 5), prompt=other)
        assert answer.end.usage.cached_tokens == 20


async def test_requests_at_once_fetch_it_once(place: Workplace) -> None:
    """Four with the same beginning: one read, all answers right."""
    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        records = [await place.record(PROMPT, max_tokens=4) for _ in range(4)]
        for record in records:
            await place.place(record, worker=reader.now.worker, kv_sources=[source(owner)])
        for record in records:
            answer = await place.answer(record)
            same(record, answer, PROMPT)
            assert answer.end.usage.cached_tokens == 40
        assert fetches(reader) == {"fetched": 1}


@pytest.mark.parametrize("field", ["cache_salt", "tenant", "revision"])
async def test_what_must_not_be_shared_is_not_found(place: Workplace, field: str) -> None:
    """The same prompt under another salt, tenant or revision: the owner has nothing for it, and
    nothing counts as cached."""
    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        record = msgspec.structs.replace(
            await place.record(PROMPT, max_tokens=4), **{field: "another"}
        )
        await place.place(record, worker=reader.now.worker, kv_sources=[source(owner)])
        answer = await place.answer(record)
        same(record, answer, PROMPT)
        assert answer.end.usage.cached_tokens == 0
        assert fetches(reader) == {"refused": 1}


# -- what goes wrong -----------------------------------------------------------------------------


async def test_a_flipped_bit_in_the_owners_slot_is_noticed(place: Workplace) -> None:
    """Another checksum: nothing of it is used, the prompt is computed."""
    async with pair(place) as (owner, reader):
        record = await computed_by(place, owner)
        host = owner.host.tiers.host
        assert host is not None
        pin = host.pin([prompt_at(owner, record).blocks[0].block_hash])
        host.memory.slots[pin.slots[0], 5] ^= 1
        host.unpin(pin)
        answer = await ask(place, reader, source(owner))
        assert answer.end.usage.cached_tokens == 0
        assert fetches(reader) == {"lost": 1}


async def test_an_owner_that_does_not_answer_costs_one_wait(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen, or gone: the request is computed after half of what computing takes, and the next
    one does not ask again."""
    never = asyncio.Event()

    async def pin(lending: Lending, blocks: object, question: KvLend) -> Pin:
        await never.wait()
        raise AssertionError("nobody woke it")

    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        monkeypatch.setattr(Lending, "_pin", pin)
        reader.engine.pace.prefill = PrefillSpeed(0.01)
        for _ in range(2):
            prompt = (*PROMPT[:-1], 7)
            answer = await ask(place, reader, source(owner), prompt=prompt)
        assert fetches(reader) == {"late": 1}
        assert answer.end.usage.cached_tokens == 40  # its own, of the first time
        monkeypatch.undo()


async def test_a_worker_that_is_gone_lends_nothing(place: Workplace) -> None:
    """The index may know of it for a while: nobody listens, which is known at once."""
    async with pair(place) as (_, reader):
        gone = KvSource(worker="gone-0123456789", num_blocks=NUM_BLOCKS)
        answer = await ask(place, reader, gone)
        assert answer.end.usage.cached_tokens == 0
        assert fetches(reader) == {"late": 1}


class Gate:
    """Holds up a worker's reads of other workers."""

    def __init__(self, made: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        reader = made.host.links.reader
        read = reader.read

        def slow(*args: object) -> object:
            self.has_begun.set()
            assert self.may_go_on.wait(60), "a test left the gate shut"
            return read(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(reader, "read", slow)


async def test_a_lease_that_ends_under_a_slow_reader_does_no_harm(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner needs the slots for others meanwhile: the reader notices, and computes."""
    async with pair(place) as (owner, reader):
        record = await computed_by(place, owner)
        gate = Gate(reader, monkeypatch)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(ask(place, reader, source(owner)))
            await until(gate.has_begun.is_set)
            for lease in owner.host.leases._leases.values():
                lease.expires_s = 0.0
            await until(lambda: is_free(owner))
            host = owner.host.tiers.host
            assert host is not None
            for block in prompt_at(owner, record).blocks:
                host.discard(block.block_hash)
            names = [
                msgspec.structs.replace(block, block_hash=block.block_hash[::-1])
                for block in prompt_at(owner, record).blocks
            ]
            filling = host.reserve(names)
            host.abort(filling)
            gate.may_go_on.set()
        assert asked.result().end.usage.cached_tokens == 0
        assert fetches(reader) == {"lost": 1}
        assert owner.ctx.metrics.leases_ended.labels("expired")._value.get() == 1


async def test_who_is_cancelled_in_the_middle_leaves_nothing(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves while blocks are being read: no pin, no slot, no lease stays."""
    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        gate = Gate(reader, monkeypatch)
        record = await place.record(PROMPT, max_tokens=4)
        await place.place(record, worker=reader.now.worker, kv_sources=[source(owner)])
        await until(gate.has_begun.is_set)
        await place.cancel(record, tells=reader)
        gate.may_go_on.set()
        await until(lambda: is_free(owner) and is_free(reader))
        await place.until_idle()


async def test_a_worker_that_is_fenced_in_the_middle_leaves_nothing(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is given up by the others while it reads: it comes back, holding nothing; the
    owner's lease was given back."""
    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        gate = Gate(reader, monkeypatch)
        record = await place.record(PROMPT, max_tokens=4)
        await place.place(record, worker=reader.now.worker, kv_sources=[source(owner)])
        await until(gate.has_begun.is_set)
        seq = await place.until_tip(record, lambda entry: entry is not None)
        reader.now._fence()
        await until(lambda: len(reader.incarnations) == 2)
        gate.may_go_on.set()
        await until(lambda: is_free(owner) and is_free(reader))
        await place.place(record, epoch=2, after_seq=seq)
        same(record, await place.answer(record), PROMPT)


async def test_over_its_bounds_an_owner_lends_nothing(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many leases, such a part of the host tier: whoever comes then computes."""
    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        for name, bound in (("MAX_LEASES", 0), ("MAX_OPEN", 0), ("MAX_SHARE", 0.0)):
            with monkeypatch.context() as patch:
                patch.setattr(f"workers.kv.lending.{name}", bound)
                first = 200 + ord(name[-1])
                await ask(place, reader, source(owner), prompt=(first, *PROMPT[1:]))
        assert fetches(reader) == {"refused": 3}
        assert owner.ctx.metrics.kv_lends.labels("busy")._value.get() == 3


async def test_a_worker_that_drains_stays_until_its_loans_are_read(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader gets the blocks; nobody gets new ones."""
    async with pair(place) as (owner, reader):
        await computed_by(place, owner)
        gate = Gate(reader, monkeypatch)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(ask(place, reader, source(owner)))
            await until(gate.has_begun.is_set)
            owner.ctx.drain()
            lending = owner.now._lending
            assert lending is not None
            await until(lambda: lending._is_closed)
            assert owner.task is not None
            assert not owner.task.done()
            gate.may_go_on.set()
        assert asked.result().end.usage.cached_tokens == 40
        await owner.task


# -- conversations -------------------------------------------------------------------------------


async def test_the_next_turn_finds_prompt_and_answer_at_the_decode_worker(
    place: Workplace,
) -> None:
    """Turn 1 is prefilled here and decoded there; turn 2, prefilled by a third worker, fetches all
    full blocks of both from the decode worker."""
    place.start_router()
    first = await worker(place, "p", "prefill")
    decoding = await worker(place, "d", "decode")
    record = await place.record(PROMPT, max_tokens=20)
    await place.place(record, worker=first.now.worker)
    answer = await place.answer(record)
    same(record, answer, PROMPT)
    turn = (*unpack_ids(record.prompt_ids), *answer.tokens(), 20, 21, 22)
    second = await worker(place, "q", "prefill")
    later = await place.record(turn, max_tokens=4)
    num_kept = (len(PROMPT) + 19) // 4  # the last token was sampled, never computed
    await until(lambda: num_held(decoding, later) == num_kept)
    await until(lambda: second.incarnations)
    await place.place(later, worker=second.now.worker, kv_sources=[source(decoding, num_kept)])
    again = await place.answer(later)
    same(later, again, turn)
    assert again.end.usage.cached_tokens == num_kept * 4
    for made in (first, decoding, second):
        await until(lambda made=made: is_free(made))

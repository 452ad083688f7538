"""A worker's life: it drains, is fenced, comes back under another id, and takes what it can."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from msgspec.structs import replace

from infra.bus import WORK, worker_consumer
from infra.bus.topology import delete_consumer
from pipeline.cost_model import FREE
from schemas import subjects
from schemas.codec import encode
from schemas.control import Beat, CancelWord
from schemas.errors import EngineFailed
from schemas.requests import RequestRecord
from tests.workers.workplace import (
    SERVED,
    Worker,
    Workplace,
    is_claim,
    until,
    workplace,
)
from workers.service import serve


async def decoding(
    place: Workplace, name: str = "d", **fields: object
) -> tuple[Worker, RequestRecord]:
    """A decode worker in the middle of an answer, between two steps."""
    place.start_router()
    await place.worker("p", "prefill")
    worker = await place.worker(name, "decode", **fields)  # type: ignore[arg-type]
    worker.runner.close_after(3)
    record = await place.ask(max_tokens=20)
    await place.until_tokens(record, 4)
    return worker, record


async def until_drained(worker: Worker, timeout_s: float) -> None:
    assert worker.task is not None
    async with asyncio.timeout(timeout_s):
        await worker.task


async def fence(place: Workplace, worker: Worker) -> None:
    """What a router does to a worker that it takes for dead."""
    for role in worker.config.roles:
        config = worker_consumer(role, SERVED, worker.now.worker, place.bus.times)
        await delete_consumer(place.bus, WORK, str(config.name))


def make_beat(worker: Worker) -> Beat:
    return worker.ctx.describe(worker.ctx.beat("ready"))


# -- draining ----------------------------------------------------------------------------------


async def test_a_drain_finishes_what_runs_and_takes_nothing_more(place: Workplace) -> None:
    """The answer is complete when the worker leaves; the next request waits for another."""
    worker, record = await decoding(place)
    worker.ctx.drain()
    late = await place.ask([50, 51])
    worker.runner.open()
    await until_drained(worker, 5)
    place.check(record, await place.stored(record))
    assert worker.owed == 0
    await place.worker("d-2", "decode")
    place.check(late, await place.answer(late), [50, 51])


async def test_an_idle_worker_drains_at_once(place: Workplace) -> None:
    """It does not wait for the end of its grace time."""
    worker = await place.worker("b", "both", grace_s=120.0)
    await until(lambda: worker.incarnations)
    worker.ctx.drain()
    await until_drained(worker, 60)


async def test_a_drain_waits_for_leases_to_be_read(place: Workplace) -> None:
    """A prefill worker that leaves with its blocks unread would have them computed again."""
    place.start_router()
    worker = await place.worker("p", "prefill")
    record = await place.ask()
    await until(lambda: len(worker.host.leases))
    worker.ctx.drain()
    await place.worker("d", "decode")
    answer = await place.answer(record)
    place.check(record, answer)
    assert answer.claims == [(1, "prefill"), (2, "decode")]
    await until_drained(worker, 5)


async def test_what_is_not_read_by_the_end_of_the_grace_is_given_back(place: Workplace) -> None:
    """Nobody came for the blocks: another prefill worker computes them again."""
    worker = await place.worker("p", "prefill", grace_s=0.5)
    record = await place.ask()
    await until(lambda: len(worker.host.leases))
    worker.ctx.drain()
    await until_drained(worker, 3)
    assert not len(worker.host.leases)
    place.start_router()
    await place.worker("p-2", "prefill")
    await place.worker("d", "decode")
    answer = await place.answer(record)
    place.check(record, answer)
    assert len(answer.claims) > 2


async def test_what_still_runs_at_the_end_of_the_grace_is_given_back(place: Workplace) -> None:
    """Another worker goes on from the last token: the answer is the undisturbed one."""
    worker, record = await decoding(place, grace_s=0.5)
    await place.worker("d-2", "decode")
    worker.ctx.drain()
    await until_drained(worker, 3)
    worker.runner.open()
    answer = await place.answer(record)
    place.check(record, answer)
    assert answer.claims[2:] == [(3, "prefill"), (4, "decode")]
    assert {delta.epoch for delta in answer.deltas} == {1, 2, 3, 4}


async def test_a_drain_ends_although_the_broker_is_away(place: Workplace) -> None:
    """What can't be given back is left to the router; the process does not hang."""
    worker, record = await decoding(place, grace_s=1.0)
    seq = (await place.chain.tip(record.reader, record.request_id)).seq
    await place.broker.kill()
    worker.ctx.drain()
    await until_drained(worker, 3)
    worker.runner.open()
    await place.restart_broker()
    await place.worker("d-2", "decode")
    await place.place(record, epoch=3, after_seq=seq)
    place.check(record, await place.answer(record))


# -- fenced ------------------------------------------------------------------------------------


async def test_a_fenced_worker_drops_everything_and_comes_back_as_another(
    place: Workplace,
) -> None:
    """Its consumer is gone: it has been given up. The engine is empty and loaded, the new id
    takes work, and the old request is right wherever it goes on."""
    worker, record = await decoding(place)
    seq = (await place.chain.tip(record.reader, record.request_id)).seq
    old = worker.now
    await fence(place, worker)
    await until(lambda: len(worker.incarnations) == 2)
    assert worker.now.worker != old.worker
    assert old.execution.num_running == 0
    worker.runner.open()
    await place.place(record, epoch=3, after_seq=seq)
    answer = await place.answer(record)
    place.check(record, answer)
    assert answer.claims == [(1, "prefill"), (2, "decode"), (3, "prefill"), (4, "decode")]


async def test_a_fenced_prefill_worker_ends_its_leases(place: Workplace) -> None:
    """Nobody may wait for what it held: the blocks are free, the lease is not renewed."""
    worker = await place.worker("p", "prefill")
    record = await place.ask()
    await until(lambda: len(worker.host.leases))
    seq = await place.until_tip(record, is_claim)
    await fence(place, worker)
    await until(lambda: len(worker.incarnations) == 2)
    await until(lambda: not len(worker.host.leases))
    place.start_router()
    await place.worker("d", "decode")
    await place.place(record, epoch=2, after_seq=seq)
    place.check(record, await place.answer(record))


async def test_a_worker_that_was_frozen_gives_itself_up(place: Workplace) -> None:
    """Silent for as long as makes it dead to others: it does not wait to be told."""
    worker, record = await decoding(place)
    seq = (await place.chain.tip(record.reader, record.request_id)).seq
    names = {name: one.now.worker for name, one in place.workers.items()}
    time.sleep(place.bus.times.dead_s + 0.2)  # noqa: ASYNC251 - nothing of this process runs
    await until(lambda: all(len(one.incarnations) == 2 for one in place.workers.values()))
    assert all(one.now.worker != names[name] for name, one in place.workers.items())
    worker.runner.open()
    await place.place(record, epoch=3, after_seq=seq)
    place.check(record, await place.answer(record))


async def test_a_worker_that_has_just_woken_offers_no_room(place: Workplace) -> None:
    """What it pulled before it has given itself up would wait until its ack is overdue."""
    worker = await place.worker("b", "both")
    await until(lambda: worker.incarnations and make_beat(worker).load.num_free_slots > 0)
    time.sleep(place.bus.times.dead_s + 0.2)  # noqa: ASYNC251 - nothing of this process runs
    assert make_beat(worker).load.num_free_slots == 0, "before its watchdog has run"


async def test_a_worker_whose_request_was_taken_over_gives_itself_up(place: Workplace) -> None:
    """It runs a request that another has claimed: somebody takes it for dead, and has placed
    everything else that it runs as well."""
    worker, record = await decoding(place)
    seq = (await place.chain.tip(record.reader, record.request_id)).seq
    seq = await place.dead_claim(record, 3, seq)
    await until(lambda: len(worker.incarnations) == 2)
    worker.runner.open()
    await place.place(record, epoch=4, after_seq=seq)
    answer = await place.answer(record)
    place.check(record, answer)


async def test_what_a_zombie_still_says_is_void(place: Workplace) -> None:
    """Tokens of an old epoch that reach the stream after the next claim: the reader has the
    right ones, once."""
    worker, record = await decoding(place)
    seq = (await place.chain.tip(record.reader, record.request_id)).seq
    worker.runner.close_after(2)
    await place.place(record, epoch=3, after_seq=seq)
    await place.until_tip(record, lambda entry: is_claim(entry, "prefill"))
    worker.runner.open()  # it goes on under epoch 2, not knowing
    answer = await place.answer(record)
    place.check(record, answer)


async def test_the_end_of_one_id_cancels_what_its_decode_had_begun(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fenced in the middle of a copy: the blocks go back when the copy has ended, and never while
    it still writes into them."""

    monkeypatch.setattr("workers.kv.intake.AT_ONCE_BYTES", 0)
    place.start_router()
    await place.worker("p", "prefill")
    worker = await place.worker("d", "decode")
    reader = worker.host.intake._reader
    may_read, read, used = threading.Event(), reader.read, []

    def read_later(*args: object) -> None:
        assert may_read.wait(5)
        used.append(worker.engine.blocks.counts().active)
        read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "read", read_later)
    record = await place.ask()
    seq = await place.until_tip(record, lambda entry: is_claim(entry, "decode"))
    await fence(place, worker)
    await until(lambda: len(worker.incarnations) == 2)
    assert await worker.num_used_blocks() == 6
    may_read.set()
    async with asyncio.timeout(60):
        while await worker.num_used_blocks():
            await asyncio.sleep(0.01)
    assert used == [6]
    await place.place(record, epoch=3, after_seq=seq)
    place.check(record, await place.answer(record))


# -- what it takes -----------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "both"])
async def test_a_busy_worker_leaves_work_to_others(place: Workplace, role: str) -> None:
    """It takes about as much as it runs; a second worker finds the rest in the queue."""
    busy = await place.worker("busy", role, max_num_sequences=4)
    busy.runner.gate.clear()
    records = [await place.ask([10 + number], max_tokens=1) for number in range(20)]
    await until(lambda: busy.owed >= 4)
    await asyncio.sleep(5 * place.bus.times.pull_expiry_s)
    assert busy.owed <= 8  # both of its queues asked for what was free
    assert make_beat(busy).load.num_free_slots == 0
    await place.worker("free", role)
    await until(lambda: place.workers["free"].ctx.metrics.tokens_generated._value.get() >= 12)
    busy.runner.open()
    for number, record in enumerate(records):
        place.check(record, await place.answer(record), [10 + number])
    assert make_beat(busy).load.num_free_slots == 4


async def test_what_decodes_keeps_no_prefill_waiting(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of both roles fills all its places: few prompts wait at a time, and a request that
    has a token waits for nothing."""
    monkeypatch.setattr("workers.incarnation._MAX_WAITING_PREFILLS", 2)
    worker = await place.worker("b", "both", max_num_sequences=12, num_blocks=256)
    worker.runner.gate.clear()
    records = [await place.ask([10 + number], max_tokens=60) for number in range(12)]
    for count in range(2, 12, 2):
        await until(lambda at_least=count: worker.owed >= at_least)
        worker.runner.close_after(3)
        worker.runner.gate.set()
    await until(lambda: worker.owed == 12)
    worker.runner.open()
    for number, record in enumerate(records):
        place.check(record, await place.answer(record), [10 + number])
    assert worker.now.execution.num_decoding == 0


async def test_choices_count_as_what_they_are(place: Workplace) -> None:
    """A request of four choices fills four places."""
    worker = await place.worker("b", "both", max_num_sequences=8)
    worker.runner.gate.clear()
    record = await place.ask(n=4, temperature=0.8)
    await place.until_tip(record, is_claim)
    await until(lambda: make_beat(worker).load.num_free_slots == 4)
    worker.runner.open()
    place.check(record, await place.answer(record))


async def test_unread_blocks_hold_up_more_prefills(place: Workplace) -> None:
    """Decode workers that do not keep up are not buried in held requests."""
    worker = await place.worker("p", "prefill", num_blocks=256)
    for number in range(100):
        await place.ask([10 + number])
    await until(lambda: len(worker.host.leases) >= 60)
    await asyncio.sleep(5 * place.bus.times.pull_expiry_s)
    assert len(worker.host.leases) < 90
    place.start_router()
    await place.worker("d", "decode", num_blocks=256)
    await place.until_queues_empty()


async def test_a_beat_says_who_it_is_and_what_it_can_take(place: Workplace) -> None:
    """Id, roles, model, layout and load: what placement needs."""
    worker = await place.worker("b", "both")
    await until(lambda: worker.incarnations)
    beat = make_beat(worker)
    assert (beat.worker, beat.roles) == (worker.now.worker, ("prefill", "decode"))
    assert (beat.served, beat.engine) == (SERVED, "simulated")
    assert beat.fingerprint == worker.engine.info.fingerprint
    assert beat.load.num_free_slots == 8
    assert (beat.costs, beat.kv_token_bytes) == (None, 8)
    worker.engine.meter.costs = FREE
    assert make_beat(worker).costs == FREE


async def test_a_worker_says_at_once_that_its_line_is_empty(place: Workplace) -> None:
    """Routers that heard of a line need not wait for the next beat to send more."""
    worker = await place.worker("b", "both")
    worker.runner.gate.clear()
    record = await place.ask()
    await until(lambda: worker.runner.is_waiting)
    worker.host.load = replace(worker.host.load, waiting_tokens=21, waiting_ms=5.0)
    assert make_beat(worker).load.waiting_ms == 5.0
    worker.ctx.health.changed.clear()
    worker.runner.open()
    place.check(record, await place.answer(record))
    await until(worker.ctx.health.changed.is_set)
    assert make_beat(worker).load.waiting_tokens == 0


async def test_a_worker_says_at_once_that_it_has_room(place: Workplace) -> None:
    """The same where the last beat said that no place was free."""
    worker = await place.worker("d", "both", max_num_sequences=1)
    worker.runner.close_after(3)
    record = await place.ask()
    await place.until_tokens(record, 2)
    await until(lambda: not make_beat(worker).load.waiting_tokens)
    assert make_beat(worker).load.num_free_slots == 0
    worker.ctx.health.changed.clear()
    worker.runner.open()
    place.check(record, await place.answer(record))
    await until(worker.ctx.health.changed.is_set)
    assert make_beat(worker).load.num_free_slots == 1


async def test_a_beat_waits_for_the_engine_but_not_long(place: Workplace) -> None:
    """What a beat says of the load was asked for when it was due; of an engine in a long step it
    says how old it is."""
    worker = await place.worker("b", "both")
    await until(lambda: worker.incarnations)
    await worker.now.measured()
    idle = make_beat(worker).load
    worker.runner.gate.clear()
    record = await place.ask()
    await until(lambda: worker.runner.is_waiting)
    await worker.now.measured()  # comes back though the engine does not
    stuck = make_beat(worker).load
    assert stuck.age_ms > idle.age_ms
    assert stuck.num_running == 0, "nobody can know"
    worker.runner.open()
    place.check(record, await place.answer(record))
    await worker.now.measured()
    assert make_beat(worker).load.num_free_slots == worker.config.max_num_sequences


async def test_an_idle_worker_checks_its_books(place: Workplace) -> None:
    """Asking for the load does not keep the engine from its peace."""
    worker = await place.worker("b", "both")
    record = await place.ask()
    await place.answer(record)
    await until(lambda: worker.host.load.num_blocks)
    await until(lambda: worker.host.thread._is_checked, timeout_s=60)


async def test_cancel_words_of_no_use_are_passed_over(place: Workplace) -> None:
    """Nonsense, a request it does not have, and one that has not ended."""
    worker, record = await decoding(place)
    subject = subjects.cancel(worker.now.worker)
    await place.bus.publish(subject, b"\xc1")
    for request_id in ("unknown-request", record.request_id):
        await place.bus.publish(subject, encode(CancelWord(request_id=request_id)))
    worker.runner.open()
    place.check(record, await place.answer(record))
    assert len(worker.incarnations) == 1


# -- the engine --------------------------------------------------------------------------------


async def test_an_engine_that_breaks_ends_the_process_and_not_the_request(
    place: Workplace,
) -> None:
    """The error is the worker's: no word of it to the client, whose request another takes."""
    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012 - where it is raised varies
        async with workplace(place.broker, place.bus, place.connect, place.folder) as doomed:
            worker = await doomed.worker("b", "both", starts=False)
            worker.engine.step = None  # type: ignore[assignment,method-assign]
            doomed.start("b")
            record = await doomed.ask()
            await doomed.until_tip(record, is_claim)
            await asyncio.Event().wait()
    assert caught.value.subgroup(EngineFailed) is not None
    tip = await place.chain.tip(record.reader, record.request_id)
    assert is_claim(tip.entry)
    await place.worker("b-2", "both")
    await place.place(record, epoch=2, after_seq=tip.seq)
    place.check(record, await place.answer(record))


async def test_serving_is_one_incarnation_after_the_other(place: Workplace) -> None:
    """Ready at once; a drain ends it without another id."""
    worker = await place.worker("b", "both", starts=False)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(worker.ctx, worker.config, worker.host))
        await until(lambda: worker.ctx.describe(worker.ctx.beat()).worker)
        assert worker.ctx.health.is_ready
        worker.ctx.drain()
        async with asyncio.timeout(60):
            await serving
    assert worker.ctx.beat().state == "draining"

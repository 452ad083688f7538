"""Offers: a lease stands as long as the request waits for it, and ends once."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from infra.bus import Msg
from schemas import subjects
from schemas.codec import decode, encode, unpack_ids
from schemas.errors import PayloadTooLarge
from schemas.kv import KvReady, LeaseRelease, LeaseRenew
from schemas.requests import RequestRecord
from schemas.tokens import StreamError
from tests.workers.engine.simulated_engines import BLOCK_SIZE
from tests.workers.workplace import PROMPT, SERVED, Worker, Workplace, is_claim, until
from workers.kv.leases import Lease


async def offered(place: Workplace, **fields: object) -> tuple[Worker, RequestRecord, KvReady]:
    """A prefill worker that holds one request, and what it has announced of it. There is no
    router: nobody comes for the blocks."""
    heard: list[Msg] = []
    await place.bus.subscribe(subjects.kv_ready(SERVED), heard.append)
    worker = await place.worker("p", "prefill")
    record = await place.ask(**fields)
    await until(lambda: heard)
    return worker, record, decode(heard[0].data, KvReady)


async def release(place: Workplace, worker: Worker, ready: KvReady, **changes: object) -> None:
    fields = {"lease_id": ready.handle.lease_id, "secret": ready.handle.secret, **changes}
    word = LeaseRelease(**fields)  # type: ignore[arg-type]
    await place.bus.publish(subjects.lease(worker.now.worker), encode(word))


def expire(worker: Worker) -> Lease:
    """Let the time of its one lease be over."""
    (lease,) = worker.host.leases._leases.values()
    lease.expires_s = 0.0
    return lease


async def throw_work_away(place: Workplace) -> None:
    """What lies in the queues is of no interest any more."""
    await place.bus.api("STREAM.PURGE.MESH_WORK")


async def test_what_is_announced_is_what_is_held(place: Workplace) -> None:
    """Tokens so far, the blocks of all but the last token, and the claim to build upon."""
    worker, record, ready = await offered(place)
    answer = await place.stored(record)
    assert [list(unpack_ids(run)) for run in ready.tokens] == [answer.tokens()]
    assert len(answer.tokens()) == 1
    assert ready.finished == ("",)
    handle = ready.handle
    assert handle.num_tokens == len(PROMPT)
    assert len(unpack_ids(handle.blocks)) == -(-len(PROMPT) // BLOCK_SIZE)
    assert (ready.epoch, ready.after_seq) == (1, answer.view.chain_seq)
    assert (ready.worker, handle.owner) == (worker.now.worker, worker.now.worker)
    assert await worker.num_used_blocks() == len(unpack_ids(handle.blocks))
    await release(place, worker, ready)
    await place.until_idle()


async def test_several_choices_share_the_prompts_blocks(place: Workplace) -> None:
    """A choice that ended with its first token is said to have ended; the others go on."""
    worker, _, ready = await offered(place, n=3, temperature=0.9, max_tokens=4)
    assert [len(unpack_ids(run)) for run in ready.tokens] == [1, 1, 1]
    assert ready.handle.num_tokens == len(PROMPT)
    await release(place, worker, ready)
    await place.until_idle()


async def test_tokens_are_stored_before_they_are_announced(place: Workplace) -> None:
    """Whoever hears KvReady finds in the stream what it tells of."""
    order: list[str] = []
    tokens = subjects.token_stream("client.tests")
    for subject in (subjects.live(tokens), subjects.kv_ready(SERVED)):
        await place.bus.subscribe(subject, lambda message: order.append(message.subject))
    worker, _, ready = await offered(place)
    assert order == [subjects.live(tokens), subjects.kv_ready(SERVED)]
    await release(place, worker, ready)


async def test_a_release_needs_the_secret_and_counts_once(place: Workplace) -> None:
    """Guesses, repeats and nonsense are counted and change nothing; a nack frees as well."""
    worker, _, ready = await offered(place)
    subject = subjects.lease(worker.now.worker)
    await place.bus.publish(subject, b"\xc1 nonsense")
    await release(place, worker, ready, secret=b"guess")
    await release(place, worker, ready, lease_id="0" * 16)
    await until(lambda: worker.host.leases.num_refused == 2)
    assert len(worker.host.leases) == 1
    for _ in range(3):
        await release(place, worker, ready, ok=False)
    await until(lambda: worker.host.leases.num_refused == 4)
    assert worker.ctx.metrics.leases_ended.labels("released")._value.get() == 1
    await place.until_idle()
    assert len(worker.incarnations) == 1


async def test_a_reader_that_takes_its_time_extends_its_lease(place: Workplace) -> None:
    """By its word, with the secret; guesses and words after the end change nothing."""
    worker, _, ready = await offered(place)
    subject = subjects.lease(worker.now.worker)
    (lease,) = worker.host.leases._leases.values()
    lease.expires_s = early_s = lease.expires_s - place.bus.times.lease_s / 2
    right = LeaseRenew(lease_id=ready.handle.lease_id, secret=ready.handle.secret)
    await place.bus.publish(subject, encode(msgspec.structs.replace(right, secret=b"guess")))
    await until(lambda: worker.host.leases.num_refused == 1)
    await place.bus.publish(subject, encode(right))
    await until(lambda: lease.expires_s > early_s)
    await release(place, worker, ready)
    await place.bus.publish(subject, encode(right))
    await until(lambda: worker.host.leases.num_refused == 2)
    await place.until_idle()


async def test_a_lease_is_renewed_while_its_request_waits(place: Workplace) -> None:
    """No decode worker for longer than a lease: the blocks are still there when one comes."""
    worker, record, _ = await offered(place)
    for _ in range(3):
        lease = expire(worker)
        await until(lambda lease=lease: lease.expires_s > time.monotonic())  # type: ignore[misc]
    place.start_router()
    await place.worker("d", "decode")
    answer = await place.answer(record)
    place.check(record, answer)
    assert answer.claims == [(1, "prefill"), (2, "decode")]


async def test_a_lease_ends_when_its_request_has_gone_on(place: Workplace) -> None:
    """Taken over by others: at its next expiry nobody needs it."""
    worker, record, ready = await offered(place)
    await place.dead_claim(record, 2, ready.after_seq)
    expire(worker)
    await place.until_idle()
    assert worker.ctx.metrics.leases_ended.labels("expired")._value.get() == 1
    assert len(worker.incarnations) == 1, "a request that was handed on is nobody's theft"
    await throw_work_away(place)


async def test_a_lease_outlives_an_outage(place: Workplace) -> None:
    """Expired while the chain can't be read: kept, not guessed about."""
    worker, record, _ = await offered(place)
    await place.broker.kill()
    lease = expire(worker)
    await asyncio.sleep(3 * place.bus.times.beat_s)
    assert len(worker.host.leases) == 1
    await place.restart_broker()
    await until(lambda: lease.expires_s > 0)
    place.start_router()
    await place.worker("d", "decode")
    place.check(record, await place.answer(record))


async def test_what_can_not_be_announced_fails(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too large even for the object store: the client hears of it, nothing stays held."""

    async def publish_work(*args: object, **fields: object) -> None:
        raise PayloadTooLarge("no bus takes that")

    monkeypatch.setattr("workers.offers.publish_work", publish_work)
    await place.worker("p", "prefill")
    record = await place.ask()
    terminal = (await place.answer(record)).view.terminal
    assert isinstance(terminal, StreamError)
    assert terminal.error.code == "payload_too_large"


async def test_a_large_hand_over_is_summed_up_beside_the_loop(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums and copy on threads of their own: the same answer."""
    monkeypatch.setattr("workers.offers._INLINE_CHECK_BYTES", 0)
    monkeypatch.setattr("workers.kv.intake.AT_ONCE_BYTES", 0)
    place.start_router()
    await place.worker("p", "prefill")
    await place.worker("d", "decode")
    for number in range(3):
        prompt = [10 + number, *PROMPT]
        record = await place.ask(prompt)
        place.check(record, await place.answer(record), prompt)


async def test_a_request_cancelled_before_its_tokens_are_stored_is_not_announced(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease has ended when the flush returns: no KvReady for nothing."""
    heard: list[Msg] = []
    await place.bus.subscribe(subjects.kv_ready(SERVED), heard.append)
    worker = await place.worker("p", "prefill")
    await until(lambda: worker.incarnations)
    writer = worker.now._writer
    flush, may_flush = writer.flush, asyncio.Event()

    async def flush_later(timeout_s: float) -> None:
        await may_flush.wait()
        await flush(timeout_s)

    monkeypatch.setattr(writer, "flush", flush_later)
    record = await place.ask()
    await until(lambda: len(worker.host.leases))
    await place.until_tip(record, is_claim)
    await place.cancel(record, tells=worker)
    await place.until_idle()
    may_flush.set()
    await until(lambda: not [t for t in asyncio.all_tasks() if t.get_name().startswith("offer ")])
    assert not heard

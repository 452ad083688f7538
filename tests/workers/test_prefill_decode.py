"""Requests through a prefill and a decode worker: two worker ids, one real broker, real memory.

Every answer is compared with that of one engine which computes the request alone.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from infra.bus import DEAD
from schemas import subjects
from schemas.codec import decode
from schemas.control import DeadLetter
from schemas.decode import DecodeTask
from schemas.errors import BusUnavailable
from schemas.requests import RequestRecord
from schemas.tokens import Cancelled, Expired, StreamError, TokenDelta
from tests.workers.engine.simulated_engines import (
    CONTEXT_LENGTH,
    make_engine,
    request_of,
    run,
)
from tests.workers.workplace import (
    PROMPT,
    SERVED,
    Answer,
    GatedRunner,
    Worker,
    Workplace,
    is_claim,
    until,
)
from workers.engine.api import TokenOutput

A_BEAT_S = 1.0  # ten beats of these tests: a busy machine has its own


async def pair(place: Workplace, **fields: object) -> tuple[Worker, Worker]:
    """A router, a prefill worker, and a decode worker with ``fields``."""
    place.start_router()
    prefill = await place.worker("p", "prefill")
    return prefill, await place.worker("d", "decode", **fields)  # type: ignore[arg-type]


def alone(record: RequestRecord, prompt: Sequence[int] = PROMPT) -> list[TokenOutput]:
    """What one engine makes of the request, undisturbed."""
    request = structs.replace(request_of("alone", tuple(prompt)), sampling=record.sampling)
    engine = make_engine()
    engine.add(request)
    outputs = run(engine).outputs
    engine.pool.close()
    return outputs


def same(record: RequestRecord, answer: Answer, prompt: Sequence[int] = PROMPT) -> None:
    """Tokens, text, finish reasons and logprobs are those of :func:`alone`."""
    outputs = alone(record, prompt)
    for index in range(record.sampling.n):
        wanted = [output for output in outputs if output.index == index]
        got = [delta for delta in answer.deltas if delta.index == index]
        assert [delta.ids[0] for delta in got] == [output.token_id for output in wanted]
        assert answer.text(index) == "".join(output.text for output in wanted)
        assert answer.reason(index) == wanted[-1].finish_reason
        assert answer.end.num_tokens[index] == len(wanted)
        logprobs = [output.logprob for output in wanted]
        assert [delta.logprobs and delta.logprobs[0] for delta in got] == logprobs
    assert answer.end.usage.prompt_tokens == len(prompt)
    assert answer.end.usage.completion_tokens == len(outputs)


# -- the journey -------------------------------------------------------------------------------

SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "n": 3},
    {"temperature": 0.9, "n": 2, "logprobs": 2},
    {"logprobs": 0},
    {"max_tokens": 2},
    {"max_tokens": 60, "ignore_eos": False, "temperature": 0.7},
    {"stop": ("e", "a", "o")},
    {"n": 4, "temperature": 1.0, "stop": ("e", "t")},
]


@pytest.mark.parametrize("length", [1, 20, 21])
async def test_what_two_workers_answer_is_what_one_engine_answers(
    place: Workplace, length: int
) -> None:
    """Prefilled here, decoded there: tokens, text, reasons, logprobs and usage, whatever is asked
    for, all at once; the prompt may end within a block or with it."""
    _, decode_worker = await pair(place)
    prompt = PROMPT[:length]
    records = [await place.ask(prompt, **sampling) for sampling in SAMPLINGS]
    for record in records:
        same(record, await place.answer(record), prompt)
    assert decode_worker.ctx.metrics.kv_transfer_bytes.labels("shm")._value.get() > 0
    steps = decode_worker.ctx.metrics.registry.get_sample_value("mesh_step_seconds_count")
    assert steps
    assert steps > 0


async def test_the_journey_is_two_claims_and_one_release(place: Workplace) -> None:
    """Token 0 under the first epoch, all others under the second; the lease is released, not left
    to expire, and tokens found in the cache are counted."""
    prefill, _ = await pair(place)
    record = await place.ask()
    answer = await place.answer(record)
    same(record, answer)
    assert answer.claims == [(1, "prefill"), (2, "decode")]
    assert [delta.epoch for delta in answer.deltas] == [1] + [2] * 11
    await place.until_idle(A_BEAT_S)
    ended = prefill.ctx.metrics.leases_ended
    assert ended.labels("released")._value.get() == 1
    again = await place.answer(await place.ask())
    assert again.end.usage.cached_tokens == 20
    assert answer.end.usage.cached_tokens == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_what_was_handed_over_does_not_count_as_cached(place: Workplace, n: int) -> None:
    """Usage tells what was found before anything was computed; blocks that one worker computed and
    the other copied are not that, however many choices share them."""
    await pair(place)
    for cached in (0, 20):
        answer = await place.answer(await place.ask(n=n, temperature=0.9))
        assert answer.end.usage.cached_tokens == cached


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"max_tokens": 1, "n": 3}])
async def test_what_ends_with_its_first_token_is_not_handed_over(
    place: Workplace, sampling: dict[str, object]
) -> None:
    """Finished at once: StreamEnd under the prefill's own epoch, no lease, no decode."""
    prefill, _ = await pair(place)
    record = await place.ask(**sampling)
    answer = await place.answer(record)
    same(record, answer)
    assert answer.claims == [(1, "prefill")]
    assert prefill.ctx.metrics.leases_ended._metrics == {}


async def test_one_worker_can_do_both(place: Workplace) -> None:
    """Role ``both``: one claim, nothing is handed to anybody."""
    await place.worker("b", "both")
    record = await place.ask(n=2, temperature=0.8)
    answer = await place.answer(record)
    same(record, answer)
    assert answer.claims == [(1, "prefill")]


async def test_a_record_too_large_for_the_task_is_read_from_the_stream(place: Workplace) -> None:
    """A task without its record means the same."""
    await pair(place)
    record = await place.record()
    await place.place(record, is_inline=False)
    same(record, await place.answer(record))


# -- taking over -------------------------------------------------------------------------------


def _deltas(record: RequestRecord, outputs: list[TokenOutput], count: int) -> list[TokenDelta]:
    """The first ``count`` tokens of each choice (one more of each odd one) as deltas of epoch 1."""
    return [
        TokenDelta(
            request_id=record.request_id,
            epoch=1,
            number=output.number,
            ids=(output.token_id,),
            text=output.text,
            index=output.index,
            finish_reason=output.finish_reason,
        )
        for output in outputs
        if output.number < count + output.index % 2
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 9, "temperature": 0.9},
        {"max_tokens": 9, "stop": ("e", "a"), "temperature": 0.9},
        {"max_tokens": 5, "n": 2, "temperature": 0.9},
    ],
)
async def test_a_take_over_goes_on_from_any_token(
    place: Workplace, sampling: dict[str, object]
) -> None:
    """However many tokens the dead worker had published: none is sampled again, none missing, and
    the text goes on where it stopped, in the middle of a held back stop string too."""
    await pair(place)
    records = []
    for count in range(10):
        record = await place.record(**sampling)
        seq = await place.dead_claim(record, 1, 0)
        await place.dead_tokens(record, _deltas(record, alone(record), count))
        await place.place(record, epoch=2, after_seq=seq)
        records.append(record)
    for count, record in enumerate(records):
        answer = await place.answer(record)
        same(record, answer)
        firsts = [delta for delta in answer.deltas if delta.epoch == 1]
        assert len(firsts) == len(_deltas(record, alone(record), count))


async def test_words_that_nobody_can_read_do_not_keep_from_taking_over(place: Workplace) -> None:
    """What a newer peer wrote to the reader is passed over, as readers do."""
    await pair(place)
    record = await place.record()
    seq = await place.dead_claim(record, 1, 0)
    await place.bus.publish_stored(subjects.token_stream(record.reader), b"\xc1 from the future")
    await place.dead_tokens(record, _deltas(record, alone(record), 3))
    await place.place(record, epoch=2, after_seq=seq)
    same(record, await place.answer(record))


async def test_three_epochs_without_a_token_are_poison(place: Workplace) -> None:
    """The fourth worker does not try: StreamError for the client, a dead letter for people."""
    await pair(place)
    record = await place.record()
    seq = 0
    for epoch in (1, 2, 3):
        seq = await place.dead_claim(record, epoch, seq)
    await place.place(record, epoch=4, after_seq=seq)
    terminal = (await place.answer(record)).view.terminal
    assert isinstance(terminal, StreamError)
    assert terminal.error.code == "poisoned"
    found = await place.bus.api(f"STREAM.MSG.GET.{DEAD}", {"last_by_subj": subjects.DEAD})
    letter = decode(base64.b64decode(found["message"]["data"]), DeadLetter)
    assert letter.code == "poisoned"
    assert decode(letter.payload, RequestRecord) == record


async def test_epochs_that_brought_tokens_are_no_poison(place: Workplace) -> None:
    """Only epochs in a row count, from the last one that brought a token on."""
    await pair(place)
    record = await place.record()
    seq = await place.dead_claim(record, 1, 0)
    await place.dead_tokens(record, _deltas(record, alone(record), 2))
    for epoch in (2, 3):
        seq = await place.dead_claim(record, epoch, seq)
    await place.place(record, epoch=4, after_seq=seq)
    same(record, await place.answer(record))


# -- tasks that come twice or too late -----------------------------------------------------------


async def test_tasks_that_come_again_change_nothing(place: Workplace) -> None:
    """The same prefill task five times, also while it is computed and after its end."""
    prefill, decode_worker = await pair(place)
    prefill.runner.gate.clear()
    record = await place.record()
    for _ in range(3):
        await place.place(record)
    await place.until_tip(record, is_claim)
    await place.place(record)
    prefill.runner.open()
    answer = await place.answer(record)
    await place.place(record)
    await place.until_queues_empty()
    same(record, await place.stored(record))
    assert (await place.stored(record)).claims == answer.claims == [(1, "prefill"), (2, "decode")]
    assert len(prefill.incarnations) == len(decode_worker.incarnations) == 1


async def test_a_decode_task_that_comes_again_does_not_disturb_what_it_began(
    place: Workplace,
) -> None:
    """A repeat of a running request's task is acked: it neither fails nor releases anything."""
    _, decode_worker = await pair(place)
    tasks: list[bytes] = []
    await place.bus.subscribe(subjects.decode(SERVED), lambda message: tasks.append(message.data))
    decode_worker.runner.close_after(3)
    record = await place.ask()
    await place.until_tip(record, lambda entry: is_claim(entry, "decode"))
    await place.until_tokens(record, 3)
    for _ in range(4):
        task = decode(tasks[0], DecodeTask)
        await place.place_task(task, subjects.decode(SERVED), record.deadline_unix_ms)
    await place.until_queues_empty()
    decode_worker.runner.open()
    same(record, await place.answer(record))


async def test_a_late_decode_task_gives_the_lease_back(place: Workplace) -> None:
    """The chain has gone on: nobody will read the blocks, so whoever notices releases them."""
    place.start_router()
    prefill = await place.worker("p", "prefill")
    record = await place.ask()
    await until(lambda: len(prefill.host.leases))
    seq = await place.until_tip(record, is_claim)
    seq = await place.dead_claim(record, 2, seq)
    await place.worker("d", "decode")
    await place.until_idle(A_BEAT_S)
    await place.place(record, epoch=3, after_seq=seq)
    same(record, await place.answer(record))


# -- blocks that are lost ------------------------------------------------------------------------


async def test_damaged_blocks_are_computed_again(place: Workplace) -> None:
    """A flipped bit shows in the checksum: prefilled again under the next epoch, never used."""
    place.start_router()
    tasks: list[bytes] = []
    await place.bus.subscribe(subjects.decode(SERVED), lambda message: tasks.append(message.data))
    prefill = await place.worker("p", "prefill")
    record = await place.ask()
    await until(lambda: tasks)
    (held,) = prefill.engine.scheduler.parked
    prefill.engine.pool.slots[held.block_table[-1], 3] ^= 1  # not full: nobody shares it
    await place.worker("d", "decode")
    answer = await place.answer(record)
    same(record, answer)
    assert answer.claims == [(1, "prefill"), (2, "decode"), (3, "prefill"), (4, "decode")]


async def test_workers_that_cannot_share_blocks_get_on_token_by_token(place: Workplace) -> None:
    """Another fingerprint: every hand-over is lost, every epoch brings one token, and the answer
    is complete all the same."""
    place.start_router()
    await place.worker("p", "prefill")
    decode_worker = await place.worker("d", "decode", starts=False)
    decode_worker.engine.info = replace(decode_worker.engine.info, fingerprint="other")
    decode_worker.host.intake._info = decode_worker.engine.info
    place.start("d")
    record = await place.ask(max_tokens=3)
    answer = await place.answer(record)
    same(record, answer)
    assert [delta.epoch for delta in answer.deltas] == [1, 3, 5]


# -- no room -----------------------------------------------------------------------------------


async def test_without_room_a_decode_waits_its_turn(place: Workplace) -> None:
    """A pool for one request at a time: all get their answer, none is refused."""
    await pair(place, num_blocks=9)
    records = [await place.ask([10 + number, *PROMPT[1:]], max_tokens=10) for number in range(4)]
    for number, record in enumerate(records):
        same(record, await place.answer(record), [10 + number, *PROMPT[1:]])


@pytest.mark.parametrize(
    ("prompt", "fields", "code"),
    [
        (
            range(10, 50),
            {"max_tokens": 50},
            "context_length_exceeded",
        ),  # 23 blocks, and there are 12
        (range(10, 10 + CONTEXT_LENGTH), {}, "context_length_exceeded"),
        ((5, 100_000), {}, "invalid_request"),
    ],
)
async def test_what_can_never_be_computed_is_refused(
    place: Workplace, prompt: Sequence[int], fields: dict[str, object], code: str
) -> None:
    """Larger than any pool, than the context, outside the vocabulary: the client hears of it."""
    await place.worker("b", "both", num_blocks=12)
    record = await place.ask(tuple(prompt), **fields)
    terminal = (await place.answer(record)).view.terminal
    assert isinstance(terminal, StreamError)
    assert terminal.error.code == code


async def test_blocks_that_no_decode_worker_has_room_for_end_the_request(
    place: Workplace,
) -> None:
    """A decode pool too small for the prompt: an error, not a task that comes back for ever."""
    prefill, _ = await pair(place, num_blocks=4)
    record = await place.ask()
    terminal = (await place.answer(record)).view.terminal
    assert isinstance(terminal, StreamError)
    assert (terminal.error.code, terminal.error.param) == ("context_length_exceeded", "max_tokens")
    await place.until_idle(A_BEAT_S)
    assert not len(prefill.host.leases)


async def test_an_engine_that_fails_on_one_request_serves_the_others(place: Workplace) -> None:
    """The error is the guilty request's alone."""
    await pair(place)
    good = await place.ask()
    bad = await place.ask((10, 11, GatedRunner.POISON, 12))
    other = await place.ask(PROMPT[:9])
    terminal = (await place.answer(bad)).view.terminal
    assert isinstance(terminal, StreamError)
    assert terminal.error.code == "engine_failed"
    same(good, await place.answer(good))
    same(other, await place.answer(other), PROMPT[:9])


# -- cancelled ---------------------------------------------------------------------------------


async def test_cancelled_in_the_queue(place: Workplace) -> None:
    """The task of a request that has ended is dropped unseen."""
    record = await place.ask()
    await place.cancel(record)
    prefill, _ = await pair(place)
    await place.until_queues_empty()
    assert prefill.owed == 0
    assert (await place.stored(record)).claims == []


async def test_cancelled_while_it_is_prefilled(place: Workplace) -> None:
    """Nothing is held a beat later, and no token comes after the end."""
    prefill, _ = await pair(place)
    prefill.runner.gate.clear()
    record = await place.ask()
    await place.until_tip(record, is_claim)
    await place.cancel(record, tells=prefill)
    await until(lambda: prefill.owed == 0)
    prefill.runner.open()
    await place.until_idle(A_BEAT_S)
    assert not (await place.stored(record)).deltas


async def test_cancelled_while_it_is_held(place: Workplace) -> None:
    """The lease ends with the request, not with its time."""
    prefill = await place.worker("p", "prefill")
    record = await place.ask()
    await until(lambda: len(prefill.host.leases))
    await place.cancel(record, tells=prefill)
    await place.until_idle(A_BEAT_S)
    assert prefill.ctx.metrics.leases_ended.labels("dropped")._value.get() == 1


async def test_cancelled_between_prefill_and_decode(place: Workplace) -> None:
    """The decode task finds the end, and the lease, should it still stand, is released."""
    place.start_router()
    prefill = await place.worker("p", "prefill")
    record = await place.ask()
    await until(lambda: len(prefill.host.leases))
    await place.cancel(record)
    await place.worker("d", "decode")
    await place.until_idle(A_BEAT_S)
    assert prefill.ctx.metrics.leases_ended.labels("released")._value.get() == 1


async def test_cancelled_while_its_blocks_are_copied(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy ends, then the blocks go back; nothing is computed."""
    monkeypatch.setattr("workers.kv.intake.AT_ONCE_BYTES", 0)
    _, decode_worker = await pair(place)
    reader = decode_worker.host.intake._reader
    may_read, read = threading.Event(), reader.read

    def read_later(*args: object) -> None:
        assert may_read.wait(5)
        read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "read", read_later)
    record = await place.ask()
    await place.until_tip(record, lambda entry: is_claim(entry, "decode"))
    await place.cancel(record, tells=decode_worker)
    await until(lambda: decode_worker.owed == 0)
    assert await decode_worker.num_used_blocks() == 6
    may_read.set()
    await place.until_idle(A_BEAT_S)
    assert [delta.epoch for delta in (await place.stored(record)).deltas] == [1]


@pytest.mark.parametrize("is_told", [True, False])
async def test_cancelled_while_it_is_decoded(place: Workplace, is_told: bool) -> None:
    """A beat after the word nothing is held; should the word be lost, within one lease. No step
    is computed for it but the one that was under way."""
    _, decode_worker = await pair(place)
    decode_worker.runner.close_after(3)
    record = await place.ask(max_tokens=60)
    await place.until_tokens(record, 4)
    await place.cancel(record, tells=decode_worker if is_told else None)
    await until(lambda: decode_worker.owed == 0)
    num_steps = decode_worker.runner.num_steps
    decode_worker.runner.open()
    await place.until_idle(A_BEAT_S)
    assert decode_worker.runner.num_steps <= num_steps + 1
    assert isinstance((await place.stored(record)).view.terminal, Cancelled)
    assert len(decode_worker.incarnations) == 1


async def test_past_its_deadline_nothing_is_held(place: Workplace) -> None:
    """Nobody came to decode: the lease is not renewed beyond the deadline."""
    prefill = await place.worker("p", "prefill")
    record = await place.ask(deadline_s=1.0)
    await until(lambda: len(prefill.host.leases))
    await until(lambda: place.bus.now_unix_ms() > record.deadline_unix_ms)
    for lease in prefill.host.leases._leases.values():
        lease.expires_s = 0.0
    await place.until_idle()


async def test_a_task_past_its_deadline_is_expired(place: Workplace) -> None:
    """It waited too long in the queue: the chain says so."""
    record = await place.ask(deadline_s=0.01)
    late_ms = record.deadline_unix_ms + 200  # our clock and the worker's differ a little
    await until(lambda: place.bus.now_unix_ms() > late_ms)
    await place.worker("p", "prefill")
    assert isinstance((await place.answer(record)).view.terminal, Expired)


# -- the bus is away -----------------------------------------------------------------------------


async def test_the_broker_dies_in_mid_answer(place: Workplace) -> None:
    """Tokens made meanwhile wait in the ring; the stream is complete afterwards."""
    _, decode_worker = await pair(place)
    decode_worker.runner.close_after(3)
    record = await place.ask(max_tokens=30)
    await place.until_tokens(record, 4)
    await place.broker.kill()
    decode_worker.runner.open()
    await until(lambda: not decode_worker.now.execution._reports)
    await place.restart_broker()
    same(record, await place.answer(record))
    assert len(decode_worker.incarnations) == 1


async def test_the_broker_dies_before_the_blocks_are_offered(place: Workplace) -> None:
    """The lease stands through the outage; KvReady follows when token 0 is stored."""
    prefill, _ = await pair(place)
    prefill.runner.gate.clear()
    record = await place.ask()
    await place.until_tip(record, is_claim)
    await until(lambda: prefill.runner.is_waiting)
    await place.broker.kill()
    prefill.runner.open()
    await until(lambda: len(prefill.host.leases))
    await place.restart_broker()
    same(record, await place.answer(record))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_claim_whose_answer_is_lost_is_still_served(
    place: Workplace, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored, and the worker heard a time-out: nobody else may have it, so it must find out."""
    workers = dict(zip(("prefill", "decode"), await pair(place), strict=True))
    bus = workers[role].ctx.bus
    publish, lost = bus.publish_stored, []

    async def publish_stored(subject: str, *args: object, **fields: object) -> object:
        stored = await publish(subject, *args, **fields)  # type: ignore[arg-type]
        if ".claim." in subject and not lost:
            lost.append(stored)
            raise BusUnavailable("the answer was lost")
        return stored

    monkeypatch.setattr(bus, "publish_stored", publish_stored)
    record = await place.ask()
    answer = await place.answer(record)
    same(record, answer)
    assert lost
    assert answer.claims == [(1, "prefill"), (2, "decode")]

"""What enters the mesh, and what is refused at its door."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from infra.bus import waiting_work
from infra.times import Times
from pipeline.acceptance import accepted_of
from schemas import subjects
from schemas.codec import decode, encode, tag_of, unpack_ids
from schemas.headers import WorkHeaders
from schemas.prefill import PrefillTask
from schemas.requests import ChatMessage, InferenceRequest
from schemas.tokens import Accepted, StreamError
from tests.conftest import Until
from tests.pipeline.door_rig import (
    CONTEXT,
    DIRECT,
    SUBJECT,
    VOCAB,
    Door,
    ask,
    open_door,
    sampled,
    schema,
)
from tests.pipeline.rig import READER, SERVED, TRACE, beat, new_id

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(
    tmp_path_factory: pytest.TempPathFactory, times: Times, until: Until
) -> AsyncIterator[Door]:
    async with open_door(tmp_path_factory, times, until) as door:
        yield door


@pytest_asyncio.fixture(loop_scope="module")
async def own_door(
    tmp_path_factory: pytest.TempPathFactory, times: Times, until: Until
) -> AsyncIterator[Door]:
    """One that no other test has been at."""
    async with open_door(tmp_path_factory, times, until) as door:
        yield door


# What enters ---------------------------------------------------------------------------------


async def test_an_admitted_request_has_record_task_and_word(door: Door) -> None:
    """The record holds all that later stages need; the task carries it; the reader hears of it."""
    request_id = new_id()
    note = bytes(range(256)) * 16
    asked = ask(
        request_id, tenant="acme", priority=3, label="mine", cache_salt="s", reader_note=note,
        **sampled(n=2, response_format=schema('{"type":"integer"}')),
    )  # fmt: skip
    accepted = await door.admitted(asked, request_id)
    record = await door.record(request_id)
    assert record.prompt_ids == door.tokenizer.encode("The sea is")
    assert (record.served, record.reader, record.model, record.revision) == (
        SERVED,
        READER,
        "tiny",
        "r1",
    )
    assert (record.tenant, record.priority, record.label, record.cache_salt) == (
        "acme",
        3,
        "mine",
        "s",
    )
    assert record.reader_note == note
    assert record.sampling.response_format == schema('{"type":"integer"}')
    num_prompt = len(unpack_ids(record.prompt_ids))
    assert record.cost == 2 * num_prompt**2 + num_prompt * 2 * (CONTEXT - num_prompt)
    assert accepted.prompt_tokens == num_prompt
    assert accepted.max_tokens == record.sampling.max_tokens == CONTEXT - num_prompt
    assert accepted.deadline_unix_ms == record.deadline_unix_ms
    assert accepted.echo_text is None
    ((subject, task),) = door.ear.prefill_tasks(request_id)
    assert subject == subjects.prefill(SERVED)
    assert (task.epoch, task.after_seq, task.reader, task.record) == (1, 0, READER, record)


async def test_the_task_lies_in_its_queue_before_the_client_hears(door: Door) -> None:
    """Accepted is a promise: whatever happens to admission now, the request goes on."""
    request_id = new_id()
    await door.admitted(ask(request_id), request_id)
    spoken = [m.subject for m in door.ear.messages if request_id.encode() in m.data]
    record, task = subjects.request_record(request_id), subjects.prefill(SERVED)
    told = subjects.token_stream(READER)
    assert [s for s in spoken if s in (record, task, told)] == [record, task, told]


async def test_headers_begin_the_journey(door: Door) -> None:
    """The task's headers carry request, deadline and the trace that came with the request."""
    request_id = new_id()
    deadline = door.bus.now_unix_ms() + 5000
    headers = {"traceparent": TRACE, "Mesh-Request": request_id}
    asked = ask(request_id, deadline_unix_ms=deadline)
    await door.bus.publish_stored(SUBJECT, encode(asked), headers)
    await door.until(lambda: door.ear.prefill_tasks(request_id))
    (found,) = [
        WorkHeaders.from_dict(m.headers)
        for m in door.ear.on(subjects.prefill(SERVED))
        if request_id.encode() in m.data
    ]
    assert found == WorkHeaders(
        schema="prefill-task/1",
        request_id=request_id,
        epoch=1,
        deadline_unix_ms=deadline,
        traceparent=TRACE,
    )


async def test_a_chat_is_rendered_by_the_models_template(door: Door) -> None:
    """Text and text parts alike; what the model sees ends where it is to answer."""
    request_id = new_id()
    parts: Any = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content=parts),
    )
    await door.admitted(ask(request_id, messages=messages), request_id)
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = unpack_ids((await door.record(request_id)).prompt_ids)
    assert ids == unpack_ids(door.tokenizer.encode(text, add_special=False))


async def test_token_ids_are_taken_as_they_are(door: Door) -> None:
    """A prompt that is tokens already is not tokenized again."""
    request_id = new_id()
    await door.admitted(ask(request_id, prompt=(5, 6, VOCAB - 1)), request_id)
    assert unpack_ids((await door.record(request_id)).prompt_ids) == [5, 6, VOCAB - 1]


async def test_a_long_prompt_is_not_inline(door: Door) -> None:
    """Over 64 KiB of ids the task names the record; text that long is tokenized beside the loop.

    The context here is too small for it, so the rule is seen at its edge: what fits is inline.
    """
    request_id = new_id()
    await door.admitted(ask(request_id, prompt=(7,) * (CONTEXT - 1)), request_id)
    ((_, task),) = door.ear.prefill_tasks(request_id)
    assert task.record is not None
    long_id = new_id()
    await door.publish(ask(long_id, prompt="sea " * 2000))
    assert (await door.refused(long_id)).error.code == "context_length_exceeded"


@pytest.mark.parametrize("tag", [{}, {"schema": "inference-request/1"}], ids=["bare", "tagged"])
async def test_json_as_typed_by_hand_is_accepted(door: Door, tag: dict[str, str]) -> None:
    """``nats pub`` with a JSON body, with or without its tag; the reader is the id's own."""
    request_id = new_id()
    body = {"request_id": request_id, "model": "tiny", "prompt": "Hi", **tag,
            "sampling": {"max_tokens": 3, "logit_bias": {"5": 1}}}  # fmt: skip
    await door.publish(json.dumps(body, indent=1).encode())
    reader = subjects.default_reader(request_id)
    await door.until(lambda: door.ear.stream(reader, request_id))
    record = await door.record(request_id)
    assert record.reader == reader
    assert (record.sampling.max_tokens, record.sampling.logit_bias) == (3, {5: 1.0})


async def test_every_request_has_a_seed(door: Door) -> None:
    """Whoever goes on with a request draws the same numbers; its own seed is kept."""
    ids = [new_id() for _ in range(3)]
    await door.admitted(ask(ids[0]), ids[0])
    await door.admitted(ask(ids[1]), ids[1])
    await door.admitted(ask(ids[2], **sampled(seed=-1)), ids[2])
    drawn = [(await door.record(one)).sampling.seed for one in ids]
    assert None not in drawn
    assert drawn[0] != drawn[1]
    assert drawn[2] == 2**64 - 1


async def test_deadlines_are_set_and_bounded(door: Door, times: Times) -> None:
    """None gets the default; nobody gets more than the stream's memory allows."""
    before, one, other = door.bus.now_unix_ms(), new_id(), new_id()
    without = await door.admitted(ask(one), one)
    far = await door.admitted(ask(other, deadline_unix_ms=2**60), other)
    after = door.bus.now_unix_ms()
    for accepted, seconds in ((without, times.default_deadline_s), (far, times.max_deadline_s)):
        assert before <= accepted.deadline_unix_ms - seconds * 1000 <= after


async def test_an_echo_is_the_prompts_text(door: Door) -> None:
    """Completions with ``echo`` give the prompt back, from its ids."""
    request_id = new_id()
    accepted = await door.admitted(ask(request_id, echo=True), request_id)
    assert accepted.echo_text == "The sea is"


async def test_the_least_loaded_worker_is_named(door: Door) -> None:
    """With a choice of workers the task goes to the queue of one, by name."""
    door.hear(beat("w-1", num_free_slots=64, num_running=2))
    door.hear(beat("w-2", num_free_slots=64))
    request_id = new_id()
    await door.admitted(ask(request_id), request_id)
    ((subject, _),) = door.ear.prefill_tasks(request_id)
    assert subject == subjects.prefill(SERVED, "w-2")
    for worker in ("w-1", "w-2"):
        door.hear(beat(worker, state="gone"))


# What comes twice ----------------------------------------------------------------------------


async def test_a_repeat_is_admitted_once(door: Door) -> None:
    """The second one finds the record: same task, same word, nothing charged, nothing drawn."""
    request_id = new_id()
    await door.admitted(ask(request_id), request_id)
    record = await door.record(request_id)
    admitted = door.ctx.metrics.requests_admitted._value.get()
    waiting = await waiting_work(door.bus)
    num_handled = len(door.lines.outcomes("admission"))
    await door.publish(ask(request_id, **sampled(temperature=0.25)))
    await door.until(lambda: len(door.lines.outcomes("admission")) > num_handled)
    assert door.lines.outcomes("admission")[-1] == "repeated"
    assert await door.record(request_id) == record
    assert door.ctx.metrics.requests_admitted._value.get() == admitted
    first, second = door.ear.prefill_tasks(request_id)
    assert first == second
    # The broker dropped the second task and the second Accepted.
    assert len(door.ear.stream(READER, request_id)) == 1
    assert await waiting_work(door.bus) == waiting


async def test_an_id_in_use_is_refused_to_another_reader(door: Door) -> None:
    """Whoever comes second with an id gets neither the stream nor a disturbance of it."""
    request_id = new_id()
    await door.admitted(ask(request_id), request_id)
    await door.publish(ask(request_id, reader="client.thief"))
    end = await _refusal_at(door, "client.thief", request_id)
    assert (end.error.code, end.error.param) == ("invalid_request", "request_id")
    assert door.ear.end(READER, request_id) is None


async def _refusal_at(door: Door, reader: str, request_id: str) -> StreamError:
    await door.until(lambda: door.ear.end(reader, request_id))
    end = door.ear.end(reader, request_id)
    assert isinstance(end, StreamError)
    return end


# What fits -----------------------------------------------------------------------------------


async def test_an_answer_is_as_long_as_the_workers_can_hold(door: Door) -> None:
    """The smallest live worker of the model counts; one that drains, or says nothing, does not."""
    held = {"w-big": 96, "w-small": 64, "w-mute": 0}
    for worker, tokens in held.items():
        door.hear(msgspec.structs.replace(beat(worker), max_sequence_tokens=tokens))
    leaving = msgspec.structs.replace(beat("w-leaving", state="draining"), max_sequence_tokens=16)
    door.hear(leaving)
    try:
        request_id = new_id()
        accepted = await door.admitted(ask(request_id), request_id)
        assert accepted.max_tokens == 64 - accepted.prompt_tokens
        request_id = new_id()
        await door.publish(ask(request_id, **sampled(max_tokens=accepted.max_tokens + 1)))
        end = await door.refused(request_id)
        assert (end.error.code, end.error.param) == ("context_length_exceeded", "max_tokens")
        assert "64" in end.error.message
        request_id = new_id()
        await door.publish(ask(request_id, prompt=(5,) * 64))
        end = await door.refused(request_id)
        assert (end.error.code, end.error.param) == ("context_length_exceeded", "prompt")
    finally:
        for worker in (*held, "w-leaving"):
            door.hear(beat(worker, state="gone"))
    request_id = new_id()
    accepted = await door.admitted(ask(request_id), request_id)
    assert accepted.max_tokens == CONTEXT - accepted.prompt_tokens, "no worker: the context counts"


async def test_what_was_admitted_is_not_refused_later(door: Door) -> None:
    """A repeat of a request is the same request, whatever would be said to a new one by now."""
    request_id = new_id()
    await door.admitted(ask(request_id), request_id)
    small = msgspec.structs.replace(beat("w-tiny"), max_sequence_tokens=1)
    door.hear(small)
    try:
        num_repeated = door.lines.outcomes("admission").count("repeated")
        await door.publish(ask(request_id))
        await door.until(
            lambda: door.lines.outcomes("admission").count("repeated") == num_repeated + 1
        )
        assert door.ear.end(READER, request_id) is None
    finally:
        door.hear(beat("w-tiny", state="gone"))


# What comes directly --------------------------------------------------------------------------


async def said(door: Door, request: InferenceRequest) -> Accepted | None:
    """Say ``request`` without the queue; its answer, if it has one."""
    headers = WorkHeaders(
        schema=tag_of(InferenceRequest),
        request_id=request.request_id,
        epoch=0,
        deadline_unix_ms=door.bus.now_unix_ms() + 60_000,
    )
    wire = headers.to_dict(f"{request.request_id}.admission")
    answer = door.bus.ask(DIRECT, encode(request), wire, 60.0)
    await door.until(lambda: answer.done() or door.ear.stream(READER, request.request_id), 60)
    if answer.done():
        return decode(answer.result().data, Accepted)
    answer.cancel()
    return None


async def test_what_comes_directly_is_answered_and_goes_directly(own_door: Door) -> None:
    """Accepted is the answer, the only worker is told the task, with a record that it is to store;
    nothing is stored here."""
    door = own_door
    door.hear(beat("d0", num_free_slots=4))
    own = subjects.direct(subjects.prefill(SERVED, "d0"))
    await door.bus.subscribe(own, lambda _: None)
    request_id = new_id()
    word = await said(door, ask(request_id))
    await door.until(lambda: door.ear.on(own))
    task = decode(door.ear.on(own)[-1].data, PrefillTask)
    record = task.record
    assert record is not None
    assert (task.request_id, record.request_id, task.is_recorded) == (request_id, request_id, False)
    assert record.is_direct
    assert word == accepted_of(record)
    assert await door.ctx.chain.record(request_id) is None
    assert door.ear.stream(READER, request_id) == []
    assert door.ear.prefill_tasks(request_id) == []
    assert len(door.dispatch) == 1


async def test_without_a_worker_a_direct_requests_task_lies_in_the_queue(own_door: Door) -> None:
    """It is accepted, for it is durable: whoever comes pulls it."""
    door, request_id = own_door, new_id()
    word = await said(door, ask(request_id))
    assert word is not None
    assert [subject for subject, _ in door.ear.prefill_tasks(request_id)] == [
        subjects.prefill(SERVED)
    ]
    assert len(door.dispatch) == 0


@pytest.mark.parametrize("case", ["an echo", "admitted before"])
async def test_what_is_not_so_simple_takes_the_queue(door: Door, case: str) -> None:
    """Its word says more than its record, or stands in the stream already."""
    asked = ask(new_id(), echo=case == "an echo")
    if case == "admitted before":
        await door.admitted(asked, asked.request_id)
    assert await said(door, asked) is None
    await door.until(lambda: door.ear.on(SUBJECT)[-1:])
    await door.until(lambda: decode(door.ear.on(SUBJECT)[-1].data, InferenceRequest) == asked, 60)
    record = await door.record(asked.request_id)
    assert not record.is_direct
    (word,) = {w for w in door.ear.stream(READER, asked.request_id) if isinstance(w, Accepted)}
    assert word.echo_text == ("The sea is" if asked.echo else None)


async def test_a_direct_request_that_can_not_be_is_refused_on_its_chain(door: Door) -> None:
    """As ever: with the field's name."""
    request_id = new_id()
    assert await said(door, ask(request_id, **sampled(temperature=-1.0))) is None
    assert (await door.refused(request_id)).error.param == "temperature"


async def test_a_direct_request_that_must_wait_waits_in_the_queue(
    own_door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment it waits where it is; then it is made durable, and accepted by the stream."""
    monkeypatch.setattr("pipeline.admission._MOMENT_S", 0.0)
    door = own_door
    door.hear(beat("d1", num_free_slots=0, num_running=4))
    await door.bus.subscribe(subjects.direct(subjects.prefill(SERVED, "d1")), lambda _: None)
    ahead = [new_id() for _ in range(4)]
    for request_id in ahead:
        assert await said(door, ask(request_id)) is not None
    waits = new_id()
    assert await said(door, ask(waits)) is None
    (word,) = door.ear.stream(READER, waits)
    assert isinstance(word, Accepted)
    assert not (await door.record(waits)).is_direct
    for request_id in ahead:
        door.gate.hear_end(request_id, None)
    await door.until(lambda: door.ear.prefill_tasks(waits))

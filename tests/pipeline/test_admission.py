"""What enters the mesh, and what is refused at its door."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from infra.bus import (
    Bus,
    EmbeddedBroker,
    Limits,
    admission_consumer,
    ensure_topology,
    waiting_work,
)
from infra.task_scope import task_scope
from infra.times import Times
from pipeline.acceptance import accepted_of
from pipeline.admission import Admission
from pipeline.backlog import Backlog
from pipeline.budget import Budget
from pipeline.dispatch import Dispatch
from pipeline.door_meter import DoorMeter
from pipeline.doorkeeper import Doorkeeper
from pipeline.fleet import Fleet
from pipeline.outlook import Outlook
from pipeline.policy import FixedPolicies
from pipeline.prompt_reader import PromptReader
from pipeline.registry import Registry
from pipeline.stage import Stage, StageContext
from pipeline.tokenizing import ChatTokenizer
from schemas import subjects
from schemas.codec import decode, encode, tag_of, unpack_ids
from schemas.control import Beat
from schemas.headers import WorkHeaders
from schemas.models import ModelCard
from schemas.prefill import PrefillTask
from schemas.requests import (
    ChatMessage,
    InferenceRequest,
    RequestRecord,
    ResponseFormat,
    SamplingParams,
)
from schemas.tokens import Accepted, Expired, StreamError
from tests.conftest import Until
from tests.pipeline.placing import placing
from tests.pipeline.rig import (
    READER,
    SERVED,
    TRACE,
    Ear,
    LogLines,
    beat,
    new_id,
    prefill_task,
    running,
    send,
    stage_context,
)
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 128
LIMIT = 4096
VOCAB = 512
SUBJECT = subjects.admission("tiny")


def card_of(folder: Path) -> ModelCard:
    return ModelCard(
        name="tiny",
        revision="r1",
        served=SERVED,
        folder=str(folder),
        architecture="llama",
        context_length=CONTEXT,
        vocab_size=VOCAB,
        has_chat_template=True,
        created_unix_s=1,
    )


@dataclass(slots=True)
class Door:
    """Admission at work, with one model and no worker yet."""

    bus: Bus
    ctx: StageContext
    ear: Ear
    lines: LogLines
    fleet: Fleet
    tokenizer: ChatTokenizer
    until: Until
    gate: Doorkeeper
    outlook: Outlook
    dispatch: Dispatch

    def hear(self, beat: Beat) -> None:
        """A worker's heartbeat, as everybody in a control process hears it."""
        self.fleet.hear(beat, time.monotonic())
        self.outlook.hear_beat(beat, time.monotonic())
        self.gate.hear_beat()

    async def publish(self, request: InferenceRequest | bytes, subject: str = SUBJECT) -> None:
        """As any NATS client would: the body, no headers."""
        data = request if isinstance(request, bytes) else encode(request)
        await self.bus.publish_stored(subject, data)

    async def admitted(self, request: InferenceRequest | bytes, request_id: str) -> Accepted:
        await self.publish(request)
        reader = READER
        if isinstance(request, InferenceRequest) and request.reader is None:
            reader = subjects.default_reader(request_id)
        await self.until(lambda: self.ear.stream(reader, request_id))
        accepted = self.ear.stream(reader, request_id)[0]
        assert isinstance(accepted, Accepted), accepted
        return accepted

    async def refused(self, request_id: str, reader: str = READER) -> StreamError:
        """The refusal that the client of a request hears, and that it hears nothing else."""
        await self.until(lambda: self.ear.end(reader, request_id))
        (end,) = self.ear.stream(reader, request_id)
        assert isinstance(end, StreamError), end
        assert self.ear.prefill_tasks(request_id) == []
        return end

    async def record(self, request_id: str) -> RequestRecord:
        found = await self.ctx.chain.record(request_id)
        assert found is not None
        return found[1]


def admission_of(
    ctx: StageContext, registry: Registry, fleet: Fleet, limit: int = LIMIT
) -> tuple[Admission, Doorkeeper, Outlook, Dispatch]:
    """Admission for the workers of ``fleet``, who lets requests go to them, by what, and how."""
    outlook, policies = Outlook(fleet, beat_s=60.0), FixedPolicies()
    placement = placing(fleet, outlook=outlook, clock=time.monotonic)
    door = Doorkeeper(
        fleet, outlook, Budget(fleet, outlook, policies), placement, None, DoorMeter(ctx.metrics)
    )
    backlog = Backlog(ctx.bus, limit, door.room.num_waiting)
    reader = PromptReader(fleet.max_sequence_tokens)
    dispatch = Dispatch(ctx.bus, ctx.chain, ctx.log)
    admission = Admission(
        ctx, registry, reader, backlog=backlog, door=door, policies=policies, dispatch=dispatch
    )
    return admission, door, outlook, dispatch


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


@asynccontextmanager
async def open_door(
    tmp_path_factory: pytest.TempPathFactory, times: Times, until: Until
) -> AsyncIterator[Door]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder, VOCAB)
    async with AsyncExitStack() as stack:
        data = tmp_path_factory.mktemp("broker")
        broker = await stack.enter_async_context(EmbeddedBroker(data))
        connection = await Bus.connect(broker.url("control"), role="control", times=times)
        bus = await stack.enter_async_context(connection)
        await ensure_topology(bus)
        lines, ear = LogLines(), Ear()
        await bus.subscribe(f"{subjects.ROOT}.>", ear.hear)
        ctx = stage_context(bus, lines)
        fleet = Fleet(times.dead_s, 0.0)
        registry = Registry(bus)
        await registry.start()
        await registry.register(card_of(folder))
        admission, gate, outlook, dispatch = admission_of(ctx, registry, fleet)
        stage = Stage(
            ctx,
            "admission",
            admission_consumer(times),
            admission.parse,
            admission.reader_of,
            admission.handle,
            when_full=admission.when_full,
            direct=subjects.direct(subjects.ALL_ADMISSION),
            direct_queue="control",
        )
        tasks = await stack.enter_async_context(task_scope())
        tasks.create_task(dispatch.run())
        await stack.enter_async_context(running(stage))
        yield Door(
            bus, ctx, ear, lines, fleet, ChatTokenizer(folder), until, gate, outlook, dispatch
        )


def ask(request_id: str, **fields: Any) -> InferenceRequest:
    fields.setdefault("reader", READER)
    if "messages" not in fields:
        fields.setdefault("prompt", "The sea is")
    return InferenceRequest(request_id=request_id, model="tiny", **fields)


def sampled(**params: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**params)}


def schema(text: str) -> ResponseFormat:
    return ResponseFormat(kind="json_schema", json_schema=text)


def says(*contents: str, role: str = "user") -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for content in contents)


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


# What is refused -----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "neither": ({"prompt": None}, "invalid_request", "messages"),
    "both": ({"prompt": "x", "messages": says("y")}, "invalid_request", "messages"),
    "no messages": ({"messages": ()}, "invalid_request", "messages"),
    "a role": ({"messages": says("y", role="wizard")}, "invalid_request", "messages[0].role"),
    "an image": (
        {"messages": (*says("y"), ChatMessage(role="user", content=[{"type": "image_url"}]))},
        "invalid_request",
        "messages[1].content[0]",
    ),
    "no prompt": ({"prompt": ""}, "invalid_request", "prompt"),
    "no ids": ({"prompt": ()}, "invalid_request", "prompt"),
    "an id too high": ({"prompt": (1, VOCAB)}, "invalid_request", "prompt"),
    "a negative id": ({"prompt": (-1,)}, "invalid_request", "prompt"),
    "a prompt over the context": (
        {"prompt": (5,) * CONTEXT}, "context_length_exceeded", "prompt",
    ),
    "a chat over the context": (
        {"messages": says("漢" * CONTEXT)}, "context_length_exceeded", "messages",
    ),
    "max_tokens over the room": (
        sampled(max_tokens=CONTEXT), "context_length_exceeded", "max_tokens",
    ),
    "min over max": (sampled(min_tokens=5, max_tokens=4), "invalid_request", "min_tokens"),
    "min over the room": (sampled(min_tokens=CONTEXT), "invalid_request", "min_tokens"),
    "a bias out of the vocabulary": (
        sampled(logit_bias={VOCAB: 1.0}), "invalid_request", "logit_bias",
    ),
    "a bias too large": (sampled(logit_bias={1: 100.5}), "invalid_request", "logit_bias"),
    "a stop id": (sampled(stop_token_ids=(VOCAB,)), "invalid_request", "stop_token_ids"),
    "an empty stop": (sampled(stop=("",)), "invalid_request", "stop"),
    "many stops": (sampled(stop=("x",) * 17), "invalid_request", "stop"),
    "priority": ({"priority": 2**40}, "invalid_request", "priority"),
    "a schema that is none": (
        sampled(response_format=schema("{")), "invalid_request", "response_format",
    ),
    "a schema that can't be kept": (
        sampled(response_format=schema('{"not": {}}')), "invalid_request", "response_format",
    ),
    "a large schema": (
        sampled(response_format=schema(" " * 2**15 + "{}")), "invalid_request", "response_format",
    ),
    "a long note": ({"reader_note": bytes(4097)}, "invalid_request", "reader_note"),
    **{
        f"{field} = {value}": (sampled(**{field: value}), "invalid_request", field)
        for field, value in (
            ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 2**40), ("min_tokens", -1),
            ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
            ("temperature", float("inf")), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1),
            ("min_p", 1.1), ("presence_penalty", 2.5), ("frequency_penalty", -2.5),
            ("repetition_penalty", 0.0), ("logprobs", 21), ("prompt_logprobs", 21),
            ("n", 0), ("n", 65),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_what_can_not_be_is_refused_by_name(door: Door, case: str) -> None:
    """The client hears which field is wrong; nothing is written down, nothing is queued."""
    fields, code, param = REFUSED[case]
    request_id = new_id()
    await door.publish(ask(request_id, **fields))
    end = await door.refused(request_id)
    assert (end.error.code, end.error.param, end.epoch) == (code, param, 0)
    assert end.error.message
    assert await door.ctx.chain.record(request_id) is None


WRONG_BODIES: dict[str, tuple[str, str]] = {
    "a text for a number": ('"sampling": {"max_tokens": "many"}', "$.sampling.max_tokens"),
    "a number for a text": ('"label": 7', "$.label"),
    "a message without role": ('"messages": [{"content": "x"}]', "$.messages[0].role"),
    "messages that are none": ('"messages": "hello"', "$.messages"),
    "no model": ('"model": null', "$.model"),
    "another message": ('"schema": "claim/1"', "$.schema"),
    "a number beyond all floats": ('"sampling": {"top_p": 1e999}', "$.sampling.top_p"),
}


@pytest.mark.parametrize("case", WRONG_BODIES)
async def test_a_body_of_the_wrong_shape_is_refused_by_path(door: Door, case: str) -> None:
    """It is kept as a dead letter, and its client still hears what is wrong with it."""
    wrong, path = WRONG_BODIES[case]
    request_id, num_letters = new_id(), len(door.ear.letters())
    given = {"request_id": f'"{request_id}"', "model": '"tiny"', "reader": f'"{READER}"'}
    for name in list(given):
        if wrong.startswith(f'"{name}"'):
            del given[name]
    members = [f'"{name}": {value}' for name, value in given.items()]
    await door.publish(("{" + ", ".join([*members, wrong]) + "}").encode())
    end = await door.refused(request_id)
    assert (end.error.code, end.error.param) == ("schema_error", path)
    await door.until(lambda: len(door.ear.letters()) == num_letters + 1)


async def test_numbers_without_end_are_refused(door: Door) -> None:
    """JSON has no largest number; the wire has, and so has every check."""
    for field in ("seed", "max_tokens", "top_k"):
        request_id = new_id()
        body = f'{{"request_id": "{request_id}", "model": "tiny", "prompt": "x", "reader": \
"{READER}", "sampling": {{"{field}": 1{"0" * 400}}}}}'
        await door.publish(body.encode())
        assert (await door.refused(request_id)).error.param == field


async def test_an_unknown_model_is_not_found(door: Door) -> None:
    """The refusal says which models there are."""
    request_id = new_id()
    request = msgspec.structs.replace(ask(request_id), model="gpt/0")
    await door.publish(request, subjects.admission("gpt/0"))
    error = (await door.refused(request_id)).error
    assert (error.code, error.param) == ("model_not_found", "model")
    assert "tiny" in error.message


async def test_a_model_under_another_subject_is_refused(door: Door) -> None:
    """Permissions know subjects: the body may not name another model."""
    request_id = new_id()
    await door.publish(ask(request_id), subjects.admission("other"))
    assert (await door.refused(request_id)).error.param == "model"


async def test_a_header_of_another_request_is_refused(door: Door) -> None:
    """The header's request is the one that is told: by its own default reader."""
    stated, request_id = new_id(), new_id()
    headers = {"Mesh-Request": stated}
    await door.bus.publish_stored(SUBJECT, encode(ask(request_id)), headers)
    end = await door.refused(stated)
    assert end.error.param == "Mesh-Request"


@pytest.mark.parametrize("reader", ["nobody", "a.b.c", "client.*"])
async def test_a_reader_that_is_none_hears_by_its_id(door: Door, reader: str) -> None:
    """Where a client listens that names a bad reader is the subject of its request id."""
    request_id = new_id()
    await door.publish(ask(request_id, reader=reader))
    end = await door.refused(request_id, subjects.default_reader(request_id))
    assert end.error.param == "reader"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"{", b"[1]", b'{"request_id": "no.id.at.all"}'])
async def test_what_names_no_request_is_buried_only(door: Door, data: bytes) -> None:
    """Nobody can be told; it is kept, and the door stays open."""
    num_letters = len(door.ear.letters())
    await door.publish(data)
    # An earlier test's letter may come after ours was sent.
    await door.until(lambda: data in [one.payload for one in door.ear.letters()[num_letters:]])
    request_id = new_id()
    await door.admitted(ask(request_id), request_id)


async def test_garbage_with_a_header_is_told_by_it(door: Door) -> None:
    """A body that was cut on the way: the header still says whose it was."""
    request_id = new_id()
    data = encode(ask(request_id))[:-4]
    await door.bus.publish_stored(SUBJECT, data, {"Mesh-Request": request_id})
    end = await door.refused(request_id, subjects.default_reader(request_id))
    assert end.error.code == "schema_error"


async def test_garbage_on_its_own_chain_harms_a_client_only(door: Door) -> None:
    """A client may write to its chains; a refusal is appended behind whatever lies there."""
    request_id = new_id()
    await door.bus.publish_stored(subjects.chain(READER, request_id), b"\xc1 garbage")
    await door.publish(ask(request_id, **sampled(n=0)))
    assert (await door.refused(request_id)).error.param == "n"


async def test_past_its_deadline_a_request_does_not_enter(door: Door) -> None:
    """It waited too long in the queue: Expired, and no record."""
    request_id = new_id()
    await door.publish(ask(request_id, deadline_unix_ms=door.bus.now_unix_ms() - 1))
    await door.until(lambda: door.ear.end(READER, request_id))
    assert door.ear.end(READER, request_id) == Expired(request_id=request_id)
    assert await door.ctx.chain.record(request_id) is None


async def test_a_full_queue_refuses_at_once(door: Door) -> None:
    """The client hears 429 and nothing before it: no Accepted that would not hold."""
    worker = "w-full"
    door.hear(beat(worker, num_free_slots=64))
    door.hear(beat("w-other", num_free_slots=61, num_running=3))
    await send(door.bus, subjects.prefill(SERVED, worker), prefill_task(new_id()))
    await ensure_topology(door.bus, Limits(queue_msgs=1))
    try:
        request_id = new_id()
        await door.publish(ask(request_id))
        await door.until(lambda: door.ear.end(READER, request_id))
        (end,) = door.ear.stream(READER, request_id)
        assert isinstance(end, StreamError)
        assert end.error.code == "queue_full"
        assert end.error.retry_after_s == 1.0
    finally:
        await ensure_topology(door.bus, Limits())
        for one in (worker, "w-other"):
            door.hear(beat(one, state="gone"))
    assert subjects.prefill(SERVED, worker) in await waiting_work(door.bus)


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

DIRECT = subjects.direct(SUBJECT)


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

"""What is refused at the mesh's door, and how its client hears."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from infra.bus import Limits, ensure_topology, waiting_work
from infra.times import Times
from schemas import subjects
from schemas.codec import encode
from schemas.requests import ChatMessage
from schemas.tokens import Expired, StreamError
from tests.conftest import Until
from tests.pipeline.door_rig import (
    CONTEXT,
    SUBJECT,
    VOCAB,
    Door,
    ask,
    open_door,
    sampled,
    says,
    schema,
)
from tests.pipeline.rig import READER, SERVED, beat, new_id, prefill_task, send

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(
    tmp_path_factory: pytest.TempPathFactory, times: Times, until: Until
) -> AsyncIterator[Door]:
    async with open_door(tmp_path_factory, times, until) as door:
        yield door


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

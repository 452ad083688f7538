"""Dead letters can be looked at, published again and thrown away."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.bus import DEAD, Bus, waiting_work
from pipeline.claim_chain import ClaimChain
from pipeline.dead_letter_box import DeadLetterBox, FiledLetter
from pipeline.dead_letter_view import details, outline, summary
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import DeadLetter
from schemas.errors import InvalidRequest, QueueFull
from schemas.headers import WorkHeaders
from schemas.requests import ChatMessage, InferenceRequest
from schemas.tokens import Cancelled, StreamError
from tests.conftest import Until
from tests.pipeline.rig import (
    READER,
    SERVED,
    TRACE,
    Ear,
    claim,
    kv_ready,
    new_id,
    prefill_task,
    record,
    store,
)

ADMISSION = subjects.admission("tiny")
SECRET = "the prompt of somebody"


@pytest.fixture
def box(bus: Bus) -> DeadLetterBox:
    return DeadLetterBox(bus)


async def bury(bus: Bus, subject: str, payload: bytes, **fields: Any) -> int:
    """A dead letter as a stage would write it; its number."""
    fields.setdefault("payload_bytes", len(payload))
    letter = DeadLetter(subject=subject, reason="why", code="engine_failed", payload=payload,
                        unix_ms=1_790_000_000_000, **fields)  # fmt: skip
    return await store(bus, subjects.DEAD, letter)


def asked(request_id: str, **fields: Any) -> InferenceRequest:
    fields.setdefault("reader", READER)
    return InferenceRequest(
        request_id=request_id,
        model="tiny",
        messages=(ChatMessage(role="user", content=SECRET),),
        **fields,
    )


async def retried(box: DeadLetterBox, seq: int) -> str:
    return await box.retry(await box.get(seq))


async def num_letters(bus: Bus) -> int:
    return int((await bus.api(f"STREAM.INFO.{DEAD}"))["state"]["messages"])


# Looking and throwing away -------------------------------------------------------------------


async def test_letters_are_listed_in_order_and_named_by_their_number(
    bus: Bus, box: DeadLetterBox
) -> None:
    """What can't be understood is passed over; the request is known by header or payload."""
    first, second = new_id(), new_id()
    headers = WorkHeaders(
        schema="prefill-task/1", request_id=first, epoch=1, deadline_unix_ms=1
    ).to_dict()
    one = await bury(bus, subjects.prefill(SERVED), b"\xc1", headers=headers)
    await bus.publish_stored(subjects.DEAD, b"of a newer version")
    two = await bury(bus, ADMISSION, encode(asked(second)))
    three = await bury(bus, ADMISSION, b"")
    found = [filed async for filed in box.letters()]
    assert [(f.seq, f.request_id) for f in found] == [(one, first), (two, second), (three, "")]
    assert await box.get(two) == found[1]


async def test_a_dropped_letter_is_gone(bus: Bus, box: DeadLetterBox) -> None:
    """And only that one; a second time it is not there."""
    first, second = [await bury(bus, ADMISSION, b"x") for _ in range(2)]
    await box.drop(first)
    assert [filed.seq async for filed in box.letters()] == [second]
    for call in (box.get(first), box.drop(first), box.get(10_000)):
        with pytest.raises(InvalidRequest) as caught:
            await call
        assert caught.value.param == "id"


# Publishing again ----------------------------------------------------------------------------


async def test_a_request_nobody_heard_of_enters_as_it_was(
    bus: Bus, box: DeadLetterBox, ear: Ear, until: Until
) -> None:
    """The same bytes, JSON as well; twice, because the message id is a new one."""
    request_id = new_id()
    data = msgspec.json.encode(asked(request_id))
    for _ in range(2):
        seq = await bury(bus, ADMISSION, data, headers={"traceparent": TRACE, "Nats-Msg-Id": "m"})
        assert await retried(box, seq) == request_id
    await until(lambda: len(ear.on(ADMISSION)) == 2)
    assert {message.data for message in ear.on(ADMISSION)} == {data}
    assert (await waiting_work(bus))[ADMISSION] == 2
    assert ear.on(ADMISSION)[0].headers["traceparent"] == TRACE
    assert await num_letters(bus) == 0


@pytest.mark.parametrize("known", ["record", "end"])
async def test_a_request_that_was_told_of_its_end_is_a_new_one(
    bus: Bus, box: DeadLetterBox, ear: Ear, until: Until, known: str
) -> None:
    """Its own id is used up. The reader stays; a deadline that passed is asked for anew."""
    request_id = new_id()
    if known == "record":
        await store(bus, subjects.request_record(request_id), record(request_id))
    else:
        error = StreamError(request_id=request_id, epoch=0, error=QueueFull("full").info)
        await ClaimChain(bus).end(READER, error)
    seq = await bury(bus, ADMISSION, encode(asked(request_id, deadline_unix_ms=1)))
    again = await retried(box, seq)
    assert again != request_id
    await until(lambda: ear.on(ADMISSION))
    published = decode(ear.on(ADMISSION)[0].data, InferenceRequest)
    assert published == asked(again)


async def test_what_admission_could_not_read_is_published_as_it_is(
    bus: Bus, box: DeadLetterBox, ear: Ear, until: Until
) -> None:
    """A newer version may read it. The broker's headers and the lost object are left out."""
    headers = {"Mesh-Request": "request-1", "Mesh-Object": "o", "Mesh-Attempt": "4", "Nats-X": "y"}
    seq = await bury(bus, ADMISSION, b"\xc1 rubbish", headers=headers)
    assert await retried(box, seq) == "request-1"
    await until(lambda: ear.on(ADMISSION))
    (message,) = ear.on(ADMISSION)
    assert message.data == b"\xc1 rubbish"
    assert "Mesh-Request" in message.headers
    assert message.headers.keys() & headers.keys() == {"Mesh-Request"}


@pytest.mark.parametrize("kind", ["prefill", "kv-ready"])
async def test_a_task_of_a_request_that_lives_is_published_again(
    bus: Bus, box: DeadLetterBox, ear: Ear, until: Until, kind: str
) -> None:
    """On top of the chain as it stands: whoever takes it claims what the task says."""
    request_id = new_id()
    await store(bus, subjects.request_record(request_id), record(request_id))
    chain = ClaimChain(bus)
    seq = await chain.append(READER, claim(request_id, "w1"), 0)
    assert seq is not None
    message, subject = prefill_task(request_id, epoch=2, after_seq=seq), subjects.prefill(SERVED)
    if kind == "kv-ready":
        subject = subjects.kv_ready(SERVED)
        message = msgspec.structs.replace(kv_ready(request_id), after_seq=seq)
    assert await retried(box, await bury(bus, subject, encode(message))) == request_id
    await until(lambda: ear.on(subject))
    assert ear.on(subject)[0].data == encode(message)
    await chain.append(READER, claim(request_id, "w2", epoch=2), seq)
    late = await bury(bus, subject, encode(message))
    with pytest.raises(InvalidRequest, match="gone on"):
        await retried(box, late)


async def test_a_task_of_a_request_that_ended_is_refused(
    bus: Bus, box: DeadLetterBox, ear: Ear
) -> None:
    """Its client was told, or its record has aged out. The letter stays."""
    ended, aged, poisonous = new_id(), new_id(), new_id()
    for request_id in (ended, poisonous):
        await store(bus, subjects.request_record(request_id), record(request_id))
        await ClaimChain(bus).end(READER, Cancelled(request_id=request_id))
    subject = subjects.prefill(SERVED)
    for payload, why in (
        (encode(prefill_task(ended)), "has ended"),
        (encode(record(poisonous)), "has ended"),
        (encode(prefill_task(aged)), "no longer stored"),
        (b"\xc1", "MessagePack"),
    ):
        seq = await bury(bus, subject, payload)
        with pytest.raises(InvalidRequest, match=why):
            await retried(box, seq)
        await box.get(seq)
    assert ear.on(subject) == []


async def test_what_was_cut_can_not_be_published_again(bus: Bus, box: DeadLetterBox) -> None:
    """The rest of it is nowhere."""
    seq = await bury(bus, ADMISSION, encode(asked(new_id())), payload_bytes=10**6)
    with pytest.raises(InvalidRequest, match="of its 1000000 bytes"):
        await retried(box, seq)


# Showing -------------------------------------------------------------------------------------


def filed(payload: bytes, **fields: Any) -> FiledLetter:
    letter = DeadLetter(subject=ADMISSION, reason="why", code="x", payload=payload,
                        payload_bytes=len(payload), **fields)  # fmt: skip
    return FiledLetter(seq=7, letter=letter)


@pytest.mark.parametrize("form", [encode, msgspec.json.encode])
def test_a_prompt_is_shown_only_when_asked_for(form: Any) -> None:
    """Names and numbers are; text, token ids and secrets are not, unless with the payload."""
    letter = filed(form(asked("request-1", tenant="acme", cache_salt="s", priority=3)))
    shown = details(letter, with_payload=False)
    assert SECRET not in json.dumps(shown)
    assert shown["payload"]["messages"] == "(1 entries)"
    assert (shown["payload"]["tenant"], shown["payload"]["priority"]) == ("acme", 3)
    assert shown["payload"]["cache_salt"] == "(1 characters)"
    assert SECRET in json.dumps(details(letter, with_payload=True))


def test_rubbish_is_shown_in_hexadecimal_when_asked_for() -> None:
    """It may be anything, also somebody's text."""
    letter = filed(SECRET.encode() + b"\xff")
    assert details(letter, with_payload=False)["payload"] == f"({len(SECRET) + 1} bytes)"
    whole = details(letter, with_payload=True)
    assert bytes.fromhex(whole["payload"]) == letter.letter.payload
    assert whole["payload_error"]
    assert summary(letter)["payload_bytes"] == len(SECRET) + 1


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(-(2**31), 2**31) | st.just(SECRET) | st.just(SECRET.encode()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(
        0, 9), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(anything)
def test_no_text_of_an_unknown_field_is_ever_shown(value: Any) -> None:
    """Whatever was put where: only fields known to be names show their text."""
    assert SECRET not in json.dumps(outline(value))
    shown = details(filed(msgpack.packb(value)), with_payload=False)
    assert SECRET not in json.dumps(shown)
    json.dumps(details(filed(msgpack.packb(value)), with_payload=True))

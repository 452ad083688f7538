"""Where a request is, as the bus tells it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

from infra.bus import Bus
from loadgen.chaos.witness import Trace, Witness
from schemas import subjects
from schemas.codec import Message, encode
from schemas.decode import DecodeTask
from schemas.headers import REQUEST
from schemas.kv import KvHandle, KvReady
from schemas.prefill import PrefillTask
from schemas.requests import InferenceRequest
from schemas.tokens import Accepted, Claim, StreamEnd, TokenBatch, TokenDelta, Usage

ID = "request-1"
READER = "client.r"
SERVED = subjects.served("m", "1")


@dataclass
class Heard:
    subject: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)


def work(subject: str, message: Message) -> Any:
    return Heard(subject, encode(message), {REQUEST: ID})


def stream(message: Message) -> Any:
    return Heard(subjects.live(subjects.token_stream(READER)), encode(message))


def claim(epoch: int, worker: str, role: str) -> Claim:
    return Claim(
        request_id=ID, epoch=epoch, worker=worker, role=role, served=SERVED, deadline_unix_ms=1
    )


def ready(owner: str) -> KvReady:
    handle = KvHandle(
        lease_id="l", secret=b"s", owner=owner, fingerprint="f", num_tokens=1, blocks=b"",
        generations=b"", checksums=b"", addresses=(), expires_unix_ms=1,
    )  # fmt: skip
    return KvReady(
        request_id=ID, epoch=1, after_seq=1, reader=READER, worker=owner, handle=handle,
        tokens=(b"",), finished=("",),
    )  # fmt: skip


def batch(count: int) -> TokenBatch:
    deltas = tuple(TokenDelta(request_id=ID, epoch=1, number=n, ids=(7,)) for n in range(count))
    return TokenBatch(worker="p", deltas=deltas)


def admitted() -> tuple[Witness, Trace]:
    witness = Witness(cast(Bus, None))
    trace = witness.expect("label")
    request = InferenceRequest(request_id=ID, model="m", prompt="x", label="label", reader=READER)
    witness.on_work(work(subjects.admission("m"), request))
    return witness, trace


def test_a_request_is_followed_from_queue_to_queue() -> None:
    """Each message moves it on; who must stay alive for it is known at each point."""
    witness, trace = admitted()
    assert (trace.request_id, trace.reader, trace.waits_for) == (ID, READER, "admission")

    task = PrefillTask(request_id=ID, epoch=1, after_seq=0, reader=READER)
    witness.on_work(work(subjects.prefill(SERVED, "p"), task))
    assert (trace.waits_for, trace.placed, trace.depends_on("p")) == ("prefill", "p", True)

    witness.on_stream(stream(claim(1, "p", "prefill")))
    assert (trace.waits_for, trace.is_claimed_by("prefill")) == ("", True)
    witness.on_stream(stream(batch(1)))
    witness.on_work(work(subjects.kv_ready(SERVED), ready("p")))
    assert (trace.is_offered, trace.prefiller, trace.num_tokens) == (True, "p", 1)

    decode_task = DecodeTask(request_id=ID, epoch=2, after_seq=1, reader=READER, ready=ready("p"))
    witness.on_work(work(subjects.decode(SERVED, "d"), decode_task))
    assert (trace.waits_for, trace.depends_on("d")) == ("decode", True)

    witness.on_stream(stream(claim(2, "d", "decode")))
    assert not trace.is_offered
    assert trace.depends_on("p")  # its blocks may still be copied
    witness.on_stream(stream(batch(2)))
    assert not trace.depends_on("p")
    assert trace.depends_on("d")

    usage = Usage(prompt_tokens=1, completion_tokens=3)
    end = StreamEnd(request_id=ID, epoch=2, num_tokens=(3,), finish_reasons=("stop",), usage=usage)
    witness.on_stream(stream(end))
    assert trace.has_ended
    assert not trace.depends_on("d")


def test_a_task_for_anybody_names_nobody() -> None:
    """Then no one worker is the one to strike."""
    witness, trace = admitted()
    task = PrefillTask(request_id=ID, epoch=1, after_seq=0, reader=READER)
    witness.on_work(work(subjects.prefill(SERVED), task))
    assert (trace.waits_for, trace.placed) == ("prefill", "")


def test_accepted_and_the_requests_of_others_change_nothing() -> None:
    """Neither does what can't be read."""
    witness, trace = admitted()
    accepted = Accepted(
        request_id=ID, model="m", revision="1", prompt_tokens=1, max_tokens=1,
        admitted_unix_ms=1, deadline_unix_ms=1,
    )  # fmt: skip
    witness.on_stream(stream(accepted))
    witness.on_stream(cast(Any, Heard("mesh.v1.live.token-stream.a.b.tokens", b"junk")))
    witness.on_work(cast(Any, Heard("mesh.v1.kv-ready.junk", b"junk", {REQUEST: ID})))
    assert not trace.has_ended
    assert not trace.is_offered


def test_a_request_sent_anew_is_the_one_that_counts() -> None:
    """An HTTP client whose bridge died before the first byte posts again: same label, new id."""
    witness, trace = admitted()
    witness.on_stream(stream(claim(1, "p", "prefill")))
    request = InferenceRequest(request_id="request-2", model="m", prompt="x", label="label")
    witness.on_work(work(subjects.admission("m"), request))
    assert (trace.request_id, trace.claim) == ("request-2", None)
    assert trace.reader == subjects.default_reader("request-2")
    witness.on_stream(stream(claim(2, "q", "decode")))
    assert trace.claim is None


async def test_waiting_ends_with_the_news_or_the_time() -> None:
    """What is waited for is looked at whenever something passed."""
    witness, trace = admitted()
    assert not await witness.until(lambda: trace.has_ended, 0.01)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(witness.until(lambda: trace.claim is not None, 10))
        tasks.create_task(_say(witness))
    assert waiting.result()


async def _say(witness: Witness) -> None:
    witness.on_stream(stream(claim(1, "p", "prefill")))

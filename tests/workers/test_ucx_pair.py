"""A prefill and a decode worker that reach each other only over UCX.

Whatever happens on the way, the answer is that of one engine, and no block stays behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from infra.bus import Msg
from infra.transport.plan import TransportPlan
from schemas import subjects
from schemas.codec import decode
from schemas.errors import SchemaError
from schemas.kv import LeaseRenew
from tests.workers.test_prefill_decode import same
from tests.workers.workplace import PROMPT, Worker, Workplace, is_claim, until

pytestmark = pytest.mark.ucx
pytest.importorskip("ucxx", reason="needs the extra ucx")

from infra.transport.ucx.door import UcxDoor  # noqa: E402
from infra.transport.ucx.wire import Bytes, Fetch  # noqa: E402

OVER_UCX = TransportPlan(shm=False, ucx_host="127.0.0.1")
PATIENCE_S = 60.0


async def ucx_pair(place: Workplace) -> tuple[Worker, Worker]:
    place.start_router()
    prefill = await place.worker("p", "prefill", transports=OVER_UCX)
    return prefill, await place.worker("d", "decode", transports=OVER_UCX)


def transferred(worker: Worker) -> float:
    return float(worker.ctx.metrics.kv_transfer_bytes.labels("ucx")._value.get())


class Meddler:
    """Has its way with what an owner sends, once; everything after that is left alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meddle: Callable[[Bytes], None]) -> None:
        self.has_begun = threading.Event()
        answer = UcxDoor._message

        def message(door: UcxDoor, fetch: Fetch, buffer: Bytes) -> Bytes:
            made = answer(door, fetch, buffer)
            if not self.has_begun.is_set():
                self.has_begun.set()
                meddle(made)
            return made

        monkeypatch.setattr(UcxDoor, "_message", message)


async def test_what_two_workers_answer_is_what_one_engine_answers(place: Workplace) -> None:
    """Prompts that end within a block and with it, choices that share one, all at once."""
    _, decoding = await ucx_pair(place)
    prompts = [PROMPT[:length] for length in (1, 20, 21)]
    records = [await place.ask(prompt, n=n) for prompt in prompts for n in (1, 3)]
    for record, prompt in zip(records, [p for p in prompts for _ in range(2)], strict=True):
        same(record, await place.answer(record), prompt)
    assert transferred(decoding) > 0


async def test_a_flipped_bit_is_computed_again(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noticed by its checksum, never used."""

    def flip(message: Bytes) -> None:
        message[-1] ^= 1

    Meddler(monkeypatch, flip)
    await ucx_pair(place)
    record = await place.ask()
    answer = await place.answer(record)
    same(record, answer)
    assert answer.claims == [(1, "prefill"), (2, "decode"), (3, "prefill"), (4, "decode")]


async def test_a_frozen_owner_is_given_up_and_its_work_done_again(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-transfer: its blocks are lost to us; it frees them when it wakes up."""
    wakes = threading.Event()
    monkeypatch.setattr("infra.transport.ucx.connection.STALLED_S", 0.5)
    meddler = Meddler(monkeypatch, lambda _: wakes.wait(PATIENCE_S) and None)
    _, decoding = await ucx_pair(place)
    record = await place.ask()
    await until(meddler.has_begun.is_set)
    await place.until_tip(record, lambda entry: is_claim(entry, "decode"))
    await until(lambda: not decoding.owed)
    wakes.set()
    same(record, await place.answer(record))
    await place.until_idle()


async def test_a_reader_that_waits_says_so(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is extended as long as it reads."""
    goes_on, renewals = threading.Event(), []
    Meddler(monkeypatch, lambda _: goes_on.wait(PATIENCE_S) and None)
    prefill, _ = await ucx_pair(place)

    def hear(message: Msg) -> None:
        try:
            renewals.append(decode(message.data, LeaseRenew))
        except SchemaError:
            return  # a release

    await place.bus.subscribe(subjects.lease(prefill.now.worker), hear)
    record = await place.ask()
    await until(lambda: len(renewals) >= 2)
    goes_on.set()
    same(record, await place.answer(record))
    await place.until_idle()

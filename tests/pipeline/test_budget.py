"""The compute budget: who enters, who is told what, and whether that is true."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.degradation import error_of
from pipeline.verdict import Admit, Clamp, Fallback, Refuse, Verdict, Wait
from schemas.control import Placed
from schemas.errors import OverBudget, SloUnreachable
from schemas.requests import Slo
from schemas.tokens import Claim
from tests.pipeline.budget_rig import (
    CHAT,
    COSTS,
    House,
    Sequence,
    ask,
    decoder,
    policy,
    prefiller,
)
from tests.pipeline.rig import SERVED


def fill(house: House, name: str, **more: Any) -> int:
    """Ask until something else than Admit is said; how many were admitted."""
    for number in range(1000):
        wanted = ask(f"{name}-{number}", house.now_s, **more)
        if not isinstance(house.budget.judge(wanted), Admit):
            return number
        house.admit(wanted)
    raise AssertionError("never full")


def refused(verdict: Verdict) -> Refuse:
    assert isinstance(verdict, Refuse), verdict
    return verdict


# Prefill ------------------------------------------------------------------------------------------


def test_the_prefill_budget_is_the_time_that_the_first_token_may_take() -> None:
    """500 ms of prefill each, 2,000 ms allowed: 1,500 ms may be before a request, so four go in;
    with twice the workers seven (half prompts count as if two workers could share one)."""
    assert fill(House(prefiller(), decoder()), "r") == 4
    assert fill(House(prefiller("p1"), prefiller("p2"), decoder()), "r") == 7


def test_only_uncached_tokens_are_charged() -> None:
    """A worker that holds nine tenths of each prompt has room for ten times as many."""
    house = House(prefiller(), decoder())
    assert fill(house, "r", num_cached={"p1": 450}) >= 35


def test_the_budget_follows_workers_that_come_and_go() -> None:
    """A worker that leaves takes its part of the budget along, one that comes brings it."""
    house = House(prefiller("p1"), prefiller("p2"), decoder())
    assert fill(house, "r") == 7
    gone = house.workers.pop("p2")
    house.fleet.hear(msgspec.structs.replace(gone.beat, state="gone"), 0.0)
    far = refused(house.budget.judge(ask("next"))).retry_after_s
    assert far == pytest.approx(3.5 - 1.5, abs=0.05)
    for name in ("p3", "p4"):
        house.workers[name] = prefiller(name)
    house.beat()
    assert isinstance(house.budget.judge(ask("next")), Admit)


def test_without_costs_or_targets_nothing_is_over_budget() -> None:
    """Then only the queue's bound refuses."""
    house = House(prefiller(costs=None), decoder(costs=None))
    for number in range(50):
        assert isinstance(house.budget.judge(ask(f"r-{number}")), Admit)
        house.admit(ask(f"r-{number}"))
    house = House(prefiller(), decoder())
    fill(house, "r")
    assert isinstance(house.budget.judge(ask("batch", slo=Slo())), Admit)


def test_a_stale_pool_has_no_room() -> None:
    """Workers that were not heard lately are taken for busy; nobody knows for how long."""
    house = House(prefiller(), decoder())
    house.stale.add("p1")
    assert refused(house.budget.judge(ask("r"))).retry_after_s == 1.0


def test_a_time_that_no_idle_worker_keeps_is_the_callers_fault() -> None:
    """There is no use in trying again: no Retry-After, 400, the field's name."""
    house = House(prefiller(), decoder())
    verdict = refused(house.budget.judge(ask("long", num_prompt=3000)))
    error = error_of(verdict, SERVED)
    assert isinstance(error, SloUnreachable)
    assert error.param == "slo.ttft_ms"
    verdict = refused(house.budget.judge(ask("fast", slo=Slo(tbt_ms=10.5))))
    assert verdict.retry_after_s is None
    assert error_of(verdict, SERVED).param == "slo.tbt_ms"


def test_who_is_charged_is_admitted_and_charged_once() -> None:
    """A redelivered request neither pays twice nor is refused for its own charge."""
    house = House(prefiller(), decoder())
    fill(house, "r")
    before = house.budget.books.queued_ms(SERVED)
    house.budget.charge(ask("r-0"))
    assert house.budget.books.queued_ms(SERVED) == before
    assert isinstance(house.budget.judge(ask("r-0")), Admit)


# Decode -------------------------------------------------------------------------------------------


def test_the_batch_is_judged_for_when_the_prefill_is_done() -> None:
    """A full batch that will have ended by then is no reason to refuse; a half-full one that the
    queue will have filled by then is."""
    ending = [Sequence(f"old-{number}", 100, 5) for number in range(60)]
    for mode, is_admitted in (("predicted", True), ("now", False), ("off", True)):
        house = House(prefiller(), decoder(), mode=mode)
        house.workers["d1"].batch = [Sequence(one.request_id, 100, 5) for one in ending]
        verdict = house.budget.judge(ask("r"))
        assert isinstance(verdict, Admit) == is_admitted, mode
    slow_to_begin = Slo(ttft_ms=60_000.0, tbt_ms=50.0)
    house = House(prefiller(), decoder())
    assert fill(house, "r", slo=slow_to_begin, max_tokens=4000) == 40  # as many as a step allows
    assert not house.workers["d1"].batch, "nobody decodes yet"


def test_memory_is_a_budget_of_its_own() -> None:
    """Who would not fit in the decode worker's KV memory is not prefilled for nothing."""
    house = House(prefiller(), decoder(num_blocks=200))
    house.workers["d1"].batch = [Sequence("old", 2900, 1000)]
    assert refused(house.budget.judge(ask("r"))).shortage == "kv"


def test_decode_time_is_charged_and_given_back() -> None:
    """What was admitted takes device time of the horizon until it ends, whatever its place."""
    house = House(prefiller(), decoder(), policy=policy(horizon_s=1.0), mode="now")
    half = Slo(tbt_ms=50.0)
    num = fill(house, "r", slo=half, num_prompt=1, max_tokens=10)
    assert num == 80  # 10 ms each, of 800
    assert refused(house.budget.judge(ask("next", slo=half))).shortage == "decode"
    for number in range(num):
        house.budget.settle(f"r-{number}")
    assert isinstance(house.budget.judge(ask("next", slo=half)), Admit)
    assert house.budget.books.whole_ms(SERVED) == 0


# Others' ------------------------------------------------------------------------------------------


def test_what_other_control_processes_admit_is_charged_here_too() -> None:
    """A placement or a claim that is heard stands in the books, once, until its end is heard."""
    house = House(prefiller(), decoder())
    placed = Placed(
        process="control-2", request_id="theirs", served=SERVED, worker="p1", role="prefill",
        prefill_ms=500.0, num_tokens=500,
    )  # fmt: skip
    claim = Claim(
        request_id="theirs", epoch=1, worker="d1", role="decode", served=SERVED,
        deadline_unix_ms=1, num_tokens=500, max_tokens=100,
    )  # fmt: skip
    house.budget.hear_placed(placed, 1.0)
    assert house.budget.books.whole_ms(SERVED) > 0 == house.budget.books.queued_ms(SERVED)
    house.budget.hear_claim(claim, 2.0)
    house.budget.hear_claim(claim, 2.0)
    assert len(house.budget.books) == 1
    house.budget.settle("theirs")
    assert not house.budget.books.pools()


# Over budget --------------------------------------------------------------------------------------


def test_rungs_are_tried_in_order() -> None:
    """Waiting as long as the policy lets it, then the fallback, then 429."""
    house = House(
        prefiller(), decoder(),
        policy=policy(rungs=("wait", "fallback"), max_wait_s=3.0, fallback="small"),
    )  # fmt: skip
    fill(house, "r")
    verdict = house.budget.judge(ask("next"))
    assert isinstance(verdict, Wait)
    assert verdict.until_s == pytest.approx(0.5, abs=0.05)
    verdict = house.budget.judge(ask("next", since_s=-2.9))
    assert verdict == Fallback(model="small", shortage="ttft")
    house = House(prefiller(), decoder(), policy=policy(rungs=("wait",), max_wait_s=0.1))
    fill(house, "r")
    error = error_of(refused(house.budget.judge(ask("next"))), SERVED)
    assert isinstance(error, OverBudget)
    assert error.retry_after_s == pytest.approx(0.5, abs=0.05)
    assert error.http_status == 429
    assert error.retryable
    assert error.param == "model"


def test_a_clamp_leaves_what_fits_and_never_less_than_the_floor() -> None:
    """Fewer tokens where memory is short; none where they would not help."""
    house = House(prefiller(), decoder(num_blocks=200), policy=policy(rungs=("clamp",)))
    house.workers["d1"].batch = [Sequence("old", 2200, 5000)]
    verdict = house.budget.judge(ask("r", max_tokens=900))
    assert isinstance(verdict, Clamp)
    assert verdict.shortage == "kv"
    assert 64 <= verdict.max_tokens < 900
    strict = House(prefiller(), decoder(num_blocks=200), policy=policy(rungs=("clamp",)))
    strict.workers["d1"].batch = [Sequence("old", 2900, 5000)]
    assert isinstance(strict.budget.judge(ask("r", max_tokens=900)), Refuse)
    queue = House(prefiller(), decoder(), policy=policy(rungs=("clamp",)))
    fill(queue, "r")
    assert refused(queue.budget.judge(ask("next"))).shortage == "ttft"


def test_only_another_model_helps_against_times_that_are_too_short() -> None:
    """The fallback may be fast enough; waiting or a clamp never is."""
    house = House(
        prefiller(), decoder(),
        policy=policy(rungs=("wait", "clamp", "fallback"), fallback="small"),
    )  # fmt: skip
    verdict = house.budget.judge(ask("long", num_prompt=3000))
    assert verdict == Fallback(model="small", shortage="ttft")
    moved = {"asked_model": "big"}
    assert isinstance(house.budget.judge(ask("long", num_prompt=3000, **moved)), Refuse)
    fill(house, "r")
    assert isinstance(house.budget.judge(ask("late", since_s=-60.0, **moved)), Refuse)


def test_low_priority_is_refused_first() -> None:
    """It may use its share of the budget; the rest is for those above it."""
    house = House(prefiller(), decoder(), policy=policy(shares=((-1, 0.25), (0, 0.7))))
    low = fill(house, "low", priority=-5)
    middle = fill(house, "middle", priority=0)
    high = fill(house, "high", priority=1)
    assert 0 < low < low + middle < low + middle + high
    again = House(prefiller(), decoder(), policy=policy(shares=((-1, 0.25), (0, 0.7))))
    assert fill(again, "high", priority=1) > 0
    assert isinstance(again.budget.judge(ask("low", priority=-5)), Refuse)


def test_a_tenant_is_not_refused_for_what_another_has_queued() -> None:
    """Tenants take turns, so one that has nothing waiting is served soon."""
    house = House(prefiller(), decoder())
    fill(house, "big", tenant="big")
    assert isinstance(house.budget.judge(ask("next", tenant="big")), Refuse)
    assert isinstance(house.budget.judge(ask("small", tenant="small")), Admit)


def test_a_budget_that_is_over_stays_so_until_it_is_left() -> None:
    """Between ``leave`` and ``enter`` nobody enters who would have before: no flapping."""
    house = House(prefiller(), decoder(), policy=policy(enter=1.0, leave=0.4))
    for number in range(6):
        house.admit(ask(f"r-{number}"))  # 3,000 ms: over, whoever let them in
    verdicts = []
    for step in range(14):
        verdicts.append(isinstance(house.budget.judge(ask(f"next-{step}", house.now_s)), Admit))
        house.run(0.2)
    first = verdicts.index(True)
    assert verdicts == [False] * first + [True] * (14 - first)
    assert first == 11, "2,200 of 3,000 ms are over when 800 = 0.4 * 2,000 are left"


# Retry-After --------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "a burst of prompts": {"num": 12, "num_prompt": 500, "max_tokens": 50},
    "few long prompts": {"num": 5, "num_prompt": 1500, "max_tokens": 20},
    "long answers": {"num": 70, "num_prompt": 20, "max_tokens": 200},
    "very long answers": {"num": 55, "num_prompt": 10, "max_tokens": 600},
    "mixed": {"num": 60, "num_prompt": 200, "max_tokens": 300},
}


def overload(shape: dict[str, Any], seed: int, **rules: Any) -> House:
    house = House(prefiller("p1"), prefiller("p2"), decoder(), policy=policy(**rules))
    rng = random.Random(seed)
    facts = dict(shape)
    for number in range(facts.pop("num")):
        some = {key: max(1, round(value * rng.uniform(0.5, 1.5))) for key, value in facts.items()}
        house.admit(ask(f"r-{number}", house.now_s, **some))
    return house


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", [1, 2])
def test_retry_after_is_honest(name: str, seed: int) -> None:
    """The same request is admitted when it comes again after that time, and not much sooner: what
    is said lies within 30 % of the moment at which it would have been admitted."""
    house = overload(SHAPES[name], seed)
    wanted = ask("again", num_prompt=100, max_tokens=50)
    verdict = house.budget.judge(wanted)
    said_s = refused(verdict).retry_after_s
    assert said_s is not None
    while not isinstance(house.budget.judge(ask("again", house.now_s, num_prompt=100,
                                                max_tokens=50)), Admit):  # fmt: skip
        house.run(max(0.02, said_s / 40))
        assert house.now_s < 120, "never"
    assert said_s == pytest.approx(house.now_s, rel=0.3, abs=0.1)


@settings(max_examples=10, deadline=None)
@given(
    num=st.integers(8, 60),
    num_prompt=st.integers(50, 1200),
    max_tokens=st.integers(1, 400),
    leave=st.floats(0.2, 1.0),
)
def test_whoever_is_refused_is_admitted_later(
    num: int, num_prompt: int, max_tokens: int, leave: float
) -> None:
    """Nobody is refused for ever by a pool that works, and the time that is told is finite."""
    shape = {"num": num, "num_prompt": num_prompt, "max_tokens": max_tokens}
    house = overload(shape, 7, leave=leave)
    verdict = house.budget.judge(ask("again"))
    if isinstance(verdict, Refuse):
        assert verdict.retry_after_s is not None
        assert verdict.retry_after_s > 0
        house.run(verdict.retry_after_s * 1.3 + 0.2, tick_ms=20.0)
        assert isinstance(house.budget.judge(ask("again", house.now_s)), Admit)


def test_the_rig_itself_computes() -> None:
    """The pool that promises are checked against does the work that costs say."""
    house = House(prefiller(), decoder())
    house.admit(ask("r", num_prompt=500, max_tokens=10))
    house.run(0.5)
    assert len(house.workers["d1"].batch) == 1
    house.run(10 * (COSTS.decode_base_ms + COSTS.decode_sequence_ms) / 1000 + 0.02)
    assert not house.workers["d1"].batch
    assert not house.budget.books.pools()
    assert CHAT.ttft_ms > 0

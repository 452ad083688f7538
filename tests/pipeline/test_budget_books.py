"""The budget's books: what is charged is given back, once, and never more."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pipeline.budget_books import MAX_AGE_S, Books, Charge

IDS = st.sampled_from([f"request-{n}" for n in range(8)])
MS = st.floats(0, 1e5, allow_nan=False)


def charge(request: str, **more: object) -> Charge:
    given = {
        "served": "m@1",
        "tenant": "a",
        "priority": 0,
        "num_prompt": 100,
        "prefill_ms": 100.0,
        "num_tokens": 50.0,
        "cap_tokens": 1000.0,
        "token_ms": 2.0,
        "charged_s": 0.0,
        **more,
    }
    return Charge(request_id=request, **given)  # type: ignore[arg-type]


def left_tokens(one: Charge, now_s: float, at_s: float, step_ms: float) -> float:
    """Of one charge, as the docstring of ``Charge`` has it."""
    if one.begins_s is None:
        return one.num_tokens
    begins_s = one.begins_s if one.has_decoder else max(one.begins_s, now_s)
    steps = max(0.0, at_s - begins_s) * 1000 / step_ms
    return max(0.0, one.num_tokens - steps * one.num_choices)


class BooksMachine(RuleBasedStateMachine):
    """Any order of charges, placements, beginnings and ends, repeated ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.there: set[str] = set()

    @rule(
        request=IDS,
        served=st.sampled_from(["m@1", "n@1"]),
        tenant=st.sampled_from(["a", "b"]),
        priority=st.integers(-1, 1),
        prefill_ms=MS,
        token_ms=MS,
    )
    def charge(self, request: str, **more: object) -> None:
        is_new = self.books.charge(charge(request, **more))
        assert is_new == (request not in self.there), "a repeat charges nothing"
        self.there.add(request)

    @rule(request=IDS)
    def place(self, request: str) -> None:
        self.books.place(request)

    @rule(request=IDS, at_s=st.floats(0, 100), has_decoder=st.booleans())
    def begin(self, request: str, at_s: float, has_decoder: bool) -> None:
        self.books.begin(request, at_s, has_decoder=has_decoder)

    @rule(request=IDS)
    def settle(self, request: str) -> None:
        found = self.books.settle(request)
        assert (found is not None) == (request in self.there), "what was charged is found, once"
        self.there.discard(request)

    @invariant()
    def sums_are_those_of_the_charges(self) -> None:
        self.books.check_invariants()
        assert len(self.books) == len(self.there)
        for served in self.books.pools():
            found = filter(None, map(self.books.find, self.there))
            charges = [one for one in found if one.served == served]
            left = [left_tokens(one, now_s=40.0, at_s=50.0, step_ms=10.0) for one in charges]
            ms = [
                min(tokens, one.cap_tokens) * one.token_ms
                for one, tokens in zip(charges, left, strict=True)
            ]
            assert self.books.left_tokens(served, 40.0, 50.0, 10.0) == pytest.approx(sum(left))
            assert self.books.decode_ms(served, 40.0, 50.0, 10.0) == pytest.approx(sum(ms))
            assert sum(left) <= self.books.whole_tokens(served) + 1e-6
            assert sum(ms) <= self.books.whole_ms(served) + 1e-6

    def teardown(self) -> None:
        for request in list(self.there):
            self.books.settle(request)
        assert not self.books.pools(), "all ended: nothing is left"
        for served in ("m@1", "n@1"):
            assert self.books.queued_ms(served) == self.books.whole_ms(served) == 0


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)


def test_a_charge_runs_down_while_it_decodes() -> None:
    """A token per step and choice; before it begins the charge is whole, at the end nothing."""
    books = Books()
    books.charge(charge("r", num_choices=2))
    assert books.decode_ms("m@1", 0.0, 9.0, 50.0) == books.whole_ms("m@1") == 100.0
    books.begin("r", 10.0)
    assert books.decode_ms("m@1", 10.0, 10.0, 50.0) == 100.0
    assert books.decode_ms("m@1", 10.0, 10.5, 50.0) == 60.0  # ten steps, two tokens each, of fifty
    assert books.decode_ms("m@1", 10.0, 20.0, 50.0) == 0.0


def test_who_waits_for_a_decode_worker_has_not_begun() -> None:
    """However long ago its prefill was predicted to be done: a charge runs down from the claim of
    whoever decodes it, and until then no sooner than from now on."""
    books = Books()
    books.charge(charge("r"))
    books.begin("r", 1.0, has_decoder=False)
    assert books.left_tokens("m@1", 0.0, 2.0, 50.0) == 30.0  # predicted: twenty steps by then
    assert books.left_tokens("m@1", 60.0, 60.0, 50.0) == 50.0
    assert books.left_tokens("m@1", 60.0, 61.0, 50.0) == 30.0
    books.begin("r", 60.0)
    assert books.left_tokens("m@1", 62.0, 62.0, 50.0) == 10.0


def test_what_lies_beyond_the_horizon_is_not_charged() -> None:
    """A long answer takes of the budget what the horizon has room for, until less is left."""
    books = Books()
    books.charge(charge("r", num_tokens=200.0, cap_tokens=100.0))
    books.begin("r", 0.0)
    assert books.whole_ms("m@1") == books.decode_ms("m@1", 4.0, 4.0, 50.0) == 200.0
    assert books.decode_ms("m@1", 7.5, 7.5, 50.0) == 100.0


def test_the_pace_is_that_of_late() -> None:
    """As many as come each second, and of their prompts the long ones count for more; it fades
    when nobody comes any more."""
    books = Books()
    for number in range(1000):
        long = {"num_prompt": 300, "prefill_ms": 300.0} if number % 2 else {}
        books.charge(charge(f"r-{number}", charged_s=number / 10, **long))
    pace = books.pace("m@1", 100.0)
    assert pace.num == pytest.approx(10.0, rel=0.02)
    assert pace.tokens == pytest.approx(2000.0, rel=0.02)
    assert pace.prefill_ms == pytest.approx((100 * 100 + 300 * 300) / 400, rel=0.02)
    assert books.pace("m@1", 120.0).num == pytest.approx(pace.num * math.exp(-2), rel=0.02)
    assert books.pace("nobody@1", 100.0).num == 0


def test_tenants_take_turns() -> None:
    """Before a tenant's request stands its own queue, and of another's as much as takes turns
    with it; less urgent work does not stand before it."""
    books = Books()
    for number in range(10):
        books.charge(charge(f"big-{number}", tenant="big"))
    books.charge(charge("small-0", tenant="small"))
    books.charge(charge("late", tenant="big", priority=-1))
    assert books.ahead("m@1", "big", 0, 100.0).ms == 1000 + 100
    assert books.ahead("m@1", "small", 0, 100.0) == (300, 3, 300, 150)
    assert books.ahead("m@1", "new", 0, 100.0).ms == 100 + 100
    assert books.ahead("m@1", "big", -1, 100.0).ms == 1100 + 100
    assert books.ahead("m@1", "big", 1, 100.0).ms == 0
    assert books.queued_ms("m@1") == 1200


@settings(deadline=None)
@given(st.lists(st.floats(0, 2000), min_size=1, max_size=20))
def test_a_charge_without_an_end_is_forgotten(times: list[float]) -> None:
    """An end that was missed does not hold a budget for ever."""
    books = Books()
    for number, at_s in enumerate(sorted(times)):
        books.charge(charge(f"r-{number}", charged_s=at_s))
    books.forget(2000.0)
    assert len(books) == sum(2000.0 - at_s <= MAX_AGE_S for at_s in times)
    books.check_invariants()

"""One request's permit: what is charged, given back, refused."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.access.budgets import Budgets, open_budgets
from pipeline.access.charge import Charge
from pipeline.access.errors import OverLimit, RateLimited
from pipeline.access.permit import ANYONE, MeteredPermit
from tests.pipeline.access.conftest import PATIENCE_S, Clock, key

NOTHING = Charge(0, 0)


def remaining(permit: MeteredPermit, what: str) -> int:
    return int(dict(permit.headers())[f"x-ratelimit-remaining-{what}".encode()])


def test_requests_per_minute(budgets: Budgets, clock: Clock) -> None:
    """Three go, the fourth hears when; then it goes."""
    limited = key(requests_per_minute=3)
    for left in (2, 1, 0):
        permit = MeteredPermit(limited, budgets)
        permit.enter(NOTHING)
        assert remaining(permit, "requests") == left
        permit.end(None)
    with pytest.raises(RateLimited, match="3 requests per minute") as refused:
        MeteredPermit(limited, budgets).enter(NOTHING)
    assert refused.value.retry_after_s == pytest.approx(20.0)
    clock.now_s += refused.value.retry_after_s or 0
    MeteredPermit(limited, budgets).enter(NOTHING)


def test_tokens_are_reserved_confirmed_and_trued_up(budgets: Budgets) -> None:
    """Each step replaces the charge of the one before."""
    permit = MeteredPermit(key(tokens_per_minute=1000), budgets)
    permit.enter(Charge(100, 10))
    assert remaining(permit, "tokens") == 890
    permit.confirm(Charge(130, 0))
    assert remaining(permit, "tokens") == 870
    permit.end(40)
    assert remaining(permit, "tokens") == 960
    permit.end(999)
    assert remaining(permit, "tokens") == 960


def test_a_refusal_at_the_entrance_costs_nothing(budgets: Budgets) -> None:
    """Neither a request nor tokens nor a place; the answer shows what is left."""
    limited = key(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=1)
    refused = MeteredPermit(limited, budgets)
    with pytest.raises(OverLimit, match="this request needs 101 at least"):
        refused.enter(Charge(101, 0))
    assert (remaining(refused, "requests"), remaining(refused, "tokens")) == (10, 100)
    refused.end(None)
    MeteredPermit(limited, budgets).enter(Charge(100, 0))


def test_a_prompt_that_turns_out_too_long_gives_its_tokens_back(budgets: Budgets) -> None:
    """The request itself stays charged: the mesh has counted its prompt."""
    limited = key(requests_per_minute=10, tokens_per_minute=100)
    other = MeteredPermit(limited, budgets)
    other.enter(Charge(60, 0))
    permit = MeteredPermit(limited, budgets)
    permit.enter(Charge(20, 0))
    with pytest.raises(RateLimited, match="40 left, 90 needed") as refused:
        permit.confirm(Charge(90, 0))
    assert refused.value.retry_after_s == pytest.approx(30.0)
    permit.end(0)
    assert (remaining(permit, "requests"), remaining(permit, "tokens")) == (8, 40)


def test_a_long_answer_is_owed(budgets: Budgets, clock: Clock) -> None:
    """Use beyond the charge holds later requests back until it is paid."""
    limited = key(tokens_per_minute=100)
    permit = MeteredPermit(limited, budgets)
    permit.enter(Charge(10, 50))
    permit.end(180)
    with pytest.raises(RateLimited) as refused:
        MeteredPermit(limited, budgets).enter(Charge(20, 0))
    assert refused.value.retry_after_s == pytest.approx(60.0)
    clock.now_s += 60.0
    MeteredPermit(limited, budgets).enter(Charge(20, 0))


def test_requests_at_once(budgets: Budgets) -> None:
    """A place is free again when its request has ended, once."""
    limited = key(concurrent_requests=2)
    first, second, third = (MeteredPermit(limited, budgets) for _ in range(3))
    first.enter(NOTHING)
    second.enter(NOTHING)
    with pytest.raises(RateLimited, match="2 requests open"):
        third.enter(NOTHING)
    first.end(5)
    first.end(5)
    third.enter(NOTHING)
    assert list(third.headers()) == []


def test_keys_are_counted_apart(budgets: Budgets) -> None:
    """One key's use is nothing to another."""
    MeteredPermit(key(requests_per_minute=1), budgets).enter(NOTHING)
    MeteredPermit(key(requests_per_minute=1, digest=b"o" * 32), budgets).enter(NOTHING)


def test_anyone_is_not_counted() -> None:
    """Without keys there is no tenant and no limit; a priority is what the client says."""
    ANYONE.enter(Charge(10**9, 0))
    assert ANYONE.may_use("x")
    assert (ANYONE.tenant, ANYONE.priority_of(None), ANYONE.priority_of(7)) == ("", 0, 7)
    assert not ANYONE.headers()


requests = st.lists(
    st.tuples(
        st.integers(1, 300),  # certain
        st.integers(0, 300),  # likely
        st.integers(1, 300),  # as counted
        st.floats(0, 1),  # used of that
        st.floats(0, 40),  # seconds until the next
    ),
    min_size=1,
    max_size=20,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Budgets, Clock]]:
    clock = Clock()
    folder = tmp_path_factory.mktemp("budgets")
    with open_budgets(folder, patience_s=PATIENCE_S, now_s=clock) as budgets:
        yield budgets, clock


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests, st.integers(1, 400), st.integers(1, 20), st.integers(1, 4))
def test_no_history_exceeds_a_limit(
    shared: tuple[Budgets, Clock],
    history: list[tuple[int, int, int, float, float]],
    tokens: int,
    rate: int,
    places: int,
) -> None:
    """Whatever comes: used tokens, requests and open requests stay within the limits, every
    announced time is true, and in the end nothing is open."""
    budgets, clock = shared
    limited = key(
        digest=secrets.token_bytes(32),
        tokens_per_minute=tokens,
        requests_per_minute=rate,
        concurrent_requests=places,
    )
    begun_s, entered, used = clock.now_s, 0, 0
    still_open: list[tuple[MeteredPermit, int]] = []
    for certain, likely, counted, share, pause_s in history:
        if len(still_open) == places:
            with pytest.raises(RateLimited):
                MeteredPermit(limited, budgets).enter(NOTHING)
            ended, amount = still_open.pop(0)
            ended.end(amount)
            used += amount
        permit = MeteredPermit(limited, budgets)
        if not _enters_in_time(permit, Charge(certain, likely), clock):
            continue
        entered += 1
        try:
            permit.confirm(Charge(counted, 0))
        except RateLimited:
            permit.end(0)
        else:
            still_open.append((permit, int(counted * share)))
        clock.now_s += pause_s
        span = 1 + (clock.now_s - begun_s) / 60
        assert used <= tokens * span + 1e-3
        assert entered <= rate * span + 1e-3
    for permit, _ in still_open:
        permit.end(None)
    with budgets.account(limited.digest) as account:
        assert account.num_open(1) == 0


def _enters_in_time(permit: MeteredPermit, charge: Charge, clock: Clock) -> bool:
    """Wait as told: each limit refuses at most once. False for what can never enter."""
    for _ in range(3):
        try:
            permit.enter(charge)
        except OverLimit:
            return False
        except RateLimited as error:
            clock.now_s += (error.retry_after_s or 0) + 0.001
        else:
            return True
    raise AssertionError("both limits had let it in by now")

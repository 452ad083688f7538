"""The lease book: a lease ends once, whoever ends it, and lasts as long as it was told to."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from workers.kv.leases import Lease, LeaseBook

LEASE_S = 10.0
MAX_S = 25.0  # after which no reader's word counts


class Leases(RuleBasedStateMachine):
    """Gives, readers' releases and extensions (right, wrong and repeated), expiries and renewals in
    any order, against a model that keeps who stands until when."""

    given = Bundle("given")

    @initialize()
    def start(self) -> None:
        self.book = LeaseBook()
        self.now_s = 0.0
        self.stands: dict[str, float] = {}
        self.ended: list[str] = []
        self.num_refused = 0
        self.num_keys = 0

    @rule(target=given)
    def give(self) -> Lease:
        self.num_keys += 1
        until_s = self.now_s + MAX_S
        lease = self.book.give(f"key-{self.num_keys}", LEASE_S, self.now_s, until_s)
        assert lease.lease_id not in self.stands
        self.stands[lease.lease_id] = self.now_s + LEASE_S
        return lease

    @rule(lease=given, knows_secret=st.booleans())
    def release(self, lease: Lease, knows_secret: bool) -> None:
        secret = lease.secret if knows_secret else b"wrong"
        released = self.book.release(lease.lease_id, secret)
        if knows_secret and lease.lease_id in self.stands:
            assert released is lease
            self._end(lease)
        else:
            assert released is None
            self.num_refused += 1

    @rule(lease=given)
    def take_off(self, lease: Lease) -> None:
        taken = self.book.take_off(lease.lease_id)
        assert taken is (lease if lease.lease_id in self.stands else None)
        if taken is not None:
            self._end(lease)

    @rule(lease=given)
    def renew(self, lease: Lease) -> None:
        self.book.renew(lease.lease_id, LEASE_S, self.now_s)
        if lease.lease_id in self.stands:
            self.stands[lease.lease_id] = self.now_s + LEASE_S

    @rule(lease=given, knows_secret=st.booleans())
    def extend(self, lease: Lease, knows_secret: bool) -> None:
        lease_id, before_s = lease.lease_id, self.stands.get(lease.lease_id)
        secret = lease.secret if knows_secret else b"wrong"
        extended = self.book.extend(lease_id, secret, LEASE_S, self.now_s)
        if knows_secret and before_s is not None:
            assert extended is lease
            wanted_s = min(self.now_s + LEASE_S, lease.until_s)
            self.stands[lease_id] = max(before_s, wanted_s)
        else:
            assert extended is None
            self.num_refused += 1

    @rule(seconds=st.sampled_from([0.0, 1.0, LEASE_S, 3 * LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def take_all(self) -> None:
        taken = {lease.lease_id for lease in self.book.take_all()}
        assert taken == set(self.stands)
        self.ended += taken
        self.stands.clear()

    @rule(lease=given, knows_secret=st.booleans())
    def look(self, lease: Lease, knows_secret: bool) -> None:
        may_read = self.book.may_read(lease.lease_id, lease.secret if knows_secret else b"")
        assert may_read == (knows_secret and lease.lease_id in self.stands)

    @invariant()
    def books_are_right(self) -> None:
        self.book.check_invariants()
        assert len(self.book) == len(self.stands)
        assert self.book.num_refused == self.num_refused
        overdue = {lease_id for lease_id, until in self.stands.items() if until <= self.now_s}
        assert {lease.lease_id for lease in self.book.expired(self.now_s)} == overdue
        assert len(self.ended) == len(set(self.ended)), "a lease ended twice"
        for lease_id, until_s in self.stands.items():
            assert self.book._leases[lease_id].expires_s == until_s

    def _end(self, lease: Lease) -> None:
        del self.stands[lease.lease_id]
        self.ended.append(lease.lease_id)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_held_request_has_one_lease() -> None:
    """Two leases on the same blocks would free them twice: the books say so."""
    book = LeaseBook()
    book.give("key", LEASE_S, 0)
    book.give("key", LEASE_S, 0)
    with pytest.raises(AssertionError, match="two leases"):
        book.check_invariants()


def test_the_same_word_twice_extends_once() -> None:
    """A message that the bus delivers again, or late, neither adds time nor takes any."""
    book = LeaseBook()
    lease = book.give("key", LEASE_S, 0)
    for now_s, expires_s in ((4, 14), (4, 14), (2, 14), (9, 19)):
        assert book.extend(lease.lease_id, lease.secret, LEASE_S, now_s) is lease
        assert lease.expires_s == expires_s


def test_nobody_reads_for_ever() -> None:
    """However often a reader says that it is at it: the request's deadline ends the lease."""
    book = LeaseBook()
    lease = book.give("key", LEASE_S, 0, until_s=15)
    for now_s in (5, 9, 12):
        book.extend(lease.lease_id, lease.secret, LEASE_S, now_s)
    assert book.expired(14.9) == []
    assert book.expired(15) == [lease]


def test_secrets_cannot_be_guessed_from_one_another() -> None:
    """128 random bits each."""
    book = LeaseBook()
    secrets = {book.give(str(number), LEASE_S, 0).secret for number in range(100)}
    assert len(secrets) == 100
    assert {len(secret) for secret in secrets} == {16}

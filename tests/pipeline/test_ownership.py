"""The ownership rules as a state machine.

A model of the whole: one stream with compare-and-set, workers that claim, sample, publish, lose
publishes, resend, freeze, wake and die; routers that judge too early; tasks that come twice.
Sampling here is *not* deterministic across epochs: a token is a hash of the tokens before it and
of the epoch and worker that drew it. So a reader whose tokens form an unbroken hash chain has one
right sequence, and any mixture of two workers' ideas shows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.ownership import Ledger, RequestView
from schemas.tokens import Cancelled, ChainEntry, Claim, StreamEnd, TokenDelta, Usage

REQUEST = "request-0"
NUM_TOKENS = 6
NUM_CHOICES = 2


def draw(prefix: tuple[int, ...], epoch: int) -> int:
    """A token that depends on all before it, and on the epoch that drew it."""
    data = repr((prefix, epoch)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


@dataclass
class Task:
    epoch: int
    after_seq: int


@dataclass
class Owner:
    """A worker at work under one claim. ``ring`` holds what is not confirmed by the stream."""

    epoch: int
    claim_seq: int
    tokens: list[list[int]]
    ring: list[TokenDelta] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return all(len(tokens) >= NUM_TOKENS for tokens in self.tokens)


class Ownership(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stream: list[TokenDelta | ChainEntry] = []  # sequence = index + 1
        self.chain_seq = 0
        self.tasks: list[Task] = [Task(1, 0)]
        self.owners: list[Owner] = []
        self.live = RequestView(REQUEST)
        self.shown: list[list[TokenDelta]] = [[] for _ in range(NUM_CHOICES)]
        self.ledger = Ledger()

    # The stream ------------------------------------------------------------------------------

    def store(self, item: TokenDelta | ChainEntry) -> int:
        self.stream.append(item)
        seq = len(self.stream)
        if isinstance(item, TokenDelta):
            for delta in self.live.apply_delta(item):
                self.shown[delta.index].append(delta)
        else:
            self.live.apply_entry(seq, item)
            self.ledger.apply(seq, "client.reader", item)
        return seq

    def append(self, entry: ChainEntry, after_seq: int) -> int | None:
        """Compare-and-set on the chain."""
        if after_seq != self.chain_seq:
            return None
        self.chain_seq = self.store(entry)
        return self.chain_seq

    def replay(self, until: int) -> RequestView:
        view = RequestView(REQUEST)
        for seq, item in enumerate(self.stream[:until], start=1):
            if isinstance(item, TokenDelta):
                view.apply_delta(item)
            else:
                view.apply_entry(seq, item)
        return view

    # Routers: they judge from what they know, too early, twice, two at a time -----------------

    @precondition(lambda self: self.ledger.get(REQUEST) is not None)
    @rule(copies=st.integers(1, 2))
    def router_places_again(self, copies: int) -> None:
        holding = self.ledger.get(REQUEST)
        assert holding is not None
        self.tasks += [Task(holding.claim.epoch + 1, holding.seq)] * copies

    @rule(data=st.data())
    def message_comes_again(self, data: st.DataObject) -> None:
        """Any task ever published may be delivered once more, however old."""
        self.tasks.append(data.draw(st.sampled_from(self.tasks)))

    # Workers ---------------------------------------------------------------------------------

    @rule(data=st.data())
    def worker_takes_a_task(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.tasks))
        claim = Claim(
            request_id=REQUEST,
            epoch=task.epoch,
            worker=f"w{len(self.owners)}",
            role="prefill",
            served="m@1",
            deadline_unix_ms=0,
        )
        seq = self.append(claim, task.after_seq)
        if seq is None:
            return  # superseded
        view = self.replay(seq)
        tokens = [list(run) for run in view.tokens(NUM_CHOICES)]
        self.owners.append(Owner(task.epoch, seq, tokens))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), lost=st.booleans(), most=st.integers(1, 3))
    def worker_samples(self, data: st.DataObject, lost: bool, most: int) -> None:
        """A token or a few; their publish may be lost on the way. A zombie does the same,
        unaware."""
        owner = data.draw(st.sampled_from(self.owners))
        index = data.draw(st.integers(0, NUM_CHOICES - 1))
        tokens = owner.tokens[index]
        number = len(tokens)
        for _ in range(min(most, NUM_TOKENS - number)):
            tokens.append(draw((index, *tokens), owner.epoch))
        if len(tokens) == number:
            return
        delta = TokenDelta(
            request_id=REQUEST,
            epoch=owner.epoch,
            number=number,
            ids=tuple(tokens[number:]),
            index=index,
            finish_reason="length" if len(tokens) == NUM_TOKENS else None,
        )
        owner.ring.append(delta)
        if not lost:
            self.store(delta)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def worker_resends(self, data: st.DataObject) -> None:
        """The whole ring again; the stream confirms it."""
        owner = data.draw(st.sampled_from(self.owners))
        for delta in owner.ring:
            self.store(delta)
        owner.ring.clear()

    @precondition(lambda self: any(owner.is_complete for owner in self.owners))
    @rule(data=st.data())
    def worker_ends(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([o for o in self.owners if o.is_complete]))
        for delta in owner.ring:
            self.store(delta)
        owner.ring.clear()
        end = StreamEnd(
            request_id=REQUEST,
            epoch=owner.epoch,
            num_tokens=(NUM_TOKENS,) * NUM_CHOICES,
            finish_reasons=("length",) * NUM_CHOICES,
            usage=Usage(prompt_tokens=1, completion_tokens=NUM_TOKENS * NUM_CHOICES),
        )
        self.append(end, owner.claim_seq)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        """With whatever was not stored."""
        self.owners.remove(data.draw(st.sampled_from(self.owners)))

    @rule(stale=st.booleans())
    def client_cancels(self, stale: bool) -> None:
        """A rare event, and one that may lose against somebody else's entry."""
        if len(self.stream) < 12 or self.live.terminal is not None:
            return  # ClaimChain.end appends nothing after an end
        self.append(Cancelled(request_id=REQUEST), self.chain_seq - 1 if stale else self.chain_seq)
        if not stale and self.live.terminal is None:
            raise AssertionError("a cancel on top of the chain must count")

    # What must hold --------------------------------------------------------------------------

    @invariant()
    def shown_tokens_are_one_sequence(self) -> None:
        """Numbers 0, 1, 2, … once each; every token drawn from exactly the ones shown before."""
        for index, deltas in enumerate(self.shown):
            prefix: tuple[int, ...] = (index,)
            for delta in deltas:
                assert delta.number == len(prefix) - 1
                for token_id in delta.ids:
                    assert token_id == draw(prefix, delta.epoch)
                    prefix += (token_id,)

    @invariant()
    def late_reader_sees_the_same(self) -> None:
        late = self.replay(len(self.stream))
        assert late.tokens(NUM_CHOICES) == self.live.tokens(NUM_CHOICES)
        assert late.terminal == self.live.terminal
        assert late.chain_seq == self.live.chain_seq == self.chain_seq

    @invariant()
    def end_means_complete(self) -> None:
        if isinstance(self.live.terminal, StreamEnd):
            num_tokens = [sum(len(one.ids) for one in deltas) for deltas in self.shown]
            assert num_tokens == list(self.live.terminal.num_tokens)
            assert self.live.finish_reasons(NUM_CHOICES) == self.live.terminal.finish_reasons

    @invariant()
    def ledger_agrees_with_the_chain(self) -> None:
        self.ledger.check_invariants()
        holding = self.ledger.get(REQUEST)
        if self.live.terminal is not None:
            assert holding is None
        elif self.live.claim is not None:
            assert holding is not None
            assert (holding.seq, holding.claim) == (self.live.chain_seq, self.live.claim)


Ownership.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, database=None
)
TestOwnership = Ownership.TestCase


def delta(number: int, epoch: int = 1, token: int = 0, index: int = 0) -> TokenDelta:
    return TokenDelta(
        request_id=REQUEST, epoch=epoch, number=number, ids=(token or number,), index=index
    )


def claim(epoch: int, worker: str = "w") -> Claim:
    return Claim(
        request_id=REQUEST,
        epoch=epoch,
        worker=worker,
        role="decode",
        served="m@1",
        deadline_unix_ms=100 * epoch,
    )


def test_late_number_holds_back_higher_ones() -> None:
    """A number that arrives after higher ones is shown first, and all follow at once."""
    view = RequestView(REQUEST)
    view.apply_entry(1, claim(1))
    assert [d.number for d in view.apply_delta(delta(0))] == [0]
    assert view.apply_delta(delta(2)) == []
    assert view.apply_delta(delta(3)) == []
    assert [d.number for d in view.apply_delta(delta(1))] == [1, 2, 3]
    assert view.apply_delta(delta(2)) == []


def test_claim_discards_what_still_waits() -> None:
    """The new owner goes on from the unbroken run, so a token beyond a hole is not used."""
    view = RequestView(REQUEST)
    view.apply_entry(1, claim(1))
    view.apply_delta(delta(0, token=10))
    view.apply_delta(delta(2, token=12))
    view.apply_entry(4, claim(2))
    assert view.tokens(1) == ((10,),)
    view.apply_delta(delta(1, epoch=2, token=21))
    assert view.tokens(1) == ((10, 21),)


def test_old_epoch_is_void_after_the_next_claim() -> None:
    """What a frozen worker publishes after it was replaced does not count."""
    view = RequestView(REQUEST)
    view.apply_entry(1, claim(1))
    view.apply_entry(2, claim(2))
    assert view.apply_delta(delta(0, epoch=1)) == []
    assert view.num_void == 1


def test_epochs_without_token_counts_completed_epochs_only() -> None:
    """Three owners that brought nothing make three; a token starts the count anew."""
    view = RequestView(REQUEST)
    for epoch in (1, 2, 3, 4):
        view.apply_entry(epoch, claim(epoch))
    assert view.epochs_without_token == 3
    view.apply_delta(delta(0, epoch=4))
    view.apply_entry(9, claim(5))
    assert view.epochs_without_token == 0
    view.apply_entry(10, claim(6))
    assert view.epochs_without_token == 1


def test_ledger_lists_what_a_dead_worker_held() -> None:
    """A later claim moves the request to its new holder; an end forgets it and names the holder."""
    ledger = Ledger()
    ledger.apply(1, "client.r", claim(1, "a"))
    assert [h.request_id for h in ledger.held_by("a")] == [REQUEST]
    ledger.apply(5, "client.r", claim(2, "b"))
    ledger.apply(1, "client.r", claim(1, "a"))  # a repeat changes nothing
    assert ledger.held_by("a") == []
    assert [h.request_id for h in ledger.overdue(201)] == [REQUEST]
    assert ledger.overdue(200) == []
    ended = ledger.apply(7, "client.r", Cancelled(request_id=REQUEST))
    assert ended is not None
    assert ended.claim.worker == "b"
    assert len(ledger) == 0
    ledger.check_invariants()


def test_ledger_hears_of_an_end_before_the_claim() -> None:
    """Who reads stored entries while live ones come may get them the wrong way round: what has
    ended is not held again, and its end is told once."""
    ledger = Ledger()
    ledger.apply(1, "client.r", claim(1, "a"))
    assert ledger.apply(7, "client.r", Cancelled(request_id=REQUEST)) is not None
    ledger.apply(5, "client.r", claim(2, "b"))
    assert ledger.apply(7, "client.r", Cancelled(request_id=REQUEST)) is None
    assert len(ledger) == 0
    assert ledger.workers() == []
    ledger.check_invariants()

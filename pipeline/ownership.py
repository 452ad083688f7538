"""Who owns a request, and what of its stream counts. Pure: stream entries in, decisions out.

All tokens and the claim chain of a request lie in one stream, so they have one order. Readers,
workers that take over, routers and checkers apply the same entries in that order and therefore
come to the same result, whoever published what, however often, and whenever it woke up.

The rules:

1. A chain entry is appended by compare-and-set on the chain's last entry. Only one of several
   can win, and nobody appends after a terminal entry.
2. A token counts when its epoch is the epoch of the last claim before it. What epoch e publishes
   after claim e + 1 is void.
3. Tokens are taken in number order, each number once. A number may arrive after higher ones: the
   higher ones wait.
4. A claim discards what still waits. The new owner therefore goes on from the unbroken run of
   tokens before its claim, and every reader has exactly that run.
5. After a terminal entry everything is void. StreamEnd is appended only when every token before
   it is confirmed, so a reader that has reached it has them all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.tokens import (
    Cancelled,
    ChainEntry,
    Claim,
    Expired,
    StreamEnd,
    StreamError,
    TokenDelta,
)

Terminal = StreamEnd | StreamError | Cancelled | Expired
_REMEMBERED_ENDS = 16384  # longer than any older news of them may still be under way


@dataclass(slots=True)
class ChoiceView:
    """The tokens of one choice that count so far."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    waiting: dict[int, TokenDelta] = field(default_factory=dict)  # by number, above the run

    def take(self, delta: TokenDelta, ready: list[TokenDelta]) -> None:
        """Add a valid delta; append to ``ready`` those that now follow the run, in order."""
        token_ids = self.token_ids
        if delta.number != len(token_ids):
            if delta.number > len(token_ids):
                self.waiting.setdefault(delta.number, delta)
            return
        following: TokenDelta | None = delta
        while following is not None:
            token_ids += following.ids
            if following.finish_reason is not None:
                self.finish_reason = following.finish_reason
            ready.append(following)
            following = self.waiting.pop(len(token_ids), None) if self.waiting else None


class RequestView:
    """One request as its stream tells it. Apply entries in stream order, each once."""

    __slots__ = (
        "chain_seq",
        "choices",
        "claim",
        "epoch",
        "epoch_of_last_token",
        "num_void",
        "request_id",
        "terminal",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.epoch = 0  # of the last claim; 0 while nobody claimed
        self.claim: Claim | None = None
        self.chain_seq = 0  # stream sequence of the chain's last entry: what to compare-and-set on
        self.terminal: Terminal | None = None
        self.choices: dict[int, ChoiceView] = {}
        self.epoch_of_last_token = 0
        self.num_void = 0  # deltas that did not count, repeats not included

    def apply_delta(self, delta: TokenDelta) -> list[TokenDelta]:
        """The deltas that a reader may show now: valid, in order, each once."""
        ready: list[TokenDelta] = []
        self.show(delta, ready)
        return ready

    def show(self, delta: TokenDelta, ready: list[TokenDelta]) -> None:
        """As :meth:`apply_delta`, appending them to ``ready``: for who gathers those of many."""
        if self.terminal is not None or delta.epoch != self.epoch:
            self.num_void += 1
            return
        self.epoch_of_last_token = self.epoch
        choice = self.choices.get(delta.index) or self.choice(delta.index)
        choice.take(delta, ready)

    def apply_entry(self, seq: int, entry: ChainEntry) -> None:
        """Apply the chain entry stored at stream sequence ``seq``."""
        if self.terminal is not None or seq <= self.chain_seq:
            return
        self.chain_seq = seq
        if isinstance(entry, Claim):
            self.claim = entry
            self.epoch = entry.epoch
            for choice in self.choices.values():
                choice.waiting.clear()
        else:
            self.terminal = entry

    def choice(self, index: int) -> ChoiceView:
        """The view of one choice, made when first asked for."""
        view = self.choices.get(index)
        if view is None:
            view = self.choices[index] = ChoiceView()
        return view

    def tokens(self, num_choices: int) -> tuple[tuple[int, ...], ...]:
        """Per choice the unbroken run of tokens: what a new owner goes on from."""
        return tuple(tuple(self.choice(index).token_ids) for index in range(num_choices))

    def num_tokens(self, num_choices: int) -> tuple[int, ...]:
        """How many those are, per choice."""
        return tuple([len(self.choice(index).token_ids) for index in range(num_choices)])

    def finish_reasons(self, num_choices: int) -> tuple[str, ...]:
        """Per choice why it ended; "" while it runs."""
        return tuple(self.choice(index).finish_reason or "" for index in range(num_choices))

    @property
    def epochs_without_token(self) -> int:
        """How many epochs, the present one not counted, passed since one brought a token."""
        return max(0, self.epoch - 1 - self.epoch_of_last_token)


class Holding(NamedTuple):
    """A claimed request as a router knows it."""

    request_id: str
    reader: str
    claim: Claim
    seq: int  # of the claim: the next claim's ``after_seq``


class Ledger:
    """Who holds what, from the last entry of every chain.

    What ended is forgotten, but for the latest ids: who reads the stored entries while live ones
    come hears of an end first and of the claim before it afterwards.
    """

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # oldest first
        self._by_worker: dict[str, dict[str, Holding]] = {}

    def __len__(self) -> int:
        return len(self._holdings)

    def apply(self, seq: int, reader: str, entry: ChainEntry) -> Holding | None:
        """Apply a chain entry, in any order across requests and repeats allowed.

        Returns:
            The holding that a terminal entry ended, so that its worker can be told; else None.
        """
        known = self._holdings.get(entry.request_id)
        if entry.request_id in self._ended or (known is not None and seq <= known.seq):
            return None
        if known is not None:
            self._forget(known)
        if isinstance(entry, Claim):
            self._remember(Holding(entry.request_id, reader, entry, seq))
            return None
        self._ended[entry.request_id] = None
        if len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        return known

    def get(self, request_id: str) -> Holding | None:
        """The present holding of a request, if it is claimed and has not ended."""
        return self._holdings.get(request_id)

    def held_by(self, worker: str) -> list[Holding]:
        """What ``worker`` claimed last and has not ended."""
        return list(self._by_worker.get(worker, {}).values())

    def workers(self) -> list[str]:
        """Every worker that holds something."""
        return list(self._by_worker)

    def holdings(self) -> list[Holding]:
        """All that is held."""
        return list(self._holdings.values())

    def overdue(self, now_unix_ms: int) -> list[Holding]:
        """Holdings whose deadline has passed."""
        return [h for h in self._holdings.values() if h.claim.deadline_unix_ms < now_unix_ms]

    def check_invariants(self) -> None:
        """The two indexes name the same holdings."""
        listed = {h.request_id: h for held in self._by_worker.values() for h in held.values()}
        assert listed == self._holdings
        assert not self._ended.keys() & self._holdings.keys(), "an ended request is held"
        assert all(self._by_worker.values()), "an empty worker is kept"

    def _remember(self, holding: Holding) -> None:
        self._holdings[holding.request_id] = holding
        self._by_worker.setdefault(holding.claim.worker, {})[holding.request_id] = holding

    def _forget(self, holding: Holding) -> None:
        del self._holdings[holding.request_id]
        held = self._by_worker[holding.claim.worker]
        del held[holding.request_id]
        if not held:
            del self._by_worker[holding.claim.worker]

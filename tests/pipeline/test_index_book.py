"""Events that are lost, doubled and out of order: the index ends equal to the workers' tiers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pipeline.index_book import MAX_KEPT, IndexBook
from pipeline.radix_index import RadixIndex
from schemas.errors import SchemaError
from schemas.kv_events import KvEvents, KvSnapshotAsk, KvSnapshotPart, KvTier, StoredRun
from tests.pipeline.kv_rig import name_of, names
from workers.kv.events import BlockLog, Changes, in_batches

TIERS: tuple[KvTier, ...] = ("device", "host", "disk")


@dataclass(slots=True)
class Said:
    """One worker: what it notes, the batches that it says, the snapshots that it would give."""

    worker: str
    log: BlockLog = field(default_factory=BlockLog)
    seq: int = 0
    max_bytes: int = 2048
    parts: list[KvSnapshotPart] = field(default_factory=list)

    def batches(self, changes: Changes | None = None) -> Iterator[KvEvents]:
        for one in in_batches(changes or self.log.cut(), self.max_bytes):
            self.seq += 1
            yield KvEvents(
                worker=self.worker,
                seq=self.seq,
                stored=one.stored,
                removed=one.removed,
                is_gap=one.is_gap,
            )

    def answer(self, ask: KvSnapshotAsk) -> tuple[list[KvEvents], KvSnapshotPart]:
        """The part asked for, and what had to be said before it."""
        said: list[KvEvents] = []
        if ask.part == 0:
            changes, held = self.log.cut_whole()
            said = list(self.batches(changes))
            pieces = in_batches(Changes(stored=held()), self.max_bytes) or [Changes()]
            self.parts = [
                KvSnapshotPart(
                    worker=self.worker,
                    seq=self.seq,
                    part=number,
                    num_parts=len(pieces),
                    stored=piece.stored,
                )
                for number, piece in enumerate(pieces)
            ]
        return said, self.parts[ask.part]


class Air:
    """Loses, doubles and delays."""

    def __init__(self, rng: random.Random, book: IndexBook) -> None:
        self.rng = rng
        self.book = book
        self.late: list[KvEvents] = []
        self.num_lost = 0

    def carry(self, events: KvEvents) -> None:
        chance = self.rng.random()
        if chance < 0.02:
            self.num_lost += 1
        elif chance < 0.05:
            self.late.append(events)
        else:
            self.book.hear(events)
            if chance > 0.97:
                self.book.hear(events)
        if self.late and self.rng.random() < 0.5:
            self.book.hear(self.late.pop(self.rng.randrange(len(self.late))))


def note(rng: random.Random, said: Said) -> None:
    tier = rng.choice(TIERS)
    name = name_of(rng.randrange(40), rng.randrange(20))
    if rng.random() < 0.6:
        said.log.stored(tier, name)
    else:
        said.log.removed(tier, name.block_hash)


def converge(book: IndexBook, all_said: list[Said], air: Air | None = None) -> None:
    """Everybody beats, and whoever is stale is asked until nobody is."""
    for said in all_said:
        for events in said.batches():
            book.hear(events)
        book.hear_seq(said.worker, said.seq)
    by_worker = {said.worker: said for said in all_said}
    for _ in range(100):
        for worker in book.stale():
            take(book, by_worker[worker])
        if not book.stale():
            return
    raise AssertionError("snapshots do not help")


def take(book: IndexBook, said: Said) -> None:
    while (ask := book.next_ask(said.worker)) is not None:
        events, part = said.answer(ask)
        for one in events:
            book.hear(one)
        if book.take(part) != "more":
            return


def test_after_100_000_events_lost_at_random_the_index_is_true() -> None:
    """Batches are lost, doubled and late, beats too, snapshots are taken in between: at the end
    the index says of each worker what it holds, in each tier, and nothing else."""
    rng = random.Random(1)
    index = RadixIndex(100_000)
    book = IndexBook(index)
    air = Air(rng, book)
    all_said = [Said(f"w{number}") for number in range(4)]
    for number in range(100_000):
        said = rng.choice(all_said)
        note(rng, said)
        if number % 10 == 0:
            for events in said.batches():
                air.carry(events)
        if number % 500 == 0 and rng.random() < 0.8:
            book.hear_seq(said.worker, said.seq)
        if number % 250 == 0:
            for worker in book.stale()[:2]:
                take(book, next(one for one in all_said if one.worker == worker))
    converge(book, all_said)
    index.check_invariants()
    for said in all_said:
        assert index.held_by(said.worker) == said.log.held()
    assert air.num_lost > 20
    assert book.num_gaps > 20
    assert book.num_snapshots > 20


def test_one_who_comes_late_has_all_of_it() -> None:
    """No event is needed: the number in a heartbeat tells that there is something to ask for."""
    said = Said("w")
    for number in range(300):
        said.log.stored("host", name_of(number, 0))
    assert len(list(said.batches())) > 2
    index = RadixIndex(1000)
    book = IndexBook(index)
    book.hear_seq("w", said.seq)
    assert book.stale() == ["w"]
    take(book, said)
    assert book.stale() == []
    assert index.held_by("w") == said.log.held()
    assert len(said.parts) > 2


def test_what_is_said_while_a_snapshot_comes_in_is_not_lost() -> None:
    """Batches between its parts are kept, and count when it is whole."""
    said = Said("w", max_bytes=256)
    for number in range(40):
        said.log.stored("host", name_of(number, 0))
    list(said.batches())
    index = RadixIndex(1000)
    book = IndexBook(index)
    book.hear_seq("w", said.seq)
    asked = 0
    while (ask := book.next_ask("w")) is not None:
        _, part = said.answer(ask)
        book.take(part)
        said.log.removed("host", name_of(asked, 0).block_hash)
        said.log.stored("disk", name_of(100 + asked, 0))
        for events in said.batches():
            book.hear(events)
        asked += 1
    assert asked == len(said.parts) > 3
    assert index.held_by("w") == said.log.held()
    assert book.num_snapshots == 1


def test_a_part_of_another_snapshot_is_not_mixed_in() -> None:
    """When the worker has made a new one, reading starts over."""
    said = Said("w", max_bytes=256)
    for number in range(40):
        said.log.stored("host", name_of(number, 0))
    list(said.batches())
    book = IndexBook(RadixIndex(1000))
    book.hear_seq("w", said.seq)
    first = book.next_ask("w")
    assert first is not None
    assert book.take(said.answer(first)[1]) == "more"
    second = book.next_ask("w")
    assert second is not None
    assert second.part == 1
    said.log.removed("host", name_of(1, 0).block_hash)
    said.answer(KvSnapshotAsk(worker="w"))  # somebody else came by
    assert book.take(said.parts[1]) == "later"
    again = book.next_ask("w")
    assert again is not None
    assert again.part == 0
    take(book, said)
    assert book.stale() == []


def test_a_worker_without_a_snapshot_now_is_asked_later() -> None:
    """An answer without parts changes nothing."""
    book = IndexBook(RadixIndex(10))
    book.hear_seq("w", 3)
    assert book.take(KvSnapshotPart(worker="w", seq=3)) == "later"
    assert book.stale() == ["w"]


def test_more_than_can_be_kept_means_another_snapshot() -> None:
    """What is kept of a worker that does not answer is bounded."""
    said = Said("w")
    index = RadixIndex(1000)
    book = IndexBook(index)
    book.hear_seq("w", 1)
    said.seq = 1
    for number in range(MAX_KEPT + 10):
        said.log.stored("host", name_of(number, 0))
        for events in said.batches():
            book.hear(events)
    assert len(book._sources["w"].kept) <= MAX_KEPT
    take(book, said)
    converge(book, [said])
    assert index.held_by("w") == said.log.held()


def test_dropped_is_forgotten() -> None:
    """Answers that come after that are nobody's."""
    said = Said("w")
    said.log.stored("host", name_of(1, 0))
    index = RadixIndex(1000)
    book = IndexBook(index)
    for events in said.batches():
        book.hear(events)
    assert index.held_by("w")
    book.hear_seq("w", 5)
    ask = book.next_ask("w")
    assert ask is not None
    book.drop("w")
    assert book.take(said.answer(ask)[1]) == "done"
    assert index.held_by("w") == {}
    assert book.workers == []
    assert book.next_ask("w") is None


def test_hashes_that_can_not_be_read_count_as_missed() -> None:
    """Bytes that are no whole number of hashes: refused, and a snapshot sets it right."""
    index = RadixIndex(1000)
    book = IndexBook(index)
    bad = StoredRun(tier="host", parent=b"", hashes=b"short")
    with pytest.raises(SchemaError):
        book.hear(KvEvents(worker="w", seq=1, stored=(bad,)))
    said = Said("w", seq=1)
    for name in names(3):
        said.log.stored("host", name)
    converge(book, [said])
    assert index.held_by("w") == said.log.held()
    book.hear_seq("w", 9)
    with pytest.raises(SchemaError):
        book.take(KvSnapshotPart(worker="w", seq=9, num_parts=1, stored=(bad,)))
    assert book.stale() == ["w"]

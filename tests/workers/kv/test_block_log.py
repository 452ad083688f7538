"""What tiers note, what is told of it, and how it is packed."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import encode
from schemas.kv_events import (
    HASH_BYTES,
    KvEvents,
    KvTier,
    RemovedBlocks,
    StoredRun,
    unpack_hashes,
)
from tests.pipeline.kv_rig import name_of, names
from workers.kv.events import BlockLog, Changes, in_batches

TIERS: tuple[KvTier, ...] = ("device", "host", "disk")
notes = st.lists(
    st.tuples(st.booleans(), st.sampled_from(TIERS), st.integers(0, 5), st.integers(0, 3)),
    max_size=60,
)


def apply(held: dict[tuple[KvTier, bytes], bytes], changes: Changes) -> None:
    """What a reader makes of it; the parent of each block beside."""
    for blocks in changes.removed:
        for tier in (blocks.tier, *blocks.also):
            for one in unpack_hashes(blocks.hashes):
                del held[tier, one]
    for run in changes.stored:
        parent = run.parent
        for one in unpack_hashes(run.hashes):
            for tier in (run.tier, *run.also):
                assert (tier, one) not in held
                held[tier, one] = parent
            parent = one


@given(st.lists(notes, max_size=5), st.integers(112, 400))
def test_cuts_in_pieces_of_any_size_tell_all(
    rounds: list[list[tuple[bool, KvTier, int, int]]], max_bytes: int
) -> None:
    """Applied one after the other they give what is held; nothing is told twice, each block has
    its parent, and no piece is over its size."""
    log = BlockLog()
    held: dict[tuple[KvTier, bytes], bytes] = {}
    for one_round in rounds:
        for is_stored, tier, prompt, depth in one_round:
            name = name_of(prompt, depth)
            if is_stored:
                log.stored(tier, name)
            else:
                log.removed(tier, name.block_hash)
        for piece in in_batches(log.cut(), max_bytes):
            assert piece.stored or piece.removed
            assert len(encode(_message(piece))) - len(encode(_message(Changes()))) <= max_bytes + 8
            apply(held, piece)
        expected = {(tier, one) for one, in_tiers in log.held().items() for tier in in_tiers}
        assert held.keys() == expected
    parents = {name_of(p, d).block_hash: name_of(p, d).parent for p in range(6) for d in range(4)}
    assert all(parent == parents[one] for (_, one), parent in held.items())


def _message(changes: Changes) -> KvEvents:
    return KvEvents(worker="w", seq=1, stored=changes.stored, removed=changes.removed)


def test_what_came_and_went_is_not_told() -> None:
    """Between two cuts only the difference counts."""
    log = BlockLog()
    kept, gone = names(2)
    log.stored("device", kept)
    log.stored("device", gone)
    log.removed("device", gone.block_hash)
    assert log.cut() == Changes(
        stored=(StoredRun(tier="device", parent=kept.parent, hashes=kept.block_hash),)
    )
    log.removed("device", kept.block_hash)
    log.stored("device", kept)
    log.removed("host", kept.block_hash)  # was never there
    assert not log.cut()
    log.removed("device", kept.block_hash)
    assert log.cut() == Changes(removed=(RemovedBlocks(tier="device", hashes=kept.block_hash),))
    assert len(log) == 0


def test_blocks_of_a_prompt_travel_as_one_run() -> None:
    """16 bytes a block: the parents follow from the order."""
    log = BlockLog()
    for name in names(64):
        log.stored("device", name)
    (run,) = log.cut().stored
    assert run.parent == name_of(0, 0).parent
    assert len(run.hashes) == 64 * HASH_BYTES


def test_what_happens_in_two_tiers_is_told_once() -> None:
    """A block that is put aside as soon as it is computed takes its hash once, not per tier."""
    log, some = BlockLog(), names(4)
    log.stored("host", *some)
    log.stored("device", *some)
    (run,) = log.cut().stored
    assert (run.tier, run.also, len(run.hashes)) == ("device", ("host",), 4 * HASH_BYTES)
    log.removed("device", some[0].block_hash)
    log.removed("host", some[0].block_hash)
    removed = RemovedBlocks(tier="device", hashes=some[0].block_hash, also=("host",))
    assert log.cut() == Changes(removed=(removed,))


def test_too_much_at_once_is_a_gap_and_the_truth_is_kept() -> None:
    """A burst costs no memory: the cut says that more happened, the next one goes on from there."""
    log = BlockLog(max_changes=10)
    for name in names(50):
        log.stored("host", name)
    changes, held = log.cut_whole()
    assert changes == Changes(is_gap=True)
    assert sum(len(run.hashes) for run in held()) == 50 * HASH_BYTES
    assert in_batches(changes, 1000) == [changes]
    log.removed("host", name_of(0, 7).block_hash)
    assert log.cut() == Changes(
        removed=(RemovedBlocks(tier="host", hashes=name_of(0, 7).block_hash),)
    )


def test_a_whole_cut_is_of_one_instant() -> None:
    """What changes before it is put into runs does not show in it."""
    log = BlockLog()
    log.stored("host", name_of(0, 0))
    changes, held = log.cut_whole()
    log.stored("host", name_of(0, 1))
    log.removed("host", name_of(0, 0).block_hash)
    assert held() == changes.stored
    assert len(log.cut().stored) == 1


def test_the_first_change_after_a_cut_wakes() -> None:
    """And no other: a note costs a lock and a table."""
    log = BlockLog(max_changes=3)
    calls: list[int] = []
    log.on_change = lambda: calls.append(1)
    for name in names(3):
        log.stored("device", name)
    assert len(calls) == 1
    log.cut()
    for name in names(9, prompt=1):
        log.stored("device", name)
    assert len(calls) == 2


def test_any_thread_may_note_while_another_cuts() -> None:
    """Four threads and a reader: the reader ends with what is held."""
    log = BlockLog()
    held: dict[tuple[KvTier, bytes], bytes] = {}
    started = threading.Barrier(5)

    def work(prompt: int) -> None:
        started.wait(30)
        for turn in range(200):
            for name in names(5, prompt):
                log.stored("device", name)
                if turn % 2:
                    log.removed("device", name.block_hash)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in range(4)]
    for thread in threads:
        thread.start()
    started.wait(30)
    while any(thread.is_alive() for thread in threads):
        apply(held, log.cut())
    for thread in threads:
        thread.join()
    apply(held, log.cut())
    assert {one for _, one in held} == set(log.held())


def test_a_size_for_nothing_is_refused() -> None:
    """At least one hash has to fit."""
    with pytest.raises(ValueError, match="too few"):
        in_batches(Changes(is_gap=True), 50)

"""Remembered hashes are the hashes; memory is bounded; what nobody asks for is not computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import hash_memo
from pipeline.hash_memo import PIECE_BLOCKS, HashMemo
from pipeline.prefix_hash import iter_prefix_hashes, salt_of
from schemas.codec import pack_ids

SALT = salt_of("r1")
OTHER = pack_ids(list(range(7, 3 * PIECE_BLOCKS * 2)))
LONG = pack_ids(list(range(3 * PIECE_BLOCKS * 2 + 5)))  # three pieces of 2-token blocks, and more


def hashes(memo: HashMemo, packed: bytes, block_size: int, salt: bytes) -> Iterator[bytes]:
    return chain.from_iterable(memo.runs(packed, block_size, salt))


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 400), st.integers(1, 3), st.booleans()),
        max_size=12,
    )
)
def test_hashes_are_what_they_would_be_without_memory(
    asked: list[tuple[int, int, int, bool]],
) -> None:
    """Whatever was asked before: other tails, other block sizes, other salts, a part only."""
    memo = HashMemo(max_pieces=3)
    for shared, own, block_size, is_other in asked:
        packed = pack_ids([*range(shared), *range(1000, 1000 + own)])
        salt = salt_of("r2") if is_other else SALT
        expected = list(iter_prefix_hashes(packed, block_size, salt))
        assert list(islice(hashes(memo, packed, block_size, salt), own)) == expected[:own]
        assert list(hashes(memo, packed, block_size, salt)) == expected
        assert len(memo) <= 3


def test_what_came_before_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only blocks behind what was asked for are: none, of a prompt that was asked for whole."""
    memo = HashMemo()
    first = list(hashes(memo, LONG, 2, SALT))
    assert len(memo) == 3
    some = list(islice(hashes(memo, OTHER, 2, SALT), PIECE_BLOCKS + 20))
    assert len(memo) == 4
    hashed: list[bytes] = []

    def counted(packed: bytes, block_size: int, salt: bytes) -> list[bytes]:
        hashed.append(packed)
        return list(iter_prefix_hashes(packed, block_size, salt))

    monkeypatch.setattr(hash_memo, "iter_prefix_hashes", counted)
    assert list(hashes(memo, LONG, 2, SALT)) == first
    assert hashed == [LONG[-1 * 4 :]]  # less than a block
    hashed.clear()
    assert list(islice(hashes(memo, OTHER, 2, SALT), PIECE_BLOCKS + 20)) == some
    assert hashed == []
    assert list(hashes(memo, OTHER, 2, SALT))[: len(some)] == some
    assert hashed[0] == OTHER[(PIECE_BLOCKS + 32) * 2 * 4 : 2 * PIECE_BLOCKS * 2 * 4]


def test_what_prompts_end_with_does_not_crowd_out_what_they_begin_with() -> None:
    """A thousand requests that share their first piece, each with an end of its own: one piece is
    remembered, and the ends of the last few."""
    memo = HashMemo(max_pieces=4)
    for number in range(1000):
        packed = pack_ids([*range(2 * PIECE_BLOCKS), *range(number, number + 64)])
        list(hashes(memo, packed, 2, SALT))
    assert len(memo) == 1
    assert len(memo._tails) == 128


def test_a_prompt_that_nobody_asks_further_leaves_nothing() -> None:
    """One block is asked of prompts that the index does not know."""
    memo = HashMemo()
    assert len(list(islice(hashes(memo, LONG, 2, SALT), 1))) == 1
    assert len(memo) == 0


def test_pieces_that_were_used_last_stay() -> None:
    """The least recently used one goes."""
    memo = HashMemo(max_pieces=2)
    size = PIECE_BLOCKS * 2
    one, two, three = (pack_ids([number] * size) for number in (1, 2, 3))
    for packed in (one, two, one, three):
        list(hashes(memo, packed, 2, SALT))
    assert len(memo) == 2
    kept = set(memo._pieces)
    for packed in (one, three):
        list(hashes(memo, packed, 2, SALT))
    assert set(memo._pieces) == kept

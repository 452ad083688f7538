"""Locks that follow the open file: between users of one process, and gone with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.file_locks import FileMutex, is_locked_elsewhere, lock_byte


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """The same file, opened twice."""
    opened = [os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    yield opened[0], opened[1]
    os.close(opened[1])


def test_a_byte_is_held_until_the_file_is_closed(two: tuple[int, int]) -> None:
    """Each byte on its own; the holder itself does not count as another."""
    mine, other = two
    assert lock_byte(mine, 7)
    assert not lock_byte(other, 7)
    assert lock_byte(other, 8)
    assert is_locked_elsewhere(other, 7)
    assert not is_locked_elsewhere(mine, 7)
    os.close(mine)
    assert not is_locked_elsewhere(other, 7)


def test_the_mutex_lets_one_in_at_a_time(two: tuple[int, int]) -> None:
    """Who finds it taken waits, here until patience ends, and takes it later again."""
    told: list[str] = []
    mine = FileMutex(two[0], 60.0)
    other = FileMutex(two[1], 0.01, lambda: told.append("stuck"))
    with mine, other:
        assert told == ["stuck"]
        with other:
            assert told == ["stuck"]  # asks just once now
    with other, FileMutex(two[0], 0.01, lambda: told.append("mine")):
        assert told == ["stuck", "mine"]  # it holds the file again
    os.close(two[0])


def test_the_mutex_does_not_mind_a_byte(two: tuple[int, int]) -> None:
    """The two kinds of lock are independent."""
    assert lock_byte(two[0], 0)
    with FileMutex(two[1], 0.01, lambda: pytest.fail("stuck")):
        pass
    os.close(two[0])

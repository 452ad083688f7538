import gc

import pytest

from infra.garbage import collect_rarely


@pytest.fixture
def restored():
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_is_there_at_the_start_is_walked_no_more(restored):
    """Later looks skip it; a cycle that is made afterwards is still found."""
    collect_rarely()
    assert gc.get_freeze_count() > 1000
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1


def test_looks_are_rarer_than_by_default(restored):
    """A thousand new objects that stay are no reason to look."""
    collect_rarely()
    num_looks = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(5000)]
    assert gc.get_stats()[0]["collections"] == num_looks
    assert len(kept) == 5000

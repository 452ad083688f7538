from __future__ import annotations

from loadgen.bench.kv_index import PROMPT_BLOCKS, IndexFigures, _in_a_process, figures_of


def test_figures_come_from_an_index_of_that_size() -> None:
    """Every prompt that was stored is found, which the bench itself checks; times are times."""
    found = figures_of(40 * PROMPT_BLOCKS)
    assert 0 < found.lookup_us <= found.lookup_p99_us
    assert 0 < found.miss_us
    assert 0 < found.stored_us


def test_a_process_of_its_own_tells_its_memory() -> None:
    """Of one index and nothing else: more than the hashes alone take."""
    found = _in_a_process(800 * PROMPT_BLOCKS)
    assert isinstance(found, IndexFigures)
    assert found.bytes_per_block > 16

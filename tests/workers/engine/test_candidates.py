"""Finding the likeliest tokens against a full sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.candidates import likeliest


@given(
    vocab_size=st.sampled_from([1, 7, 64, 65, 500, 1111]),
    at_least=st.sampled_from([1, 8, 60, 400]),
    seed=st.integers(0, 2**31),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    share_masked=st.sampled_from([0.0, 0.5, 0.995]),
)
@settings(max_examples=150, deadline=None)
def test_candidates_are_the_beginning_of_a_full_sort(
    vocab_size: int, at_least: int, seed: int, step: float, share_masked: float
) -> None:
    """A row's candidates are the first of its tokens in order, whole runs of equals, at least as
    many as asked for or all; masked tokens are none. A row with too many equals has none."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=generator)
    if step:
        logits = (logits / step).round() * step
    masked = torch.rand(3, vocab_size, generator=generator) < share_masked
    logits = logits.masked_fill(masked, -torch.inf)
    found = likeliest(logits, at_least)
    for number, one in enumerate(logits):
        order = one.sort(stable=True, descending=True)
        num_possible = int((one > -torch.inf).sum())
        count = int(found.counts[number])
        if count == 0 and num_possible:
            assert num_possible > 8 * at_least
            assert not found.is_all[number]
            continue
        assert count >= min(at_least, num_possible)
        assert found.ids[number, :count].tolist() == order.indices[:count].tolist()
        assert found.logits[number, :count].tolist() == order.values[:count].tolist()
        assert (found.logits[number, count:] == -torch.inf).all()
        assert not found.is_all[number] or count == num_possible
        if count < num_possible:
            assert order.values[count] < order.values[count - 1]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_without_any_token_has_no_candidates(value: float) -> None:
    """Rows of NaN or of masked tokens have none, and the row beside them has its own."""
    good = torch.arange(40.0)[None]
    found = likeliest(torch.cat([torch.full((1, 40), value), good]), 2)
    assert found.counts.tolist()[0] == 0
    assert found.ids[1, :2].tolist() == [39, 38]


def test_few_are_looked_at_in_a_large_vocabulary() -> None:
    """Of logits in no order the candidates are little more than what was asked for."""
    logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(0))
    assert likeliest(logits, 256).counts.max() < 400

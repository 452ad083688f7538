"""The library's look at a vocabulary against torch's, and sampling with it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.engine.test_sampler import logits_and_rows, row
from workers.engine.api import ScheduledSequence
from workers.engine.native.library import ModelShape
from workers.engine.native.load import load_library
from workers.engine.native.scan import NativeScan
from workers.engine.native.weights import NativeModel
from workers.engine.sampler import draw
from workers.engine.scan import RUN, TORCH_SCAN

THREADS = (1, 3)


@cache
def native_scan(num_threads: int) -> NativeScan:
    """Of a model without weights: a scan needs its threads alone."""
    shape = ModelShape(
        num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1, head_dim=16,
        intermediate_size=16, vocab_size=16, block_size=1,
    )  # fmt: skip
    return NativeScan(NativeModel(load_library(), shape, num_threads))


@given(
    vocab_size=st.sampled_from([1, 7, 64, 65, 500, 1111, 3000]),
    at_least=st.sampled_from([1, 8, 60, 400]),
    seed=st.integers(0, 2**31),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    share_masked=st.sampled_from([0.0, 0.5, 0.995]),
    num_threads=st.sampled_from(THREADS),
)
@settings(max_examples=150, deadline=None)
def test_the_same_candidates_number_for_number(
    vocab_size: int, at_least: int, seed: int, step: float, share_masked: float, num_threads: int
) -> None:
    """Ids, logits, counts and whether they are all, also among equals, masked tokens, both zeros
    and more than fit."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab_size, generator=generator)
    if step:
        logits = (logits / step).round() * step
    masked = torch.rand(4, vocab_size, generator=generator) < share_masked
    logits = logits.masked_fill(masked, -torch.inf)
    scan = native_scan(num_threads)
    expected, got = TORCH_SCAN.likeliest(logits, at_least), scan.likeliest(logits, at_least)
    assert got.ids.tolist() == expected.ids.tolist()
    assert got.logits.tolist() == expected.logits.tolist()
    assert got.counts.tolist() == expected.counts.tolist()
    assert got.is_all.tolist() == expected.is_all.tolist()
    assert scan.largest(logits) == TORCH_SCAN.largest(logits)


@pytest.mark.parametrize("vocab_size", [5, RUN - 1, RUN, 2 * RUN + 9])
@pytest.mark.parametrize("num_threads", THREADS)
def test_weights_are_the_sums_of_exponentials(num_threads: int, vocab_size: int) -> None:
    """To a millionth, run by run; what is masked, or lies e**-87 below the largest, weighs
    nothing at all."""
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(3)) * 4
    logits[1, 1:] = -torch.inf
    logits[2, ::2] -= 1e4
    temperatures = torch.tensor([[1.0], [0.3], [0.7], [1.9], [0.01]])
    got = native_scan(num_threads).weigh(logits, temperatures)
    assert torch.equal(got.largest, logits.amax(-1, keepdim=True))
    exact = ((logits.double() - got.largest) / temperatures.double()).exp()
    for run, expected in enumerate(exact.split(RUN, dim=-1)):
        torch.testing.assert_close(got.sums[:, run], expected.sum(-1), rtol=2e-6, atol=1e-37)
    assert got.sums[1].tolist() == [1.0] + [0.0] * (got.sums.shape[1] - 1)


@given(logits_and_rows(), st.sampled_from(THREADS))
@settings(max_examples=100, deadline=None)
def test_draws_are_those_of_the_general_path(
    case: tuple[Tensor, list[ScheduledSequence]], num_threads: int
) -> None:
    """Filters of all kinds over flat and peaked rows give the same tokens."""
    logits, rows = case
    assert draw(logits, rows, native_scan(num_threads)) == draw(logits, rows)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 0.0}])
def test_a_row_is_drawn_as_if_it_were_alone(sampling: dict[str, float]) -> None:
    """Whatever the batch and the number of threads; and most draws are those of torch, whose
    exponentials differ in the last bit."""
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(5)) * 2
    rows = [row(seed=seed, **{"temperature": 0.8, **sampling}) for seed in range(len(logits))]
    together = [draw(logits, rows, native_scan(num_threads)) for num_threads in THREADS]
    alone = [draw(logits[n : n + 1], [one], native_scan(1))[0] for n, one in enumerate(rows)]
    assert together == [alone, alone]
    assert draw(logits, rows) == alone


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_without_a_number_harms_no_other(value: float) -> None:
    """Every kind of draw gives some token of the vocabulary, and the row beside it its own."""
    logits = torch.cat([torch.full((1, 3000), value), torch.arange(3000.0)[None]])
    for sampling in ({}, {"top_p": 0.9}, {"top_k": 4}, {"temperature": 0.0}):
        rows = [row(seed=seed, **{"temperature": 0.1, **sampling}) for seed in (1, 2)]
        broken, good = draw(logits, rows, native_scan(3))
        assert 0 <= broken < 3000
        assert good == 2999

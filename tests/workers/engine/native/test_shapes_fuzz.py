"""Random shapes against the general path: what the two compute from the same pool is the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.engine.native.native_models import (
    VOCAB_SIZE,
    Shape,
    general_runner,
    layout_for,
    native_runner,
    scheduled,
)
from workers.engine.api import ScheduledSequence

NUM_SHARED = 40  # blocks that any sequence may have as its beginning


@dataclass(frozen=True)
class Case:
    shape: Shape
    block_size: int
    num_threads: int
    spans: tuple[tuple[int, int], ...]  # start, count
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "mistral"]))
    more = {"sliding_window": draw(st.sampled_from([None, 1, 30, 500]))}
    shape = Shape.of(
        family,
        head_dim=draw(st.sampled_from([64, 80, 96, 128])),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        intermediate_size=draw(st.sampled_from([16, 48, 160])),
        num_layers=1,
        more=more if family == "mistral" else {},
    )
    decodes = st.tuples(st.integers(0, 1999), st.just(1))
    chunks = st.tuples(st.integers(0, 1900), st.integers(1, 90))
    spans = draw(st.lists(decodes, max_size=60)) + draw(st.lists(chunks, max_size=4))
    return Case(
        shape=shape,
        block_size=draw(st.sampled_from([1, 4, 16, 32])),
        num_threads=draw(st.integers(1, 3)),
        spans=tuple(draw(st.permutations(spans or [(0, 1)]))),
        seed=draw(st.integers(0, 2**16)),
    )


def _batch(case: Case, rng: np.random.Generator) -> tuple[list[ScheduledSequence], int]:
    """The sequences, and how many blocks they use. Blocks that are written belong to one only;
    those before may be anybody's."""
    batch = []
    num_blocks = NUM_SHARED
    for start, count in case.spans:
        num_before = start // case.block_size
        num_own = -(-(start + count) // case.block_size) - num_before
        table = [*rng.integers(0, NUM_SHARED, num_before), *range(num_blocks, num_blocks + num_own)]
        num_blocks += num_own
        ids = rng.integers(3, VOCAB_SIZE, start + count).tolist()
        batch.append(scheduled(ids, [int(block) for block in table], start, count))
    return batch, num_blocks


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(cases())
def test_both_paths_compute_the_same(case: Case) -> None:
    """Batches of 1 to 64 sequences with contexts of 1 to 2,000 tokens whose keys and values are
    random numbers: logits agree to 1e-3, and so do the keys and values that were written."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(case.seed)
    batch, num_blocks = _batch(case, rng)
    layout = layout_for(case.shape, "fp32", case.block_size)
    values = rng.standard_normal((num_blocks, layout.block_bytes // 4), np.float32)
    pools = [values.view(np.uint8).copy() for _ in range(2)]
    general = general_runner(case.shape, block_size=case.block_size, pool=pools[0])
    native = native_runner(
        case.shape, block_size=case.block_size, num_threads=case.num_threads, pool=pools[1]
    )
    expected, got = general.logits(batch), native.logits(batch)
    scale = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * max(scale, 1.0))
    written = [pool.view(np.float32) for pool in pools]
    np.testing.assert_allclose(written[1], written[0], rtol=1e-3, atol=1e-4)

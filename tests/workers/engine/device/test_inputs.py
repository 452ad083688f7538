"""One step's numbers in one array; padding to buckets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tests.workers.engine.torch_engines import greedy
from workers.engine.api import ScheduledSequence
from workers.engine.device.batch import Share
from workers.engine.device.buckets import Buckets
from workers.engine.device.inputs import StepInputs, pack_decodes, pack_step


def scheduled(
    blocks: Sequence[int], start: int, count: int, *, first: int = 0, samples: bool = True
) -> ScheduledSequence:
    return ScheduledSequence(
        token_ids=range(first, first + start + count),
        num_prompt_tokens=1,
        block_table=blocks,
        start=start,
        count=count,
        sample=samples,
        sampling=greedy(),
        index=0,
    )


def test_a_mixed_step_has_its_decodes_first() -> None:
    """Rows, table lines and shares in packed order; rows of logits in the order of the batch, for
    those that sample."""
    batch = [
        scheduled([7, 8], 0, 6, first=100),
        scheduled([1, 2, 3], 8, 1, first=200),
        scheduled([4], 1, 3, first=300, samples=False),
        scheduled([5, 9], 3, 1, first=400),  # the second block is not in use yet
    ]
    shape, numbers = pack_step(batch, block_size=4)
    inputs = StepInputs.of(torch.from_numpy(numbers), shape)
    assert inputs.token_ids.tolist() == [208, 403, *range(100, 106), 301, 302, 303]
    assert inputs.positions.tolist() == [8, 3, *range(6), 1, 2, 3]
    assert inputs.owners.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    assert inputs.ends.tolist() == [9, 4, 6, 4]
    assert inputs.first_rows.tolist() == [0, 1, 2, 8, 11]
    assert inputs.logits_rows.tolist() == [7, 0, 1]
    assert inputs.block_table.tolist() == [[1, 2, 3], [5, 5, 5], [7, 8, 8], [4, 4, 4]]
    assert (shape.max_q, shape.max_k, shape.num_keys) == (6, 9, 23)
    assert shape.shares == (
        Share(first=0, last=2, first_row=0, num_queries=1, num_blocks=3),
        Share(first=2, last=3, first_row=2, num_queries=6, num_blocks=2),
        Share(first=3, last=4, first_row=8, num_queries=3, num_blocks=1),
    )


def test_padding_computes_one_token_in_the_spare_block() -> None:
    """What is added names no block of a sequence, and the shape depends on the bucket alone."""
    batch = [scheduled([3, 4], 4, 1, first=50), scheduled([6], 2, 1, first=60, samples=False)]
    shape, numbers = pack_decodes(batch, (4, 3), block_size=4, spare_block=99)
    inputs = StepInputs.of(torch.from_numpy(numbers), shape)
    assert inputs.token_ids.tolist() == [54, 62, 0, 0]
    assert inputs.positions.tolist() == [4, 2, 0, 0]
    assert inputs.ends.tolist() == [5, 3, 1, 1]
    assert inputs.first_rows.tolist() == [0, 1, 2, 3, 4]
    assert inputs.logits_rows.tolist() == [0, 1, 2, 3]
    assert inputs.block_table.tolist() == [[3, 4, 4], [6, 6, 6], [99] * 3, [99] * 3]
    other, _ = pack_decodes([scheduled([1], 0, 1)], (4, 3), block_size=4, spare_block=99)
    assert other == shape
    assert hash(other) == hash(shape)


@given(
    max_batch=st.integers(1, 200),
    max_blocks=st.integers(1, 3000),
    growth=st.integers(2, 4),
    data=st.data(),
)
def test_every_step_that_fits_has_a_bucket(
    max_batch: int, max_blocks: int, growth: int, data: st.DataObject
) -> None:
    """Large enough, never above the largest, batches at most doubled; and there are few."""
    buckets = Buckets(max_batch=max_batch, max_blocks=max_blocks, growth=growth)
    batch = data.draw(st.integers(1, max_batch))
    num_blocks = data.draw(st.integers(1, max_blocks))
    size = buckets.size_for(batch, num_blocks)
    assert size is not None
    assert batch <= size[0] <= min(2 * batch - (batch > 1), max_batch)
    assert num_blocks <= size[1] <= min(max(16, growth * num_blocks), max_blocks)
    assert buckets.size_for(*size) == size
    assert buckets.size_for(max_batch + 1, 1) is None
    assert buckets.size_for(1, max_blocks + 1) is None
    all_batches = {buckets.size_for(n, 1) for n in range(1, max_batch + 1)}
    assert len(all_batches) <= max_batch.bit_length() + 1


@pytest.mark.parametrize("sizes", [(0, 4, 2), (4, 0, 2), (4, 4, 1)])
def test_buckets_of_nothing_are_refused(sizes: tuple[int, int, int]) -> None:
    max_batch, max_blocks, growth = sizes
    with pytest.raises(ConfigError):
        Buckets(max_batch=max_batch, max_blocks=max_blocks, growth=growth)

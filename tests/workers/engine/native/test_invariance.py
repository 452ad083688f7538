"""A row's result depends on its own sequence alone, bit for bit: not on its batch, on how its
prompt was cut into chunks, on threads, or on where its blocks lie."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.workers.engine.native.native_models import (
    LLAMA3_ROPE,
    VOCAB_SIZE,
    Shape,
    native_runner,
    scheduled,
)
from tests.workers.engine.torch_engines import prompts
from workers.engine.native.runner import NativeRunner

SHAPES = {
    "llama": Shape.of("llama", head_dim=64, group=3, more={"rope_parameters": LLAMA3_ROPE}),
    "mistral": Shape.of("mistral", more={"sliding_window": 50}),
    "qwen2": Shape.of("qwen2", num_kv_heads=3, group=1, intermediate_size=1600),
    "qwen3": Shape.of("qwen3", head_dim=80, group=2),
}
LENGTHS = (1, 3, 17, 64, 65, 90, 130, 200)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _tables(rng: random.Random, lengths: Sequence[int], block_size: int) -> list[list[int]]:
    sizes = [-(-length // block_size) for length in lengths]
    blocks = rng.sample(range(sum(sizes)), sum(sizes))
    return [[blocks.pop() for _ in range(size)] for size in sizes]


def _alone(runner: NativeRunner, asked: Sequence[Sequence[int]], block_size: int) -> list[Tensor]:
    """Each prompt in one chunk in a batch of its own: [1, vocab_size] each."""
    tables = _tables(random.Random(0), [len(ids) for ids in asked], block_size)
    return [
        runner.logits([scheduled(ids, table, 0, len(ids))])
        for ids, table in zip(asked, tables, strict=True)
    ]


def _in_pieces(
    runner: NativeRunner, asked: Sequence[Sequence[int]], block_size: int, rng: random.Random
) -> dict[int, Tensor]:
    """All together, each prompt cut at random places; those that are left go on in new batches of
    random order. The logits of each last piece, [vocab_size], by number."""
    tables = _tables(rng, [len(ids) for ids in asked], block_size)
    pieces = {}
    for number, ids in enumerate(asked):
        cuts = rng.sample(range(1, len(ids)), min(len(ids) - 1, rng.randint(0, 6)))
        pieces[number] = list(pairwise((0, *sorted(cuts), len(ids))))
    results: dict[int, Tensor] = {}
    while pieces:
        chosen = rng.sample(sorted(pieces), rng.randint(1, len(pieces)))
        batch, last = [], []
        for number in chosen:
            start, end = pieces[number].pop(0)
            is_last = not pieces[number]
            batch.append(
                scheduled(asked[number], tables[number], start, end - start, samples=is_last)
            )
            if is_last:
                last.append(number)
                del pieces[number]
        results |= dict(zip(last, runner.logits(batch), strict=True))
    return results


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_batch_chunks_threads_and_blocks_change_no_bit(name: str, dtype: str) -> None:
    """Eight prompts, each alone in one chunk on one thread; then all together in random pieces on
    one, two and three threads, in other blocks of another size."""
    asked = prompts(LENGTHS, vocab_size=VOCAB_SIZE, seed=7)
    expected = _alone(
        native_runner(SHAPES[name], dtype, block_size=16, num_blocks=50), asked, block_size=16
    )
    for num_threads, block_size in ((1, 16), (2, 5), (3, 1)):
        rng = random.Random(num_threads)
        runner = native_runner(
            SHAPES[name], dtype, block_size=block_size, num_blocks=600, num_threads=num_threads
        )
        got = _in_pieces(runner, asked, block_size, rng)
        for number, logits in enumerate(expected):
            assert torch.equal(got[number], logits[0]), (number, num_threads)


def test_results_are_numbers_although_the_pool_was_not() -> None:
    """What nobody wrote (here: not-a-number) is never read, in the middle of a tile or at its
    end."""
    runner = native_runner(SHAPES["mistral"], "bf16", block_size=16, num_blocks=50)
    asked = prompts(LENGTHS, vocab_size=VOCAB_SIZE, seed=2)
    assert torch.cat(_alone(runner, asked, 16)).isfinite().all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_sequence_is_the_same_however_its_heads_are_shared_out(dtype: str) -> None:
    """Nine query heads over three kv heads, by as many threads as cut groups anywhere: prompt and
    decode of a sequence alone give the same bits."""
    shape = Shape.of("llama", num_kv_heads=3, group=3)
    (ids,) = prompts((150,), vocab_size=VOCAB_SIZE)
    table = list(range(38))
    expected = None
    for num_threads in (1, 2, 4, 5, 12):
        runner = native_runner(shape, dtype, num_threads=num_threads)
        got = torch.cat(
            [
                runner.logits([scheduled(ids, table, 0, 149)]),
                runner.logits([scheduled(ids, table, 149, 1)]),
            ]
        )
        expected = got if expected is None else expected
        assert torch.equal(got, expected), num_threads

"""The native path computes what transformers does, in each family and shape that it claims."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import VOCAB_SIZE as TINY_VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.native.native_models import (
    LLAMA3_ROPE,
    VOCAB_SIZE,
    WINDOWED_QWEN2,
    YARN_ROPE,
    Shape,
    general_runner,
    make_model,
    native_runner,
    scheduled,
)
from tests.workers.engine.torch_engines import (
    NUM_TOKENS,
    Run,
    generate,
    greedy,
    hand_over,
    prompts,
    reference_model,
    small_engine,
)
from workers.engine.api import EngineRequest
from workers.engine.native.self_test import divergence

SHAPES = {
    "llama": Shape.of("llama"),
    "llama, separate head": Shape.of("llama", more={"tie_word_embeddings": False}),
    "llama, tied head": Shape.of("llama", more={"tie_word_embeddings": True}),
    "llama, all biases": Shape.of("llama", more={"attention_bias": True, "mlp_bias": True}),
    "llama 3 rotations": Shape.of("llama", more={"rope_parameters": LLAMA3_ROPE}),
    "yarn rotations": Shape.of("llama", more={"rope_parameters": YARN_ROPE}),
    "one query head per key head": Shape.of("llama", group=1, num_kv_heads=3),
    "seven query heads per key head": Shape.of("llama", group=7, num_kv_heads=1),
    "heads of 64": Shape.of("llama", head_dim=64, group=3),
    "heads of 80": Shape.of("llama", head_dim=80),
    "heads of 96": Shape.of("qwen3", head_dim=96),
    "heads of 128": Shape.of("qwen3", head_dim=128, group=4),
    "rows of more than one pass": Shape.of("llama", hidden_size=2064, num_layers=1),
    "mistral": Shape.of("mistral", more={"sliding_window": None}),
    "mistral, sliding window": Shape.of("mistral", more={"sliding_window": 12}),
    "qwen2": Shape.of("qwen2"),
    "qwen2, some layers with a window": Shape.of("qwen2", more=WINDOWED_QWEN2, num_layers=3),
    "qwen3": Shape.of("qwen3"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(name: str) -> None:
    """fp32, two ragged sequences in chunks and then token by token, through blocks in no order: at
    every step the logits are those of one plain forward pass, to 1e-5 of the largest."""
    shape = SHAPES[name]
    reference = make_model(shape)
    runner = native_runner(shape, num_threads=2)
    first, second = prompts((45, 30), vocab_size=VOCAB_SIZE, seed=5)
    with torch.inference_mode():
        expected = [reference(torch.tensor([ids])).logits[0] for ids in (first, second)]
    blocks = (list(range(40, 52)), list(range(12, 4, -1)))
    steps = [((0, 13), (0, 5)), ((13, 25), (5, 1)), ((38, 1), (6, 14))]
    steps += [((39 + n, 1), (20 + n, 1)) for n in range(6)]
    for spans in steps:
        batch = [
            scheduled(ids, table, start, count)
            for ids, table, (start, count) in zip((first, second), blocks, spans, strict=True)
        ]
        got = runner.logits(batch)
        for row, logits, (start, count) in zip(got, expected, spans, strict=True):
            wanted = logits[start + count - 1]
            torch.testing.assert_close(
                row, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())
            )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "heads of 80", "mistral"])
def test_bf16_is_nearer_to_fp32_than_the_general_path(name: str) -> None:
    """The residual stream is kept in fp32: the divergence of a bf16 model's answers from those of
    the same weights in fp32 is at most that of transformers' own bf16."""
    shape = SHAPES[name]
    reference = make_model(shape, "bf16").float()
    ids = prompts((60,), vocab_size=VOCAB_SIZE, seed=3)[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    found = []
    for runner in (native_runner(shape, "bf16"), general_runner(shape, "bf16")):
        ends = (17, 40, 41, 42, 60)
        starts = (0, *ends)
        rows = [
            runner.logits([scheduled(ids, range(15), start, end - start)]).float()
            for start, end in zip(starts, ends, strict=False)
        ]
        found.append(divergence(expected[[end - 1 for end in ends]], torch.cat(rows)))
    native, general = found
    assert native < max(general, 1e-4)


def test_results_come_in_batch_order_for_those_that_sample() -> None:
    """Sequences that do not sample get no row, and a batch of only such gives none."""
    runner = native_runner(SHAPES["llama"])
    asked = prompts((9, 20, 6), vocab_size=VOCAB_SIZE)
    tables = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]
    warm = [
        scheduled(ids, table, 0, len(ids) - 1, samples=False)
        for ids, table in zip(asked, tables, strict=True)
    ]
    assert runner.execute(warm) == []
    last = [
        scheduled(ids, table, len(ids) - 1, 1) for ids, table in zip(asked, tables, strict=True)
    ]
    alone = [runner.execute([one])[0] for one in last]
    fresh = scheduled(asked[0], [11, 12, 13], 0, 9)
    silent = scheduled(asked[1], tables[1], 3, 4, samples=False)
    assert runner.execute([silent, fresh, *last]) == [alone[0], *alone]
    assert len({one.token_id for one in alone}) > 1


def test_nothing_leads_out_of_the_pool_or_the_vocabulary() -> None:
    """A token, a block or a position that is not there is an IndexError, as in torch."""
    runner = native_runner(SHAPES["llama"], num_blocks=8)
    for ids, blocks, count in (
        ((5, VOCAB_SIZE), (0,), 2),
        ((5, -1), (0,), 2),
        ((5, 6), (8,), 2),
        ((5, 6), (-1,), 2),
        ((5,) * 5, (0,), 5),
    ):
        with pytest.raises(IndexError):
            runner.logits([scheduled(ids, blocks, 0, count)])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_engines_answer_as_in_transformers(architecture: str, tiny_folder: TinyFolder) -> None:
    """Through the whole engine, fp32, greedy: chunked prompts, common beginnings, a pool so small
    that sequences are set back; each answer is that of ``generate``."""
    folder = tiny_folder(architecture)
    asked = prompts((21, 5, 37), vocab_size=TINY_VOCAB_SIZE)
    asked.append(asked[2][:30] + asked[0][:9])
    run = Run(small_engine(folder, num_blocks=26, kernels="native"))
    assert run.engine.info.kind == "native"
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy())
        run.step(2 if number < 2 else 5)
    tokens = run.to_end()
    assert [tokens[str(n)] for n in range(len(asked))] == _generated(folder, asked)


@pytest.mark.parametrize(("first", "then"), [("native", "general"), ("general", "native")])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_paths_go_on_with_each_others_blocks(
    architecture: str, first: str, then: str, tiny_folder: TinyFolder
) -> None:
    """Prefill on one path, decode on the other: same fingerprint, the answer of ``generate``."""
    folder = tiny_folder(architecture)
    prefill = Run(small_engine(folder, kernels=first))
    decode = Run(small_engine(folder, kernels=then))
    assert prefill.engine.info.fingerprint == decode.engine.info.fingerprint
    asked = prompts((21, 37), vocab_size=TINY_VOCAB_SIZE)
    for number, prompt in enumerate(asked):
        prefill.add(str(number), prompt, greedy(), hold_after_first=True)
    prefill.to_end()
    for number, prompt in enumerate(asked):
        request = EngineRequest(key=str(number), prompt_ids=prompt, sampling=greedy())
        hand_over(prefill, str(number), request, decode)
    tokens = decode.to_end()
    assert [tokens[str(n)] for n in range(len(asked))] == _generated(folder, asked)


def _generated(folder: Path, asked: list[tuple[int, ...]]) -> list[list[int]]:
    reference = reference_model(folder)
    return [generate(reference, prompt, NUM_TOKENS) for prompt in asked]

"""The torch runner: logits of transformers, layouts found by running, refusals by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from infra.transport.shm import SharedPool
from schemas.errors import ConfigError, ModelUnsupported
from schemas.requests import SamplingParams
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.torch_engines import greedy, prompts, reference_model
from workers.engine import paged_step
from workers.engine.api import ScheduledSequence
from workers.engine.attention import IMPLEMENTATION
from workers.engine.build import build_torch_engine
from workers.engine.kv_layout import KvLayout
from workers.engine.loader import load_model
from workers.engine.probe import check_attention, probe_layout
from workers.engine.runner import TorchRunner, layout_of

BLOCK_SIZE = 4


def make_runner(folder: Path, num_blocks: int = 64) -> tuple[TorchRunner, SharedPool]:
    loaded = load_model(folder, "fp32")
    layout = layout_of(loaded, block_size=BLOCK_SIZE)
    pool = SharedPool(num_blocks, layout.block_bytes)
    return TorchRunner(loaded, layout, pool.slots), pool


def scheduled(
    ids: Sequence[int], blocks: Sequence[int], start: int, count: int, *, samples: bool = True
) -> ScheduledSequence:
    return ScheduledSequence(
        token_ids=ids,
        num_prompt_tokens=1,
        block_table=blocks,
        start=start,
        count=count,
        sample=samples,
        sampling=greedy(),
        index=0,
    )


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_logits_are_those_of_transformers(architecture: str, tiny_folder: TinyFolder) -> None:
    """Two sequences of 45 and 30 tokens in one ragged batch per step, chunked and then token by
    token: at every step both rows' logits are those of one plain forward pass, to 1e-4. (Tokens
    alone would say little where a random model repeats itself.)"""
    folder = tiny_folder(architecture)
    runner, _ = make_runner(folder)
    first, second = prompts((45, 30), vocab_size=VOCAB_SIZE, seed=5)
    reference = reference_model(folder)
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
            torch.testing.assert_close(row, logits[start + count - 1], rtol=1e-4, atol=1e-4)


def test_results_come_in_batch_order_for_those_that_sample(tiny_folder: TinyFolder) -> None:
    """The batch is packed in another order than it came; results are not. Sequences that do not
    sample get none, and a batch of only such gives an empty list."""
    runner, _ = make_runner(tiny_folder("llama"))
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


def test_a_copied_block_continues_the_sequence(tiny_folder: TinyFolder) -> None:
    """``copy_block`` copies all layers: a fork on the copy goes on as the original does."""
    runner, pool = make_runner(tiny_folder("llama"))
    ids = prompts((7,), vocab_size=VOCAB_SIZE)[0]
    runner.execute([scheduled(ids, [3, 4], 0, 6, samples=False)])
    runner.copy_block(4, 9)
    assert pool.slots[9].any()
    fork, original = runner.logits([scheduled(ids, [3, 9], 6, 1), scheduled(ids, [3, 4], 6, 1)])
    assert torch.equal(fork, original)


def test_info_says_what_others_must_agree_on(tiny_folder: TinyFolder) -> None:
    """Facts of folder, layout and pool; the head count of a model that has no KV head count in its
    configuration is found by running it."""
    runner, pool = make_runner(tiny_folder("gpt2"), num_blocks=7)
    info = runner.info
    assert (info.kind, info.num_blocks, info.block_size) == ("torch", 7, BLOCK_SIZE)
    assert (info.context_length, info.vocab_size) == (512, VOCAB_SIZE)
    assert info.eos_token_ids == {2}
    assert info.block_bytes == pool.block_bytes == 3 * 2 * 4 * BLOCK_SIZE * 16 * 4


def test_fingerprint_changes_with_everything_readers_rely_on() -> None:
    """Revision, dtype, shape, block size, layout version: another value, another fingerprint."""
    layout = KvLayout(
        revision="a", dtype="float32", num_layers=2, num_kv_heads=3, head_dim=8, block_size=4
    )
    others: list[dict[str, Any]] = [
        {"revision": "b"},
        {"dtype": "bfloat16"},
        {"num_layers": 3},
        {"num_kv_heads": 2},
        {"head_dim": 16},
        {"block_size": 8},
        {"version": 2},
    ]
    prints = {replace(layout, **other).fingerprint for other in others}
    assert len(prints | {layout.fingerprint}) == len(others) + 1
    assert replace(layout).fingerprint == layout.fingerprint
    assert replace(layout, dtype="bfloat16").block_bytes * 2 == layout.block_bytes == 1536


_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("architecture", "more", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 2}, "asks its cache for get_mask_sizes"),
        ("bert", {}, "BertSelfAttention looks at later tokens"),
        ("mamba", {"state_size": 4}, "asks its cache for get_conv_state"),
        ("doge", {}, "DogeAttention makes its own attention mask"),
        (
            "deepseek_v2",
            {
                "kv_lora_rank": 24,
                "q_lora_rank": None,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "n_routed_experts": 2,
                "moe_intermediate_size": 16,
                "first_k_dense_replace": 2,
            },
            "DeepseekV2ForCausalLM: keys and values differ in shape",
        ),
    ],
)
def test_models_without_plain_keys_and_values_fail_the_dry_run(
    architecture: str, more: dict[str, Any], reason: str
) -> None:
    """Whatever a folder's configuration let through is found when the model runs for the first
    time, before it serves anything."""
    config = AutoConfig.for_model(architecture, **{**_SMALL, **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ModelUnsupported, match=reason):
        probe_layout(model, revision="r", block_size=4)


def test_wrong_attention_is_found_at_load(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If our attention of a model differs from transformers' own, the model is refused."""
    loaded = load_model(tiny_folder("llama"), "fp32")
    layout = probe_layout(loaded.model, revision="r", block_size=4)
    right = paged_step.attend

    def without_old_keys(
        query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Any
    ) -> Tensor:
        return right(query, keys[:, :, -4:], values[:, :, -4:], mask[..., -4:], scoring)

    check_attention(loaded.model, layout)
    monkeypatch.setattr(paged_step, "attend", without_old_keys)
    with pytest.raises(ModelUnsupported, match="away from transformers"):
        check_attention(loaded.model, layout)


def test_bf16_is_near_and_never_paired_with_fp32(tiny_folder: TinyFolder) -> None:
    """In bf16 blocks are half as large and logits right to a few percent; the fingerprint keeps
    readers of the other dtype away."""
    folder = tiny_folder("llama")
    ids = prompts((20,), vocab_size=VOCAB_SIZE)[0]
    logits, infos = [], []
    for dtype in ("bf16", "fp32"):
        loaded = load_model(folder, dtype)
        layout = layout_of(loaded, block_size=BLOCK_SIZE)
        runner = TorchRunner(loaded, layout, SharedPool(8, layout.block_bytes).slots)
        runner.execute([scheduled(ids, range(8), 0, 19, samples=False)])
        logits.append(runner.logits([scheduled(ids, range(8), 19, 1)]).float())
        infos.append(runner.info)
    assert infos[0].block_bytes * 2 == infos[1].block_bytes
    assert infos[0].fingerprint != infos[1].fingerprint
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[1].norm()


def test_pool_size_follows_from_bytes(tiny_folder: TinyFolder) -> None:
    """As many blocks as fit, not more than could ever be used; too few bytes are an error."""
    folder = tiny_folder("llama")
    block_bytes = 3 * 2 * 2 * 16 * 16 * 4
    few = build_torch_engine(folder, dtype="fp32", kv_bytes=10 * block_bytes + 5)
    assert few.info.num_blocks == 10
    many = build_torch_engine(folder, dtype="fp32", kv_bytes=2**40)
    assert many.info.num_blocks == 64 * 512 // 16
    with pytest.raises(ConfigError, match="no block"):
        build_torch_engine(folder, dtype="fp32", kv_bytes=100)
    with pytest.raises(ConfigError, match="either"):
        build_torch_engine(folder)


def test_sampling_settings_reach_the_sampler(tiny_folder: TinyFolder) -> None:
    """Logprobs and bias of one sequence are its own."""
    runner, _ = make_runner(tiny_folder("llama"))
    ids = prompts((6,), vocab_size=VOCAB_SIZE)[0]
    plain = scheduled(ids, [1, 2], 0, 6)
    biased = msgspec.structs.replace(
        scheduled(ids, [3, 4], 0, 6),
        sampling=SamplingParams(
            temperature=0.0, seed=0, max_tokens=1, logit_bias={77: 100.0}, logprobs=2
        ),
    )
    got = runner.execute([plain, biased])
    assert got[0].token_id != 77
    assert got[1].token_id == 77
    assert [len(one.top) for one in got] == [0, 2]


def test_a_check_that_was_passed_is_not_made_again(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is kept in the user's cache, holds for this layout only, and a refusal is never
    kept; the attention is ours in any case."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checked: list[str] = []

    def check(model: object, layout: KvLayout) -> None:
        checked.append(layout.fingerprint)
        if len(checked) == 1:
            raise ModelUnsupported("away from transformers")
        check_attention(model, layout)  # type: ignore[arg-type]

    monkeypatch.setattr("workers.engine.verdicts.check_attention", check)
    loaded = load_model(tiny_folder("llama"), "fp32")
    with pytest.raises(ModelUnsupported):
        layout_of(loaded, block_size=4)
    first, again = layout_of(loaded, block_size=4), layout_of(loaded, block_size=4)
    assert first == again
    other = layout_of(loaded, block_size=8)
    assert checked == [first.fingerprint, first.fingerprint, other.fingerprint]
    assert loaded.model.config._attn_implementation == IMPLEMENTATION

"""What is kept of a GGUF file's blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from safetensors import safe_open

from schemas.errors import ModelUnsupported
from workers.engine.gguf_blocks import BLOCKS_FILE, keep_blocks, open_blocks, parameter_name

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 64


def turned(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as converters for llama.cpp write them: halves of each head in turn."""
    halves = rows.reshape(num_heads, 2, HEAD_DIM // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_file(
    folder: Path, tensors: dict[str, tuple[str, np.ndarray]], architecture: str = "llama"
) -> GGUFReader:
    """A GGUF file with tensors by name, each with the type it is quantised to."""
    file = folder / "model.gguf"
    writer = GGUFWriter(file, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    for name, (type_name, values) in tensors.items():
        kind = GGMLQuantizationType[type_name]
        data = values if values.dtype == np.uint8 else quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFReader(file)


def random_weights(num_outputs: int) -> np.ndarray:
    return np.random.default_rng(num_outputs).standard_normal((num_outputs, HIDDEN), np.float32)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_rows_of_queries_and_keys_are_put_in_order(
    architecture: str, type_name: str, tmp_path: Path
) -> None:
    """Given a file whose queries and keys are in llama.cpp's order (of llamas only), the kept
    rows are the original ones, block for block; other tensors are copied."""
    query, key, value = random_weights(HEADS * HEAD_DIM), random_weights(16), random_weights(16)
    is_turned = architecture == "llama"
    reader = write_file(
        tmp_path,
        {
            "blk.0.attn_q.weight": (type_name, turned(query, HEADS) if is_turned else query),
            "blk.0.attn_k.weight": (type_name, turned(key, KV_HEADS) if is_turned else key),
            "blk.0.attn_v.weight": (type_name, value),
            "blk.0.attn_norm.weight": ("F32", value[0]),
        },
        architecture,
    )
    keep_blocks(reader, tmp_path)
    kept = open_blocks(tmp_path)
    assert kept is not None
    for name, weights in (("q", query), ("k", key), ("v", value)):
        found = kept.blocks[f"model.layers.0.self_attn.{name}_proj.weight"]
        expected = quantize(weights, GGMLQuantizationType[type_name])
        assert found.type_name == type_name
        assert np.array_equal(found.rows.numpy(), expected)
    norm = kept.floats["model.layers.0.input_layernorm.weight"]
    assert torch.equal(norm, torch.from_numpy(value[0]))


def test_another_type_is_named(tmp_path: Path) -> None:
    """A tensor in blocks that can't be used is refused by name and type, when q4 is asked for."""
    reader = write_file(
        tmp_path,
        {
            "blk.0.attn_v.weight": ("Q4_0", random_weights(16)),
            "blk.0.ffn_down.weight": ("Q6_K", np.zeros((4, 210), np.uint8)),
        },
    )
    keep_blocks(reader, tmp_path)
    with pytest.raises(ModelUnsupported, match=r"blk\.0\.ffn_down\.weight is Q6_K; q4 takes Q4_0"):
        open_blocks(tmp_path)


@pytest.mark.parametrize(("architecture", "type_name"), [("llama", "F16"), ("gemma2", "Q4_0")])
def test_nothing_is_kept_without_use(architecture: str, type_name: str, tmp_path: Path) -> None:
    """Files without blocks, and architectures without a native path."""
    weights = random_weights(16)
    plain = weights.astype(np.float16).view(np.uint8) if type_name == "F16" else weights
    reader = write_file(tmp_path, {"blk.0.attn_v.weight": (type_name, plain)}, architecture)
    keep_blocks(reader, tmp_path)
    assert not (tmp_path / BLOCKS_FILE).exists()
    assert open_blocks(tmp_path) is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("rope_freqs.weight", None),
        ("blk.0.ffn_gate_exps.weight", None),
    ],
)
def test_names_of_parameters(theirs: str, ours: str | None) -> None:
    """GGUF's names in transformers' words."""
    assert parameter_name(theirs) == ours


def test_the_default_models_blocks_are_its_weights(default_folder: Path) -> None:
    """Of each kind of tensor in the first and last layer, and of the embedding: what the blocks
    stand for, rounded to bf16, is what transformers made of the file, number for number."""
    kept = open_blocks(default_folder)
    assert kept is not None
    assert len(kept.blocks) == 211
    assert len(kept.floats) == 61
    names = [name for name in kept.blocks if ".0." in name or ".29." in name]
    with safe_open(default_folder / "model.safetensors", framework="pt") as weights:
        for name in names:
            rounded = kept.blocks[name].dequantise().bfloat16()
            assert torch.equal(rounded, weights.get_tensor(name)), name
        embedding = kept.blocks["model.embed_tokens.weight"]
        assert embedding.type_name == "Q8_0"
        tail = type(embedding)(type_name="Q8_0", rows=embedding.rows[-700:])
        assert torch.equal(
            tail.dequantise().bfloat16(), weights.get_tensor("model.embed_tokens.weight")[-700:]
        )

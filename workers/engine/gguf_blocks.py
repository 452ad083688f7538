"""The quantised weights of a GGUF file, kept beside the converted model, block for block.

A file of the llama family holds its weights as blocks of 32 that share a scale (Q4_0, Q4_1, Q8_0).
The native path multiplies by them as they are; for it they are copied out of the GGUF file once,
under the names and in the order of rows that transformers has. Opening the copy costs nothing:
it is mapped into memory.

    file      blk.3.attn_q.weight        rows of a head: 0, 1, 2, 3, ...  turn in pairs (0, 1)
    here      model.layers.3.self_attn.q_proj.weight     0, 2, 4, ... 1, 3, ...       (0, n / 2)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from schemas.errors import ModelUnsupported

BLOCKS_FILE = "quantised.blocks"  # in the format of safetensors
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q8_0")
_PLAIN_TYPES = ("F32", "F16", "BF16")
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TURNED_IN_PAIRS = ("llama",)  # architectures whose files have queries and keys in another order
_WHOLE = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Rows of quantised weights."""

    type_name: str  # one of BLOCK_TYPES
    rows: Tensor  # [num_outputs, bytes of a row] uint8

    def dequantise(self) -> Tensor:
        """[num_outputs, num_inputs] float32: exactly the numbers that the blocks stand for."""
        floats = dequantize(self.rows.numpy(), GGMLQuantizationType[self.type_name])
        return torch.from_numpy(floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWeights:
    """What a GGUF file held, by transformers' names of parameters."""

    blocks: Mapping[str, Blocks]
    floats: Mapping[str, Tensor]  # norms and biases that the file has as float32


def keep_blocks(reader: GGUFReader, folder: Path) -> None:
    """Copy the quantised weights of a file into the folder of the converted model.

    Writes nothing for architectures that have no native path, and for files without any weights
    in blocks. Tensors in blocks of other types are noted, so that whoever asks for them can be
    told which it was.
    """
    facts = _Facts(reader)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    quantised = {name: kind for name, kind in types.items() if kind not in _PLAIN_TYPES}
    if facts.architecture not in _ARCHITECTURES or not quantised:
        return
    tensors, names = {}, {}
    for tensor, name in _named(reader):
        kind = tensor.tensor_type.name
        if kind in BLOCK_TYPES or (kind == "F32" and tensor.data.ndim == 1):
            data = facts.in_our_order(tensor.name, tensor.data)
            tensors[name] = torch.from_numpy(np.array(data))
            names[name] = kind
    refused = [f"{name} is {kind}" for name, kind in quantised.items() if kind not in BLOCK_TYPES]
    metadata = {"types": json.dumps(names), "refused": ", ".join(refused[:1])}
    save_file(tensors, folder / BLOCKS_FILE, metadata)


def open_blocks(folder: Path) -> FileWeights | None:
    """What :func:`keep_blocks` kept in a model's folder; None where there is nothing.

    Raises:
        ModelUnsupported: the file held blocks of types that can't be used; names the first.
    """
    file = folder / BLOCKS_FILE
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as content:
        metadata = content.metadata()
        if metadata["refused"]:
            raise ModelUnsupported(
                f"{folder.name}: {metadata['refused']}; q4 takes {', '.join(BLOCK_TYPES)}",
                param="dtype",
            )
        types = json.loads(metadata["types"])
        tensors = {name: content.get_tensor(name) for name in types}
    return FileWeights(
        blocks={
            name: Blocks(type_name=types[name], rows=rows)
            for name, rows in tensors.items()
            if types[name] in BLOCK_TYPES
        },
        floats={name: values for name, values in tensors.items() if types[name] == "F32"},
    )


def parameter_name(name: str) -> str | None:
    """transformers' name of a GGUF tensor; None for what a model computes itself or has not."""
    stem, _, part = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{part}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _IN_LAYER:
        return None
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{part}"


def _named(reader: GGUFReader) -> Iterator[tuple[Any, str]]:
    for tensor in reader.tensors:
        name = parameter_name(tensor.name)
        if name is not None:
            yield tensor, name


class _Facts:
    """What a file says about its heads."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader
        self.architecture = str(self._value("general.architecture"))

    def in_our_order(self, name: str, rows: _Array) -> _Array:
        """Rows [num_outputs, ...] of a tensor in transformers' order."""
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if self.architecture not in _TURNED_IN_PAIRS or part not in ("attn_q", "attn_k"):
            return rows
        num_heads = self._value(f"{self.architecture}.attention.head_count")
        if part == "attn_k":
            num_kv_heads = self._value(f"{self.architecture}.attention.head_count_kv")
            num_heads = num_kv_heads or num_heads
        pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

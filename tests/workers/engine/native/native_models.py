"""Small random models of the native families, and runners of both paths for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from infra.model_folder import ModelFolder
from schemas.requests import SamplingParams
from workers.engine.api import ScheduledSequence
from workers.engine.attention import IMPLEMENTATION
from workers.engine.kv_layout import KvLayout
from workers.engine.loader import LoadedModel
from workers.engine.native.blueprint import blueprint_of
from workers.engine.native.library import NativeLibrary
from workers.engine.native.load import load_library
from workers.engine.native.rope import RopeTable
from workers.engine.native.runner import NativeRunner
from workers.engine.native.tensors import ModelTensors
from workers.engine.native.weights import NativeModel, pack_model
from workers.engine.runner import TorchRunner

VOCAB_SIZE = 331  # no whole number of panels
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWED_QWEN2 = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 12}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model to make."""

    family: str = "llama"
    head_dim: int = 16
    num_kv_heads: int = 2
    group: int = 2
    hidden_size: int = 0  # 0: 16 for each query head, as some families want a multiple of these
    intermediate_size: int = 96
    num_layers: int = 2
    more: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, family: str, *, more: dict[str, Any] | None = None, **sizes: int) -> Shape:
        return cls(family=family, more=tuple((more or {}).items()), **sizes)

    def config(self) -> Any:
        return AutoConfig.for_model(
            self.family,
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size or 16 * self.num_kv_heads * self.group,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_kv_heads * self.group,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=4096,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **dict(self.more),
        )


def make_model(shape: Shape, dtype: str = "fp32", seed: int = 0) -> PreTrainedModel:
    """Random weights, biases and norms; large enough that answers differ from prompt to prompt."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(DTYPES[dtype]).eval()


def loaded(model: PreTrainedModel) -> LoadedModel:
    facts = ModelFolder(
        path=Path("unused"),
        revision="r",
        architecture=type(model).__name__,
        context_length=4096,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({2}),
        has_chat_template=False,
    )
    return LoadedModel(model=model, facts=facts)


Pool = npt.NDArray[np.uint8]


def make_pool(layout: KvLayout, num_blocks: int) -> Pool:
    """Blocks full of not-a-number: whoever reads what nobody wrote shows it."""
    return np.full((num_blocks, layout.block_bytes), 0xFF, np.uint8)


def layout_for(shape: Shape, dtype: str, block_size: int) -> KvLayout:
    return KvLayout(
        revision="r",
        dtype=str(DTYPES[dtype]).removeprefix("torch."),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
    )


def general_runner(
    shape: Shape,
    dtype: str = "fp32",
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    pool: Pool | None = None,
) -> TorchRunner:
    model = make_model(shape, dtype)
    model.set_attn_implementation(IMPLEMENTATION)
    layout = layout_for(shape, dtype, block_size)
    if pool is None:
        pool = np.zeros((num_blocks, layout.block_bytes), np.uint8)
    return TorchRunner(loaded(model), layout, pool)


def packed_model(
    library: NativeLibrary, model: PreTrainedModel, layout: KvLayout, num_threads: int = 1
) -> tuple[NativeModel, RopeTable]:
    """In the library's memory; ``model`` is of no use afterwards."""
    blueprint = blueprint_of(model)
    rope = RopeTable(blueprint.inv_freq, blueprint.rope_scaling, 4096)
    return pack_model(library, blueprint, ModelTensors(model), layout, num_threads), rope


def native_runner(
    shape: Shape,
    dtype: str = "fp32",
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    num_threads: int = 1,
    pool: Pool | None = None,
) -> NativeRunner:
    model = make_model(shape, dtype)
    layout = layout_for(shape, dtype, block_size)
    packed, rope = packed_model(load_library(), model, layout, num_threads)
    if pool is None:
        pool = make_pool(layout, num_blocks)
    return NativeRunner(packed, rope, loaded(model).facts, layout, pool)


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
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=1),
        index=0,
    )

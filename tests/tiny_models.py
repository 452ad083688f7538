"""Tiny models with random weights, one per architecture: a second each, nothing downloaded.

Three layers, hidden size 64, float32, vocabulary and tokenizer of ``tests.tiny_tokenizer``. Their
weights are large enough that answers differ from prompt to prompt.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tiny_tokenizer

VOCAB_SIZE = 320
WINDOW = 12  # of sliding-window models

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_MULTI_HEAD = {k: v for k, v in _BASE.items() if k not in ("num_key_value_heads", "head_dim")}
_EXPERTS = {
    **_BASE,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_SLIDING = {**_BASE, "sliding_window": WINDOW}
_SLIDING_AND_FULL = {
    **_SLIDING,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere2": _SLIDING_AND_FULL,
    "exaone4": _SLIDING_AND_FULL,
    "gemma2": {
        **_SLIDING_AND_FULL,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 1.0,  # so low that its absence would show
    },
    "gemma3_text": {**_SLIDING_AND_FULL, "query_pre_attn_scalar": 16},
    "glm4": _BASE,
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "n_inner": 96,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
    },
    "gpt_neox": _MULTI_HEAD,
    "gpt_oss": {**_EXPERTS, "sliding_window": WINDOW},
    "granite": _BASE,
    "llama": _BASE,
    "mistral": _SLIDING,
    "mixtral": _EXPERTS,
    "olmo2": _BASE,
    "opt": {**_MULTI_HEAD, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi3": _BASE,
    "qwen2": {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _BASE,
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "smollm3": _BASE,
    "starcoder2": _SLIDING,
}
"""Model type to the settings of its configuration."""


def write_tiny_model(folder: Path, architecture: str = "llama") -> None:
    """Write a complete model folder (configuration, weights, tokenizer, generation defaults).

    The weights follow from the architecture's name alone, so two processes that write the same
    model write the same revision.
    """
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # zero by default, which would hide them
            torch.nn.init.normal_(parameter)
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=EOS_TOKEN_ID, pad_token_id=0
    )
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder, VOCAB_SIZE)


def tiny_model(base: Path, architecture: str = "llama") -> Path:
    """The folder of a tiny model below ``base``, written when it is not there yet; safe when
    several processes ask for it."""
    folder = base / architecture
    if not folder.is_dir():
        part = base / f"{architecture}.part-{os.getpid()}"
        write_tiny_model(part, architecture)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder

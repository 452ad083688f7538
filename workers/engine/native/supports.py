"""Which models the native path can run, and why not the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Rotations that depend on nothing but the position. Others change with the longest sequence of a
# batch, so that a result would depend on its neighbours.
_ROTATIONS = ("default", "linear", "llama3", "yarn")
_GRANULE = 16  # of src/simd.h


def reason_against(folder: Path) -> str | None:
    """Why the native path can't run the model in ``folder``, from its configuration; None if it
    can."""
    from transformers import AutoConfig  # takes a second

    return reason_against_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def reason_against_config(config: Any) -> str | None:
    """As :func:`reason_against`, for a loaded configuration."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of {', '.join(FAMILIES)}"
    if getattr(config, "quantization_config", None) is not None:
        return "the weights are quantised by another tool"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    rotation = (config.rope_parameters or {}).get("rope_type", "default")
    if rotation not in _ROTATIONS:
        return f"its rotation is {rotation}, none of {', '.join(_ROTATIONS)}"
    return _odd_dimension(config)


def head_dim(config: Any) -> int:
    """Items of one head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _odd_dimension(config: Any) -> str | None:
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": head_dim(config),
    }
    for name, size in sizes.items():
        if size % _GRANULE:
            return f"its {name} {size} is no multiple of {_GRANULE}"
    if config.num_attention_heads % config.num_key_value_heads:
        return "its query heads don't share key heads evenly"
    return None

"""A model's folder, read without torch: what it is, whether this mesh can serve it, its revision.

A folder in Hugging Face's layout: ``config.json``, ``tokenizer.json``, weights in
``*.safetensors``; ``generation_config.json`` and a chat template where the model has them. The
control process and the workers read the same facts here, so they agree on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ModelUnsupported

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_SCALED_BY_LENGTH = frozenset({"dynamic", "longrope"})

# Keys that only configurations of such architectures hold, and model types whose configurations
# hold none. What these miss, the dry run of ``workers.engine.probe`` finds when the model loads.
_STATE_KEYS = ("state_size", "conv_L_cache", "lru_width", "time_mix_extra_dim", "ssm_cfg")
_STATE_PREFIXES = ("mamba_", "ssm_", "linear_conv_", "linear_num_")
_STATE_TYPES = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"})
_LINEAR_TYPES = frozenset({"minimax", "bailing_hybrid", "kimi_linear", "qwen3_next"})
_LATENT_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "longcat_flash"})

_IDENTITY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Facts about a model that can be served as far as its folder tells."""

    path: Path
    architecture: str  # transformers' model type
    revision: str
    context_length: int  # prompt and answer together, in tokens
    vocab_size: int  # the width of the logits
    eos_token_ids: frozenset[int]  # empty: nothing but a limit or a stop ends an answer
    has_chat_template: bool


def open_model_folder(path: Path | str) -> ModelFolder:
    """Check a folder and read its facts.

    Raises:
        ModelUnsupported: a file is missing or broken, or the architecture can't be served; the
            message names the folder, the file and the reason.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelUnsupported(f"{folder}: no such folder", param="model")
    config = _read_json(folder / "config.json")
    refuse_unsupported(config, where=folder / "config.json")
    _read_json(folder / "tokenizer.json")
    weight_files(folder)
    text = text_config(config)
    return ModelFolder(
        path=folder,
        architecture=_model_type(config),
        revision=revision_of(folder),
        context_length=_context_length(text, folder),
        vocab_size=_positive(text, "vocab_size", folder / "config.json"),
        eos_token_ids=_eos_token_ids(folder, text),
        has_chat_template=_has_chat_template(folder),
    )


def revision_of(path: Path | str) -> str:
    """A short hash of the folder's content: 12 hexadecimal digits.

    Covers every byte of configuration, tokenizer and template, and of the weights their names,
    sizes and 16 samples of 4 KiB spread over each file (the first holds the tensors' names and
    shapes). Copies of a folder have the same revision wherever they lie. Cost: a few
    milliseconds, whatever the size of the model.

    Raises:
        ModelUnsupported: the folder holds no weights.
    """
    folder = Path(path)
    digest = hashlib.blake2b(digest_size=6)
    for name in _IDENTITY_FILES:
        file = folder / name
        if file.is_file():
            data = file.read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode())
            digest.update(data)
    for file in weight_files(folder):
        digest.update(file.name.encode() + b"\0")
        digest.update(sampled_digest(file))
    return digest.hexdigest()


def sampled_digest(file: Path) -> bytes:
    """16 bytes that stand for a large file: its size and samples spread over it."""
    size_bytes = file.stat().st_size
    digest = hashlib.blake2b(size_bytes.to_bytes(8, "little"), digest_size=16)
    step = max(_SAMPLE_BYTES, (size_bytes - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
    with file.open("rb") as stream:
        for number in range(_NUM_SAMPLES):
            stream.seek(number * step)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()


def weight_files(folder: Path) -> list[Path]:
    """The weight files, sorted by name: those the index names, else every ``*.safetensors``.

    Raises:
        ModelUnsupported: there are none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelUnsupported(f"{index}: no weight_map", param="model")
        files = [folder / str(name) for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelUnsupported(f"{folder}: {missing[0]} is missing", param="model")
    if not files:
        raise ModelUnsupported(f"{folder}: no weights (*.safetensors)", param="model")
    return files


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the text decoder."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def refuse_unsupported(config: Mapping[str, Any], *, where: Path) -> None:
    """Refuse by name what a paged KV cache of keys and values can't serve.

    Raises:
        ModelUnsupported: says which architecture, why, and ``where`` that stands.
    """
    reason = _why_unsupported(config)
    if reason is not None:
        model_type = _model_type(config) or "unknown"
        raise ModelUnsupported(
            f"{where}: architecture {model_type!r} can't be served: {reason}", param="model"
        )


def _why_unsupported(config: Mapping[str, Any]) -> str | None:
    text, model_type = text_config(config), _model_type(config)
    layers = text.get("layer_types")
    kinds = frozenset(layers) if isinstance(layers, list) else frozenset()
    checks = (
        (not model_type, "it names no model_type"),
        (bool(config.get("is_encoder_decoder")), "it has an encoder besides the decoder"),
        ("text_config" not in config and "vision_config" in config, "it has no text decoder"),
        (bool(text.get("kv_lora_rank")) or model_type in _LATENT_TYPES, "latent attention (MLA)"),
        (model_type in _STATE_TYPES, "state-space or recurrent layers"),
        (model_type in _LINEAR_TYPES, "linear-attention layers"),
        (bool(kinds - _ATTENTION_LAYERS), f"layers of kind {_listed(kinds - _ATTENTION_LAYERS)}"),
        (not kinds and _has_state(text), "state-space or linear-attention layers"),
    )
    return next((reason for applies, reason in checks if applies), None)


def _has_state(text: Mapping[str, Any]) -> bool:
    return any(key in _STATE_KEYS or key.startswith(_STATE_PREFIXES) for key in text)


def _listed(kinds: frozenset[Any]) -> str:
    return ", ".join(sorted(str(kind) for kind in kinds))


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type") or "")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelUnsupported(f"{file.parent}: no {file.name}", param="model") from None
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{file}: can't be read: {error}", param="model") from error
    if not isinstance(content, dict):
        raise ModelUnsupported(f"{file}: not a JSON object", param="model")
    return content


def _positive(config: Mapping[str, Any], key: str, file: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelUnsupported(f"{file}: {key} is {value!r}, not a positive number", param="model")
    return value


def _context_length(text: Mapping[str, Any], folder: Path) -> int:
    """How many positions the model was made for.

    Rotary scalings that change with the length of the longest sequence at hand would change keys
    that are cached already; such a model gets the context it has without them.
    """
    key = next((key for key in _CONTEXT_KEYS if key in text), _CONTEXT_KEYS[0])
    length = _positive(text, key, folder / "config.json")
    for rope in _rope_settings(text):
        if rope.get("rope_type", rope.get("type")) in _SCALED_BY_LENGTH:
            original = rope.get("original_max_position_embeddings") or text.get(
                "original_max_position_embeddings"
            )
            length = min(length, int(original or length))
    return length


def _rope_settings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("rope_parameters", "rope_scaling"):
        settings = text.get(key)
        if isinstance(settings, dict):
            yield settings
            yield from (value for value in settings.values() if isinstance(value, dict))


def _eos_token_ids(folder: Path, text: Mapping[str, Any]) -> frozenset[int]:
    """What ends an answer: the generation configuration's word, else the configuration's."""
    generation = folder / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = text.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelUnsupported(f"{folder}: eos_token_id is {value!r}", param="model")
    return frozenset(token_id for token_id in ids if token_id >= 0)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    tokenizer = folder / "tokenizer_config.json"
    return tokenizer.is_file() and bool(_read_json(tokenizer).get("chat_template"))

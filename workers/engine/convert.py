"""From a GGUF file to a folder in Hugging Face's layout.

transformers reads GGUF by itself, slowly and with gaps; this closes those that were found:

- weights are dequantized on purpose, else the model refuses to be saved;
- the pre-tokenizer that the file names is put in, where transformers writes a plain byte-level
  one: numbers and runs of blanks would become other tokens than the model was trained on;
- the tokenizer's length limit and the generation defaults are those of the file;
- weights in blocks of 4 or 8 bits are kept as well, for the native path (``gguf_blocks``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from infra.model_folder import refuse_unsupported
from schemas.errors import ModelUnsupported
from workers.engine.gguf_blocks import keep_blocks

_log = structlog.get_logger(__name__)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write ``file``'s model and tokenizer into an existing folder: weights in bfloat16, and those
    in blocks as they are.

    About 20 s and 1.2 GB of memory for 135 million parameters.

    Raises:
        ModelUnsupported: not a GGUF file, or none that transformers can read.
    """
    try:
        reader = GGUFReader(file)
        facts = _gguf_facts(reader)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnsupported(f"{file}: not a GGUF file: {error}", param="model") from error
    try:
        model = _read_model(file)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # transformers raises of any kind here; the reason is passed on
        raise ModelUnsupported(f"{file}: can't be converted: {error}", param="model") from error
    refuse_unsupported(model.config.to_dict(), where=file)
    _set_pre_tokenizer(tokenizer, facts, file)
    context_length = facts.get(f"{facts['general.architecture']}.context_length")
    if isinstance(context_length, int):
        tokenizer.model_max_length = context_length
    _set_generation_defaults(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    keep_blocks(reader, folder)


def _gguf_facts(reader: GGUFReader) -> dict[str, Any]:
    """The file's scalar metadata."""
    facts = {name: field.contents() for name, field in reader.fields.items() if _is_scalar(field)}
    if "general.architecture" not in facts:
        raise ValueError("no general.architecture")
    return facts


def _is_scalar(field: Any) -> bool:
    return len(field.types) == 1  # arrays hold a whole vocabulary and take seconds to decode


def _read_model(file: Path) -> PreTrainedModel:
    quiet: Any = transformers_logging  # untyped, as is what follows
    quiet.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    converted: PreTrainedModel = model.to(torch.bfloat16)
    return converted


def _set_pre_tokenizer(
    tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any], file: Path
) -> None:
    """Put in the one that the file names; one that was not compared with its original is kept as
    transformers imports it, with a warning."""
    name = facts.get("tokenizer.ggml.pre", "")
    if name == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    else:
        _log.warning("pre_tokenizer_not_compared", file=file.name, name=name)


def _set_generation_defaults(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos
    model.generation_config = GenerationConfig.from_dict(
        {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos, "pad_token_id": pad}
    )

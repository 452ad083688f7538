"""A model folder for simulated engines: bytes for a vocabulary, and no weights.

No download, no conversion, and any context length that a fleet asks for.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
_SPECIAL = (END,)
FIRST_ID = len(_SPECIAL)
VOCAB_SIZE = FIRST_ID + 256  # ids of prompts are from FIRST_ID on, below this


def write_model(folder: Path, context_length: int) -> None:
    """Write the folder of a model that ends its answers at :data:`END`.

    Args:
        folder: made when missing.
        context_length: tokens of prompt and answer together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "simulated",
        "max_position_embeddings": context_length,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")
    (folder / "model.safetensors").write_bytes(_no_tensors())


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


def _no_tensors() -> bytes:
    """A safetensors file: the length of its header, and a header that names none."""
    header = b"{}"
    return struct.pack("<Q", len(header)) + header

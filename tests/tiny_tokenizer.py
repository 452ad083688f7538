"""A small byte-level BPE tokenizer for tests: any text round-trips, nothing is downloaded.

Ids: 0 ``<|endoftext|>``, 1 ``<|im_start|>``, 2 ``<|im_end|>`` (the end of an answer), then the 256
bytes, then pairs of frequent characters until the vocabulary is full. Emoji and CJK text is made
of single-byte tokens, so one character spans several tokens.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
FIRST_ORDINARY_ID = len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPACE = "Ġ"  # how byte-level BPE writes a blank
_FREQUENT = "etaoinshrdlucmfwypvbgkqjxz"


def _bpe(vocab_size: int) -> models.BPE:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - FIRST_ORDINARY_ID - len(alphabet)
    most = (len(_FREQUENT) + 1) * len(_FREQUENT)
    if not 0 <= room <= most:
        low = FIRST_ORDINARY_ID + len(alphabet)
        raise ValueError(f"vocab_size is {vocab_size}, not within [{low}, {low + most}]")
    merges = list(islice(product(_SPACE + _FREQUENT, _FREQUENT), room))
    tokens = [*SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges)]
    return models.BPE({token: number for number, token in enumerate(tokens)}, merges)


def tiny_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """The tokenizer itself, with exactly ``vocab_size`` ids (259 to 961)."""
    tokenizer = Tokenizer(_bpe(vocab_size))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write_tiny_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with a chat template) to ``folder``,
    which is made when missing. ``transformers.AutoTokenizer`` loads the result."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

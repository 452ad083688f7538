from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.tiny_tokenizer import SPECIAL_TOKENS, tiny_tokenizer, write_tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    """Byte-level: encoding and decoding gives the text back, whatever it is."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("vocab_size", [259, 512, 961])
def test_vocabulary_has_the_size_asked_for(tmp_path: Path, vocab_size: int) -> None:
    """Every id below vocab_size is a token, so a model of that vocabulary fits exactly."""
    write_tiny_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    assert [tokenizer.id_to_token(number) for number in range(3)] == list(SPECIAL_TOKENS)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]

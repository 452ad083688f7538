"""From a request's text to the tokens that its record carries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import prompt_reader
from pipeline.prompt_reader import PromptReader
from pipeline.tokenizing import ChatTokenizer
from schemas.codec import unpack_ids
from schemas.models import ModelCard
from schemas.requests import InferenceRequest
from tests.tiny_tokenizer import tiny_tokenizer, write_tiny_tokenizer

LONG = " ".join(["the sea is long"] * 200)


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    write_tiny_tokenizer(tmp_path, 512)
    return ModelCard(
        name="tiny",
        revision="r1",
        served="tiny@r1",
        folder=str(tmp_path),
        architecture="llama",
        context_length=100_000,
        vocab_size=512,
        has_chat_template=True,
        created_unix_s=1,
    )


@pytest.mark.parametrize("text", [LONG, LONG + " é"], ids=["known words", "others"])
async def test_long_text_goes_to_another_thread_only_for_the_library(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Words from the table take as long there, under the same lock. The ids are the same."""
    reader, tokenizer = PromptReader(lambda served: None), ChatTokenizer(Path(card.folder))
    reader.load(card, tokenizer)
    sent: list[Callable[..., Any]] = []

    async def noted(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        sent.append(call)
        return call(*args, **named)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    assert len(text) > prompt_reader._LONG_TEXT_CHARS
    prompt = await reader.read(
        InferenceRequest(request_id="r" * 8, model="tiny", prompt=text), card
    )
    assert unpack_ids(prompt.packed_ids) == tiny_tokenizer().encode(text).ids
    assert prompt.num_tokens == len(unpack_ids(prompt.packed_ids))
    assert sent == ([] if text == LONG else [tokenizer.encode])

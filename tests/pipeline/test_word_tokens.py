"""The oracle is the tokenizer's library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from pipeline.word_tokens import _MAX_SHORTS, _MAX_WORDS, WordTokens
from schemas.codec import pack_ids
from tests.tiny_tokenizer import tiny_tokenizer

# What the pattern treats differently, and the beginnings of added tokens.
PIECES = st.sampled_from(
    ["'s", "'re", "'", "I'll", "hello", "World", "a", " ", "  ", "\n", "\r\n", "\t", "1", "23",
     "4 5", "!", "...", "<|im_start|>", "<|im_end|>", "<|im", "_", "-", "http://x.y/z?q=1",
     "x" * 70]
)  # fmt: skip
PLAIN = st.lists(PIECES | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6))


def with_digits() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


def words_of(tokenizer: Tokenizer) -> WordTokens | None:
    return WordTokens.of(tokenizer, json.loads(tokenizer.to_str()))


KINDS = {"byte level": tiny_tokenizer(), "digits": with_digits()}
WORDS = {name: words_of(tokenizer) for name, tokenizer in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
@given(pieces=PLAIN)
def test_ids_are_those_of_the_library(name: str, pieces: list[str]) -> None:
    """Asked again and again, while words are learned and when all are known."""
    tokenizer, words, text = KINDS[name], WORDS[name], "".join(pieces)
    assert words is not None
    expected = pack_ids(tokenizer.encode(text, add_special_tokens=False).ids)
    answers = [words.encode(text) for _ in range(20)]
    assert all(ids in (None, expected) for ids in answers)
    if max(map(len, text.split()), default=0) < 64:
        assert answers[-1] == expected


@given(text=st.text(max_size=20))
def test_what_is_not_plain_is_left_to_the_library(text: str) -> None:
    """Never another answer: the right one or none."""
    for name, tokenizer in KINDS.items():
        words = WORDS[name]
        assert words is not None
        expected = pack_ids(tokenizer.encode(text, add_special_tokens=False).ids)
        assert words.encode(text) in (None, expected)
    assert words.encode("é") is None


def change(**changes: Any) -> tuple[Tokenizer, dict[str, Any]]:
    described = json.loads(tiny_tokenizer().to_str()) | changes
    return tiny_tokenizer(), described


def test_tokenizers_that_work_otherwise_are_left_alone() -> None:
    """A normalizer, another pattern, merges by chance, tokens that reach out or stand around."""
    split = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    assert WordTokens.of(*change()) is not None
    assert WordTokens.of(*change(normalizer={"type": "NFC"})) is None
    assert WordTokens.of(*change(pre_tokenizer=None)) is None
    assert WordTokens.of(*change(pre_tokenizer=split)) is None
    assert WordTokens.of(*change(pre_tokenizer=byte_level | {"add_prefix_space": True})) is None
    both = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    assert WordTokens.of(*change(pre_tokenizer=both)) is None
    assert WordTokens.of(*change(model={"type": "Unigram"})) is None
    assert WordTokens.of(*change(model={"type": "BPE", "dropout": 0.1})) is None
    reaching = tiny_tokenizer()
    reaching.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert words_of(reaching) is None
    around = tiny_tokenizer()
    around.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert words_of(around) is None


def test_the_table_of_words_is_bounded() -> None:
    """When it is full a new one is begun, and the answers stay right."""
    tokenizer = tiny_tokenizer()
    words = words_of(tokenizer)
    assert words is not None
    words._known |= {f" {number}": bytes(4) for number in range(_MAX_WORDS + 1)}
    assert words.encode("unheard of") is None
    assert len(words._known) == 0
    assert words.encode("unheard of") == pack_ids(tokenizer.encode("unheard of").ids)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "text", ["a b", " a", "a\nb c", "it's 1 2", "a  b", "a   b", "a \n b", "a\n  b", "a\n ", " "]
)
def test_pieces_have_the_ids_that_they_have_within_the_text(name: str, text: str) -> None:
    """Where blanks touch white space text may not be cut at them."""
    words = words_of(KINDS[name])
    assert words is not None
    for beside in ("a b c", " 1 2", "'s b", "a\nb", " "):
        words.encode(beside)
    expected = pack_ids(KINDS[name].encode(text, add_special_tokens=False).ids)
    assert [words.encode(text) for _ in range(2)] == [expected, expected]


def test_the_tables_of_pieces_are_bounded() -> None:
    """When one is full both are begun anew, and the answers stay right."""
    tokenizer = tiny_tokenizer()
    words = words_of(tokenizer)
    assert words is not None
    words._pieces |= {f"{number}": bytes(4) for number in range(_MAX_WORDS + 1)}
    words._shorts |= {f"{number}\n": bytes(4) for number in range(_MAX_SHORTS + 1)}
    assert words.encode("unheard of") is None
    for text in ("unheard of", " of", "of\n"):
        assert words.encode(text) == pack_ids(tokenizer.encode(text).ids)
    assert set(words._firsts) == {"", "unheard"}
    assert set(words._pieces) == {"of"}
    assert set(words._shorts) == {"of\n"}


def test_a_new_piece_does_not_have_the_rest_cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template puts its own word before the first of each prompt, so that one is always new."""
    tokenizer = tiny_tokenizer()
    words = words_of(tokenizer)
    assert words is not None
    words.encode("the words of a prompt")
    asked: list[set[str]] = []
    learn = words._learn

    def noted(new: Iterable[str], known: dict[str, bytes]) -> bool:
        asked.append(set(new))
        return learn(asked[-1], known)

    monkeypatch.setattr(words, "_learn", noted)
    text = "user\nAll words of the prompt"
    assert words.encode(text) == pack_ids(tokenizer.encode(text).ids)
    assert asked == [{"user", "\n", "All", " the"}]

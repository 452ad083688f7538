from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_tokenizer import EOS_TOKEN_ID, tiny_tokenizer
from workers.engine.api import Sampled
from workers.engine.output import REPLACEMENT, Detokenizer, OutputProcessor, Vocabulary

WORDS = ["▁hello", "▁world", "llo", "▁", "a", "."]


def sentencepiece_like() -> Tokenizer:
    """A tokenizer as Llama 2 has it: blanks as ▁, unknown characters as byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


BYTE_LEVEL = Vocabulary(tiny_tokenizer())
FALLBACK_TOKENIZER = sentencepiece_like()
FALLBACK = Vocabulary(FALLBACK_TOKENIZER)
TEXT = st.text(st.sampled_from("ab .\n\u00e9\u4f60\u597d\U0001f642\u200d\U0001f469\ufffd"))


def encode(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def fallback_ids(text: str) -> list[int]:
    """One token per word or character where there is one, else one per byte."""
    ids: list[int] = []
    for letter in text.replace(" ", "▁"):
        known = FALLBACK.token_id(letter)
        ids += [known] if known is not None else [3 + byte for byte in letter.encode()]
    return ids


def pieces_of(output: OutputProcessor, token_ids: Seq[int]) -> tuple[list[str], bool]:
    """What each token shows, the flush as the last piece, and whether a stop string came up."""
    pieces: list[str] = []
    for token_id in token_ids:
        text, is_stopped = output.push(token_id)
        pieces.append(text)
        if is_stopped:
            return pieces, True
    return [*pieces, output.finish()], False


def cut(text: str, stops: Seq[str]) -> tuple[str, bool]:
    """The oracle: read letter by letter, end before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)], True
    return text, False


@settings(deadline=None)
@given(st.lists(st.integers(0, 600), max_size=50), st.lists(st.integers(0, 511), max_size=12))
@example([97], [159])  # the prompt ends within a character, the answer begins within another
def test_pieces_make_the_whole_text_for_any_ids(ids: list[int], prompt_ids: list[int]) -> None:
    """Whatever a model emits, broken characters, special and unknown ids included: the pieces
    joined are the whole, decoded at once."""
    pieces, _ = pieces_of(OutputProcessor(BYTE_LEVEL, prompt_ids), ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


@settings(deadline=None)
@given(TEXT)
def test_text_is_shown_as_soon_as_it_is_certain(text: str) -> None:
    """Byte by byte: when a character is complete its text is out, and never a part of it."""
    detokenizer = Detokenizer(BYTE_LEVEL, ())
    byte_ids = [i for letter in text for byte in letter.encode() for i in _byte_ids(byte)]
    shown = ""
    for count, token_id in enumerate(byte_ids, 1):
        shown += detokenizer.push(token_id)
        certain = BYTE_LEVEL.decode(byte_ids[:count]).rstrip(REPLACEMENT)
        assert shown.startswith(certain)
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


def _byte_ids(byte: int) -> list[int]:
    table = {letter: number for number, letter in enumerate(_ALPHABET)}
    return [3 + table[_BYTE_LETTERS[byte]]]


_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_letters() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow 255."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + n) for n, b in enumerate(others)}}


_BYTE_LETTERS = _byte_letters()


@settings(deadline=None)
@given(TEXT, TEXT)
def test_byte_fallback_text_comes_out_whole(prompt: str, text: str) -> None:
    """Tokenizers with byte tokens: text after a prompt keeps its leading blank, and characters of
    several byte tokens come out whole."""
    detokenizer = Detokenizer(FALLBACK, fallback_ids("a" + prompt + "."))
    ids = fallback_ids(text)
    assert "".join(detokenizer.push(i) for i in ids) + detokenizer.flush() == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=100), st.lists(st.integers(0, 300), max_size=9))
def test_invalid_bytes_never_raise_and_never_take_back(ids: list[int], prompt: list[int]) -> None:
    """Byte-fallback decoders change earlier text when invalid bytes follow; ours only adds. Known
    words come through wherever they stand."""
    detokenizer = Detokenizer(FALLBACK, prompt)
    hello = FALLBACK.token_id("a")
    assert hello is not None
    shown = "".join(detokenizer.push(i) for i in [*ids, hello])
    assert shown.endswith("a")


def test_what_was_shown_stays_when_the_decoder_takes_it_back() -> None:
    """The decoder turns a run of byte tokens into U+FFFD altogether when one of them is wrong, and
    the good character before it was shown already: only the wrong byte shows as U+FFFD."""
    detokenizer = Detokenizer(FALLBACK, ())
    shown = [detokenizer.push(i) for i in [*fallback_ids("\u4f60"), 3 + 0xE5, *fallback_ids("a")]]
    assert shown == ["", "", "\u4f60", "", REPLACEMENT + "a"]


def test_endless_rubbish_is_shown_in_the_end() -> None:
    """Bytes that never make a character are not collected for ever: work per token is bounded."""
    detokenizer = Detokenizer(BYTE_LEVEL, ())
    [rubbish] = _byte_ids(0xFF)
    shown = [detokenizer.push(rubbish) for _ in range(1000)]
    assert len("".join(shown)) > 900
    assert max(len(piece) for piece in shown) <= 64


@settings(max_examples=300, deadline=None)
@example("cab", ["cab", "a"])  # "ab" is one token: both stops come up with it, "a" first
@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", max_size=4), max_size=3),
)
def test_stop_strings_cut_at_the_first_that_is_complete(text: str, stops: list[str]) -> None:
    """However the text falls into tokens, what is shown is the text before the first stop string,
    and no piece ever has to be taken back."""
    pieces, is_stopped = pieces_of(OutputProcessor(BYTE_LEVEL, (), stops), encode(text))
    assert ("".join(pieces), is_stopped) == cut(text, stops)


@settings(deadline=None)
@given(TEXT, st.text("ab \u4f60\U0001f642", min_size=1, max_size=3), TEXT)
def test_stop_strings_of_any_characters(before: str, stop: str, after: str) -> None:
    """Stop strings are compared as text, not as tokens: emoji and CJK work like letters."""
    text = before + stop + after
    pieces, is_stopped = pieces_of(OutputProcessor(BYTE_LEVEL, (), [stop]), encode(text))
    assert is_stopped
    assert "".join(pieces) == cut(text, [stop])[0]


def test_possible_stop_is_held_back_and_comes_when_it_is_none() -> None:
    """The longest end of the text that could become a stop string waits, and no more than that."""
    output = OutputProcessor(BYTE_LEVEL, (), ["STOP"])
    shown = [output.push(token_id)[0] for token_id in encode("1STSTO!")]
    assert shown == ["1", "", "", "ST", "", "", "STO!"]
    assert [output.push(token_id)[0] for token_id in encode("ST")] == ["", ""]
    assert output.finish() == "ST"


def test_min_tokens_are_exempt_from_stop_strings() -> None:
    """The first min_tokens tokens are shown at once; a stop string must lie after them."""
    ids = encode("A.A.A.")
    output = OutputProcessor(BYTE_LEVEL, (), ["A."], min_tokens=3)
    pieces, is_stopped = pieces_of(output, ids)
    assert is_stopped
    assert "".join(pieces) == "A.A."[:3] + "."


@settings(deadline=None)
@given(TEXT, TEXT, st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), st.integers(0, 4))
def test_take_over_continues_with_the_same_pieces(
    text: str, prompt: str, stops: list[str], min_tokens: int
) -> None:
    """Pushing the first tokens again brings a new processor into the same state: its later pieces
    equal those of the first, at whatever token the work changes hands."""
    ids, prompt_ids = encode(text), encode(prompt)
    whole, _ = pieces_of(OutputProcessor(BYTE_LEVEL, prompt_ids, stops, min_tokens), ids)
    for count in range(len(whole)):
        again = OutputProcessor(BYTE_LEVEL, prompt_ids, stops, min_tokens)
        for token_id in ids[:count]:
            again.push(token_id)
        assert pieces_of(again, ids[count:])[0] == whole[count:]


@pytest.mark.parametrize(
    ("token", "text"),
    [("<|im_end|>", "<|im_end|>"), ("th", "th"), ("Ġt", " t"), ("Ġ", " "), ("ð", REPLACEMENT)],
)
def test_token_text_is_the_tokens_own(token: str, text: str) -> None:
    """For logprobs: special tokens by name, leading blanks kept, U+FFFD for half a character."""
    token_id = BYTE_LEVEL.token_id(token)
    assert token_id is not None
    assert BYTE_LEVEL.token_text(token_id) == text


def test_token_text_keeps_the_blank_of_a_metaspace_token() -> None:
    """Decoders that strip the first blank of a text do not strip that of a token."""
    token_id = FALLBACK.token_id("▁hello")
    assert token_id is not None
    assert FALLBACK.token_text(token_id) == " hello"


def test_logprobs_name_their_tokens() -> None:
    """A sampled token and its alternatives, with texts."""
    sampled = Sampled(token_id=EOS_TOKEN_ID, logprob=-1.0, top=((EOS_TOKEN_ID, -1.0),))
    logprob = BYTE_LEVEL.logprob(sampled)
    assert logprob.token == "<|im_end|>"
    assert logprob.top[0].token == "<|im_end|>"


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, FALLBACK], ids=["byte level", "fallback"])
def test_logprobs_have_the_bytes_of_what_is_no_text(vocabulary: Vocabulary) -> None:
    """Of tokens that are part of a character, their own bytes: those of a character's tokens are
    the character. A token whose text says them, or that is special, has none apart."""
    text = "th \U0001f642 \u4f60"
    ids = encode(text) if vocabulary is BYTE_LEVEL else fallback_ids(text)
    entries = [vocabulary.logprob(Sampled(token_id=i, logprob=-1.0)) for i in ids]
    assert any(entry.raw for entry in entries)
    assert all(bool(entry.raw) == (REPLACEMENT in entry.token) for entry in entries)
    assert b"".join(entry.raw or entry.token.encode() for entry in entries).decode() == text
    assert BYTE_LEVEL.raw(EOS_TOKEN_ID) == b""


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, FALLBACK])
def test_the_table_of_pieces_says_no_more_than_is_known(vocabulary: Vocabulary) -> None:
    """It reaches as far as a model's ids do, which may be beyond the tokenizer's; an entry is the
    very piece, or None."""
    table = vocabulary.pieces(vocabulary.size + 100)
    for token_id in (*range(vocabulary.size), vocabulary.size + 99, vocabulary.size + 5000):
        piece = vocabulary.piece(token_id)
        assert piece == vocabulary.piece(token_id)
        if token_id < len(table):
            assert table[token_id] == piece
    assert vocabulary.piece(vocabulary.size + 99) == ""
    assert vocabulary.pieces(1) is table

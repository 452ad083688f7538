"""Tokens of text whose words are known, without the tokenizer's library.

A byte-level BPE tokenizer cuts text into words by a fixed pattern and merges bytes within each word
alone, so a word's tokens are the same wherever it stands. Most words of a prompt were seen before::

    text -> added tokens | pieces, at the blanks -> packed ids of each, from a table
                           or words, by the pattern -> the same
                                                       what is not there: asked of the library, kept

The pattern never takes a blank and what is before it into one word, unless that is white space too.
So where blanks stand alone, which is mostly so, text may be cut at them, and a piece with the blank
before it has the tokens of its own words.

Only printable ASCII is taken, where the pattern means the same in both languages, and only for
tokenizers that are known to work like this; everything else is the library's. 128 words cost 11 µs
in place of 180 to 300, and 40 where they have to be cut by the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

from tokenizers import Tokenizer

from schemas.codec import pack_ids

_MAX_CHARS: Final = 16_384  # 1 ms; the library, unlike this, runs beside the event loop
_MAX_WORD_CHARS: Final = 64
_MAX_WORDS: Final = 65_536  # known at a time, and as many pieces: 12 MB each
_MAX_SHORTS: Final = 1024
_MAX_NEW: Final = 16  # words of one text; with more of them the library is as fast

_PLAIN = re.compile(r"[\t\n\r -~]*")
_PIECE = re.compile(r"[!-~]([\t\n\r!-~]*[!-~])?")  # it touches its blanks with no white space
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACE, _LETTERS, _OTHERS = r"[\t\n\r ]", "[A-Za-z]", r"[^\t\n\r A-Za-z0-9]"
# What the library's ByteLevel does; white space leaves its last blank to the word behind it.
_WORDS = re.compile(
    rf"{_CONTRACTIONS}| ?{_LETTERS}+| ?[0-9]+| ?{_OTHERS}+|{_SPACE}+(?![^\t\n\r ])|{_SPACE}+"
)
# The same behind Digits: each digit is cut out first, and text ends before it.
_WORDS_AND_DIGITS = re.compile(
    rf"{_CONTRACTIONS}| ?{_LETTERS}+|[0-9]| ?{_OTHERS}+|{_SPACE}+(?![^\t\n\r 0-9])|{_SPACE}+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_WIDE_FLAGS = ("lstrip", "rstrip", "single_word")  # such a token takes, or needs, what is around it
_DIGITS = {"type": "Digits", "individual_digits": True}


class WordTokens:
    """The words of one tokenizer; make one with :meth:`of`."""

    def __init__(self, tokenizer: Tokenizer, words: re.Pattern[str], added: dict[str, int]) -> None:
        longest_first = sorted(added, key=len, reverse=True)
        self._tokenizer = tokenizer
        self._words = words
        self._added = {name: pack_ids([token_id]) for name, token_id in added.items()}
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None
        self._known: dict[str, bytes] = {}  # words
        self._pieces: dict[str, bytes] = {}  # behind a blank, which is not in the name
        self._firsts: dict[str, bytes] = {"": b""}  # the same at the beginning, without a blank
        self._shorts: dict[str, bytes] = {}  # whole texts that can't be cut at their blanks

    @classmethod
    def of(cls, tokenizer: Tokenizer, described: dict[str, Any]) -> WordTokens | None:
        """For a tokenizer and what its ``tokenizer.json`` says; None when it works otherwise."""
        words = _pattern(described.get("pre_tokenizer"))
        model = described.get("model", {})
        added = described.get("added_tokens", [])
        if (
            words is None
            or described.get("normalizer") is not None
            or model.get("type") != "BPE"
            or model.get("dropout")
            or any(one.get(flag) for one in added for flag in _WIDE_FLAGS)
            or tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids
        ):
            return None
        return cls(tokenizer, words, {one["content"]: one["id"] for one in added})

    def encode(self, text: str) -> bytes | None:
        """The token ids of ``text``, added tokens in it by name, packed as records carry them (see
        :func:`schemas.codec.pack_ids`); None: ask the library."""
        if len(text) > _MAX_CHARS:
            return None
        parts = [text] if self._cut is None else self._cut.split(text)
        if len(parts) == 1:
            return self._ids_of(text)
        ids: list[bytes] = []
        for number, part in enumerate(parts):
            found = self._added[part] if number % 2 else self._ids_of(part)
            if found is None:
                return None
            ids.append(found)
        return b"".join(ids)

    def _ids_of(self, part: str) -> bytes | None:
        """The same of text without added tokens."""
        if len(part) <= _MAX_WORD_CHARS and (short := self._shorts.get(part)) is not None:
            return short
        first, blank, rest = part.partition(" ")
        others = rest.split(" ") if blank else []
        firsts, pieces = self._firsts, self._pieces  # another thread may begin new ones
        ids = _joined(pieces, others)
        if ids is None or first not in firsts:
            new = [] if first in firsts else [(firsts, first, first)]
            if ids is None:
                new += [(pieces, one, f" {one}") for one in others if one not in pieces]
            if not all(len(one) <= _MAX_WORD_CHARS and _PIECE.fullmatch(one) for _, one, _ in new):
                return self._cut_up(part) if _PLAIN.fullmatch(part) else None
            if not self._learn_pieces(new):
                return None
            ids = _joined(pieces, others) if ids is None else ids
        return None if ids is None else firsts[first] + ids

    def _learn_pieces(self, new: list[tuple[dict[str, bytes], str, str]]) -> bool:
        """Whether each table has its piece now, under its name, and with the tokens of its text."""
        known = self._known
        words = [self._words.findall(text) for _, _, text in new]
        if not self._learn(chain.from_iterable(words), known):
            return False
        if max(len(self._firsts), len(self._pieces)) > _MAX_WORDS:
            self._firsts, self._pieces = {"": b""}, {}
            return False
        for (table, piece, _), of_piece in zip(new, words, strict=True):
            table[piece] = b"".join(map(known.__getitem__, of_piece))
        return True

    def _cut_up(self, part: str) -> bytes | None:
        """Its ids by the pattern."""
        known = self._known
        words = self._words.findall(part)
        if not self._learn(words, known):
            return None
        ids = b"".join(map(known.__getitem__, words))
        if len(part) <= _MAX_WORD_CHARS:  # what templates put between added tokens, mostly
            if len(self._shorts) > _MAX_SHORTS:
                self._shorts = {}
            self._shorts[part] = ids
        return ids

    def _learn(self, words: Iterable[str], known: dict[str, bytes]) -> bool:
        """Whether ``known`` has all of ``words`` now. Another thread may begin a new table."""
        new = {word for word in words if word not in known}  # ``- known.keys()`` goes through all
        if not new:
            return True
        if len(known) > _MAX_WORDS:
            self._known = {}
            return False
        short = [word for word in new if len(word) <= _MAX_WORD_CHARS]
        asked = short[:_MAX_NEW]
        found = self._tokenizer.encode_batch_fast(asked, add_special_tokens=False)
        known.update(zip(asked, (pack_ids(one.ids) for one in found), strict=True))
        return len(asked) == len(new)


def _joined(known: dict[str, bytes], names: list[str]) -> bytes | None:
    """The ids of all of them, one behind the other; None: one is not known."""
    try:
        return b"".join(map(known.__getitem__, names))
    except KeyError:
        return None


def _pattern(pre_tokenizer: dict[str, Any] | None) -> re.Pattern[str] | None:
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0].get("pretokenizers", [])
    kinds = [{key: step.get(key) for key in _BYTE_LEVEL} for step in steps[-1:]]
    if kinds != [_BYTE_LEVEL]:
        return None
    if len(steps) == 1:
        return _WORDS
    return _WORDS_AND_DIGITS if steps[:-1] == [_DIGITS] else None

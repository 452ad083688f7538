"""From token ids to the text that a reader may see, piece by piece.

Everything here is a function of the token ids alone: a worker that takes a request over pushes the
tokens that exist and has the very state of the one before it, so the pieces that follow fit the
pieces that were published.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from schemas.errors import ModelUnsupported
from schemas.tokens import TokenLogprob, TopLogprob
from workers.engine.api import Sampled

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character (yet)

_NUM_CONTEXT_TOKENS = 8
# A character has four bytes at most, so a long run of tokens that ends in no character is rubbish:
# it is shown then, which bounds the work per token.
_MAX_HELD_TOKENS = 64


def _byte_letters() -> dict[str, int]:
    """GPT-2's spelling of bytes in the names of tokens, which byte-level tokenizers share: letters
    that print stand for themselves, the other bytes are counted from 256 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printing))
    letters = {chr(byte): byte for byte in printing}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_LETTERS = _byte_letters()
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")  # with byte fallback


def bytes_of(name: str) -> bytes:
    """The bytes of a token that is called ``name`` in its vocabulary; nothing when that does not
    say them."""
    if found := _BYTE_NAME.match(name):
        return bytes.fromhex(found.group(1))
    try:
        return bytes(_BYTE_LETTERS[letter] for letter in name)
    except KeyError:
        return b""


class Vocabulary:
    """What the ids of one tokenizer look like as text. Shared by all choices of an engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._texts: dict[int, str] = {}
        self._raws: dict[int, bytes] = {}
        self._is_context_free = isinstance(tokenizer.decoder, ByteLevel)
        # By id, as they are asked for: a list, for each token of each answer is looked up in it.
        self._pieces: list[str | None] = [None] * tokenizer.get_vocab_size(with_added_tokens=True)
        self._parts: set[int] = set()  # those of which it is known that they have no piece
        anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor: list[int] = list(anchor)

    @classmethod
    def from_folder(cls, folder: Path) -> Vocabulary:
        """The vocabulary of a model folder.

        Raises:
            ModelUnsupported: there is no usable ``tokenizer.json`` in it.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelUnsupported(f"{folder.name} has no tokenizer.json")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises nothing more specific
            raise ModelUnsupported(f"tokenizer.json of {folder.name}: {error}") from error

    def to_json(self) -> str:
        """The whole tokenizer as its ``tokenizer.json`` says it."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def size(self) -> int:
        """Ids are below this."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def is_silent(self, token_id: int) -> bool:
        """Whether it never shows as text: special tokens and ids without a token."""
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of all of them; special tokens do not show."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def piece(self, token_id: int) -> str | None:
        """What a token adds wherever it stands, if whole characters stand before it.

        Returns:
            "" for one that never shows; None when that depends on its neighbours: it holds a part
            of a character, or the decoder is not one that puts bytes beside each other.
        """
        if token_id >= len(self._pieces):
            return self._find_piece(token_id)
        piece = self._pieces[token_id]
        if piece is None and token_id not in self._parts:
            piece = self._pieces[token_id] = self._find_piece(token_id)
            if piece is None:
                self._parts.add(token_id)
        return piece

    def pieces(self, num_ids: int) -> Seq[str | None]:
        """:meth:`piece` as a table of ``num_ids`` ids at least, which fills as pieces are asked
        for: None also stands where nobody has asked yet."""
        missing = num_ids - len(self._pieces)
        if missing > 0:
            self._pieces += [None] * missing
        return self._pieces

    def _find_piece(self, token_id: int) -> str | None:
        if self.is_silent(token_id):
            return ""
        text = self.decode([token_id]) if self._is_context_free else ""
        return None if not text or REPLACEMENT in text else text

    def token_text(self, token_id: int) -> str:
        """One token's own text within a sentence, special tokens by name, for logprobs."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._text_within(token_id)
        return text

    def logprob(self, sampled: Sampled) -> TokenLogprob:
        """A sampled token and its alternatives, as a reader gets them."""
        return TokenLogprob(
            token_id=sampled.token_id,
            token=self.token_text(sampled.token_id),
            logprob=sampled.logprob,
            top=tuple(
                TopLogprob(
                    token_id=token_id,
                    token=self.token_text(token_id),
                    logprob=logprob,
                    raw=self.raw(token_id),
                )
                for token_id, logprob in sampled.top
            ),
            raw=self.raw(sampled.token_id),
        )

    def raw(self, token_id: int) -> bytes:
        """A token's own bytes where its text does not say them, for it holds a part of a
        character; else nothing."""
        raw = self._raws.get(token_id)
        if raw is None:
            is_part = REPLACEMENT in self.token_text(token_id)
            name = self._tokenizer.id_to_token(token_id) if is_part else None
            raw = self._raws[token_id] = bytes_of(name) if name else b""
        return raw

    def _text_within(self, token_id: int) -> str:
        # Some decoders strip the first token's blank, so it must not be the first.
        before = self._tokenizer.decode(self._anchor, skip_special_tokens=False)
        both: str = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        return both.removeprefix(before)


class Detokenizer:
    """Text of one growing token sequence, without half characters.

    Tokens are decoded together with a few before them, since what a token looks like may depend on
    those; the text of the context is then cut off. Some decoders (byte fallback) take back what
    they showed when invalid bytes follow; here, what was shown stays and the rest is added.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Seq[int]) -> None:
        self._vocabulary = vocabulary
        self._prompt_tail: Seq[int] = prompt_ids[
            -_NUM_CONTEXT_TOKENS:
        ]  # the context, not looked at
        self._held: list[int] = []  # pushed, not shown
        self._context: list[int] = []
        self._context_text = ""
        self._last: int | None = None  # shown by itself since: then it alone is the context

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often that of the token itself."""
        piece = self._vocabulary.piece(token_id)
        if piece is None or self._held:
            return self._push_to_held(token_id)
        if piece:
            self._last = token_id
        return piece

    def _push_to_held(self, token_id: int) -> str:
        """One that does not stand by itself, or comes behind such."""
        if self._vocabulary.is_silent(token_id):
            return ""
        self._take_context()
        self._held.append(token_id)
        text = self._vocabulary.decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    @property
    def is_holding(self) -> bool:
        """Whether the next token comes behind such as are held back."""
        return bool(self._held)

    def skip(self, token_ids: Seq[int]) -> None:
        """The same as :meth:`push` for tokens of which each has a piece, while none is held back:
        what they show is known."""
        for token_id in reversed(token_ids):
            if self._vocabulary.piece(token_id):
                self._last = token_id
                return

    def flush(self) -> str:
        """What is held back, with U+FFFD for bytes that never became a character."""
        if not self._held:
            return ""
        return self._show(self._vocabulary.decode(self._context + self._held))

    def _show(self, text: str) -> str:
        if text.startswith(self._context_text):
            piece = text[len(self._context_text) :]
        else:
            piece = self._vocabulary.decode(self._held)  # it changed what was shown before
        self._move_context(self._held)
        self._held = []
        return piece

    def _take_context(self) -> None:
        """Only tokens that do not stand by themselves ask for what is before them."""
        tail, self._prompt_tail = self._prompt_tail, ()
        if self._last is not None:
            self._context = [self._last]
            self._context_text = self._vocabulary.piece(self._last) or ""
            self._last = None
        elif tail:
            self._move_context([t for t in tail if not self._vocabulary.is_silent(t)])

    def _move_context(self, token_ids: list[int]) -> None:
        text = self._vocabulary.decode(token_ids)
        if text.endswith(REPLACEMENT):  # ends within a character: what follows stands by itself
            token_ids, text = [], ""
        self._context, self._context_text = token_ids, text


class OutputProcessor:
    """The visible text of one choice: detokenized, and cut at the first stop string.

    Text that could still turn into a stop string is held back. The text of the first
    ``min_tokens`` tokens is shown as it comes and takes no part in stop strings.

    Attributes:
        vocabulary: what tokens look like.
        searches: whether it looks for stop strings.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Seq[int],
        stop: Seq[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, prompt_ids)
        self._stop = tuple(text for text in stop if text)
        self._num_exempt = min_tokens
        self._pending = ""  # text that is the beginning of a stop string, or empty
        self.vocabulary = vocabulary
        self.searches = bool(self._stop)

    @property
    def is_holding(self) -> bool:
        """Whether the next token comes behind such as do not show by themselves."""
        return self._detokenizer.is_holding

    def skip(self, token_ids: Seq[int]) -> None:
        """Tokens that were shown as their pieces say, without :meth:`push`, while it neither
        searched nor held anything."""
        self._detokenizer.skip(token_ids)

    def push(self, token_id: int) -> tuple[str, bool]:
        """One more token that is no end of the answer.

        Returns:
            The text that may be shown now, and whether a stop string came up. If so, nothing may
            be pushed any more, and neither the stop string nor what follows it is ever shown.
        """
        piece = self._detokenizer.push(token_id)
        if self._num_exempt:
            self._num_exempt -= 1
            return piece, False
        return self._search(piece)

    def finish(self) -> str:
        """The answer ended without a stop string: what was held back."""
        text, is_stopped = self._search(self._detokenizer.flush())
        if is_stopped:
            return text
        text, self._pending = text + self._pending, ""
        return text

    def _search(self, piece: str) -> tuple[str, bool]:
        if not self._stop or not piece:
            return piece, False
        text = self._pending + piece
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, at = min(found)  # as if it came letter by letter: the first to be complete
            self._pending = ""
            return text[:at], True
        num_held = max(_num_overlapping(text, stop) for stop in self._stop)
        self._pending = text[len(text) - num_held :]
        return text[: len(text) - num_held], False


def _num_overlapping(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

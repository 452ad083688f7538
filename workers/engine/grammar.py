"""What an answer may say next, for requests with a ``response_format``.

::

    ResponseFormat -- compiled, ms; kept per engine --> grammar -- copied, 0.02 ms --> Matcher

A matcher belongs to one choice, and its state is a function of the choice's tokens alone: a worker
that takes a request over gives them again, 0.01 ms each, and goes on as its predecessor would have.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import structlog
from llguidance import LLMatcher, LLTokenizer

from pipeline.response_format import FIELD, grammar_of, limits
from schemas.errors import EngineFailed, InvalidRequest
from schemas.requests import ResponseFormat, SamplingParams
from workers.engine.api import EngineInfo
from workers.engine.output import Vocabulary

MAX_GRAMMARS = 64  # compiled and kept; the longest unused goes first

_log = structlog.get_logger(__name__)


class Matcher:
    """Follows one answer through its grammar."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], *, may_end: bool) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._may_end = may_end
        self._allowed: bytes | None = None  # for the next token, once asked for

    def accept(self, token_id: int) -> None:
        """The next token of the answer. One that does not fit makes ``allowed`` raise."""
        self._allowed = None
        self._matcher.consume_token(token_id)

    def allowed(self) -> bytes:
        """The ids that may come next: id ``i`` is bit ``i % 8`` of byte ``i // 8``.

        An end is among them only where the grammar may end. Computed once per token; cost: 0.02 ms
        as a rule, at most some ms.

        Raises:
            EngineFailed: the answer left the grammar, or that is too complex to go on.
        """
        if self._allowed is None:
            bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                reason = self._matcher.get_error().partition("\n")[0]
                raise EngineFailed(f"the grammar of {FIELD} can't go on: {reason}", param=FIELD)
            self._allowed = bits if self._may_end else self._without_ends(bits)
        return self._allowed

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may follow."""
        if self._matcher.is_error():
            return False
        if self._matcher.is_stopped():
            return True
        if not self._matcher.is_accepting():
            return False
        try:
            return not self._without_ends(self.allowed()).strip(b"\0")
        except EngineFailed:
            return False  # whoever asks what is allowed will hear of it

    def _without_ends(self, bits: bytes) -> bytes:
        cleared = bytearray(bits)
        for token_id in self._end_ids:
            cleared[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(cleared)


class Grammars:
    """The compiled grammars of one engine. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary, info: EngineInfo) -> None:
        self._vocabulary = vocabulary
        self._size = max(info.vocab_size, vocabulary.size)
        self._eos = sorted(token_id for token_id in info.eos_token_ids if token_id < self._size)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_error = ""
        self._tokenizer_lock = threading.Lock()
        self._compiled: OrderedDict[ResponseFormat, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the tokenizer, which takes 0.3 s for 50,000 tokens. What is not done here the first
        format does. A tokenizer that llguidance can't read is logged; formats are refused then."""
        with self._tokenizer_lock:
            if self._tokenizer is not None or self._tokenizer_error:
                return
            text = self._vocabulary.to_json()
            try:
                self._tokenizer = LLTokenizer(text, n_vocab=self._size, eos_token=self._eos or None)
            except ValueError as error:
                self._tokenizer_error = str(error)
                _log.warning("formats_unavailable", reason=self._tokenizer_error)

    def prepare(self, wanted: ResponseFormat | None) -> None:
        """Compile what :meth:`matcher` would have to, on the caller's thread.

        Raises:
            InvalidRequest: it does not compile, or this model's tokenizer can't be used.

        Cost: 1 ms as a rule, at most about 0.2 s, without Python's lock.
        """
        if wanted is not None:
            self._grammar(wanted)

    def matcher(self, sampling: SamplingParams) -> Matcher | None:
        """A matcher at the beginning of an answer; None when anything may be said.

        Raises:
            InvalidRequest: as :meth:`prepare`.
        """
        if sampling.response_format is None:
            return None
        grammar = self._grammar(sampling.response_format)
        end_ids = frozenset(self._loaded_tokenizer().eos_tokens)
        may_end = bool(self._eos) and not sampling.ignore_eos
        return Matcher(grammar.deep_copy(), end_ids, may_end=may_end)

    def _grammar(self, wanted: ResponseFormat) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(wanted)
            if found is not None:
                self._compiled.move_to_end(wanted)
                return found
        made = self._compile(wanted)  # by two threads at once at worst: they get the same
        with self._lock:
            self._compiled[wanted] = made
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return made

    def _compile(self, wanted: ResponseFormat) -> LLMatcher:
        tokenizer = self._loaded_tokenizer()
        made = LLMatcher(tokenizer, grammar_of(wanted), log_level=0, limits=limits())
        made.compute_bitmask()  # the first takes longest; copies inherit what it found out
        if made.is_error():
            reason = made.get_error().partition("\n")[0]
            raise InvalidRequest(f"the schema can't be used: {reason}", param=FIELD)
        return made

    def _loaded_tokenizer(self) -> LLTokenizer:
        self.load()
        if self._tokenizer is None:
            raise InvalidRequest(
                f"this model's answers can't be given a format: {self._tokenizer_error}",
                param=FIELD,
            )
        return self._tokenizer

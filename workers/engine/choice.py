"""One answer to a request: its sequence, its visible text, and whether it has ended."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.requests import SamplingParams
from workers.engine.api import EngineInfo, TokenOutput
from workers.engine.grammar import Matcher
from workers.engine.output import OutputProcessor
from workers.engine.sequence import Sequence


class Choice:
    """Takes tokens one by one, sampled now or by an earlier owner, and decides when it ends.

    Attributes:
        finish_reason: "stop" or "length" once it ended, else None.
        is_held_next: whether it is held after its next token.
        has_sampled: whether that token has come.
        hides_token: whether its one token is no part of the answer, which is to have none.
        wants_logprob: whether its tokens are told with their logprobs.
        key: of the request.
        index: its number among the request's choices.
        matcher: what its tokens may be; None: anything.
    """

    def __init__(
        self,
        sequence: Sequence,
        output: OutputProcessor,
        sampling: SamplingParams,
        info: EngineInfo,
        matcher: Matcher | None = None,
        *,
        is_held_next: bool = False,
    ) -> None:
        self.sequence = sequence
        self.key = sequence.group.key
        self.index = sequence.index
        self.matcher = matcher
        self.finish_reason: str | None = None
        self.is_held_next = is_held_next
        self.has_sampled = False
        self.hides_token = sampling.max_tokens == 0
        self.wants_logprob = sampling.logprobs is not None and not self.hides_token
        self._output = output
        self._pieces = output.vocabulary.pieces(info.vocab_size)
        self._token_ids = sequence.token_ids
        self._num_prompt_tokens = sequence.num_prompt_tokens
        self._num_pushed = sequence.num_prompt_tokens  # of its tokens, those that output has seen
        self._min_length = sequence.num_prompt_tokens + sampling.min_tokens
        eos = frozenset() if sampling.ignore_eos else info.eos_token_ids
        self._end_ids = eos.union(sampling.stop_token_ids)
        self.max_length = max_length(sequence.num_prompt_tokens, sampling, info)
        self._is_plain = sampling.prompt_logprobs is None and self._shows_pieces()
        # A token with a number below this, whose piece shows, is no more than that piece.
        self._plain_end = self._num_before_last if self._is_plain else 0
        if self.max_length == sequence.num_prompt_tokens:
            self.finish_reason = "length"

    def _shows_pieces(self) -> bool:
        """Whether a token that shows is neither an end nor a part of a stop string or a format, and
        there is nothing to tell of it but itself and its text."""
        if self.wants_logprob or self.is_held_next or self.hides_token:
            return False
        if self.matcher is not None or self._output.searches:
            return False
        piece = self._output.vocabulary.piece
        return not any(piece(token_id) for token_id in self._end_ids)

    @property
    def _num_before_last(self) -> int:
        """How many tokens there can be without the last."""
        return self.max_length - self._num_prompt_tokens - 1

    def take_plain(self, token_id: int) -> TokenOutput | None:
        """What is to be told of the next token, if that is itself and its own text and no more:
        nearly always. None: :meth:`accept` it, for it may be an end, or a part of a character."""
        token_ids = self._token_ids
        number = len(token_ids) - self._num_prompt_tokens
        if number < self._plain_end and (piece := self._pieces[token_id]):
            token_ids.append(token_id)
            return TokenOutput(self.key, self.index, number, token_id, piece)
        return None

    def accept(self, token_id: int) -> str:
        """The next token of the answer; returns the text that may be shown with it.

        An eos or stop token belongs to the answer's tokens but not to its text. With the last
        token comes all text that was held back. An answer whose format allows no more ends there,
        without an eos and whatever ``min_tokens`` and ``ignore_eos`` say.
        """
        assert self.finish_reason is None, "a token after the end"
        token_ids = self._token_ids
        token_ids.append(token_id)
        length = len(token_ids)
        if not self._is_plain:
            return self._push(token_id, length)
        self._output.skip(token_ids[self._num_pushed : length - 1])
        self._num_pushed = length
        text = self._push(token_id, length)
        self._plain_end = 0 if self._output.is_holding else self._num_before_last
        return text

    def _push(self, token_id: int, length: int) -> str:
        output = self._output
        if self.hides_token:
            self.finish_reason = "length"
            return ""
        if token_id in self._end_ids and length > self._min_length:
            self.finish_reason = "stop"
            return output.finish()
        text, is_stopped = output.push(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if is_stopped:
            self.finish_reason = "stop"
        elif self.matcher is not None and self.matcher.is_complete:
            self.finish_reason = "stop"
            text += output.finish()
        elif length >= self.max_length:
            self.finish_reason = "length"
            text += output.finish()
        return text

    def replay(self, token_ids: Iterable[int]) -> None:
        """Tokens that were published before; their text is out already. They may end the answer,
        when their owner died between the last token and saying so."""
        for token_id in token_ids:
            if self.finish_reason is None:
                self.accept(token_id)
            else:
                self.sequence.token_ids.append(token_id)


def max_length(num_prompt_tokens: int, sampling: SamplingParams, info: EngineInfo) -> int:
    """Prompt and answer together have at most this many tokens; an answer has one at least, if
    only a hidden one."""
    if sampling.max_tokens is None:
        return info.context_length
    return min(info.context_length, num_prompt_tokens + max(1, sampling.max_tokens))

"""What a reader receives: tokens, and the entries of a request's claim chain.

Everything here lies in one stream, and that stream's order is the truth. The rules that give each
entry its meaning are in ``pipeline/ownership.py``.
"""

from __future__ import annotations

from typing import cast

import msgspec

from schemas.codec import Message, decoder
from schemas.errors import ErrorInfo


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One alternative at a position."""

    token_id: int
    token: str
    logprob: float
    raw: bytes = b""  # its own bytes, where ``token`` can't say them


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The chosen token's logprob and its alternatives, most likely first."""

    token_id: int
    token: str  # this token's own text, with U+FFFD where it holds part of a character
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    raw: bytes = b""  # its own bytes, where ``token`` can't say them


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens ``number``, ``number + 1``, … of one choice, and the text they add.

    ``text`` may be shorter than the tokens say: text that could still become a stop string, or
    half a character, is held back and comes with a later delta.

    Where steps of an engine follow each other faster than their tokens are published, one delta
    has the tokens of several: ``sizes`` then says which part of the text is whose. It has an entry
    for each token but the last, which adds the rest; without it the parts are not told apart.
    Tokens with logprobs come one by one.

    Where the request asks for ``prompt_logprobs``, token 0 of each choice brings them: one entry
    per token of the prompt. The first has none before it: its logprob is 0 and means nothing.
    """

    request_id: str
    epoch: int
    number: int
    ids: tuple[int, ...]
    text: str = ""
    index: int = 0  # the choice
    finish_reason: str | None = None  # "stop" or "length", on the last delta of a choice
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    sizes: tuple[int, ...] = ()  # in characters

    def texts(self) -> list[str]:
        """What each token adds to the text, in order; all of it at once where that is not told."""
        text, start = self.text, 0
        found = []
        for size in self.sizes:
            found.append(text[start : start + size])
            start += size
        found.append(text[start:])
        return found

    def split(self) -> list[TokenDelta]:
        """The same as a delta per token, where they are told apart."""
        if not self.sizes:
            return [self]
        last = len(self.sizes)
        return [
            msgspec.structs.replace(
                self,
                number=self.number + i,
                ids=(token_id,),
                text=text,
                sizes=(),
                finish_reason=self.finish_reason if i == last else None,
            )
            for i, (token_id, text) in enumerate(zip(self.ids, self.texts(), strict=True))
        ]


class TokenBatch(Message, frozen=True, kw_only=True, tag="token-batch/1"):
    """What one engine step, or several that were over, brought for one reader."""

    worker: str
    deltas: tuple[TokenDelta, ...]


class Accepted(Message, frozen=True, kw_only=True, tag="accepted/1"):
    """Admission let the request in. As a message of the stream: its record is written, and it will
    end with a terminal entry. As an answer to what came directly: so it will, once it is claimed.
    """

    request_id: str
    model: str
    revision: str
    prompt_tokens: int
    max_tokens: int
    admitted_unix_ms: int
    deadline_unix_ms: int
    echo_text: str | None = None
    asked_model: str = ""  # what the client asked for, where another model answers instead
    asked_max_tokens: int = 0  # what it asked for, where ``max_tokens`` was cut for lack of room


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exact token counts; ``cached_tokens`` is the part of the prompt found in a KV cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Claim(Message, frozen=True, kw_only=True, tag="claim/1"):
    """Chain entry: from here on ``worker`` owns the request, under ``epoch``."""

    request_id: str
    epoch: int
    worker: str
    role: str  # "prefill" or "decode"
    served: str
    deadline_unix_ms: int
    num_tokens: int = 0  # prompt and tokens so far; 0: not said
    max_tokens: int = 0  # that may follow, over all choices


class StreamEnd(Message, frozen=True, kw_only=True, tag="stream-end/1"):
    """Chain entry: complete. Every token was confirmed by the stream before this was written."""

    request_id: str
    epoch: int
    num_tokens: tuple[int, ...]  # per choice
    finish_reasons: tuple[str, ...]  # per choice
    usage: Usage


class StreamError(Message, frozen=True, kw_only=True, tag="stream-error/1"):
    """Chain entry: refused (epoch 0) or failed."""

    request_id: str
    epoch: int
    error: ErrorInfo


class Cancelled(Message, frozen=True, kw_only=True, tag="cancelled/1"):
    """Chain entry: the client left or asked for the end."""

    request_id: str
    reason: str = ""


class Expired(Message, frozen=True, kw_only=True, tag="expired/1"):
    """Chain entry: the deadline passed."""

    request_id: str


ChainEntry = Claim | StreamEnd | StreamError | Cancelled | Expired
StreamMessage = TokenBatch | Accepted | Claim | StreamEnd | StreamError | Cancelled | Expired

decode_chain_entry = decoder(cast("type[ChainEntry]", ChainEntry))
"""One entry of a claim chain; SchemaError as :func:`schemas.codec.decode`."""
decode_stream_message = decoder(cast("type[StreamMessage]", StreamMessage))
"""Anything that a reader may receive; SchemaError as :func:`schemas.codec.decode`."""

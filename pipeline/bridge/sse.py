"""Server-sent events of one answer: a delta in, the bytes of its events out.

What is the same in every event of a choice is built once, and what is the same in all streams of a
model once a second, for that is in it; for a plain token only its text is encoded in between. Per
choice: an opening (the role, or the echoed prompt and its logprobs) with the first token, one event
per delta that has text or logprobs, and exactly one event with a finish reason. Their shapes are in
``pipeline/bridge/chunks.py``. Nothing here does I/O.

The events of one request are a function of its token stream alone, so every bridge writes the same
ones under the same numbers. Only what a bridge says for itself, an error, has no number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, get_args

import msgspec
from msgspec import UNSET, UnsetType

from pipeline.bridge.answers import Identity, error_answer, known_reason, usage_block
from schemas.errors import InvalidRequest, MeshError
from schemas.openai import UsageBlock
from schemas.requests import FinishReason
from schemas.tokens import TokenDelta, TokenLogprob, Usage

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_ID, _TEXT = "\x00id\x00", "\x00text\x00"  # where these stand in an event that is taken apart
_ID_JSON, _TEXT_JSON = _encode(_ID), _encode(_TEXT)[1:-1]


class StreamForm(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asked of the stream.

    ``continuous_usage`` (vLLM's) puts the usage so far into every chunk. ``event_ids`` numbers the
    events, so that a client can say where it was: a line that strict SSE readers know, and
    readers that take each event for one ``data:`` line do not.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    event_ids: bool = False
    counts_tokens: bool = True  # False: the answer is to have none, what comes is hidden


class Events(ABC):
    """The events of one HTTP stream, all choices together.

    Args:
        prompt_tokens: of all prompts, for the usage so far.
        echoes: per choice, text that goes in front; "" for none.
        after_event: events up to this number are made and left out: the client has them.
    """

    def __init__(
        self,
        identity: Identity,
        form: StreamForm,
        *,
        prompt_tokens: int,
        echoes: Sequence[str],
        after_event: int = 0,
    ) -> None:
        self.identity = identity
        self.form = form
        self.num_events = 0
        self._after_event = after_event
        self._usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=0)
        self._echoes = echoes
        self._is_numbered = form.event_ids or after_event > 0
        self._begin = b'data: {"id":' + _encode(identity.id)  # of all events, up to their shape
        self._shapes: list[Shape | None] = [None] * len(echoes)  # filled when a choice opens
        self._heads: list[bytes] = [b""] * len(echoes)  # those as well
        self._tail = b""
        self._runs = [False] * len(echoes)  # open, and its events differ in their text alone
        self._finished = [False] * len(echoes)

    def deltas(self, first: int, deltas: Sequence[TokenDelta]) -> bytes:
        """The events of what came for one prompt, in order, maybe none. A choice that has its
        finish reason gets no more.

        Args:
            first: the number of the prompt's first choice.
        """
        parts: list[bytes] = []
        texts: list[bytes] = []  # as JSON, unquoted, of a run of events that differ in it alone
        running = first
        for delta in deltas:
            choice = first + delta.index
            if choice != running:
                parts.append(self._run(running, texts))
                running, texts = choice, []
            if self._runs[choice] and delta.logprobs is None:
                texts += _encoded(delta)
                if delta.finish_reason is None:
                    continue
                parts += (self._run(choice, texts), self._close(choice, delta.finish_reason))
            else:
                parts += (self._run(choice, texts), self._any_delta(choice, delta))
            texts = []
        last = self._run(running, texts)
        return b"".join((*parts, last)) if parts else last

    def _run(self, choice: int, texts: Sequence[bytes]) -> bytes:
        if not texts:
            return b""
        head, tail = self._heads[choice], self._tail
        if self._is_numbered:
            return b"".join([self._numbered(head + text + tail) for text in texts])
        self.num_events += len(texts)
        return b"".join((head, (tail + head).join(texts), tail))

    def _any_delta(self, choice: int, delta: TokenDelta) -> bytes:
        if self._finished[choice]:
            return b""
        parts = [self._open(choice, delta.prompt_logprobs or ())]
        if self._runs[choice] and not delta.logprobs:
            parts.append(self._run(choice, _encoded(delta)))
        else:
            parts += [self._any_token(choice, one) for one in delta.split()]
        if delta.finish_reason is not None:
            parts.append(self._close(choice, delta.finish_reason))
        return b"".join(parts)

    def _any_token(self, choice: int, delta: TokenDelta) -> bytes:
        if self.form.continuous_usage and self.form.counts_tokens:
            self._count(len(delta.ids))
        if not (delta.text or delta.logprobs):
            return b""
        return self._event(self._text(choice, delta))

    def _open(self, choice: int, prompt: Sequence[TokenLogprob] = ()) -> bytes:
        if self._shapes[choice] is not None:
            return b""
        about, form, echo = self.identity, self.form, self._echoes[choice]
        shape = self._shapes[choice] = _shape(
            type(self), about.created, about.model, about.fingerprint, form.include_usage, choice
        )
        self._heads[choice] = self._begin + shape.head
        self._tail = shape.tail
        self._runs[choice] = not form.continuous_usage
        if echo or prompt or form.continuous_usage:
            opening = self._opening(choice, echo, prompt)
            return b"" if opening is None else self._event(opening)
        return self._numbered(self._begin + shape.opening) if shape.opening else b""

    def _close(self, choice: int, reason: str) -> bytes:
        self._finished[choice] = True
        self._runs[choice] = False
        shape = self._shapes[choice]
        if shape is None or self.form.continuous_usage:
            return self._event(self._closing(choice, reason))
        return self._numbered(self._begin + shape.closing[known_reason(reason)])

    def _count(self, num_tokens: int) -> None:
        self._usage = Usage(
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens + num_tokens,
        )

    def end(self, reasons: Sequence[str], usage: Usage) -> bytes:
        """What completes a stream that went well.

        ``reasons`` has one finish reason per choice; choices that got theirs before stay as they
        are. Then the usage chunk, if asked for, and ``[DONE]``.

        Raises:
            InvalidRequest: there is no event of the number ``after_event``.
        """
        parts = []
        for choice, reason in enumerate(reasons):
            if not self._finished[choice]:
                parts += [self._open(choice), self._close(choice, reason)]
        if self.form.include_usage:
            parts.append(self._event(self._last(usage_block(usage))))
        if self._after_event > self.num_events:
            raise InvalidRequest(
                f"this stream has {self.num_events} events, none is number {self._after_event}",
                param="last_event_id",
            )
        return b"".join([*parts, DONE])

    def failure(self, error: MeshError) -> bytes:
        """What a client gets when a stream that has begun fails; no ``[DONE]`` follows, and no
        number: a client that resumes goes on after the last event of the stream itself."""
        return b"data: " + _encode(error_answer(error)) + b"\n\n"

    def _event(self, data: msgspec.Struct) -> bytes:
        return self._numbered(b"data: " + _encode(data) + b"\n\n")

    def _numbered(self, data: bytes) -> bytes:
        self.num_events += 1
        if self.num_events <= self._after_event:
            return b""
        return b"id: %d\n%b" % (self.num_events, data) if self.form.event_ids else data

    @property
    def _usage_now(self) -> UsageBlock | UnsetType | None:
        if self.form.continuous_usage:
            return usage_block(self._usage)
        return None if self.form.include_usage else UNSET

    @abstractmethod
    def _opening(
        self, choice: int, echo: str, prompt: Sequence[TokenLogprob]
    ) -> msgspec.Struct | None: ...

    @abstractmethod
    def _text(self, choice: int, delta: TokenDelta) -> msgspec.Struct: ...

    @abstractmethod
    def _closing(self, choice: int, reason: str) -> msgspec.Struct: ...

    @abstractmethod
    def _last(self, usage: UsageBlock) -> msgspec.Struct: ...


class Shape(NamedTuple):
    """The events of a choice, each from behind the id of its stream on."""

    opening: bytes  # empty: none
    head: bytes  # of one with a text, up to the text
    tail: bytes  # from behind it
    closing: dict[FinishReason, bytes]


@lru_cache(1024)
def _shape(
    kind: type[Events], created: int, model: str, fingerprint: str, has_usage: bool, choice: int
) -> Shape:
    """That of all streams that begin in one second and ask for the same."""
    about = Identity(id=_ID, created=created, model=model, fingerprint=fingerprint)
    form = StreamForm(include_usage=has_usage)
    events = kind(about, form, prompt_tokens=0, echoes=[""] * (choice + 1))
    token = TokenDelta(request_id="", epoch=0, number=0, ids=(), text=_TEXT)
    opening = events._opening(choice, "", ())
    head, _, tail = _behind_id(events._text(choice, token)).rpartition(_TEXT_JSON)
    return Shape(
        opening=b"" if opening is None else _behind_id(opening),
        head=head,
        tail=tail,
        closing={
            reason: _behind_id(events._closing(choice, reason)) for reason in get_args(FinishReason)
        },
    )


def _behind_id(event: msgspec.Struct) -> bytes:
    return _encode(event).partition(_ID_JSON)[2] + b"\n\n"


def _encoded(delta: TokenDelta) -> list[bytes]:
    """The texts of its tokens as JSON, without quotes, those that add some. Text that is the same
    in JSON is encoded as a whole and cut then: each call of the encoder costs what a cut does."""
    text, sizes = delta.text, delta.sizes
    if not text:
        return []
    whole = _encode(text)[1:-1]
    if not sizes:
        return [whole]
    if len(whole) != len(text):
        return [_encode(text)[1:-1] for text in delta.texts() if text]
    texts, start = [], 0
    for size in sizes:
        if size:
            texts.append(whole[start : start + size])
            start += size
    if start < len(whole):
        texts.append(whole[start:])
    return texts

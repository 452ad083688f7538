"""Questions to a model's tokenizer, asked and answered on core subjects: nothing is stored."""

from __future__ import annotations

from schemas.codec import Message
from schemas.errors import ErrorInfo
from schemas.requests import ChatMessage


class Tokenize(Message, frozen=True, kw_only=True, tag="tokenize/1"):
    """Which token ids would this be? Exactly one of ``prompt`` and ``messages`` is set."""

    model: str
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    add_special_tokens: bool | None = None  # None: as a request would: text with, chats without
    add_generation_prompt: bool = True  # chats: up to where the model is to answer


class Detokenize(Message, frozen=True, kw_only=True, tag="detokenize/1"):
    """Which text are these ids? Special tokens show by name."""

    model: str
    ids: bytes  # packed little-endian uint32


class Tokenized(Message, frozen=True, kw_only=True, tag="tokenized/1"):
    """The answer to :class:`Tokenize`."""

    ids: bytes  # packed little-endian uint32
    max_model_len: int  # the model's context


class Detokenized(Message, frozen=True, kw_only=True, tag="detokenized/1"):
    """The answer to :class:`Detokenize`."""

    text: str


class QuestionRefused(Message, frozen=True, kw_only=True, tag="question-refused/1"):
    """The answer to what can't be answered."""

    error: ErrorInfo


Question = Tokenize | Detokenize
Reply = Tokenized | Detokenized | QuestionRefused

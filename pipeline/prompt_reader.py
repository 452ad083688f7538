"""From what a client asks to what a model computes: checks, chat template, tokens, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.limits import SequenceLimit, check_priority, check_sampling, check_token_ids
from pipeline.prefix_hash import ID_BYTES
from pipeline.response_format import FormatChecks
from pipeline.tokenizing import ChatTokenizer
from schemas.codec import pack_ids
from schemas.errors import ContextTooLong, InvalidRequest
from schemas.models import ModelCard
from schemas.requests import MAX_READER_NOTE_BYTES, InferenceRequest, SamplingParams

_LONG_TEXT_CHARS = 2_000  # tokenized on another thread, so that the loop goes on
_LONG_TEXT_TOKENS = 500


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its model sees it."""

    packed_ids: bytes  # as its record carries them: see schemas.codec.pack_ids
    sampling: SamplingParams  # seed and max_tokens set

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return len(self.packed_ids) // ID_BYTES


class PromptReader:
    """Reads requests, for every model that is registered.

    Args:
        held_of: how long a sequence of ``<model@rev>`` may be so that any worker could hold it;
            None: nobody is there to ask.
    """

    def __init__(self, held_of: Callable[[str], int | None]) -> None:
        self._held_of = held_of
        self._tokenizers: dict[str, ChatTokenizer] = {}  # by <model@rev>
        self._formats = FormatChecks()

    def load(self, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        """Be able to read requests for ``card``."""
        self._tokenizers[card.served] = tokenizer

    async def tokenizer_of(self, card: ModelCard) -> ChatTokenizer:
        """The tokenizer of a registered model; read from its folder the first time."""
        found = self._tokenizers.get(card.served)
        if found is None:  # registered by another control process
            found = await asyncio.to_thread(ChatTokenizer, Path(card.folder))
            self.load(card, found)
        return found

    async def read(self, request: InferenceRequest, card: ModelCard) -> Prompt:
        """Check ``request`` and take it apart.

        Raises:
            InvalidRequest: naming the field.
            ContextTooLong: prompt, or prompt and answer, do not fit.
        """
        check_sampling(request.sampling)
        check_priority(request.priority)
        if len(request.reader_note) > MAX_READER_NOTE_BYTES:
            raise InvalidRequest(f"over {MAX_READER_NOTE_BYTES} bytes", param="reader_note")
        if request.sampling.response_format is not None:
            await self._formats.check(request.sampling.response_format)
        ids = await self._tokenize(request, card)
        limit = SequenceLimit.of(card, self._held_of(card.served))
        prompt_field = "prompt" if request.messages is None else "messages"
        sampling = limit.resolve(request.sampling, len(ids) // ID_BYTES, prompt_field)
        return Prompt(packed_ids=ids, sampling=sampling)

    async def text_of(self, ids: list[int], card: ModelCard) -> str:
        """The text of a prompt."""
        tokenizer = await self.tokenizer_of(card)
        if len(ids) < _LONG_TEXT_TOKENS:
            return tokenizer.decode(ids)
        return await asyncio.to_thread(tokenizer.decode, ids)

    async def _tokenize(self, request: InferenceRequest, card: ModelCard) -> bytes:
        tokenizer = await self.tokenizer_of(card)
        if (request.messages is None) == (request.prompt is None):
            raise InvalidRequest("give either messages or prompt", param="messages")
        if request.messages is not None:
            text = tokenizer.render_chat(request.messages)
            ids = await _encode(tokenizer, text, card, add_special=False)
        elif isinstance(request.prompt, str):
            ids = await _encode(tokenizer, request.prompt, card, add_special=True)
        else:
            check_token_ids("prompt", request.prompt or (), card.vocab_size)
            ids = pack_ids(request.prompt or ())
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        sampling = request.sampling
        check_token_ids("stop_token_ids", sampling.stop_token_ids, card.vocab_size)
        check_token_ids("logit_bias", tuple(sampling.logit_bias), card.vocab_size)
        return ids


async def _encode(
    tokenizer: ChatTokenizer, text: str, card: ModelCard, *, add_special: bool
) -> bytes:
    least = tokenizer.least_num_tokens(text)
    if least > card.context_length:
        raise ContextTooLong(
            f"the prompt has over {least} tokens, the context of {card.name} is "
            f"{card.context_length}",
            param="messages",
        )
    if len(text) < _LONG_TEXT_CHARS:
        return tokenizer.encode(text, add_special=add_special)
    known = tokenizer.encode_known(text)  # another thread would take the lock for as long
    if known is not None:
        return known
    return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special)

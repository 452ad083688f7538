"""Questions to tokenizers: how many tokens is this, what do these ids say.

Consumes   mesh.v1.tokenize.<model>    Tokenize, Detokenize; control processes share them
Publishes  the reply subject           Tokenized, Detokenized or QuestionRefused
Keeps      nothing between questions
Twice?     answered twice
Fails      MeshError -> QuestionRefused; a question nobody can read is not answered
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from infra.bus import Bus, Msg
from infra.log import Logger
from pipeline.limits import check_token_ids
from pipeline.registry import Registry
from pipeline.tokenizing import ChatTokenizer
from schemas import subjects
from schemas.codec import decode, encode, unpack_ids
from schemas.errors import (
    InvalidRequest,
    MeshError,
    PayloadTooLarge,
    QueueFull,
    from_info,
)
from schemas.models import ModelCard
from schemas.tokenize import (
    Detokenize,
    Detokenized,
    Question,
    QuestionRefused,
    Reply,
    Tokenize,
    Tokenized,
)

QUEUE = "tokenize"
MAX_OPEN = 64  # questions taken and not answered; more are refused
MAX_TEXT_CHARS = 1 << 20  # up to 2 s of CPU
_NUM_THREADS = 2  # at once, so that long texts leave threads to admission

TokenizerOf = Callable[[ModelCard], Awaitable[ChatTokenizer]]


class TokenizerClient:
    """Asks whichever control process is free."""

    def __init__(self, bus: Bus, timeout_s: float) -> None:
        self._bus = bus
        self._timeout_s = timeout_s

    async def ask(self, question: Question) -> Tokenized | Detokenized:
        """The answer to ``question``.

        Raises:
            BusUnavailable: the bus is away, nobody answers such questions, or not in time.
            PayloadTooLarge: question or answer is over what the bus takes.
            MeshError: what the answer says.
        """
        subject = subjects.tokenize(question.model)
        message = await self._bus.request(subject, encode(question), timeout_s=self._timeout_s)
        reply: Reply = decode(message.data, Reply)  # type: ignore[arg-type]
        if isinstance(reply, QuestionRefused):
            raise from_info(reply.error)
        return reply


class TokenizeService:
    """Answers questions until its task is cancelled."""

    def __init__(
        self, bus: Bus, registry: Registry, tokenizer_of: TokenizerOf, log: Logger
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._tokenizer_of = tokenizer_of
        self._log = log
        self._num_open = 0
        self._threads = asyncio.Semaphore(_NUM_THREADS)
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Listen and answer."""
        async with asyncio.TaskGroup() as self._tasks:
            subscription = await self._bus.subscribe(subjects.ALL_TOKENIZE, self._take, queue=QUEUE)
            try:
                await asyncio.Event().wait()
            finally:
                await subscription.unsubscribe()

    def _take(self, message: Msg) -> None:
        assert self._tasks is not None, "it listens while it runs"
        if self._num_open < MAX_OPEN:
            self._tasks.create_task(self._handle(message))
        else:
            full = QueueFull(f"{MAX_OPEN} questions wait for tokenizers")
            self._tasks.create_task(self._reply(message, QuestionRefused(error=full.info)))

    async def _handle(self, message: Msg) -> None:
        self._num_open += 1
        try:
            await self._reply(message, await self._answer(message))
        finally:
            self._num_open -= 1

    async def _answer(self, message: Msg) -> Reply:
        try:
            question: Question = decode(message.data, Question)  # type: ignore[arg-type]
            if message.subject != subjects.tokenize(question.model):
                raise InvalidRequest("this model has another subject", param="model")
            card = self._registry.require(question.model)
            tokenizer = await self._tokenizer_of(card)
            async with self._threads:
                if isinstance(question, Tokenize):
                    return await asyncio.to_thread(_tokenized, question, card, tokenizer)
                return await asyncio.to_thread(_detokenized, question, card, tokenizer)
        except MeshError as error:
            return QuestionRefused(error=error.info)
        except Exception:  # a bug, or a tokenizer's own: of this question alone
            self._log.exception("question_failed", subject=message.subject)
            return QuestionRefused(error=MeshError("the tokenizer failed on this").info)

    async def _reply(self, message: Msg, reply: Reply) -> None:
        if not message.reply:
            return  # said, not asked
        try:
            await self._bus.publish(message.reply, encode(reply))
        except PayloadTooLarge as error:
            await self._reply(message, QuestionRefused(error=error.info))
        except MeshError as error:  # whoever asked hears nothing in time, and says so
            self._log.warning("question_not_answered", code=error.code, reason=error.message)


def _tokenized(question: Tokenize, card: ModelCard, tokenizer: ChatTokenizer) -> Tokenized:
    if (question.prompt is None) == (question.messages is None):
        raise InvalidRequest("give either messages or prompt", param="prompt")
    if question.messages is None:
        text, adds = question.prompt or "", True
    else:
        generates = question.add_generation_prompt
        text = tokenizer.render_chat(question.messages, add_generation_prompt=generates)
        adds = False  # the template wrote them
    if len(text) > MAX_TEXT_CHARS:
        param = "prompt" if question.messages is None else "messages"
        raise InvalidRequest(f"{len(text)} characters are over {MAX_TEXT_CHARS}", param=param)
    if question.add_special_tokens is not None:
        adds = question.add_special_tokens
    ids = tokenizer.encode(text, add_special=adds)
    return Tokenized(ids=ids, max_model_len=card.context_length)


def _detokenized(question: Detokenize, card: ModelCard, tokenizer: ChatTokenizer) -> Detokenized:
    ids = unpack_ids(question.ids)
    check_token_ids("tokens", tuple(ids), card.vocab_size)
    return Detokenized(text=tokenizer.decode(ids, skip_special=False))

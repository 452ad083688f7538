"""``/tokenize`` and ``/detokenize``, in vLLM's shapes: questions to the model's tokenizer."""

from __future__ import annotations

from typing import TypeVar

from pipeline.bridge.call import Call
from pipeline.bridge.checks import MAX_MODEL_NAME
from pipeline.bridge.convert import NUM_IDS, chat_message, parse
from pipeline.bridge.endpoints import Services
from pipeline.bridge.metering import find_model
from pipeline.limits import check_token_ids
from schemas.codec import pack_ids, unpack_ids
from schemas.errors import InvalidRequest
from schemas.openai import (
    Body,
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
)
from schemas.tokenize import Detokenize, Detokenized, Tokenize, Tokenized

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

B = TypeVar("B", bound=Body)


class TokenizeEndpoints:
    """Both ways; what is refused leaves as a MeshError."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tokenize(self, call: Call) -> None:
        """Text, or a conversation, to ids."""
        question = tokenize_question(await self._read(call, TokenizeBody))

        async def answer() -> None:
            said = await self._services.ask_tokenizer(question)
            assert isinstance(said, Tokenized), "an answer is of its question's kind"
            ids = unpack_ids(said.ids)
            await call.respond(
                200, TokenizeAnswer(count=len(ids), max_model_len=said.max_model_len, tokens=ids)
            )

        await call.attended(answer(), self._services.limits.default_deadline_s)

    async def detokenize(self, call: Call) -> None:
        """Ids to text."""
        question = detokenize_question(await self._read(call, DetokenizeBody))

        async def answer() -> None:
            said = await self._services.ask_tokenizer(question)
            assert isinstance(said, Detokenized), "an answer is of its question's kind"
            await call.respond(200, DetokenizeAnswer(prompt=said.text))

        await call.attended(answer(), self._services.limits.default_deadline_s)

    async def _read(self, call: Call, kind: type[B]) -> B:
        limits = self._services.limits
        body = parse(await call.read_body(limits.max_body_bytes, limits.body_s), kind)
        model: str = body.model  # type: ignore[attr-defined]
        call.facts["model"] = model[:MAX_MODEL_NAME]
        find_model(call, self._services.models, model)
        return body


def tokenize_question(body: TokenizeBody) -> Tokenize:
    """The question behind a body.

    Raises:
        InvalidRequest: both prompt and messages or neither, or something that is not served.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    for name in ("return_token_strs", "continue_final_message", "tools"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not served", param=name)
    messages = None
    if body.messages is not None:
        messages = tuple(chat_message(i, message) for i, message in enumerate(body.messages))
    return Tokenize(
        model=body.model,
        prompt=body.prompt,
        messages=messages,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt is not False,
    )


def detokenize_question(body: DetokenizeBody) -> Detokenize:
    """The same for ids.

    Raises:
        InvalidRequest: an id that no vocabulary has.
    """
    check_token_ids("tokens", tuple(body.tokens), NUM_IDS)
    return Detokenize(model=body.model, ids=pack_ids(body.tokens))

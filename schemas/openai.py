"""OpenAI's HTTP shapes: what its clients send, and what they expect back.

Requests: every field that a client may leave out may also be null; fields that are not listed are
ignored. Only JSON types are checked here; ranges and meaning are the bridge's part.
Answers: a field that is UNSET is left out, None is written as null, as OpenAI does per field.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from schemas.requests import FinishReason
from schemas.unserved import Body as Body
from schemas.unserved import UnservedFields


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a client receives."""


# --- requests -------------------------------------------------------------------------------


class StreamOptions(Body, frozen=True, kw_only=True):
    """``continuous_usage_stats`` is vLLM's: usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(Body, frozen=True, kw_only=True):
    """One part of a message's content; only ``type`` "text" can be served."""

    type: str
    text: str | None = None


class MessageBody(Body, frozen=True, kw_only=True):
    """One turn, as the client sends it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class JsonSchemaBody(Body, frozen=True, kw_only=True):
    """A schema with its name. ``strict`` changes nothing: every schema is kept to."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormatBody(Body, frozen=True, kw_only=True):
    """What the answer must look like."""

    type: str
    json_schema: JsonSchemaBody | None = None


class GenerationBody(UnservedFields, frozen=True, kw_only=True):
    """What chat and completions have in common, vLLM's additions included."""

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormatBody | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    echo: bool | None = None  # vLLM's


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt``: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | bool | None = None  # false is null, as vLLM and chat have it
    echo: bool | None = None


class TokenizeBody(Body, frozen=True, kw_only=True):
    """``POST /tokenize``, vLLM's: a text, or a conversation."""

    model: str
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Any] | None = None


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """``POST /detokenize``, vLLM's."""

    model: str
    tokens: list[int]


# --- parts of answers -----------------------------------------------------------------------


class PromptTokensDetails(Answer, frozen=True, kw_only=True):
    """The part of the prompt that was found in a KV cache."""

    cached_tokens: int


class UsageBlock(Answer, frozen=True, kw_only=True):
    """Exact token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class TopLogprobEntry(Answer, frozen=True, kw_only=True):
    """One alternative at a position. ``bytes`` are the token's own, also where it is part of a
    character and ``token`` has U+FFFD; null where nobody knows them."""

    token: str
    logprob: float
    bytes: list[int] | None


class LogprobEntry(TopLogprobEntry, frozen=True, kw_only=True):
    """The chosen token and its alternatives, most likely first."""

    top_logprobs: list[TopLogprobEntry]


class ChatLogprobs(Answer, frozen=True, kw_only=True):
    """Logprobs in the form of chat."""

    content: list[LogprobEntry]
    refusal: None = None


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    """Logprobs in the form of completions: four lists of one length.

    ``text_offset`` counts characters from the start of the choice's text. With ``echo`` the
    prompt's tokens come first; null stands for what the first of them has not.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


# --- answers --------------------------------------------------------------------------------


class AssistantMessage(Answer, frozen=True, kw_only=True):
    """The model's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Answer, frozen=True, kw_only=True):
    """One choice of a whole chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """The whole answer of chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBlock
    system_fingerprint: str


class Delta(Answer, frozen=True, kw_only=True):
    """What one chunk adds to the model's turn; empty in the last chunk of a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Answer, frozen=True, kw_only=True):
    """One choice in one chunk of a chat stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Answer, frozen=True, kw_only=True):
    """One event of a chat stream; ``choices`` is empty in the usage chunk."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageBlock | UnsetType | None = UNSET


class CompletionChoice(Answer, frozen=True, kw_only=True):
    """One choice of a completion: whole, or what one chunk adds."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(Answer, frozen=True, kw_only=True):
    """The whole answer of completions, and each event of their stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBlock | UnsetType | None = UNSET


class ModelObject(Answer, frozen=True, kw_only=True):
    """One served model; ``max_model_len`` and ``root`` as vLLM has them."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Answer, frozen=True, kw_only=True):
    """``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class TokenizeAnswer(Answer, frozen=True, kw_only=True):
    """Token ids, as vLLM answers."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None = None


class DetokenizeAnswer(Answer, frozen=True, kw_only=True):
    """The text of token ids, as vLLM answers."""

    prompt: str


class ErrorBody(Answer, frozen=True, kw_only=True):
    """What went wrong, and which parameter is to blame."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer, frozen=True, kw_only=True):
    """Every answer that is no success, and the error event of a stream."""

    error: ErrorBody

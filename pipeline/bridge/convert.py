"""OpenAI bodies to ``InferenceRequest``: types, ranges, and clear refusals.

What needs the model (context length, vocabulary, chat template) is left to admission, which also
checks the ranges again for those who publish to the bus themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from pipeline.access.permit import ANYONE, Permit
from pipeline.bridge.checks import check
from pipeline.bridge.note import ReaderNote
from pipeline.client import new_request_id
from pipeline.limits import check_sampling, check_token_ids
from schemas.codec import decode_json
from schemas.errors import InvalidRequest, SchemaError
from schemas.openai import (
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    MessageBody,
    ResponseFormatBody,
)
from schemas.requests import ChatMessage, InferenceRequest, ResponseFormat, SamplingParams, Slo

B = TypeVar("B", bound=Body)

MAX_CHOICES = 256  # prompts times n of one HTTP request
COMPLETION_MAX_TOKENS = 16  # what OpenAI's completions do when max_tokens is left out
MAX_STOPS = 4  # OpenAI's; the bus takes more
NUM_IDS = 2**32  # ids travel in 32 bits; admission knows the vocabulary

# Fields of the body that are called as those of ``SamplingParams``, and left to it when null.
_NAMED = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "n",
)  # fmt: skip
_named_of = attrgetter(*_NAMED)
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
# A developer's message is OpenAI's newer name for the system's; chat templates know the older.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has beside its body: until when and in which time it is wanted, who asks,
    and how the answer will be given."""

    deadline_unix_ms: int
    label: str = ""
    permit: Permit = ANYONE
    slo: Slo = Slo()
    note: ReaderNote | None = None


def parse(data: bytes, kind: type[B]) -> B:
    """The JSON body ``data``.

    Raises:
        InvalidRequest: no JSON, a missing field or a wrong type; ``param`` is the field's path.
    """
    try:
        return decode_json(data, kind)
    except SchemaError as error:
        text = error.message.replace("`", "'").partition(" - at '$")[0]
        raise InvalidRequest(text, param=(error.param or "").lstrip("$.") or None) from error


def chat_requests(body: ChatBody, arrival: Arrival) -> list[InferenceRequest]:
    """One request for one conversation (a list, as for completions).

    Raises:
        InvalidRequest: a value out of range, or something that is not served; names the field.
    """
    check(body)
    messages = tuple(chat_message(i, message) for i, message in enumerate(body.messages))
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, max_tokens=max_tokens, logprobs=logprobs)
    return _requests(body, arrival, sampling, [{"messages": messages}])


def completion_requests(body: CompletionBody, arrival: Arrival) -> list[InferenceRequest]:
    """One request per prompt, in order.

    Raises:
        InvalidRequest: as :func:`chat_requests`.
    """
    check(body)
    prompts = list(_prompts(body.prompt))
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={body.n or 1} are over {MAX_CHOICES} choices",
            param="prompt",
        )
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo = bool(body.echo)
    if body.logprobs is True:
        raise InvalidRequest("logprobs is a number in completions", param="logprobs")
    logprobs = None if body.logprobs is False else body.logprobs
    sampling = _sampling(
        body,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    inputs = [{"prompt": prompt, "echo": echo} for prompt in prompts]
    return _requests(body, arrival, sampling, inputs)


def chat_message(i: int, message: MessageBody) -> ChatMessage:
    """Turn ``i`` of a conversation.

    Raises:
        InvalidRequest: a role or content that is not served; names the field.
    """
    where = f"messages[{i}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"role {message.role[:40]!r} is none of {', '.join(_ROLES)}"
            " (tool messages are not served yet)",
            param=f"{where}.role",
        )
    if message.tool_calls or message.function_call:
        raise InvalidRequest("tool calls are not served yet", param=f"{where}.tool_calls")
    return ChatMessage(role=role, content=_content(where, role, message), name=message.name)


def _content(where: str, role: str, message: MessageBody) -> str | list[dict[str, Any]]:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise InvalidRequest("content is missing", param=f"{where}.content")
    for k, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                "only parts of type 'text' with a text are served",
                param=f"{where}.content[{k}]",
            )
    return [{"type": "text", "text": part.text} for part in content]


def _prompts(prompt: str | list[str | int | list[int]]) -> Iterator[str | tuple[int, ...]]:
    if isinstance(prompt, str):
        yield prompt
    elif not prompt:
        raise InvalidRequest("prompt is empty", param="prompt")
    elif all(isinstance(item, int) for item in prompt):
        yield _token_ids("prompt", prompt)
    elif all(isinstance(item, str) for item in prompt):
        yield from msgspec.convert(prompt, list[str])
    elif all(isinstance(item, list) for item in prompt):
        for i, ids in enumerate(prompt):
            yield _token_ids(f"prompt[{i}]", ids)
    else:
        raise InvalidRequest("prompt mixes texts and token ids", param="prompt")


def _token_ids(where: str, ids: Any) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("a prompt has no tokens", param=where)
    made = tuple(ids)
    check_token_ids(where, made, NUM_IDS)
    return made


def _sampling(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    sampling = _plain_sampling(
        _named_of(body),
        max_tokens,
        max(body.top_k or 0, 0),
        _stop(body.stop),
        bool(body.ignore_eos),
        logprobs,
        prompt_logprobs,
    )
    if body.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=body.seed)
    if not (body.logit_bias or body.stop_token_ids or body.response_format):
        return sampling
    sampling = msgspec.structs.replace(
        sampling,
        logit_bias=_logit_bias(body.logit_bias or {}),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        response_format=_response_format(body.response_format),
    )
    check_sampling(sampling)
    check_token_ids("stop_token_ids", sampling.stop_token_ids, NUM_IDS)
    check_token_ids("logit_bias", tuple(sampling.logit_bias), NUM_IDS)
    return sampling


@lru_cache(256)
def _plain_sampling(
    named: tuple[Any, ...],
    max_tokens: int | None,
    top_k: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """What is neither nested nor, as a seed is, another one each time. Clients ask for the same
    again and again, so it is checked once."""
    given = {name: value for name, value in zip(_NAMED, named, strict=True) if value is not None}
    sampling = SamplingParams(
        max_tokens=max_tokens,
        top_k=top_k,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **given,
    )
    check_sampling(sampling)
    return sampling


def _response_format(given: ResponseFormatBody | None) -> ResponseFormat | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat(kind="json_object")
    if given.type != "json_schema":
        raise InvalidRequest(
            f"type {given.type[:40]!r} is none of text, json_object, json_schema",
            param="response_format.type",
        )
    wanted, where = given.json_schema, "response_format.json_schema"
    if wanted is None:
        raise InvalidRequest("json_schema is missing", param=where)
    if not _SCHEMA_NAME.match(wanted.name):
        raise InvalidRequest("a name is 1 to 64 of A-Z a-z 0-9 _ -", param=f"{where}.name")
    if wanted.schema is None:
        raise InvalidRequest("schema is missing", param=f"{where}.schema")
    text = json.dumps(wanted.schema, ensure_ascii=False, separators=(",", ":"))
    return ResponseFormat(kind="json_schema", json_schema=text)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"key {key[:40]!r} is no token id", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def _stop(given: str | list[str] | None) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings", param="stop")
    return stop


def _requests(
    body: GenerationBody, arrival: Arrival, sampling: SamplingParams, inputs: list[dict[str, Any]]
) -> list[InferenceRequest]:
    permit, note = arrival.permit, arrival.note
    priority = permit.priority_of(body.priority)
    packed = b"" if note is None else note.packed_for(len(inputs))
    return [
        InferenceRequest(
            request_id=new_request_id(),
            model=body.model,
            sampling=sampling,
            deadline_unix_ms=arrival.deadline_unix_ms,
            priority=priority,
            tenant=permit.tenant,
            label=arrival.label,
            cache_salt=body.cache_salt or "",
            reader_note=packed,
            slo=arrival.slo,
            **given,
        )
        for given in inputs
    ]

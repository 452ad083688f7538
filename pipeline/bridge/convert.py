"""OpenAI bodies to ``InferenceRequest``: types, ranges, and clear refusals.

What needs the model (context length, vocabulary, chat template) is left to admission, which also
checks the ranges again for those who publish to the bus themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from schemas.codec import decode_json
from schemas.errors import InvalidRequest, SchemaError
from schemas.openai import ChatBody, CompletionBody, GenerationBody, MessageBody
from schemas.requests import ChatMessage, InferenceRequest, SamplingParams

B = TypeVar("B", bound=GenerationBody)

MAX_STOP = 4
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 256  # prompts times n of one HTTP request
MAX_MODEL_NAME = 255
MAX_TOKEN_ID = 2**32 - 1
COMPLETION_MAX_TOKENS = 16  # what OpenAI's completions do when max_tokens is left out


@dataclass(frozen=True, slots=True)
class Range:
    """``low`` to ``high``, both included unless ``above`` says that ``low`` is not."""

    low: float
    high: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies inside."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.above else 'from'} {self.low:g} to {self.high:g}"


RANGES: dict[str, Range] = {
    "max_tokens": Range(1, 2**31 - 1),
    "max_completion_tokens": Range(1, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 100, above=True),
    "seed": Range(-(2**63), 2**63 - 1),
    "n": Range(1, 128),
    "best_of": Range(1, 128),
    "top_logprobs": Range(0, 20),
    "priority": Range(-(2**31), 2**31 - 1),
}
LOGPROBS = Range(0, 20)  # of completions; chat's ``logprobs`` is a boolean
LOGIT_BIAS = Range(-100, 100)

Asks = Callable[[Any], bool]
_UNSERVED: tuple[tuple[str, Asks, str], ...] = (
    (
        "response_format",
        lambda body: body.response_format is not None and body.response_format.type != "text",
        "only response_format of type 'text' is served",
    ),
    ("best_of", lambda body: (body.best_of or 1) > (body.n or 1), "best_of above n is not served"),
    ("use_beam_search", lambda body: body.use_beam_search, "beam search is not served"),
)
_UNSERVED_IN_CHAT: tuple[tuple[str, Asks, str], ...] = (
    (
        "tools",
        lambda body: body.tools and body.tool_choice != "none",
        "tools are not served yet; leave them out, or set tool_choice to 'none'",
    ),
    (
        "tool_choice",
        lambda body: body.tool_choice not in (None, "none", "auto"),
        "tool_choice asks for a tool call, which is not served yet",
    ),
    (
        "functions",
        lambda body: body.functions and body.function_call != "none",
        "functions are not served",
    ),
    (
        "modalities",
        lambda body: any(kind != "text" for kind in body.modalities or ()),
        "only text is served",
    ),
    (
        "continue_final_message",
        lambda body: body.continue_final_message,
        "continue_final_message is not served yet",
    ),
)
_UNSERVED_IN_COMPLETIONS: tuple[tuple[str, Asks, str], ...] = (
    ("suffix", lambda body: body.suffix, "suffix is not served: no insertion"),
    (
        "logprobs",
        lambda body: body.echo and body.logprobs is not None,
        "logprobs of the prompt are not served: use logprobs or echo, not both",
    ),
)
# A developer's message is OpenAI's newer name for the system's; chat templates know the older.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a request has beside its body."""

    deadline_unix_ms: int
    label: str = ""


def parse(data: bytes, kind: type[B]) -> B:
    """The JSON body ``data``.

    Raises:
        InvalidRequest: no JSON, a missing field or a wrong type; ``param`` is the field's path.
    """
    try:
        return decode_json(data, kind)
    except SchemaError as error:
        path = (error.param or "").removeprefix("$").removeprefix(".")
        raise InvalidRequest(_in_words(error.message), param=path or None) from error


def _in_words(message: str) -> str:
    text = message.replace("`", "'").partition(" - at '$")[0]
    return f"{text[:1].lower()}{text[1:]}" if text.startswith(("Expected", "Object")) else text


def chat_requests(body: ChatBody, arrival: Arrival) -> list[InferenceRequest]:
    """One request for one conversation (a list, as for completions).

    Raises:
        InvalidRequest: a value out of range, or something that is not served; names the field.
    """
    _check(body, _UNSERVED + _UNSERVED_IN_CHAT)
    messages = tuple(_message(i, message) for i, message in enumerate(body.messages))
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, max_tokens=max_tokens, logprobs=logprobs)
    return [_request(body, arrival, sampling, messages=messages)]


def completion_requests(body: CompletionBody, arrival: Arrival) -> list[InferenceRequest]:
    """One request per prompt, in order.

    Raises:
        InvalidRequest: as :func:`chat_requests`.
    """
    _check(body, _UNSERVED + _UNSERVED_IN_COMPLETIONS)
    if body.logprobs is not None:
        _in_range("logprobs", body.logprobs, LOGPROBS)
    prompts = list(_prompts(body.prompt))
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={body.n or 1} are over {MAX_CHOICES} choices",
            param="prompt",
        )
    max_tokens = body.max_tokens or COMPLETION_MAX_TOKENS
    sampling = _sampling(body, max_tokens=max_tokens, logprobs=body.logprobs)
    echo = bool(body.echo)
    return [_request(body, arrival, sampling, prompt=prompt, echo=echo) for prompt in prompts]


def _check(body: GenerationBody, unserved: tuple[tuple[str, Asks, str], ...]) -> None:
    if not 0 < len(body.model) <= MAX_MODEL_NAME:
        raise InvalidRequest(f"model is not 1 to {MAX_MODEL_NAME} characters", param="model")
    for name, allowed in RANGES.items():
        value = getattr(body, name, None)
        if value is not None:
            _in_range(name, value, allowed)
    for name, asks, reason in unserved:
        if asks(body):
            raise InvalidRequest(reason, param=name)


def _in_range(name: str, value: float, allowed: Range) -> None:
    if not allowed.holds(value):
        raise InvalidRequest(f"{name} is {value:.12g}, not {allowed}", param=name)


def _message(i: int, message: MessageBody) -> ChatMessage:
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
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise InvalidRequest(f"a token id is not from 0 to {MAX_TOKEN_ID}", param=where)
    return tuple(ids)


def _sampling(
    body: GenerationBody, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is over max_tokens ({max_tokens})", param="min_tokens")
    given = {
        name: value
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                     "repetition_penalty", "n", "seed")
        if (value := getattr(body, name)) is not None
    }  # fmt: skip
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        top_k=max(body.top_k or 0, 0),  # -1 is vLLM's word for "off"
        logit_bias=_logit_bias(body.logit_bias or {}),
        stop=_stop(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or []),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        **given,
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"over {MAX_LOGIT_BIAS} entries", param="logit_bias")
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise InvalidRequest(f"key {key[:40]!r} is no token id", param="logit_bias")
        _in_range("logit_bias", value, LOGIT_BIAS)
        bias[int(key)] = value
    return bias


def _stop(given: str | list[str] | None) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stop) > MAX_STOP:
        raise InvalidRequest(f"over {MAX_STOP} stop strings", param="stop")
    if "" in stop:
        raise InvalidRequest("a stop string is empty", param="stop")
    return stop


def _stop_token_ids(ids: list[int]) -> tuple[int, ...]:
    if ids and (min(ids) < 0 or max(ids) > MAX_TOKEN_ID):
        raise InvalidRequest(
            f"a token id is not from 0 to {MAX_TOKEN_ID}", param="stop_token_ids"
        )
    return tuple(ids)


def _request(
    body: GenerationBody, arrival: Arrival, sampling: SamplingParams, **what: Any
) -> InferenceRequest:
    return InferenceRequest(
        request_id=secrets.token_hex(16),
        model=body.model,
        sampling=sampling,
        deadline_unix_ms=arrival.deadline_unix_ms,
        priority=body.priority or 0,
        label=arrival.label,
        cache_salt=body.cache_salt or "",
        **what,
    )

"""What a body may ask for: a table of ranges, and one of what is not served."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any

from pipeline.limits import RANGES, Range
from schemas.errors import InvalidRequest
from schemas.openai import ChatBody, CompletionBody, GenerationBody
from schemas.unserved import unserved

MAX_MODEL_NAME = 255

# The body's numbers. What ``SamplingParams`` has under the same name is bounded in one place for
# HTTP and bus; ``logprobs`` is not here: a number in completions, a boolean in chat. A prompt's are
# asked for by ``echo`` beside it.
BODY_RANGES: dict[str, Range] = {
    **{name: allowed for name, allowed in RANGES.items() if not name.endswith("logprobs")},
    "top_k": Range(-1, RANGES["top_k"].high),  # -1 is vLLM's word for "off"
    "max_completion_tokens": Range(1, RANGES["max_tokens"].high),
    "top_logprobs": RANGES["logprobs"],
    "best_of": RANGES["n"],
    "priority": Range(-(2**31), 2**31 - 1),
}


def _numbers(kind: type[GenerationBody]) -> tuple[tuple[str, ...], attrgetter[Any]]:
    names = tuple(name for name in BODY_RANGES if name in kind.__struct_fields__)
    return names, attrgetter(*names)


_KINDS: tuple[type[GenerationBody], ...] = (ChatBody, CompletionBody)
_NUMBERS = {kind: _numbers(kind) for kind in _KINDS}

Asks = Callable[[Any], bool]
_UNSERVED: tuple[tuple[str, Asks, str], ...] = (
    ("best_of", lambda body: (body.best_of or 1) > (body.n or 1), "best_of above n is not served"),
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
    ("echo", lambda body: body.echo, "echo is not served in chat"),
)

_REFUSALS: dict[type[GenerationBody], tuple[tuple[str, Asks, str], ...]] = {
    ChatBody: _UNSERVED + _UNSERVED_IN_CHAT,
    CompletionBody: _UNSERVED,
}


def check(body: GenerationBody) -> None:
    """Ranges and refusals of ``body``.

    Raises:
        InvalidRequest: names the field.
    """
    if not 0 < len(body.model) <= MAX_MODEL_NAME:
        raise InvalidRequest(f"model is not 1 to {MAX_MODEL_NAME} characters", param="model")
    names, numbers_of = _NUMBERS[type(body)]
    _check_numbers(names, numbers_of(body))
    if found := unserved(body):
        raise InvalidRequest(found[1], param=found[0])
    for name, asks, reason in _REFUSALS[type(body)]:
        if asks(body):
            raise InvalidRequest(reason, param=name)


@lru_cache(256)
def _check_numbers(names: tuple[str, ...], numbers: tuple[float | None, ...]) -> None:
    """Clients ask for the same again and again, so it is checked once."""
    for name, number in zip(names, numbers, strict=True):
        if number is None:
            continue
        low, high = BODY_RANGES[name]
        if not low <= number <= high:
            raise InvalidRequest(f"{name} must be from {low} to {high}, not {number}", param=name)

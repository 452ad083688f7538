"""What a body may ask for: one table of ranges, and one of what is not served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas.errors import InvalidRequest
from schemas.openai import ChatBody, GenerationBody

MAX_MODEL_NAME = 255


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
        return f"{'above' if self.above else 'from'} {self.low} to {self.high}"


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


def check(body: GenerationBody) -> None:
    """Ranges and refusals of ``body``.

    Raises:
        InvalidRequest: names the field.
    """
    if not 0 < len(body.model) <= MAX_MODEL_NAME:
        raise InvalidRequest(f"model is not 1 to {MAX_MODEL_NAME} characters", param="model")
    for name, allowed in RANGES.items():
        value = getattr(body, name, None)
        if value is not None:
            in_range(name, value, allowed)
    more = _UNSERVED_IN_CHAT if isinstance(body, ChatBody) else _UNSERVED_IN_COMPLETIONS
    for name, asks, reason in _UNSERVED + more:
        if asks(body):
            raise InvalidRequest(reason, param=name)


def in_range(name: str, value: float, allowed: Range) -> None:
    """Raise InvalidRequest unless ``value`` is ``allowed`` for the field ``name``."""
    if not allowed.holds(value):
        raise InvalidRequest(f"{name} is {value}, not {allowed}", param=name)

"""From ``response_format`` to a grammar that llguidance compiles, and whether it can be kept.

Admission checks here what workers compile later, so a schema that does not work is refused before
any worker sees it. No torch, no model: a check compiles for an alphabet of single bytes.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import llguidance

from schemas.errors import InvalidRequest
from schemas.requests import ResponseFormat

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

FIELD = "response_format"
_MAX_REASON_CHARS = 300
_MAX_KNOWN = 256  # formats whose check is remembered
_NUM_PROBED_STEPS = 8

# Between two parts of the JSON: room for a line and its indentation, not for the endless white
# space that small models like to fall into.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"
_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": _WHITE_SPACE,
    "lenient": False,  # a keyword that can't be kept is refused, not ignored
    "coerce_one_of": False,  # the same for alternatives that may overlap
}
_ANY_OBJECT = '{"type":"object"}'


def limits() -> llguidance.LLParserLimits:
    """What one grammar may cost a process: about 7 ms per mask, and 40 MB of states."""
    return llguidance.LLParserLimits(
        step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False
    )


def grammar_of(wanted: ResponseFormat) -> str:
    """The grammar of ``wanted``, in the form that llguidance takes; it may not compile.

    Raises:
        InvalidRequest: the schema is no JSON object.
    """
    if wanted.kind == "json_object":
        return llguidance.LLMatcher.grammar_from_json_schema(_ANY_OBJECT, overrides=_OPTIONS)
    schema = _parse(wanted.json_schema)
    schema.pop("x-guidance", None)  # options of the library, which would go before ours
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False), overrides=_OPTIONS
        )
    except ValueError as error:
        raise _refusal(str(error)) from error


def check_format(wanted: ResponseFormat) -> None:
    """Compile ``wanted`` and take some steps with it.

    Raises:
        InvalidRequest: it does not compile, nothing can satisfy it, or it is too complex.

    Cost: as compiling, 1 ms as a rule; 0.2 s at worst for sizes that ``pipeline.limits`` lets
    through. Python's lock is free meanwhile.
    """
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar_of(wanted), log_level=0, limits=limits())
    for _ in range(_NUM_PROBED_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not matcher.is_error() and mask:
            matcher.consume_token((mask & -mask).bit_length() - 1)  # the lowest that is allowed
    if matcher.is_error():
        raise _refusal(matcher.get_error())


class FormatChecks:
    """Checks for an event loop: off its thread, one at a time, each format once."""

    def __init__(self) -> None:
        self._known: OrderedDict[ResponseFormat, str] = OrderedDict()  # why not; "": it works
        self._lock = asyncio.Lock()

    async def check(self, wanted: ResponseFormat | None) -> None:
        """As :func:`check_format`; None is fine."""
        if wanted is None:
            return
        async with self._lock:
            reason = self._known.get(wanted)
            if reason is None:
                reason = await asyncio.to_thread(_reason, wanted)
            self._known[wanted] = reason
            self._known.move_to_end(wanted)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if reason:
            raise InvalidRequest(reason, param=FIELD)


def _reason(wanted: ResponseFormat) -> str:
    try:
        check_format(wanted)
    except InvalidRequest as error:
        return error.message
    return ""


def _parse(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"it is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _refusal("it is no JSON object")
    return schema


def _refusal(reason: str) -> InvalidRequest:
    words = " ".join(reason.replace("<non-verbose/>", "").split()) or "it can't be satisfied"
    return InvalidRequest(f"the schema can't be used: {words[:_MAX_REASON_CHARS]}", param=FIELD)

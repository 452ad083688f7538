"""Which formats of an answer are taken, and how the others are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import response_format
from pipeline.limits import MAX_SCHEMA_BYTES, check_sampling
from pipeline.response_format import FormatChecks, check_format
from schemas.errors import InvalidRequest
from schemas.requests import ResponseFormat, SamplingParams
from tests.pipeline.bridge.fake import patient


def schema(of: object) -> ResponseFormat:
    return ResponseFormat(kind="json_schema", json_schema=json.dumps(of))


def refusal(wanted: ResponseFormat) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_format(wanted)
    assert (caught.value.param, caught.value.http_status) == ("response_format", 400)
    return caught.value.message


@pytest.mark.parametrize(
    "wanted",
    [
        ResponseFormat(kind="json_object"),
        schema({}),
        schema({"type": "integer", "minimum": 3}),
        schema({"enum": ["a", None, 3]}),
        schema({"type": "string", "pattern": "^[A-Z]{2}$"}),
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}),
        schema({"oneOf": [{"type": "string"}, {"type": "null"}]}),
    ],
)  # fmt: skip
def test_what_can_be_kept_is_taken(wanted: ResponseFormat) -> None:
    """Objects, scalars, choices, patterns, recursion."""
    check_format(wanted)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"type": "thing"}, "Invalid type: thing"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"$ref": "#/$defs/missing"}, "does not exist"),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "not present in a registry"),
        ({"$ref": "#"}, "can't be used"),
        ({"type": "string", "pattern": "^" + "(a|b|c)?" * 3000 + "$"}, "too many"),
        ([{"type": "string"}], "no JSON object"),
        (True, "no JSON object"),
    ],
)
def test_what_can_not_be_kept_is_refused(of: object, reason: str) -> None:
    """A keyword is never ignored: what the answer could break is refused, in words."""
    assert reason in refusal(schema(of))


@pytest.mark.parametrize("text", ["", "{", "nonsense", "NaN", "[" * 5000, '{"a":' * 5000, "\x00"])
def test_text_that_is_no_schema_is_refused(text: str) -> None:
    """Whoever publishes to the bus may send any text."""
    assert "can't be used" in refusal(ResponseFormat(kind="json_schema", json_schema=text))


def test_options_of_the_library_are_not_the_callers() -> None:
    """A schema can't switch strictness off by naming the library's own settings."""
    lenient = {"not": {}, "x-guidance": {"lenient": True}}
    assert "Unimplemented" in refusal(schema(lenient))


def test_a_schema_over_the_bound_is_not_even_compiled() -> None:
    """Its size is among the first checks, for HTTP and bus."""
    with pytest.raises(InvalidRequest, match="over") as caught:
        check_sampling(SamplingParams(response_format=schema({"title": "x" * MAX_SCHEMA_BYTES})))
    assert caught.value.param == "response_format"


def test_the_largest_schema_does_not_hold_admission_up() -> None:
    """The worst kind that is known, at the bound: well under the time of a request's life."""
    properties = {f"p{number}": {"type": "string"} for number in range(1100)}
    wanted = schema({"type": "object", "properties": properties})
    assert 0.9 * MAX_SCHEMA_BYTES < len(wanted.json_schema) <= MAX_SCHEMA_BYTES
    started_s = time.perf_counter()
    with contextlib.suppress(InvalidRequest):
        check_format(wanted)
    assert time.perf_counter() - started_s < 5.0  # 0.2 s on an idle machine


@patient
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "properties", "items", "enum", "anyOf", "oneOf", "pattern", "$ref",
                         "minLength", "maxItems", "x-guidance", "required"]) | st.text(),
        inner, max_size=4),
    max_leaves=8,
))  # fmt: skip
def test_any_schema_is_taken_or_refused(of: object) -> None:
    """Nothing but InvalidRequest comes out, whatever goes in."""
    with contextlib.suppress(InvalidRequest):
        check_format(schema(of))


async def test_a_format_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Good and bad are remembered, also when asked for at the same time; memory is bounded."""
    calls: list[ResponseFormat] = []

    def count(wanted: ResponseFormat) -> None:
        calls.append(wanted)
        check_format(wanted)

    monkeypatch.setattr(response_format, "check_format", count)
    monkeypatch.setattr(response_format, "_MAX_KNOWN", 2)
    checks = FormatChecks()
    good, bad = ResponseFormat(kind="json_object"), schema({"type": "thing"})
    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(checks.check(good))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="thing"):
            await checks.check(bad)
    await checks.check(None)
    assert calls == [good, bad]
    await checks.check(schema({}))
    await checks.check(good)
    assert len(calls) == 4

"""``/openapi.json``: the bridge's interface, made from the structs that it decodes and encodes.

Fields, ranges and error codes come from where they are checked and raised, so the page can't
promise what the code does not keep.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from pipeline.bridge.checks import BODY_RANGES
from pipeline.bridge.errors import OriginRefused
from pipeline.limits import RANGES
from pipeline.policy import MAX_SLO_MS
from schemas.errors import MeshError
from schemas.openai import (
    ChatBody,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionBody,
    DetokenizeAnswer,
    DetokenizeBody,
    ErrorAnswer,
    ModelList,
    ModelObject,
    TokenizeAnswer,
    TokenizeBody,
)

Json = dict[str, Any]

_REF = "#/components/schemas/"
_JSON_TYPE, _EVENTS_TYPE = "application/json", "text/event-stream"
_STRUCTS = (
    ChatBody, ChatCompletion, ChatChunk, CompletionBody, Completion, TokenizeBody, TokenizeAnswer,
    DetokenizeBody, DetokenizeAnswer, ModelList, ModelObject, ErrorAnswer,
)  # fmt: skip
_MS: Json = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SLO_MS}
_CLIENT_LEFT = 499  # nobody is there to read it
_PROCESS: Json = {
    "type": "object",
    "required": ["status", "process"],
    "properties": {
        "status": {"type": "string"},
        "process": {"type": "string"},
        "failing": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_SAID = "of this answer; the request's own header of this name, where it had one"
_ID_HEADERS: Json = {"x-request-id": {"description": _SAID, "schema": {"type": "string"}}}


@cache
def document() -> msgspec.Raw:
    """The page, as JSON."""
    page = {
        "openapi": "3.1.0",
        "info": {
            "title": "inference-mesh",
            "version": version("inference-mesh"),
            "description": "OpenAI's API. Fields that may be left out may be null; fields that are "
            "not listed are ignored, unless they would change the answer: then 400.",
        },
        "security": [{}, {"bearer": []}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "responses": _error_responses(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.Raw(msgspec.json.encode(page))


def _paths() -> Json:
    return {
        "/v1/chat/completions": {"post": _generation("chat", ChatBody, ChatCompletion, ChatChunk)},
        "/v1/completions": {"post": _generation("completion", CompletionBody, Completion,
                                                Completion)},
        "/v1/models": {"get": _operation("listModels", "The models", _answer(ModelList))},
        "/v1/models/{model}": {
            "get": _operation("showModel", "One model", _answer(ModelObject), [_in_path("model")])
        },
        "/v1/requests/{request_id}/events": {"get": _operation(
            "readOn", "A stream again, from any event on", {_EVENTS_TYPE: {}},
            [_in_path("request_id"), _in_header("last-event-id", _whole(0)),
             _in("query", "last_event_id", _whole(0))])},
        "/tokenize": {"post": _with_body(TokenizeBody, _operation(
            "tokenize", "Text, or a conversation, to token ids", _answer(TokenizeAnswer)))},
        "/detokenize": {"post": _with_body(DetokenizeBody, _operation(
            "detokenize", "Token ids to text", _answer(DetokenizeAnswer)))},
        "/health": {"get": _operation("health", "Whether the process runs", _json(_PROCESS))},
        "/ready": {"get": _ready()},
        "/metrics": {"get": _operation("metrics", "Of this process, for Prometheus; not there "
                                       "where several share the port or keys are needed",
                                       {"text/plain": {}})},
        "/openapi.json": {"get": _operation("openapi", "This page", _json({"type": "object"}))},
    }  # fmt: skip


# --- operations ------------------------------------------------------------------------------


def _operation(
    name: str, summary: str, content: Json, parameters: list[Json] | None = None
) -> Json:
    found: Json = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters or [],
        "responses": {
            "200": {"description": "Done", "headers": _ID_HEADERS, "content": content},
            **{status: {"$ref": f"#/components/responses/{status}"} for status in _codes()},
        },
    }
    return found


def _with_body(kind: type[msgspec.Struct], operation: Json) -> Json:
    body = {"required": True, "content": _answer(kind)}
    return {**operation, "requestBody": body}


def _generation(
    name: str,
    body: type[msgspec.Struct],
    whole: type[msgspec.Struct],
    chunk: type[msgspec.Struct],
) -> Json:
    events = {
        "description": f"With stream: each event's data is a {chunk.__name__}, an ErrorAnswer when "
        "it fails in between, or [DONE] at the end"
    }
    return _with_body(body, _operation(
        name, f"Generate: {name}", {**_answer(whole), _EVENTS_TYPE: events},
        [_in_header("x-request-id", {"type": "string", "maxLength": 128}),
         _in_header("x-mesh-deadline-ms", _whole(1)),
         _in_header("x-mesh-event-ids", {"enum": ["0", "1"]}),
         _in_header("x-mesh-resume-window", {"type": "number", "minimum": 0}),
         _in_header("x-slo-ttft-ms", _MS), _in_header("x-slo-tbt-ms", _MS),
         _in_header("x-slo-class", {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"})],
    ))  # fmt: skip


def _ready() -> Json:
    found = _operation("ready", "Whether requests would be served", _json(_PROCESS))
    not_ready = {"description": "Not ready, and why", "content": _json(_PROCESS)}
    return {**found, "responses": {**found["responses"], "503": not_ready}}


def _answer(kind: type[msgspec.Struct]) -> Json:
    return _json({"$ref": _REF + kind.__name__})


def _json(schema: Json) -> Json:
    return {_JSON_TYPE: {"schema": schema}}


def _in(place: str, name: str, schema: Json) -> Json:
    return {"in": place, "name": name, "schema": schema, "required": place == "path"}


def _in_path(name: str) -> Json:
    return _in("path", name, {"type": "string", "minLength": 1})


def _in_header(name: str, schema: Json) -> Json:
    return _in("header", name, schema)


def _whole(low: int) -> Json:
    return {"type": "integer", "minimum": low}


# --- errors ----------------------------------------------------------------------------------


def _error_responses() -> Json:
    return {
        status: {
            "description": ", ".join(codes),
            "headers": {**_ID_HEADERS, "retry-after": {"schema": {"type": "integer"}}},
            "content": _answer(ErrorAnswer),
        }
        for status, codes in _codes().items()
    }


@cache
def _codes() -> dict[str, list[str]]:
    """The codes of every status with which a request may be refused or fail."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    waiting: list[type[MeshError]] = [MeshError, OriginRefused]
    while waiting:
        kind = waiting.pop()
        found[kind.http_status].add(kind.code)
        waiting += kind.__subclasses__()
    return {str(status): sorted(found[status]) for status in sorted(found) if
            status != _CLIENT_LEFT}  # fmt: skip


# --- schemas ---------------------------------------------------------------------------------


def _schemas() -> Json:
    """What msgspec says of the structs, with the ranges that the bridge checks. What can be of any
    type is left out: it is there to be refused."""
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF + "{name}")
    for kind in (ChatBody, CompletionBody):
        properties = components[kind.__name__]["properties"]
        for name in [
            name for name, schema in properties.items() if not schema.keys() - {"default"}
        ]:
            del properties[name]
        for name, allowed in BODY_RANGES.items():
            if name in properties:
                _limit(properties[name], *allowed)
    logprobs = components[CompletionBody.__name__]["properties"]["logprobs"]
    _limit(logprobs, *RANGES["logprobs"])
    for one in logprobs["anyOf"]:
        if one["type"] == "boolean":
            one["enum"] = [False]
    return components


def _limit(schema: Json, low: float, high: float) -> None:
    for one in schema.get("anyOf", [schema]):
        if one.get("type") in ("integer", "number"):
            one.update(minimum=low, maximum=high)

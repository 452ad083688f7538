"""The page that tells of the interface."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from pipeline.bridge.endpoints import ENDPOINTS
from schemas.errors import QueueFull
from schemas.openai import ChatBody
from tests.pipeline.bridge.fake import FakeClient, Script, build, chat, completion


def browser() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build().bridge), base_url="http://mesh")


async def page() -> dict[str, Any]:
    async with browser() as client:
        return (await client.get("/openapi.json")).json()


def references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(one) for one in value.values()))
    return set().union(*(references(one) for one in value)) if isinstance(value, list) else set()


async def test_it_tells_of_all_that_is_served() -> None:
    """Every endpoint is there, every reference leads somewhere, every error names its codes."""
    found = await page()
    async with browser() as client:
        assert {one.path for one in ENDPOINTS.values()} < found["paths"].keys()
        for path, operations in found["paths"].items():
            for method in operations:
                url = path.replace("{model}", "m").replace("{request_id}", "0" * 32)
                answer = await client.request(method, url)
                assert answer.is_success or "unknown_url" not in answer.text
    for reference in references(found):
        here: Any = found
        for key in reference.removeprefix("#/").split("/"):
            here = here[key]
    codes = {s: r["description"].split(", ") for s, r in found["components"]["responses"].items()}
    assert {"queue_full"} <= set(codes["429"])
    assert {"bus_unavailable", "shutting_down"} <= set(codes["503"])
    assert {"headers_too_large"} == set(codes["431"])


async def test_it_has_the_fields_and_ranges_of_the_code() -> None:
    """A field of the struct that the page does not show is one that is there to be refused."""
    found = await page()
    schemas = found["components"]["schemas"]
    shown = schemas["ChatBody"]["properties"]
    assert shown.keys() < set(ChatBody.__struct_fields__)
    assert {"messages", "max_completion_tokens", "response_format", "top_k"} < shown.keys()
    assert shown["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    logprobs = schemas["CompletionBody"]["properties"]["logprobs"]
    assert logprobs["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 20}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", chat(logprobs=True), "ChatCompletion"),
        ("/v1/completions", completion(logprobs=2), "Completion"),
        ("/v1/chat/completions", chat(n=0), "ErrorAnswer"),
    ],
)
async def test_answers_are_as_it_says(path: str, body: dict[str, object], name: str) -> None:
    """Real answers against the page's schema."""
    found = await page()
    async with browser() as client:
        answer = (await client.post(path, json=body)).json()
    jsonschema.validate(answer, {"$ref": f"#/components/schemas/{name}", **found})


async def test_a_refusal_that_may_be_repeated_says_when() -> None:
    """Retry-After, as the page promises for 429."""
    refused = FakeClient(lambda _: Script(steps=[], end=None, refusal=QueueFull("full")))
    house = build(refused)
    transport = httpx.ASGITransport(house.bridge)
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        answer = await client.post("/v1/completions", json=completion())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")

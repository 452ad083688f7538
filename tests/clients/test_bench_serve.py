"""A load as ``vllm bench serve`` makes it: its requests, and its way of reading a stream.

That reader strips each piece of the body as the network hands it over and takes what is complete
JSON for an event, so how events are cut into writes matters to it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.clients.conftest import MODEL

NUM_REQUESTS = 24
NUM_TOKENS = 20
CONCURRENCY = 6
CONVERSATION = [{"role": "user", "content": [{"type": "text", "text": "Say something."}]}]
FORMS: dict[str, dict[str, Any]] = {
    "completions": {
        "prompt": list(range(100, 164)),
        "max_tokens": NUM_TOKENS,
        "logprobs": None,
        "repetition_penalty": 1.0,
    },
    "chat/completions": {"messages": CONVERSATION, "max_completion_tokens": NUM_TOKENS},
}


@dataclass(slots=True)
class Measured:
    """What the load generator notes of one request."""

    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    is_done: bool = False


async def messages(response: httpx.Response) -> AsyncIterator[str]:
    """The stream's events, put together from pieces that were stripped."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    buffer = ""
    async for piece in response.aiter_bytes():
        buffer += decoder.decode(piece.strip())
        while "\n\n" in buffer:
            message, buffer = buffer.split("\n\n", 1)
            yield message.strip()
        content = buffer.removeprefix("data: ")
        if content == "[DONE]" or (buffer.startswith("data: ") and is_json(content)):
            yield buffer
            buffer = ""
    assert buffer == ""


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


async def measure(http: httpx.AsyncClient, path: str, number: int) -> Measured:
    """One request, labelled as the tool does."""
    body = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **FORMS[path],
    }
    found = Measured()
    headers = {"x-request-id": f"bench-{number}"}
    async with http.stream("POST", f"/{path}", json=body, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["x-request-id"] == f"bench-{number}"
        async for message in messages(response):
            if message.startswith(":"):
                continue
            content = message.removeprefix("data: ")
            if content == "[DONE]":
                found.is_done = True
                continue
            chunk = json.loads(content)
            if choices := chunk["choices"]:
                delta = choices[0]
                found.text += delta.get("text") or delta.get("delta", {}).get("content") or ""
                found.arrivals_s.append(time.perf_counter())
            else:
                found.num_tokens = chunk["usage"]["completion_tokens"]
                found.num_prompt_tokens = chunk["usage"]["prompt_tokens"]
    return found


@pytest.mark.parametrize("path", FORMS)
async def test_every_request_is_measured(base_url: str, path: str) -> None:
    """First token, gaps, exact counts and the end are found for each of many at once."""
    turns = asyncio.Semaphore(CONCURRENCY)

    async def one(http: httpx.AsyncClient, number: int) -> Measured:
        async with turns:
            return await measure(http, path, number)

    async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
        found = await asyncio.gather(*(one(http, number) for number in range(NUM_REQUESTS)))
    for each in found:
        assert each.is_done
        assert each.num_tokens == NUM_TOKENS
        assert each.text
    # One event for each token that shows (an end that is ignored does not), one for the finish
    # reason, in chat one for the role.
    most = NUM_TOKENS + 1 + (path != "completions")
    assert max(len(each.arrivals_s) for each in found) == most
    if path == "completions":
        assert {each.num_prompt_tokens for each in found} == {len(FORMS[path]["prompt"])}

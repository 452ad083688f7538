"""The official client against a real server: what it parses is what we meant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from schemas.errors import ContextTooLong, EngineFailed, QueueFull
from schemas.requests import InferenceRequest
from tests.pipeline.bridge.fake import MODEL, WORDS, House, Script, build, say, served

TEXT = "".join(WORDS)
HI: list[dict[str, str]] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def house() -> House:
    return build()


@pytest.fixture
async def port(house: House) -> AsyncIterator[int]:
    async with served(house) as port:
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    """Whole answer."""
    answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    assert answer.usage.total_tokens == 9
    assert answer._request_id == answer.id.removeprefix("chatcmpl-")


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    """Role first, text, one reason per choice, then usage with no choices."""
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=HI,
        stream=True,
        stream_options={"include_usage": True},
        n=2,
        logprobs=True,
        top_logprobs=1,
    )
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == TEXT
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]
        tokens = [t.token for c in mine if c.logprobs for t in c.logprobs.content or ()]
        assert tokens == list(WORDS)
    assert [len(chunk.choices) for chunk in chunks].count(0) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_chat_stream_with_event_ids(client: openai.AsyncOpenAI) -> None:
    """Numbered events are legal SSE: the client reads the same text."""
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=HI,
        stream=True,
        extra_headers={"x-mesh-event-ids": "1"},
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT


async def test_completions(client: openai.AsyncOpenAI) -> None:
    """Batches of token ids, streamed and not."""
    answer = await client.completions.create(model=MODEL, prompt=[[1, 2], [3]])
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    stream = await client.completions.create(model=MODEL, prompt=[[1, 2], [3]], stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [TEXT, TEXT]


async def test_models(client: openai.AsyncOpenAI) -> None:
    """Listing and looking up."""
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "inference-mesh"


async def test_the_sync_client(port: int) -> None:
    """The blocking client, from a thread."""

    def ask() -> tuple[str | None, str]:
        base = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model=MODEL, messages=HI)
            stream = client.completions.create(model=MODEL, prompt="x", stream=True)
            return answer.choices[0].message.content, "".join(c.choices[0].text for c in stream)

    assert await asyncio.to_thread(ask) == (TEXT, TEXT)


async def test_errors_become_the_clients_exceptions(
    client: openai.AsyncOpenAI, house: House
) -> None:
    """Status, code and param arrive where programs look for them."""
    refused = Script(steps=[], end=None, refusal=ContextTooLong("too long", param="messages"))
    house.client.script = lambda _: refused
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=HI)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "messages")
    house.client.script = lambda _: Script(steps=[], end=None, refusal=QueueFull("full"))
    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert full.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("none")


async def test_a_failed_stream_raises_in_the_client(
    client: openai.AsyncOpenAI, house: House
) -> None:
    """The error event is an exception after the text that came before."""

    def script(request: InferenceRequest) -> Script:
        return Script(steps=[say(request).steps[0], EngineFailed("it broke")], end=None)

    house.client.script = script
    chunks = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    stream = aiter(chunks)
    texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    assert texts == ["", WORDS[0]]
    with pytest.raises(openai.APIError, match="it broke"):
        await anext(stream)


async def test_retries_of_the_client_succeed_in_the_end(port: int, house: House) -> None:
    """A 429 with Retry-After is tried again by the client without our doing."""
    attempts = []

    def script(request: InferenceRequest) -> Script:
        attempts.append(request.request_id)
        if len(attempts) == 1:
            return Script(steps=[], end=None, refusal=QueueFull("full"))
        return say(request)

    house.client.script = script
    base = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=1) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == TEXT
    assert len(set(attempts)) == 2

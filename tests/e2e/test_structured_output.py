"""Answers with a format, through bridge, admission, prefill, hand-over and decode."""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.e2e.harness import MODEL, Mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [{"role": "user", "content": "Which animal is it?"}]


class Kind(enum.StrEnum):
    cat = "cat"
    dog = "dog"


# A model without sense ends no text and no number that may go on.
Count = Annotated[int, pydantic.Field(ge=0, le=99)]


class Owner(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=20)]
    age: Count | None


class Animal(pydantic.BaseModel):
    kind: Kind
    legs: Count
    owners: Annotated[list[Owner], pydantic.Field(max_length=2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base_url(simulated_mesh: Mesh) -> str:
    await simulated_mesh.start("bridge", "bridge", "--port", "0")
    await simulated_mesh.until_ready("bridge")
    return f"http://127.0.0.1:{await simulated_mesh.bridge_port('bridge')}"


@pytest_asyncio.fixture(loop_scope="module")
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_the_official_client_parses_its_own_models(
    client: openai.AsyncOpenAI, simulated_mesh: Mesh
) -> None:
    """``parse`` with a pydantic model, two choices: objects, whatever a model without sense says.
    Each was prefilled in one process and decoded in another."""
    answer = await client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Animal, n=2, seed=4, max_tokens=400  # type: ignore[arg-type]
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Animal)
    await simulated_mesh.until_idle()


async def test_a_streamed_object_is_the_whole_one(client: openai.AsyncOpenAI) -> None:
    """The client's own streaming helper ends with the same object that a whole answer brings."""
    arguments = {"model": MODEL, "messages": ASK, "seed": 9, "max_tokens": 400}
    whole = await client.chat.completions.parse(response_format=Animal, **arguments)  # type: ignore[arg-type]
    async with client.chat.completions.stream(response_format=Animal, **arguments) as stream:  # type: ignore[arg-type]
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


async def test_json_mode(client: openai.AsyncOpenAI) -> None:
    """``json_object`` in chat and in completions."""
    chat = await client.chat.completions.create(
        model=MODEL, messages=ASK, seed=1, response_format={"type": "json_object"}, max_tokens=400  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(json.loads(chat.choices[0].message.content or ""), dict)
    completion = await client.completions.create(
        model=MODEL,
        prompt="{",
        seed=2,
        max_tokens=400,
        extra_body={"response_format": {"type": "json_object"}},
    )
    assert isinstance(json.loads(completion.choices[0].text), dict)


async def test_a_schema_that_can_not_be_kept_is_the_callers_fault(
    client: openai.AsyncOpenAI,
) -> None:
    """A 400 that names the field and says why, whole or streamed."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as caught:
            await client.chat.completions.create(
                model=MODEL,
                messages=ASK,  # type: ignore[arg-type]
                stream=stream,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "odd", "schema": {"not": {"type": "string"}}},
                },
            )
        assert caught.value.param == "response_format"


async def test_token_ids_can_be_asked_for(
    base_url: str, client: openai.AsyncOpenAI, tiny_folder: Path
) -> None:
    """What ``/tokenize`` says is what a request costs; its ids, as a prompt, are that prompt."""
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    async with httpx.AsyncClient(base_url=base_url) as http:
        text = "The sea is 漢字."
        said = (await http.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
        assert said["tokens"] == tokenizer.encode(text).ids
        back = await http.post("/detokenize", json={"model": MODEL, "tokens": said["tokens"]})
        assert back.json() == {"prompt": text}
        chat = (await http.post("/tokenize", json={"model": MODEL, "messages": ASK})).json()
    whole = await client.completions.create(
        model=MODEL, prompt=said["tokens"], max_tokens=2, echo=True
    )
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == said["count"]
    assert whole.choices[0].text.startswith(text)
    answer = await client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == chat["count"]

"""LangChain, as its users call it: ask_langchain.py BASE_URL MODEL prints what it got as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """Something that lives."""

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


async def main(base_url: str, model: str) -> None:
    about = {"base_url": base_url, "api_key": "none", "model": model, "seed": 5}
    chat = ChatOpenAI(**about, max_tokens=24, stream_usage=True, extra_body={"ignore_eos": True})
    question = "What is a queue?"
    whole = chat.invoke(question)
    later = await chat.ainvoke(question)
    chunks = list(chat.stream(question))
    alater = [chunk async for chunk in chat.astream(question)]
    batch = chat.batch([question, question])
    counted = sum(chunks[1:], chunks[0]).usage_metadata
    shaped = ChatOpenAI(**about, max_tokens=400).with_structured_output(
        Animal, method="json_schema"
    )
    said = {
        "texts": [
            whole.content,
            later.content,
            "".join(one.content for one in chunks),
            "".join(one.content for one in alater),
            *(one.content for one in batch),
        ],
        "usages": [
            [one["input_tokens"], one["output_tokens"]] for one in (whole.usage_metadata, counted)
        ],
        "reasons": [[whole.response_metadata["finish_reason"]]],
        "animal": shaped.invoke("Which animal?").model_dump(),
        "completion": OpenAI(**about, max_tokens=24).invoke("Once"),
    }
    print(json.dumps(said))


asyncio.run(main(*sys.argv[1:]))

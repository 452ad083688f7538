"""LiteLLM, as its users call it: ask_litellm.py BASE_URL MODEL prints what it got as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import litellm


def text_of(chunk) -> str:
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""


def has_reason(chunk) -> bool:
    return bool(chunk.choices and chunk.choices[0].finish_reason)


async def main(base_url: str, model: str) -> None:
    ask = {
        "model": f"openai/{model}",
        "api_base": base_url,
        "api_key": "none",
        "messages": [{"role": "user", "content": "What is a queue?"}],
        "seed": 5,
        "max_tokens": 24,
        "extra_body": {"ignore_eos": True},
    }
    whole = litellm.completion(**ask)
    later = await litellm.acompletion(**{**ask, "model": f"hosted_vllm/{model}"})
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**ask, **options))
    alater = [chunk async for chunk in await litellm.acompletion(**ask, **options)]
    refused = ""
    try:
        litellm.completion(**{**ask, "model": "openai/gpt-9"})
    except litellm.NotFoundError as error:
        refused = type(error).__name__
    texts = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=base_url,
        api_key="none",
        prompt="Once",
        seed=5,
        max_tokens=24,
    )
    said = {
        "texts": [
            whole.choices[0].message.content,
            later.choices[0].message.content,
            "".join(map(text_of, chunks)),
            "".join(map(text_of, alater)),
        ],
        "usages": [
            [one.prompt_tokens, one.completion_tokens]
            for one in (whole.usage, later.usage, chunks[-1].usage, alater[-1].usage)
        ],
        "reasons": [
            [one.choices[0].finish_reason for one in run if has_reason(one)]
            for run in ([whole], [later], chunks, alater)
        ],
        "completion": texts.choices[0].text,
        "refused": refused,
    }
    print(json.dumps(said))


asyncio.run(main(*sys.argv[1:]))

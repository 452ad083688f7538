"""The official ``openai`` client against a running mesh: streamed and whole are one answer."""

from __future__ import annotations

import asyncio
import collections
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk

from tests.clients.conftest import MODEL

PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a queue?"}]
HI: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": PARTS}]
ASK: dict[str, Any] = {"model": MODEL, "seed": 5, "max_tokens": 24}
EXACT = {"ignore_eos": True}


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    """Role first, one finish reason, usage last without choices, the same text and counts."""
    whole = client.chat.completions.create(messages=HI, extra_body=EXACT, **ASK)
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=EXACT,
            **ASK,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.role for c in chunks[1:-1]] == [None] * (len(chunks) - 2)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}) == 1
    assert whole.id != chunks[0].id


async def test_the_async_client_asks_many_at_once(base_url: str) -> None:
    """Sixteen streams side by side under one label of the client's, each its own."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def ask(seed: int) -> tuple[str, str | None]:
            arguments = {**ASK, "seed": seed, "messages": HI}
            whole = await client.chat.completions.create(**arguments)
            text = ""
            headers = {"x-request-id": "the same"}
            async with client.chat.completions.with_streaming_response.create(
                stream=True, extra_headers=headers, **arguments
            ) as response:
                assert response.headers["x-request-id"] == "the same"
                async for chunk in await response.parse():
                    text += chunk.choices[0].delta.content or ""
            return text, whole.choices[0].message.content

        answers = await asyncio.gather(*(ask(seed) for seed in range(16)))
    assert all(streamed == whole for streamed, whole in answers)
    assert len({streamed for streamed, _ in answers}) > 1


def test_the_stream_helper(client: openai.OpenAI) -> None:
    """Its events add up to the answer that comes whole, logprobs and usage included."""
    # Limits make the helper raise, so these end by a stop string: a vowel comes soon.
    arguments = {
        **ASK, "max_tokens": 200, "messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2,
        "stop": ["a", "e", "i"],
    }  # fmt: skip
    whole = client.chat.completions.create(**arguments)
    seen = ""
    with client.chat.completions.stream(
        stream_options={"include_usage": True}, **arguments
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                seen += event.delta
        final = stream.get_final_completion()
    assert len(final.choices) == 2
    for mine, theirs in zip(final.choices, whole.choices, strict=True):
        assert mine.message.content == theirs.message.content
        assert mine.finish_reason == theirs.finish_reason
        assert mine.logprobs
        assert theirs.logprobs
        assert mine.logprobs.content == theirs.logprobs.content
    assert sorted(seen) == sorted("".join(c.message.content or "" for c in whole.choices))
    assert final.usage
    assert whole.usage
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def gathered(chunks: list[Completion]) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Texts and finish reasons of a completions stream, by choice."""
    texts: dict[int, str] = collections.defaultdict(str)
    reasons: dict[int, list[str]] = collections.defaultdict(list)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    return texts, reasons


@pytest.mark.parametrize("prompt", [["One", "Two", "Three"], [[10, 11], [12], [13, 14, 15]]])
def test_batches_with_choices(client: openai.OpenAI, prompt: Any) -> None:
    """Texts or token ids, n of each, streamed in any order: choice prompt * n + index."""
    arguments = {**ASK, "prompt": prompt, "n": 2, "extra_body": EXACT}
    whole = client.completions.create(**arguments)
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    )
    texts, reasons = gathered(chunks)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [choice.text for choice in whole.choices] == [texts[index] for index in range(6)]
    assert list(reasons.values()) == [["length"]] * 6
    assert whole.usage
    assert chunks[-1].usage
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 6 * 24
    assert len({choice.text for choice in whole.choices}) == 6


def test_a_stop_string_across_tokens_is_never_shown(client: openai.OpenAI) -> None:
    """All before it is, also in a stream; its tokens still have logprobs."""
    ask = {**ASK, "prompt": "Once", "logprobs": 0, "extra_body": EXACT}
    free = client.completions.create(**ask).choices[0]
    assert free.logprobs
    assert free.logprobs.tokens
    tokens = free.logprobs.tokens
    assert "".join(tokens) == free.text
    stop = tokens[9][-1:] + tokens[10] + tokens[11][:1]
    before = free.text[: free.text.index(stop)]
    arguments = {**ask, "stop": ["never said", stop]}
    cut = client.completions.create(**arguments).choices[0]
    assert (cut.text, cut.finish_reason) == (before, "stop")
    assert cut.logprobs
    assert cut.logprobs.tokens
    assert "".join(cut.logprobs.tokens).startswith(before + stop)
    texts, reasons = gathered(list(client.completions.create(stream=True, **arguments)))
    assert (texts[0], reasons[0]) == (before, ["stop"])


def test_usage_can_be_read_in_every_chunk(client: openai.OpenAI) -> None:
    """``continuous_usage_stats``: it grows by what each chunk brought, up to the exact one."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            messages=HI, stream=True, stream_options=options, extra_body=EXACT, **ASK
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert set(range(1, 25)) <= set(counts)
    assert counts[-1] == 24
    assert len({chunk.usage.prompt_tokens for chunk in chunks if chunk.usage}) == 1


def test_lengths_are_exact(client: openai.OpenAI) -> None:
    """``min_tokens``, ``ignore_eos`` and both names of the limit, which benchmarks count on."""
    for wanted in (1, 17):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HI,
            max_completion_tokens=wanted,
            max_tokens=99,
            extra_body={"min_tokens": wanted, "ignore_eos": True, "stop": None},
        )
        assert answer.usage
        assert answer.usage.completion_tokens == wanted
        assert answer.choices[0].finish_reason == "length"


def test_echo_comes_in_front(client: openai.OpenAI) -> None:
    """Once per choice, in a stream as well; text or token ids."""
    tokens = [40, 41, 42]
    for prompt in ("Once upon", tokens):
        bare = client.completions.create(prompt=prompt, n=2, **ASK)
        whole = client.completions.create(prompt=prompt, n=2, echo=True, **ASK)
        front = whole.choices[0].text.removesuffix(bare.choices[0].text)
        assert front
        assert prompt == tokens or front == prompt
        assert [one.text for one in whole.choices] == [front + one.text for one in bare.choices]
        texts, _ = gathered(
            list(client.completions.create(prompt=prompt, n=2, echo=True, stream=True, **ASK))
        )
        assert [texts[0], texts[1]] == [one.text for one in whole.choices]


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    """Texts and token ids, in batches, with ``n``, whole and streamed: the prompt's tokens in
    front, the first without a logprob; the answer is the one without."""
    texts = ["Once upon a time", "Ein Märchen 😀, 漢字"]
    for prompt in (texts, [[40, 41, 42], [7]]):
        asked: dict[str, Any] = {"prompt": prompt, "n": 2, "logprobs": 2, **ASK}
        bare = client.completions.create(**asked)
        whole = client.completions.create(echo=True, **asked)
        for one, other in zip(whole.choices, bare.choices, strict=True):
            check_scores(one, other)
            assert prompt is not texts or one.text == texts[one.index // 2] + other.text
        chunks: list[Completion] = list(client.completions.create(echo=True, stream=True, **asked))
        for one in whole.choices:
            parts = [c.choices[0] for c in chunks if c.choices[0].index == one.index]
            assert "".join(part.text for part in parts) == one.text
            found = [p.logprobs.token_logprobs or [] for p in parts if p.logprobs]
            assert [x for part in found for x in part] == tokens_and_logprobs(one)[1]


def tokens_and_logprobs(choice: CompletionChoice) -> tuple[list[str], list[float | None]]:
    assert choice.logprobs
    return choice.logprobs.tokens or [], list(choice.logprobs.token_logprobs or [])


def check_scores(one: CompletionChoice, bare: CompletionChoice) -> None:
    """``one`` is ``bare`` behind its prompt."""
    (tokens, logprobs), (own_tokens, own) = tokens_and_logprobs(one), tokens_and_logprobs(bare)
    front = len(tokens) - len(own_tokens)
    assert front >= 1
    assert (tokens[front:], logprobs[front:]) == (own_tokens, own)
    assert one.text.endswith(bare.text)
    assert one.logprobs
    offsets, tops = one.logprobs.text_offset or [], one.logprobs.top_logprobs or []
    assert offsets == sorted(offsets)
    assert offsets[front] == len(one.text) - len(bare.text)
    assert logprobs[0] is tops[0] is None
    for token, logprob, top in zip(tokens[1:], logprobs[1:], tops[1:], strict=True):
        assert token in top
        assert logprob in top.values()
        assert 2 <= len(top) <= 3


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_as_an_evaluation_asks_for_it(
    client: openai.OpenAI, base_url: str, max_tokens: int
) -> None:
    """lm-eval's ``local-completions``: batches of token ids, contexts with a continuation; what is
    read is logprobs behind the context, and whether each is the greedy choice."""
    context = list(range(40, 60))
    greedy = client.completions.create(
        model=MODEL, prompt=context, max_tokens=3, temperature=0, logprobs=1, extra_body=EXACT
    ).choices[0]
    continuations = [[], [5, 6, 7]]
    for token in tokens_and_logprobs(greedy)[0]:
        question = {"model": MODEL, "prompt": token, "add_special_tokens": False}
        said = httpx.post(base_url.replace("/v1", "/tokenize"), json=question, timeout=60).json()
        continuations[0] += said["tokens"]
    answer = client.completions.create(
        model=MODEL,
        prompt=[[*context, *continuation] for continuation in continuations],
        temperature=0,
        max_tokens=max_tokens,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    sums, is_greedy = [], []
    for choice in sorted(answer.choices, key=lambda one: one.index):
        assert choice.logprobs
        _, logprobs = tokens_and_logprobs(choice)
        end = len(logprobs) - max_tokens
        own = [one for one in logprobs[len(context) : end] if one is not None]
        tops = (choice.logprobs.top_logprobs or [])[len(context) : end]
        assert len(own) == len(continuations[choice.index]) == 3
        sums.append(sum(own))
        is_greedy.append(all(one == max(top.values()) for one, top in zip(own, tops, strict=True)))
    assert answer.usage
    assert answer.usage.completion_tokens == 2 * max_tokens
    assert is_greedy == [True, False]
    assert sums[0] == -0.75
    assert sums[1] < -0.75


def test_a_prompt_too_long_for_its_logprobs_is_refused(client: openai.OpenAI) -> None:
    """Before anything is computed, by name."""
    with pytest.raises(openai.BadRequestError, match="over 65536") as caught:
        client.completions.create(
            model=MODEL, prompt=[7] * 4000, max_tokens=1, logprobs=20, echo=True
        )
    assert caught.value.param == "logprobs"


def test_a_salt_keeps_tenants_apart(client: openai.OpenAI) -> None:
    """The cache is told of in usage; what another salt left there is never used, and what was
    handed from worker to worker does not count."""
    prompt = "The same long beginning, said again and again. " * 8

    def cached(salt: str) -> int:
        answer = client.completions.create(
            prompt=prompt, n=2, extra_body={"cache_salt": salt}, **ASK
        )
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("ann") == 0
    assert cached("ann") > 0
    assert cached("bob") == 0


TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra_body": {"guided_json": {}, "bad_words": ["x"]}}, "bad_words"),
        ({"messages": [{"role": "user", "content": "x " * 20_000}]}, "messages"),
        ({"max_tokens": 100_000}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    """A 400 that names the field, before any stream begins."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASK, "messages": HI, "stream": stream, **fields})
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    too_long = len(str(fields)) > 10_000 or param == "max_tokens"
    assert (caught.value.code == "context_length_exceeded") == too_long


def test_models(client: openai.OpenAI, base_url: str) -> None:
    """Listed, looked up, and 404 for others; HEAD has the headers alone."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HI)
    assert caught.value.code == "model_not_found"
    for path in ("/models", f"/models/{MODEL}"):
        head, body = httpx.head(base_url + path), httpx.get(base_url + path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == body.headers["content-type"]

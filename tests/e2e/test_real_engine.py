"""The default model in fp32 through separate prefill and decode processes, against its oracles."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from pipeline.client import MeshClient
from tests.e2e.harness import Answer, Mesh, ask, mesh_of
from tests.e2e.test_takeover import bring_back, read_rest, read_some, strike
from tests.workers.engine.torch_engines import generate_all, reference_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(300),  # five processes that import torch start before the first test
]

NUM_TOKENS = 24
SUBJECTS = (
    "the sea", "a haiku", "prime numbers", "the capital of France", "photosynthesis", "Hamlet",
    "pancakes", "12 times 12", "the moon", "rain", "a good morning", "gravity", "bread", "Rome",
    "a bicycle", "tea", "the colour blue", "winter", "an old house", "music",
)  # fmt: skip
PROMPTS = tuple(
    "You are a careful assistant who answers briefly and truthfully.\n"
    f"Question: what do you know about {subject}?\nAnswer:"
    for subject in SUBJECTS
)
WORKER_FLAGS = ("--dtype", "fp32", "--kv-memory", "256MiB", "--threads", "1",
                "--max-batch-tokens", "96")  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, default_folder: Path
) -> AsyncIterator[Mesh]:
    """Control, bridge, two prefill and two decode workers."""
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as running:
        running.model = "smollm2-135m"
        await running.start(
            "control", "control", "--model", f"smollm2-135m={default_folder}",
            "--route-suffix-tokens", "0",  # every rest of a prompt goes to a prefill worker
        )  # fmt: skip
        await running.start("bridge", "bridge", "--port", "0")
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            role = name.partition("-")[0]
            await running.start_worker(name, role, default_folder, *WORKER_FLAGS)
        await running.until_ready()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with mesh.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def expected(default_folder: Path) -> list[list[int]]:
    """What ``transformers.generate`` says to each prompt."""
    torch.set_num_threads(1)
    model = reference_model(default_folder)
    tokenizer = Tokenizer.from_file(str(default_folder / "tokenizer.json"))
    return generate_all(model, [tokenizer.encode(prompt).ids for prompt in PROMPTS], NUM_TOKENS)


async def ask_all(
    mesh: Mesh, client: MeshClient, prompts: tuple[str, ...], **sampling: object
) -> list[Answer]:
    """All at once."""
    async with asyncio.TaskGroup() as tasks:
        answers = [
            tasks.create_task(ask(client, mesh.request(prompt, **sampling))) for prompt in prompts
        ]
    return [answer.result() for answer in answers]


async def test_twenty_prompts_at_once_answer_as_in_transformers(
    mesh: Mesh, client: MeshClient, expected: list[list[int]]
) -> None:
    """fp32, greedy, prefill and decode in separate processes, chunked prefill, common beginnings
    reused: token for token what ``generate`` gives."""
    answers = await ask_all(
        mesh, client, PROMPTS, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
    )
    assert [list(answer.ids[0]) for answer in answers] == expected
    await mesh.until_idle()


async def test_seeded_answers_do_not_depend_on_the_batch(mesh: Mesh, client: MeshClient) -> None:
    """The same seed gives the same tokens alone and beside fifteen others, through whichever
    processes a request went."""
    sampling = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 11, "ignore_eos": True}
    together = await ask_all(mesh, client, PROMPTS[:16], **sampling)
    alone = [await ask(client, mesh.request(prompt, **sampling)) for prompt in PROMPTS[:3]]
    assert [answer.ids for answer in alone] == [answer.ids for answer in together[:3]]
    await mesh.until_idle()


async def test_prompt_logprobs_are_those_of_transformers(
    mesh: Mesh, client: MeshClient, default_folder: Path
) -> None:
    """Chunked, with beginnings in the cache that are of no use here, answers decoded by another
    process: every prompt token has the logprob of ``log_softmax``, and the likeliest is right."""
    torch.set_num_threads(1)
    model = reference_model(default_folder)
    tokenizer = Tokenizer.from_file(str(default_folder / "tokenizer.json"))
    prompts = (" ".join(PROMPTS[:5]), PROMPTS[5])
    answers = await ask_all(
        mesh, client, prompts, max_tokens=4, temperature=0.0, prompt_logprobs=1, n=2
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.inference_mode():
            expected = model(ids).logits[0].log_softmax(-1)[:-1]
        by_choice = [delta.prompt_logprobs for delta in answer.deltas if delta.number == 0]
        assert by_choice[0] == by_choice[1]
        found = by_choice[0] or ()
        assert [one.token_id for one in found] == ids[0].tolist()
        logprobs = torch.tensor([one.logprob for one in found[1:]])
        assert torch.allclose(logprobs, expected.gather(1, ids[0, 1:, None])[:, 0], atol=1e-3)
        top = torch.tensor([one.top[0].logprob for one in found[1:]])
        assert torch.allclose(top, expected.amax(-1), atol=1e-3)
        assert answer.usage.cached_tokens == 0
    await mesh.until_idle()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_lost_in_mid_request_changes_nothing(
    mesh: Mesh,
    client: MeshClient,
    expected: list[list[int]],
    default_folder: Path,
    role: str,
    blow: signal.Signals,
) -> None:
    """SIGKILL, and SIGSTOP for 10 s: the client's text is that of the undisturbed run."""
    request = mesh.request(
        PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, cache_salt=role
    )
    stream = await client.submit(request)
    if role == "prefill":
        while stream.view.claim is None:
            await asyncio.sleep(0.001)
        deltas = []
    else:
        deltas = await read_some(stream, 6)
    victim = strike(mesh, stream, blow)
    assert victim.startswith(role)
    async with asyncio.timeout(60):
        answer = await read_rest(stream, deltas)
    assert list(answer.ids[0]) == expected[0]
    if blow == signal.SIGSTOP:
        await asyncio.sleep(10)  # the freeze itself, not a wait for a condition
    await bring_back(mesh, victim, str(default_folder), *WORKER_FLAGS)
    await mesh.until_idle()


async def test_the_openai_client_streams_what_the_bus_gives(
    mesh: Mesh, client: MeshClient, expected: list[list[int]]
) -> None:
    """The official client, streaming and not, gets the text that a bus client gets."""
    port = await mesh.bridge_port("bridge")
    over_bus = await ask(
        client,
        mesh.request(PROMPTS[3], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    )
    api = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    async with api:
        assert [model.id async for model in api.models.list()] == ["smollm2-135m"]
        arguments = {
            "model": "smollm2-135m",
            "prompt": PROMPTS[3],
            "max_tokens": NUM_TOKENS,
            "temperature": 0.0,
            "extra_body": {"ignore_eos": True},
        }
        whole = await api.completions.create(**arguments)  # type: ignore[call-overload]
        assert whole.choices[0].text == over_bus.texts[0]
        assert whole.usage.completion_tokens == NUM_TOKENS
        pieces = [
            chunk.choices[0].text
            async for chunk in await api.completions.create(stream=True, **arguments)  # type: ignore[call-overload]
        ]
        assert "".join(pieces) == over_bus.texts[0]
        chat = await api.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0.0,
        )
        assert chat.choices[0].message.content == "The capital of France is Paris."
        assert chat.choices[0].finish_reason == "stop"
        with pytest.raises(openai.NotFoundError):
            await api.completions.create(model="nope", prompt="x")
    await mesh.until_idle()

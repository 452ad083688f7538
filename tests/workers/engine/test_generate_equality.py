"""fp32, greedy: the engine's tokens are those of ``transformers.generate``, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from schemas.requests import SamplingParams
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.torch_engines import (
    NUM_TOKENS,
    Run,
    generate,
    generate_all,
    greedy,
    hand_over,
    prompts,
    reference_model,
    small_engine,
)
from workers.engine.api import EngineRequest
from workers.engine.build import build_torch_engine
from workers.engine.engine import Engine, EngineConfig

SUBJECTS = (
    "the sea", "a haiku", "prime numbers", "the capital of France", "photosynthesis", "Hamlet",
    "pancakes", "12 times 12", "the moon", "rain", "a good morning", "gravity", "bread", "Rome",
    "a bicycle", "tea", "the colour blue", "winter", "an old house", "music",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_tiny_models_answer_as_in_transformers(architecture: str, tiny_folder: TinyFolder) -> None:
    """Given requests that arrive one after the other, prompts that need several chunks and one
    that begins like an earlier one: each answer is that of ``generate``, and the common beginning
    was not computed twice."""
    folder = tiny_folder(architecture)
    asked = prompts((21, 5, 37), vocab_size=VOCAB_SIZE)
    asked.append(asked[2][:30] + asked[0][:9])
    run = Run(small_engine(folder))
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy())
        run.step(2 if number < 2 else 5)
    tokens = run.to_end()
    reference = reference_model(folder)
    assert [tokens[str(n)] for n in range(len(asked))] == [
        generate(reference, prompt, NUM_TOKENS) for prompt in asked
    ]
    assert run.finished["3"].num_cached_tokens == 28


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "gpt_oss", "llama", "mistral"])
def test_blocks_handed_over_continue_the_same_answer(
    architecture: str, tiny_folder: TinyFolder
) -> None:
    """Prefill in one engine, decode in another whose block ids differ: the answers are those of
    ``generate``, and both engines are empty afterwards."""
    folder = tiny_folder(architecture)
    prefill, decode = Run(small_engine(folder)), Run(small_engine(folder, num_blocks=80))
    assert prefill.engine.info.fingerprint == decode.engine.info.fingerprint
    asked = prompts((21, 5, 37, 16), vocab_size=VOCAB_SIZE)
    decode.add("other", asked[0], greedy(3))
    decode.step(3)
    requests = {
        str(n): EngineRequest(key=str(n), prompt_ids=prompt, sampling=greedy())
        for n, prompt in enumerate(asked)
    }
    for key, request in requests.items():
        prefill.add(key, request.prompt_ids, request.sampling, hold_after_first=True)
    prefill.to_end()
    for key, request in requests.items():
        hand_over(prefill, key, request, decode)
    tokens = decode.to_end()
    prefill.to_end()
    reference = reference_model(folder)
    assert {key: tokens[key] for key in requests} == {
        str(n): generate(reference, prompt, NUM_TOKENS) for n, prompt in enumerate(asked)
    }


def test_a_small_pool_preempts_and_the_answers_stay(tiny_folder: TinyFolder) -> None:
    """When the pool is too small for all, sequences are set back and computed again; answers do
    not change."""
    folder = tiny_folder("llama")
    asked = prompts((21, 25, 37, 33, 18), vocab_size=VOCAB_SIZE)
    run = Run(small_engine(folder, num_blocks=24))
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy())
    tokens = run.to_end()
    reference = reference_model(folder)
    assert [tokens[str(n)] for n in range(len(asked))] == [
        generate(reference, prompt, NUM_TOKENS) for prompt in asked
    ]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_seeded_sampling_is_the_same_alone_and_among_others(
    architecture: str, tiny_folder: TinyFolder
) -> None:
    """A seed gives the same tokens whether a request runs alone or beside fifteen others."""
    folder = tiny_folder(architecture)
    asked = prompts(range(5, 37, 2), vocab_size=VOCAB_SIZE)
    sampling = [_sampling(number) for number in range(16)]
    config = EngineConfig(max_batch_tokens=64, max_num_sequences=16)
    together, alone = (
        Run(build_torch_engine(folder, dtype="fp32", num_blocks=400, block_size=4, config=config))
        for _ in range(2)
    )
    for number in range(16):
        together.add(str(number), asked[number], sampling[number])
    together.to_end()
    for number in range(16):
        alone.add(str(number), asked[number], sampling[number])
        alone.to_end()
    assert together.tokens == alone.tokens
    assert len({tuple(tokens) for tokens in alone.tokens.values()}) == 16


def _sampling(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.5 + 0.1 * number,
        top_p=(1.0, 0.9)[number % 2],
        top_k=(0, 0, 7)[number % 3],
        min_p=0.02 * (number % 4),
        frequency_penalty=0.1 * (number % 5),
        seed=number,
        max_tokens=12,
        ignore_eos=True,
    )


# ---- the default model ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_engines(default_folder: Path) -> tuple[Engine, Engine]:
    config = EngineConfig(max_batch_tokens=256, max_num_sequences=32)
    first, second = (
        build_torch_engine(
            default_folder, dtype="fp32", num_blocks=400, num_threads=1, config=config
        )
        for _ in range(2)
    )
    return first, second


@pytest.fixture(scope="module")
def chat_prompts(default_folder: Path) -> list[tuple[int, ...]]:
    """Twenty questions behind one system prompt."""
    tokenizer = AutoTokenizer.from_pretrained(default_folder)
    system = {"role": "system", "content": "You are a careful assistant. Answer briefly."}
    return [
        tuple(
            tokenizer.apply_chat_template(
                [system, {"role": "user", "content": f"Tell me about {subject}."}],
                add_generation_prompt=True,
            )["input_ids"]
        )
        for subject in SUBJECTS
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_default_model_answers_twenty_prompts_as_transformers(
    default_engines: tuple[Engine, Engine],
    chat_prompts: list[tuple[int, ...]],
    default_folder: Path,
) -> None:
    """Twenty prompts at once, then four of them again by way of a second engine: tokens of
    ``generate``, end tokens included; the system prompt's blocks are shared."""
    engine, second = default_engines
    run, decode = Run(engine), Run(second)
    run.add("0", chat_prompts[0], greedy(10, ignore_eos=False))
    run.step()
    for number, prompt in enumerate(chat_prompts[1:], 1):
        run.add(str(number), prompt, greedy(10, ignore_eos=False))
    tokens = dict(run.to_end())
    reference = reference_model(default_folder)
    answers = generate_all(reference, chat_prompts, 10, eos=2)
    expected = {str(n): answer for n, answer in enumerate(answers)}
    assert tokens == expected
    assert all(run.finished[str(n)].num_cached_tokens >= 16 for n in range(1, 20))

    run.tokens = {}
    requests = {
        key: EngineRequest(key=key, prompt_ids=chat_prompts[int(key)], sampling=greedy(10))
        for key in ("3", "8", "13", "19")
    }
    for key, request in requests.items():
        run.add(key, request.prompt_ids, request.sampling, hold_after_first=True)
    run.to_end()
    for key, request in requests.items():
        hand_over(run, key, request, decode)
    assert {k: v[: len(expected[k])] for k, v in decode.to_end().items()} == {
        key: expected[key] for key in requests
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_default_model_samples_the_same_alone_and_among_sixteen(
    default_engines: tuple[Engine, Engine], chat_prompts: list[tuple[int, ...]]
) -> None:
    """Seeded sampling with a real model: four requests alone give what they gave among sixteen."""
    together, alone = (Run(engine) for engine in default_engines)
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=n, max_tokens=8) for n in range(16)
    ]
    for number in range(16):
        together.add(f"s{number}", chat_prompts[number], sampling[number])
    together.to_end()
    for number in (0, 5, 10, 15):
        alone.add(f"s{number}", chat_prompts[number], sampling[number])
        alone.to_end()
    assert alone.tokens == {key: together.tokens[key] for key in alone.tokens}

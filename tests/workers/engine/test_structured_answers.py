"""The default model keeps to a schema: alone, among free requests, in chunks, taken over."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoTokenizer

from schemas.requests import ResponseFormat, SamplingParams
from tests.workers.engine.torch_engines import Run, greedy, hand_over
from workers.engine.api import EngineRequest
from workers.engine.build import build_torch_engine
from workers.engine.engine import Engine, EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "country": {"enum": ["France", "Italy", "Japan"]},
        "big": {"type": "boolean"},
        "ids": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
    },
    "required": ["name", "country", "big", "ids"],
    "additionalProperties": False,
}
WANTED = ResponseFormat(kind="json_schema", json_schema=json.dumps(CITY))


@pytest.fixture(scope="module")
def pair(default_folder: Path) -> tuple[Engine, Engine]:
    """Two engines that compute a prompt in chunks of 24 tokens."""
    config = EngineConfig(max_batch_tokens=24, max_num_sequences=12)
    first, second = (
        build_torch_engine(
            default_folder, dtype="fp32", num_blocks=200, num_threads=1, config=config
        )
        for _ in range(2)
    )
    return first, second


@pytest.fixture(scope="module")
def tokenizer(default_folder: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(default_folder)


@pytest.fixture(scope="module")
def prompt(tokenizer: AutoTokenizer) -> tuple[int, ...]:
    question = {"role": "user", "content": "Describe Paris as JSON: name, country, big, ids."}
    return tuple(tokenizer.apply_chat_template([question], add_generation_prompt=True)["input_ids"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def seeded(seed: int, **more: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=90, response_format=WANTED, **more)  # type: ignore[arg-type]


def check(tokenizer: AutoTokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids)
    jsonschema.validate(json.loads(text), CITY)
    return text


def answers(run: Run, key: str, request: EngineRequest) -> list[list[int]]:
    """Tokens per choice of one request, run to its end."""
    run.engine.add(request)
    found: list[list[int]] = [[] for _ in range(request.sampling.n)]
    while run.engine.has_work():
        report = run.engine.step()
        assert not report.failed
        for output in report.outputs:
            found[output.index].append(output.token_id)
        for finished in report.finished:
            assert set(finished.finish_reasons) == {"stop"}
    run.engine.check_invariants()
    return found


def test_answers_are_json_of_the_schema(
    pair: tuple[Engine, Engine], prompt: tuple[int, ...], tokenizer: AutoTokenizer
) -> None:
    """Greedy, seeded with filters, and two choices: all parse and validate; the same seed gives
    the same answer again, two choices differ."""
    run = Run(pair[0])
    params = [
        seeded(1, temperature=0.0),
        seeded(2, temperature=1.5, top_p=0.9, top_k=50),
        seeded(3, temperature=1.2, n=2),
    ]
    requests = [
        EngineRequest(key=str(n), prompt_ids=prompt, sampling=one) for n, one in enumerate(params)
    ]
    first = [answers(run, request.key, request) for request in requests]
    texts = [check(tokenizer, ids) for choices in first for ids in choices]
    assert texts[2] != texts[3]
    assert answers(run, "1", requests[1]) == first[1]


def test_free_rows_of_a_batch_do_not_change(
    pair: tuple[Engine, Engine], prompt: tuple[int, ...]
) -> None:
    """Free requests, greedy and seeded, beside constrained ones: their logits are masked nowhere,
    so they answer what they answer beside the same requests without a format."""
    free = {
        "greedy": greedy(14),
        "seeded": SamplingParams(seed=5, temperature=0.9, top_p=0.9, max_tokens=14),
    }
    seen = []
    for wanted in (None, WANTED):
        run = Run(pair[0])
        for key, sampling in free.items():
            run.add(key, prompt, sampling)
        for number in range(2):
            sampling = replace_format(seeded(number, ignore_eos=True), wanted)
            run.add(f"other-{number}", prompt[number:], sampling)
        tokens = run.to_end()
        seen.append({key: tokens[key] for key in free})
    assert seen[0] == seen[1]


def replace_format(sampling: SamplingParams, wanted: ResponseFormat | None) -> SamplingParams:
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return SamplingParams(**{**fields, "response_format": wanted})


def test_any_prefix_can_be_taken_over(
    pair: tuple[Engine, Engine], prompt: tuple[int, ...], tokenizer: AutoTokenizer
) -> None:
    """After each token another engine goes on: the whole is the undisturbed answer, the end at
    the same token."""
    sampling = seeded(11, temperature=0.8)
    request = EngineRequest(key="a", prompt_ids=prompt, sampling=sampling)
    (whole,) = answers(Run(pair[0]), "a", request)
    check(tokenizer, whole)
    for count in range(1, len(whole) + 1, 3):
        taken = replace(request, tokens=(tuple(whole[:count]),))
        (rest,) = answers(Run(pair[1]), "a", taken)
        assert whole[:count] + rest == whole
    (nothing,) = answers(Run(pair[1]), "a", replace(request, tokens=(tuple(whole),)))
    assert nothing == []


def test_prefill_hands_the_answer_over(
    pair: tuple[Engine, Engine], prompt: tuple[int, ...], tokenizer: AutoTokenizer
) -> None:
    """The first token of one engine, masked there, and the rest of another that has its blocks:
    together the answer of one."""
    prefill, decode = Run(pair[0]), Run(pair[1])
    request = EngineRequest(key="a", prompt_ids=prompt, sampling=seeded(21))
    (whole,) = answers(prefill, "a", request)
    prefill.add("a", prompt, request.sampling, hold_after_first=True)
    prefill.to_end()
    hand_over(prefill, "a", request, decode)
    assert decode.to_end()["a"] == whole
    check(tokenizer, whole)
    prefill.to_end()

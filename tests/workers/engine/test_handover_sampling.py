"""Every sampling option in two engines, prefill here and decode there, is what one engine gives.

The state that an option keeps (penalties over the tokens so far, a grammar's place, stop strings
half seen, the seed's position) is made again from the tokens that exist, so byte for byte the same
comes out behind a hand-over.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from schemas.requests import ResponseFormat, SamplingParams
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.workers.engine.torch_engines import prompts, small_engine
from workers.engine.api import EngineRequest, TokenOutput
from workers.engine.engine import Engine

PROMPTS = prompts((21, 16, 5), vocab_size=VOCAB_SIZE)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=14, ignore_eos=True)
SCHEMA = '{"type":"object","properties":{"a":{"enum":["x","yy"]},"b":{"type":"boolean"}}}'
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "n": {"n": 3},
    "seed": {"seed": 2**63 + 5},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 2.0, "temperature": 0.0},
    "frequency": {"frequency_penalty": 2.0, "temperature": 0.0, "n": 2},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0},
    "logit_bias": {"logit_bias": {9: 100.0, 10: 99.0}},
    "logprobs": {"logprobs": 3, "n": 2},
    "stop": {"stop": ("e", "t", "a"), "n": 2},
    "stop_after_min_tokens": {"stop": ("e", "t", "a"), "min_tokens": 6},
    "stop_token_ids": {"stop_token_ids": tuple(range(3, 130))},
    "eos": {"ignore_eos": False, "logit_bias": {2: 4.0}, "n": 2},
    "min_tokens": {"ignore_eos": False, "logit_bias": {2: 100.0}, "min_tokens": 5},
    "json_object": {"response_format": ResponseFormat(kind="json_object"), "n": 2},
    "json_schema": {"response_format": ResponseFormat(kind="json_schema", json_schema=SCHEMA)},
    "all": {
        "n": 2, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {9: -100.0},
        "logprobs": 2, "stop": ("zz",), "min_tokens": 3,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[Engine, Engine, Engine]:
    """One for all; prefill; decode, with other block ids."""
    return small_engine(folder), small_engine(folder), small_engine(folder, num_blocks=80)


def work(engine: Engine) -> list[TokenOutput]:
    """All outputs until nothing is left to do."""
    outputs: list[TokenOutput] = []
    while engine.has_work():
        report = engine.step()
        assert not report.failed, report.failed
        outputs += report.outputs
    engine.check_invariants()
    return outputs


def handed_over(prefill: Engine, decode: Engine, request: EngineRequest) -> list[TokenOutput]:
    """Tokens 0 from ``prefill``, the rest from ``decode``."""
    prefill.add(msgspec.structs.replace(request, hold_after_first=True))
    outputs: list[TokenOutput] = []
    held = None
    while prefill.has_work():
        report = prefill.step()
        assert not report.failed, report.failed
        outputs += report.outputs
        held = next(iter(report.held), held)
    if held is None:
        return outputs
    blocks = decode.reserve(request.key, held.num_tokens)
    assert blocks is not None
    decode.pool.slots[list(blocks)] = prefill.pool.slots[list(held.blocks)]
    prefill.release(request.key)
    by_choice = sorted(outputs, key=lambda output: output.index)
    decode.add(
        EngineRequest(
            key=request.key,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            tokens=tuple((output.token_id,) for output in by_choice),
            finished=tuple(output.finish_reason or "" for output in by_choice),
            imported_blocks=blocks,
            num_imported_tokens=held.num_tokens,
        )
    )
    return outputs + work(decode)


@pytest.mark.parametrize("option", OPTIONS)
def test_two_engines_say_what_one_says(engines: tuple[Engine, Engine, Engine], option: str) -> None:
    """Tokens, text, finish reasons; logprobs up to how sums of other shapes round."""
    alone, prefill, decode = engines
    sampling = msgspec.structs.replace(SEEDED, **OPTIONS[option])
    for number, prompt in enumerate(PROMPTS):
        # Another salt each time: no cached block makes two runs compute different things.
        request = EngineRequest(
            key=f"{option}-{number}",
            prompt_ids=prompt,
            sampling=sampling,
            salt=f"{option}-{number}".encode(),
        )
        alone.add(request)
        whole, parts = work(alone), handed_over(prefill, decode, request)
        for index in range(sampling.n):
            assert said(parts, index) == said(whole, index)
            for mine, theirs in zip(logprobs(parts, index), logprobs(whole, index), strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
    for engine in engines:
        assert engine.blocks.num_available == engine.blocks.num_blocks


def said(outputs: list[TokenOutput], index: int) -> list[tuple[int, int, str, str | None]]:
    return [
        (output.number, output.token_id, output.text, output.finish_reason)
        for output in outputs
        if output.index == index
    ]


def logprobs(outputs: list[TokenOutput], index: int) -> list[list[float]]:
    return [
        [output.logprob.logprob, *(top.logprob for top in output.logprob.top)]
        for output in outputs
        if output.index == index and output.logprob is not None
    ]


def test_the_options_do_something(engines: tuple[Engine, Engine, Engine]) -> None:
    """Else the comparison above would compare one answer with itself."""
    answers = {}
    for option, fields in OPTIONS.items():
        sampling = msgspec.structs.replace(SEEDED, **fields)
        engines[0].add(EngineRequest(key=option, prompt_ids=PROMPTS[0], sampling=sampling))
        answers[option] = said(work(engines[0]), 0)
    base = {name: answers[name] for name in ("plain", "greedy")}
    same_by_nature = {"plain", "greedy", "n", "logprobs"}  # choice 0 is what it is without them
    for option in set(OPTIONS) - same_by_nature:
        assert answers[option] not in base.values(), option

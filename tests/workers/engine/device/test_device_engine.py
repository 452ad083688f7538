"""An engine that computes in a pool of its own: the answers are those of ``generate``, and what
goes to other processes and comes from them is what it computed.

Here the device is the CPU, with a pool apart from the shared one: the same code as on CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.transport.handover import checksums
from schemas.requests import SamplingParams
from tests.tiny_models import VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.device.device_engines import staged_engine
from tests.workers.engine.torch_engines import (
    NUM_TOKENS,
    Run,
    generate,
    greedy,
    hand_over,
    prompts,
    reference_model,
    small_engine,
)
from workers.engine.api import EngineRequest, RunnerLost
from workers.engine.build import build_torch_engine


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "gpt_oss", "llama"])
def test_tiny_models_answer_as_in_transformers(architecture: str, tiny_folder: TinyFolder) -> None:
    """Chunks, mixed steps, padded steps, a shared beginning; nothing is written into the shared
    pool for requests that stay."""
    folder = tiny_folder(architecture)
    asked = prompts((21, 5, 37), vocab_size=VOCAB_SIZE)
    asked.append(asked[2][:30] + asked[0][:9])
    run = Run(staged_engine(folder))
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy())
        run.step(2 if number < 2 else 5)
    tokens = run.to_end()
    reference = reference_model(folder)
    assert [tokens[str(n)] for n in range(len(asked))] == [
        generate(reference, prompt, NUM_TOKENS) for prompt in asked
    ]
    assert run.finished["3"].num_cached_tokens == 28
    assert not run.engine.pool.slots.any()


@pytest.mark.parametrize("staged", ["prefill", "decode", "both"])
def test_blocks_go_to_engines_of_either_kind(staged: str, tiny_folder: TinyFolder) -> None:
    """Two rounds of hand-overs in pools so small that slots are used again: whichever side has a
    pool of its own, answers are those of ``generate``."""
    folder = tiny_folder("llama")
    prefill = Run(_engine(folder, is_staged=staged != "decode", num_blocks=40))
    decode = Run(_engine(folder, is_staged=staged != "prefill", num_blocks=60))
    assert prefill.engine.info.fingerprint == decode.engine.info.fingerprint
    reference = reference_model(folder)
    common = prompts((10,), vocab_size=VOCAB_SIZE)[0]
    for turn in range(2):
        asked = [common + own for own in prompts((11, 3, 27), vocab_size=VOCAB_SIZE, seed=turn)]
        requests = {
            f"{turn}.{n}": EngineRequest(key=f"{turn}.{n}", prompt_ids=prompt, sampling=greedy())
            for n, prompt in enumerate(asked)
        }
        for key, request in requests.items():
            prefill.add(key, request.prompt_ids, request.sampling, hold_after_first=True)
        prefill.to_end()
        for key, request in requests.items():
            hand_over(prefill, key, request, decode)
        tokens = decode.to_end()
        prefill.to_end()
        assert [tokens[key] for key in requests] == [
            generate(reference, prompt, NUM_TOKENS) for prompt in asked
        ]


def _engine(folder: Path, *, is_staged: bool, num_blocks: int) -> Any:
    make = staged_engine if is_staged else small_engine
    return make(folder, num_blocks=num_blocks)


def test_held_blocks_are_those_an_engine_in_the_shared_pool_has(tiny_folder: TinyFolder) -> None:
    """Readers see the same numbers, up to rounding, and checksums of a block that two requests
    hold stay what they were when the second is held."""
    folder = tiny_folder("llama")
    prompt = prompts((21,), vocab_size=VOCAB_SIZE)[0]
    seen = []
    for engine in (small_engine(folder), staged_engine(folder)):
        run = Run(engine)
        run.add("a", prompt, greedy(), hold_after_first=True)
        run.to_end()
        held = run.held["a"]
        before = checksums(engine.pool, held.blocks)
        run.add("b", prompt, greedy(), hold_after_first=True)
        run.to_end()
        assert run.held["b"].blocks[:5] == held.blocks[:5]
        assert checksums(engine.pool, held.blocks) == before
        floats = engine.pool.slots[list(held.blocks[:5])].view(np.float32)
        seen.append(floats)
    assert np.abs(seen[0]).max() > 0.1
    np.testing.assert_allclose(seen[1], seen[0], atol=1e-5)


def test_choices_of_a_handed_over_request(tiny_folder: TinyFolder) -> None:
    """Three choices begin as forks of an imported prompt that ends within a block: each is what
    one engine alone gives."""
    folder = tiny_folder("llama")
    prompt = prompts((22,), vocab_size=VOCAB_SIZE)[0]
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=9, n=3, ignore_eos=True)
    alone = _Choices(small_engine(folder))
    alone.add("r", prompt, sampling)
    alone.to_end()

    prefill, decode = _Choices(staged_engine(folder)), _Choices(staged_engine(folder))
    prefill.add("r", prompt, sampling, hold_after_first=True)
    prefill.to_end()
    held = prefill.held["r"]
    blocks = decode.engine.reserve("r", held.num_tokens)
    assert blocks is not None
    decode.engine.pool.slots[list(blocks)] = prefill.engine.pool.slots[list(held.blocks)]
    first = tuple(tuple(prefill.choices[n]) for n in range(3))
    decode.choices = {n: list(tokens) for n, tokens in enumerate(first)}
    decode.add(
        "r",
        prompt,
        sampling,
        tokens=first,
        imported_blocks=blocks,
        num_imported_tokens=held.num_tokens,
    )
    decode.to_end()
    assert decode.choices == alone.choices
    assert len({tuple(tokens) for tokens in alone.choices.values()}) == 3


class _Choices(Run):
    """Keeps tokens by choice."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.choices: dict[int, list[int]] = {}

    def _take(self, report: Any) -> None:
        super()._take(report)
        for output in report.outputs:
            self.choices.setdefault(output.index, []).append(output.token_id)


def test_a_small_pool_preempts_and_the_answers_stay(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("llama")
    asked = prompts((21, 25, 37, 33, 18), vocab_size=VOCAB_SIZE)
    run = Run(staged_engine(folder, num_blocks=24))
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy())
    tokens = run.to_end()
    assert run.engine.scheduler.num_preemptions > 0
    reference = reference_model(folder)
    assert [tokens[str(n)] for n in range(len(asked))] == [
        generate(reference, prompt, NUM_TOKENS) for prompt in asked
    ]


def test_a_request_whose_blocks_cant_be_exported_fails_alone(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported as failed, its blocks go back, and the next one is held."""
    engine = staged_engine(tiny_folder("llama"))
    first, second = prompts((9, 9), vocab_size=VOCAB_SIZE)
    engine.add(EngineRequest(key="a", prompt_ids=first, sampling=greedy(), hold_after_first=True))
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "export_blocks", _raise)
        report = engine.step()
    assert [(failed.key, failed.message) for failed in report.failed] == [
        ("a", "RuntimeError: the device is lost")
    ]
    assert not report.held
    engine.check_invariants()
    assert engine.blocks.num_available == engine.blocks.num_blocks
    engine.add(EngineRequest(key="b", prompt_ids=second, sampling=greedy(), hold_after_first=True))
    assert [held.key for held in engine.step().held] == ["b"]


def test_a_lost_device_ends_the_engine(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is blamed on no request: the worker ends, and others go on with what it had."""

    def lose(*_: Any) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    engine = staged_engine(tiny_folder("llama"))
    engine.add(EngineRequest(key="a", prompt_ids=(4, 5, 6), sampling=greedy()))
    monkeypatch.setattr(engine.runner, "_forward", lose)
    with pytest.raises(RunnerLost, match="illegal memory access"):
        engine.step()


def _raise(*_: Any) -> None:
    raise RuntimeError("the device is lost")


def test_an_import_that_fails_leaves_the_reservation(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with every other reason for which ``add`` raises."""
    engine = staged_engine(tiny_folder("llama"))
    prompt = prompts((9,), vocab_size=VOCAB_SIZE)[0]
    blocks = engine.reserve("a", 9)
    assert blocks is not None
    request = EngineRequest(
        key="a",
        prompt_ids=prompt,
        sampling=greedy(),
        tokens=((5,),),
        imported_blocks=blocks,
        num_imported_tokens=9,
    )
    monkeypatch.setattr(engine.runner, "import_blocks", _raise)
    with pytest.raises(RuntimeError, match="device is lost"):
        engine.add(request)
    engine.check_invariants()
    assert not engine.has_work()
    engine.release("a")
    assert engine.blocks.num_available == engine.blocks.num_blocks


def test_the_builder_takes_the_device_way(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is not the plain CPU: bf16 where the dtype is left open, whatever the
    processor prefers."""
    monkeypatch.setattr("workers.engine.build.resolve_device", lambda name: torch.device("cpu", 0))
    engine = build_torch_engine(tiny_folder("llama"), device="cuda", num_blocks=64, block_size=4)
    assert (engine.info.kind, engine.info.dtype) == ("cpu", "bf16")
    run = Run(engine)
    run.add("a", prompts((9,), vocab_size=VOCAB_SIZE)[0], greedy(5))
    assert len(run.to_end()["a"]) == 5

"""On CUDA: the same rules as on the CPU, with the kernels and graphs that are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra.config import WorkerConfig
from tests.tiny_models import VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.device.device_engines import CUDA, device_runner, staged_engine
from tests.workers.engine.test_runner import scheduled
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
from workers.engine.api import EngineRequest
from workers.engine.build import build_torch_engine
from workers.engine.device.backends import make_backend
from workers.engine.device.check import agrees, max_difference
from workers.engine.device.choice import Needs, candidates
from workers.engine.device.needs import find_machine
from workers.engine.kv_layout import KvLayout

pytestmark = pytest.mark.gpu

NEEDS = Needs(dtype="bfloat16", num_heads=16, head_dim=128)
LAYOUT = KvLayout(
    revision="r", dtype="bfloat16", num_layers=2, num_kv_heads=4, head_dim=128, block_size=16
)


@pytest.mark.parametrize(
    "needs",
    [
        NEEDS,
        replace(NEEDS, has_window=True),
        replace(NEEDS, has_softcap=True, has_sinks=True),
        replace(NEEDS, head_dim=64),
        replace(NEEDS, head_dim=80, dtype="float16"),
        replace(NEEDS, dtype="float32"),
    ],
)
@pytest.mark.parametrize("name", ["fa3", "triton", "varlen", "gather"])
def test_each_allowed_way_is_plain_attention(name: str, needs: Needs) -> None:
    """What the table allows on this device is right, not merely dropped when it is not."""
    (way,) = [way for way in candidates(find_machine(CUDA), needs) if way.name == name]
    if way.refusal:
        pytest.skip(f"{name}: {way.refusal}")
    layout = replace(LAYOUT, dtype=needs.dtype, head_dim=needs.head_dim)
    difference = max_difference(make_backend(name), layout, needs, CUDA)
    assert agrees(difference, needs.dtype), difference


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "gpt_oss", "llama", "mistral"])
def test_tiny_models_answer_as_in_transformers(architecture: str, tiny_folder: TinyFolder) -> None:
    """fp32, greedy: tokens of ``generate`` on the CPU, with steps that are recorded and replayed
    where the model can be."""
    folder = tiny_folder(architecture)
    asked = prompts((21, 5, 37), vocab_size=VOCAB_SIZE)
    run = Run(staged_engine(folder, device=CUDA))
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy())
    tokens = run.to_end()
    reference = reference_model(folder)
    assert [tokens[str(n)] for n in range(len(asked))] == [
        generate(reference, prompt, NUM_TOKENS) for prompt in asked
    ]


@pytest.mark.parametrize("cuda_side", ["prefill", "decode"])
def test_blocks_go_between_cuda_and_the_cpu(cuda_side: str, tiny_folder: TinyFolder) -> None:
    """A request begun on one goes on on the other."""
    folder = tiny_folder("llama")
    engines = (staged_engine(folder, device=CUDA), small_engine(folder))
    prefill, decode = (Run(one) for one in (engines if cuda_side == "prefill" else engines[::-1]))
    prompt = prompts((37,), vocab_size=VOCAB_SIZE)[0]
    request = EngineRequest(key="r", prompt_ids=prompt, sampling=greedy())
    prefill.add("r", prompt, greedy(), hold_after_first=True)
    prefill.to_end()
    hand_over(prefill, "r", request, decode)
    assert decode.to_end()["r"] == generate(reference_model(folder), prompt, NUM_TOKENS)


def test_a_replayed_step_has_the_logits_of_one_that_is_not(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step of a shape is a replay with other numbers."""
    runner, _ = device_runner(tiny_folder("llama"), device=CUDA, num_blocks=30)
    asked = prompts((10, 20, 7), vocab_size=VOCAB_SIZE)
    tables = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]
    for ids, table in zip(asked, tables, strict=True):
        runner.execute([scheduled(ids, table, 0, len(ids) - 2, samples=False)])
    steps = [
        [
            scheduled(ids, table, len(ids) - back, 1)
            for ids, table in zip(asked, tables, strict=True)
        ]
        for back in (2, 1)
    ]
    assert runner._graphs is not None
    replayed = [runner.logits(step) for step in steps]
    assert len(runner._graphs._recorded) == 1
    monkeypatch.setattr(runner, "_graphs", None)
    for step, logits in zip(steps, replayed, strict=True):
        torch.testing.assert_close(logits, runner.logits(step), rtol=1e-3, atol=1e-3)


def test_auto_chooses_cuda_and_bf16(tiny_folder: TinyFolder) -> None:
    """As a worker without settings does."""
    folder: Path = tiny_folder("llama")
    assert WorkerConfig.__dataclass_fields__["device"].default == "auto"
    engine = build_torch_engine(folder, device="auto", num_blocks=64, block_size=4)
    assert (engine.info.kind, engine.info.dtype) == ("cuda", "bf16")
    run = Run(engine)
    run.add("a", prompts((9,), vocab_size=VOCAB_SIZE)[0], greedy(5))
    assert len(run.to_end()["a"]) == 5

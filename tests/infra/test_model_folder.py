"""Reading model folders without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.model_folder import open_model_folder, revision_of
from schemas.errors import ModelUnsupported
from tests.tiny_tokenizer import write_tiny_tokenizer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete folder; its weights are bytes that nobody loads here."""
    write_tiny_tokenizer(tmp_path, 320)
    write_config(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return tmp_path


def write_config(folder: Path, config: dict[str, Any], name: str = "config.json") -> None:
    (folder / name).write_text(json.dumps(config))


def test_facts_of_a_complete_folder(folder: Path) -> None:
    """Architecture, context, vocabulary, ends and template are read; the generation
    configuration's end tokens go before the configuration's."""
    facts = open_model_folder(folder)
    assert (facts.architecture, facts.context_length, facts.vocab_size) == ("llama", 512, 320)
    assert facts.eos_token_ids == {2}
    assert facts.has_chat_template
    assert facts.revision == revision_of(folder)
    write_config(folder, {"eos_token_id": [2, 7]}, "generation_config.json")
    assert open_model_folder(folder).eos_token_ids == {2, 7}


def test_text_models_inside_others_are_read(folder: Path) -> None:
    """A text decoder nested in a larger configuration gives the facts."""
    write_config(folder, {"model_type": "gemma3", "vision_config": {}, "text_config": CONFIG})
    assert open_model_folder(folder).context_length == 512


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "longrope"}},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
    ],
    ids=str,
)
def test_rotations_that_grow_with_the_text_keep_the_original_context(
    folder: Path, rope: dict[str, Any]
) -> None:
    """Such a model would turn cached keys wrong beyond the length it was first trained on."""
    write_config(folder, CONFIG | {"original_max_position_embeddings": 128} | rope)
    assert open_model_folder(folder).context_length == 128


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba", "state_size": 16}, "'mamba'.*state-space"),
        ({"model_type": "zamba9", "mamba_d_state": 16}, "'zamba9'.*state-space"),
        ({"model_type": "rwkv"}, "'rwkv'.*recurrent"),
        ({"model_type": "qwen3_next"}, "'qwen3_next'.*linear"),
        ({"model_type": "new", "layer_types": ["full_attention", "linear_attention"]}, "linear_"),
        ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5'.*encoder"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'.*MLA"),
        ({"model_type": "new", "kv_lora_rank": 512}, "'new'.*MLA"),
        ({"model_type": "vit", "vision_config": {}}, "'vit'.*no text decoder"),
        ({"model_type": ""}, "no model_type"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cant_be_served_is_refused_by_name(
    folder: Path, config: dict[str, Any], reason: str
) -> None:
    """The error names the folder, the architecture, and why."""
    write_config(folder, CONFIG | config)
    with pytest.raises(ModelUnsupported, match=reason) as caught:
        open_model_folder(folder)
    assert str(folder) in str(caught.value)


def test_hybrids_whose_layers_are_all_attention_are_let_through(folder: Path) -> None:
    """The kinds of layers decide, where a configuration names them."""
    layers = {"model_type": "granitemoehybrid", "mamba_d_state": 16, "layer_types": ["attention"]}
    write_config(folder, CONFIG | layers)
    assert open_model_folder(folder).architecture == "granitemoehybrid"


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove("config.json"), "no config.json"),
        (remove("tokenizer.json"), "no tokenizer.json"),
        (remove("model.safetensors"), "no weights"),
        (write("config.json", "{"), r"config\.json: can't be read"),
        (write("config.json", "[]"), r"config\.json: not a JSON object"),
        (write("tokenizer.json", "nonsense"), r"tokenizer\.json: can't be read"),
        (write("model.safetensors.index.json", "{}"), "no weight_map"),
        (
            write("model.safetensors.index.json", '{"weight_map": {"a": "part-2.safetensors"}}'),
            r"part-2\.safetensors is missing",
        ),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_damaged_folders_are_refused(
    folder: Path, damage: Callable[[Path], None], reason: str
) -> None:
    """Each missing or broken file is an error that names folder and file."""
    damage(folder)
    with pytest.raises(ModelUnsupported, match=reason) as caught:
        open_model_folder(folder)
    assert str(folder) in str(caught.value)


def test_copies_have_the_same_revision_and_changes_another(folder: Path, tmp_path: Path) -> None:
    """The revision is of the content, not of place or time; each part of it counts."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("elsewhere"))
    seen = {revision_of(folder)}
    assert seen == {revision_of(copy)}
    with (copy / "model.safetensors").open("r+b") as weights:
        weights.write(b"\xff")
    seen.add(revision_of(copy))
    with (copy / "model.safetensors").open("ab") as weights:
        weights.write(b"\0")
    seen.add(revision_of(copy))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (copy / name).write_text((copy / name).read_text() + " ")
        seen.add(revision_of(copy))
    assert len(seen) == 6


def test_a_revision_is_cheap_whatever_the_size(folder: Path) -> None:
    """Under 50 ms (the best of three) for 64 GB of weights."""
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.truncate(64 * 10**9)  # a hole: takes no room
    times_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        revision_of(folder)
        times_s.append(time.perf_counter() - start_s)
    assert min(times_s) < 0.05


def test_nothing_heavy_is_imported() -> None:
    """The control process reads folders; torch and transformers must not come with it."""
    code = (
        "import sys, infra.model_folder, workers.engine.sources\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Which attention may be used where, and which device a name means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infra.parse import device
from schemas.errors import ConfigError
from tests.workers.engine.conftest import TinyFolder
from workers.engine.build import build_torch_engine
from workers.engine.device.choice import Machine, Needs, candidates
from workers.engine.device.needs import find_machine, find_needs
from workers.engine.device.select import resolve_device
from workers.engine.loader import load_model
from workers.engine.runner import layout_of

HOPPER = Machine(device="cuda", capability=(9, 0), has_fa3=True, has_triton=True)
PLAIN_HOPPER = Machine(device="cuda", capability=(9, 0), has_triton=True)
AMPERE = Machine(device="cuda", capability=(8, 6), has_fa3=True, has_triton=True)
BLACKWELL = Machine(device="cuda", capability=(10, 0), has_fa3=True)
TURING = Machine(device="cuda", capability=(7, 5), has_triton=True)
NO_GPU = Machine(device="cpu", has_fa3=True, has_triton=True)


def needs(dtype: str = "bfloat16", head_dim: int = 64, **more: bool) -> Needs:
    return Needs(dtype=dtype, num_heads=8, head_dim=head_dim, **more)


@pytest.mark.parametrize(
    ("machine", "wanted", "allowed"),
    [
        (HOPPER, needs(), ["fa3", "triton", "varlen", "gather"]),
        (HOPPER, needs(has_window=True), ["fa3", "triton", "varlen", "gather"]),
        (HOPPER, needs(has_softcap=True), ["triton", "gather"]),
        (HOPPER, needs(has_sinks=True), ["triton", "gather"]),
        (HOPPER, needs("float32"), ["triton", "gather"]),
        (HOPPER, needs(head_dim=512), ["gather"]),
        (HOPPER, needs(head_dim=36), ["triton", "gather"]),
        (PLAIN_HOPPER, needs(), ["triton", "varlen", "gather"]),
        (AMPERE, needs("float16"), ["triton", "varlen", "gather"]),
        (BLACKWELL, needs(), ["varlen", "gather"]),
        (TURING, needs("float16"), ["gather"]),
        (NO_GPU, needs(), ["gather"]),
    ],
)
def test_what_a_machine_and_a_model_allow(
    machine: Machine, wanted: Needs, allowed: list[str]
) -> None:
    """The preferred way first; each other one says why not."""
    ways = candidates(machine, wanted)
    assert [way.name for way in ways] == ["fa3", "triton", "varlen", "gather"]
    assert [way.name for way in ways if not way.refusal] == allowed


@pytest.mark.parametrize(
    ("machine", "wanted", "name", "reason"),
    [
        (AMPERE, needs(), "fa3", "capability 9.0, this is 8.6"),
        (PLAIN_HOPPER, needs(), "fa3", "not installed"),
        (HOPPER, needs(has_softcap=True), "varlen", "soft cap"),
        (HOPPER, needs("float32"), "fa3", "float32"),
        (BLACKWELL, needs(), "triton", "not installed"),
        (NO_GPU, needs(), "triton", "CUDA"),
    ],
)
def test_a_refusal_names_its_reason(
    machine: Machine, wanted: Needs, name: str, reason: str
) -> None:
    """It is what the log line at start-up shows."""
    (refusal,) = [way.refusal for way in candidates(machine, wanted) if way.name == name]
    assert reason in refusal


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", Needs(dtype="float32", num_heads=4, head_dim=16)),
        ("mistral", Needs(dtype="float32", num_heads=4, head_dim=16, has_window=True)),
        (
            "gemma2",
            Needs(dtype="float32", num_heads=4, head_dim=16, has_window=True, has_softcap=True),
        ),
        (
            "gpt_oss",
            Needs(dtype="float32", num_heads=4, head_dim=16, has_window=True, has_sinks=True),
        ),
    ],
)
def test_needs_are_found_by_running_the_model(
    architecture: str, expected: Needs, tiny_folder: TinyFolder
) -> None:
    """Not by reading settings, which models name as they like."""
    loaded = load_model(tiny_folder(architecture), "fp32")
    layout_of(loaded, block_size=4)
    assert find_needs(loaded.model) == expected


def test_a_machine_without_cuda_has_no_kernels_for_it() -> None:
    """Nothing is looked for there."""
    assert find_machine(torch.device("cpu")) == Machine(device="cpu")


# ---- the device --------------------------------------------------------------------------------


def has_cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the CPU elsewhere; a number is that device."""
    has_cuda(monkeypatch, 0)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    has_cuda(monkeypatch, 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, never by falling back in silence."""
    has_cuda(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="built without CUDA") as raised:
        resolve_device("cuda")
    assert raised.value.param == "device"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="no GPU is seen"):
        resolve_device("cuda:0")
    has_cuda(monkeypatch, 2)
    with pytest.raises(ConfigError, match="cuda:2 can't be used: CUDA sees 2"):
        resolve_device("cuda:2")


def test_what_exists_on_the_cpu_alone(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4-bit weights and native kernels decide for the CPU where the device is left open, and are
    refused beside CUDA."""
    has_cuda(monkeypatch, 1)
    folder: Path = tiny_folder("llama")
    for more, what in (({"dtype": "q4"}, "dtype q4"), ({"kernels": "native"}, "native kernels")):
        with pytest.raises(ConfigError, match=f"{what} can't be had on cuda:0"):
            build_torch_engine(folder, device="cuda", num_blocks=8, **more)  # type: ignore[arg-type]
    engine = build_torch_engine(folder, device="auto", kernels="native", num_blocks=8)
    assert engine.info.kind == "native"


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_device_names(name: str) -> None:
    """As settings and flags take them."""
    assert device(name) == name


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "CUDA", "cuda:1 ", "mps", 0])
def test_other_device_names_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="none of auto, cpu, cuda"):
        device(name)

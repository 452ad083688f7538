"""Each way to compute attention against plain attention, and what is dropped."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from schemas.errors import ModelUnsupported
from tests.workers.engine.device.device_engines import CPU, flash_on_cpu
from workers.engine.attention import Scoring
from workers.engine.device import load
from workers.engine.device.backends import (
    Backend,
    fa3_attention,
    gather_attention,
    make_backend,
    pages,
    varlen_attention,
)
from workers.engine.device.batch import PagedBatch
from workers.engine.device.check import agrees, max_difference
from workers.engine.device.choice import Candidate, Needs
from workers.engine.kv_layout import KvLayout
from workers.engine.kv_pool import KvPool

LAYOUT = KvLayout(
    revision="r", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=24, block_size=8
)
NEEDS = Needs(dtype="float32", num_heads=6, head_dim=24)
ALL_NEEDS = (
    NEEDS,
    replace(NEEDS, has_window=True),
    replace(NEEDS, has_softcap=True, has_window=True),
    replace(NEEDS, has_sinks=True),
)


@pytest.mark.parametrize("needs", ALL_NEEDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathering_serves_every_need(needs: Needs, dtype: str) -> None:
    """Decodes and chunks over blocks in disorder, up to rounding."""
    layout = replace(LAYOUT, dtype=dtype)
    difference = max_difference(make_backend("gather"), layout, replace(needs, dtype=dtype), CPU)
    assert difference < (1e-5 if dtype == "float32" else 0.03)
    assert agrees(difference, dtype)


@pytest.mark.parametrize("attention", [varlen_attention, fa3_attention])
@pytest.mark.parametrize("needs", ALL_NEEDS[:2])
def test_flash_kernels_get_what_they_are_documented_to_take(
    attention: Any, needs: Needs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered rows and pages, lengths, windows: a plain stand-in for torch's kernel, which has
    no CPU version, gives plain attention's numbers."""
    monkeypatch.setattr(varlen, "varlen_attn", flash_on_cpu)
    backend = Backend(name="flash", attend=attention)
    assert max_difference(backend, LAYOUT, needs, CPU) < 1e-5


def test_pages_are_views_of_the_pool() -> None:
    """[layer][keys | values][kv_head][offset][head_dim] inside a block, shown token by token; the
    last dimension is contiguous, as kernels ask."""
    slots = torch.arange(5 * LAYOUT.block_bytes // 4, dtype=torch.int32)
    pool = KvPool(slots.view(torch.uint8).view(5, -1), LAYOUT)
    keys, values = pages(pool, 2)
    assert keys.shape == values.shape == (5, 8, 2, 24)
    assert keys.stride(-1) == 1
    blocks = pool.vectors.view(5, 3, 2, 2, 8, 24)
    assert torch.equal(keys[4, 7, 1].view(torch.int32), blocks[4, 2, 0, 1, 7].view(torch.int32))
    assert torch.equal(values[1, 3, 0].view(torch.int32), blocks[1, 2, 1, 0, 3].view(torch.int32))
    assert keys.data_ptr() == pool.heads.data_ptr() + 2 * 2 * 2 * 8 * 24 * 4


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("needs", [NEEDS, replace(NEEDS, has_window=True, has_softcap=True)])
def test_the_kernel_for_decodes_interpreted(needs: Needs) -> None:
    """In Triton's interpreter, which must be asked for before the kernel's module is read."""
    code = f"""
from torch import device
from workers.engine.device.backends import make_backend
from workers.engine.device.check import max_difference
from workers.engine.device.choice import Needs
from workers.engine.kv_layout import KvLayout
print(max_difference(make_backend("triton"), {LAYOUT!r}, {needs!r}, device("cpu")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


# ---- what is dropped ---------------------------------------------------------------------------


def wrong_window(
    pool: KvPool, query: Tensor, layer: int, batch: PagedBatch, scoring: Scoring
) -> Tensor:
    window = None if scoring.window is None else scoring.window + 1
    return gather_attention(pool, query, layer, batch, replace(scoring, window=window))


def raising(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


def no_numbers(
    pool: KvPool, query: Tensor, layer: int, batch: PagedBatch, scoring: Scoring
) -> Tensor:
    return query * torch.nan


def ways(*names: str) -> tuple[Candidate, ...]:
    return tuple(Candidate(name=name) for name in names)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    """What ``make_backend`` makes, by name."""
    backends = {
        "decoder": Backend(name="decoder", attend=gather_attention, decodes_only=True),
        "gather": Backend(name="gather", attend=gather_attention),
        "nan": Backend(name="nan", attend=no_numbers),
        "raising": Backend(name="raising", attend=raising),
        "window": Backend(name="window", attend=wrong_window),
    }
    monkeypatch.setattr(load, "make_backend", backends.__getitem__)
    return backends


@pytest.mark.parametrize("bad", ["nan", "raising", "window", "unknown"])
def test_a_way_that_is_wrong_or_raises_is_dropped(bad: str, made: dict[str, Backend]) -> None:
    """A window that is one too long is found as well as a kernel that does not run: the next way
    takes its place."""
    needs = replace(NEEDS, has_window=True)
    chosen = load.choose(ways(bad, "gather"), LAYOUT, needs, CPU)
    assert chosen.decode is chosen.mixed is made["gather"]


def test_decodes_and_other_steps_may_take_different_ways(made: dict[str, Backend]) -> None:
    """A kernel for decodes alone is joined by the next way that takes everything."""
    chosen = load.choose(ways("decoder", "raising", "gather"), LAYOUT, NEEDS, CPU)
    assert (chosen.decode.name, chosen.mixed.name) == ("decoder", "gather")


def test_without_any_way_the_model_is_refused(made: dict[str, Backend]) -> None:
    """With each way's reason."""
    with pytest.raises(ModelUnsupported, match=r"soft cap.*no kernel image"):
        load.choose(
            (*ways("raising"), Candidate(name="fa3", refusal="has no soft cap")),
            LAYOUT,
            NEEDS,
            CPU,
        )


@pytest.mark.parametrize("name", ["varlen", "fa3"])
def test_kernels_for_cuda_do_not_pass_on_a_cpu(name: str) -> None:
    """torch says that there is none; nothing else happens."""
    assert load.choose(ways(name, "gather"), LAYOUT, NEEDS, CPU).decode.name == "gather"

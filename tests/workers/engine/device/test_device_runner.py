"""The runner for a device: padding, copies between the pools, what it says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import ModelUnsupported
from tests.tiny_models import VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.device.device_engines import device_runner, staged_engine
from tests.workers.engine.test_runner import scheduled
from tests.workers.engine.torch_engines import prompts, small_engine
from workers.engine.api import ScheduledSequence
from workers.engine.device import runner as runner_module


def decodes(asked: list[tuple[int, ...]], tables: list[list[int]]) -> list[ScheduledSequence]:
    return [
        scheduled(ids, table, len(ids) - 1, 1, samples=number != 1)
        for number, (ids, table) in enumerate(zip(asked, tables, strict=True))
    ]


def test_a_padded_step_has_the_logits_of_one_that_is_not(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three decodes, padded to four and to a wider table, one that does not sample among them; and
    nobody's block but the spare one is touched by padding."""
    runner, _ = device_runner(tiny_folder("gemma2"), num_blocks=30)
    asked = prompts((9, 20, 6), vocab_size=VOCAB_SIZE)
    tables = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]
    for ids, table in zip(asked, tables, strict=True):
        runner.execute([scheduled(ids, table, 0, len(ids) - 1, samples=False)])
    shapes = []
    forward = runner._forward
    monkeypatch.setattr(
        runner, "_forward", lambda numbers, shape: shapes.append(shape) or forward(numbers, shape)
    )
    padded = runner.logits(decodes(asked, tables)).clone()
    used = runner._slots.any(1).nonzero()[:, 0].tolist()
    assert used == [*range(1, 11), 30]
    monkeypatch.setattr(runner, "_bucket", lambda batch: None)
    plain = runner.logits(decodes(asked, tables))
    assert [shape.num_sequences for shape in shapes] == [4, 3]
    assert padded.shape == (2, VOCAB_SIZE)
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)


def test_copies_and_exports_move_whole_blocks(tiny_folder: TinyFolder) -> None:
    """``copy_block`` stays on the device; ``export_blocks`` and ``import_blocks`` move the named
    slots and no other."""
    runner, pool = device_runner(tiny_folder("llama"), num_blocks=8)
    pool.slots[:] = np.arange(8, dtype=np.uint8)[:, None] + 1
    runner.import_blocks([2, 5])
    assert runner._slots[:, 0].tolist() == [0, 0, 3, 0, 0, 6, 0, 0, 0]
    runner.copy_block(5, 0)
    pool.slots[:] = 0
    runner.export_blocks([0, 2])
    assert pool.slots[:, -1].tolist() == [6, 0, 3, 0, 0, 0, 0, 0]
    runner.export_blocks([])
    runner.import_blocks([])


def test_info_says_what_it_is(tiny_folder: TinyFolder) -> None:
    """Blocks are counted without the spare one, and others can read them."""
    folder = tiny_folder("llama")
    info = staged_engine(folder, num_blocks=7).info
    assert (info.kind, info.dtype, info.num_blocks) == ("cpu", "fp32", 7)
    assert info.fingerprint == small_engine(folder).info.fingerprint


def test_a_pool_that_does_not_fit_is_told_in_words(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the device is not that of the machine: the setting is named."""

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(runner_module, "KvPool", out_of_memory)
    with pytest.raises(ModelUnsupported, match="do not fit cpu") as raised:
        staged_engine(tiny_folder("llama"))
    assert raised.value.param == "kv_memory"

"""Engines whose blocks are computed apart from the shared pool: on CUDA, or on the CPU in a pool
of their own, which takes the same way."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from infra.transport.shm import SharedPool
from workers.engine.device.load import load_on_device
from workers.engine.device.runner import DeviceRunner
from workers.engine.engine import Engine, EngineConfig
from workers.engine.loader import load_model
from workers.engine.output import Vocabulary
from workers.engine.runner import layout_of

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


def device_runner(
    folder: Path,
    *,
    device: torch.device = CPU,
    dtype: str = "fp32",
    num_blocks: int = 96,
    max_batch: int = 8,
) -> tuple[DeviceRunner, SharedPool]:
    """Blocks of 4 tokens."""
    loaded = load_model(folder, dtype)
    layout = layout_of(loaded, block_size=4)
    pool = SharedPool(num_blocks, layout.block_bytes)
    return load_on_device(loaded, layout, pool.slots, device, max_batch=max_batch), pool


def staged_engine(
    folder: Path,
    *,
    device: torch.device = CPU,
    num_blocks: int = 96,
    max_num_sequences: int = 13,
) -> Engine:
    """As ``small_engine``: fp32, chunks of at most 13 tokens. Steps of more than eight decodes are
    not padded, so both ways occur."""
    runner, pool = device_runner(folder, device=device, num_blocks=num_blocks)
    config = EngineConfig(max_batch_tokens=13, max_num_sequences=max_num_sequences)
    return Engine(runner, pool, Vocabulary.from_folder(folder), config)


def flash_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """What torch's documentation promises of ``varlen_attn``, plainly: a query sees ``window_size``
    keys before and behind its own place, counted from the end of its sequence."""
    assert enable_gqa
    assert window_size[1] == 0
    assert int((cu_seq_q[1:] - cu_seq_q[:-1]).max()) <= max_q
    out = torch.empty_like(query)
    for number in range(len(cu_seq_q) - 1):
        rows = slice(int(cu_seq_q[number]), int(cu_seq_q[number + 1]))
        if block_table is None:
            assert cu_seq_k is not None
            here = slice(int(cu_seq_k[number]), int(cu_seq_k[number + 1]))
            keys, values = key[here], value[here]
        else:
            assert seqused_k is not None
            pages = block_table[number].long()
            length = int(seqused_k[number])
            keys = key[pages].flatten(0, 1)[:length]
            values = value[pages].flatten(0, 1)[:length]
        assert len(keys) <= max_k
        group = query.shape[1] // keys.shape[1]
        scores = torch.einsum(
            "qhd,khd->hqk", query[rows].float(), keys.float().repeat_interleave(group, 1)
        )
        places = torch.arange(len(keys))
        own = torch.arange(len(keys) - scores.shape[1], len(keys))[:, None]
        visible = places <= own
        if window_size[0] >= 0:
            visible &= places >= own - window_size[0]
        weights = (scores * scale).masked_fill(~visible, -torch.inf).softmax(-1)
        result = torch.einsum("hqk,khd->qhd", weights, values.float().repeat_interleave(group, 1))
        out[rows] = result.to(out.dtype)
    return out

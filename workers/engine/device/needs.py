"""What a model's attention asks for, and what the machine has for it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.engine.attention import Scoring
from workers.engine.device.choice import Machine, Needs
from workers.engine.forward import packed_logits


class _Recorder:
    """Stands where a step stands, and notes how the layers score."""

    def __init__(self) -> None:
        self.scorings: list[Scoring] = []
        self.query_shape = torch.Size()
        self.dtype = torch.float32

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        self.dtype = keys.dtype
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.scorings.append(scoring)
        self.query_shape = query.shape
        return query.transpose(1, 2)


def find_needs(model: PreTrainedModel) -> Needs:
    """Run two tokens through a model whose attention is ours."""
    recorder = _Recorder()
    ids = torch.tensor([1, 2], device=model.device)
    rows = torch.tensor([1], device=model.device)
    packed_logits(model, ids, torch.arange(2, device=model.device), recorder, rows)
    _, num_heads, _, head_dim = recorder.query_shape
    return Needs(
        dtype=str(recorder.dtype).removeprefix("torch."),
        num_heads=num_heads,
        head_dim=head_dim,
        has_window=any(scoring.window is not None for scoring in recorder.scorings),
        has_softcap=any(scoring.softcap is not None for scoring in recorder.scorings),
        has_sinks=any(scoring.sinks is not None for scoring in recorder.scorings),
    )


def find_machine(device: torch.device) -> Machine:
    """What there is on ``device``. Nothing is imported."""
    if device.type != "cuda":
        return Machine(device=device.type)
    return Machine(
        device="cuda",
        capability=torch.cuda.get_device_capability(device),
        has_fa3=find_spec("flash_attn_interface") is not None,
        has_triton=find_spec("triton") is not None,
    )

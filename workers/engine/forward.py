"""One forward pass of a transformers model over a packed batch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.engine.attention import attending


def packed_logits(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, cache: Any, rows: Tensor
) -> Tensor:
    """The logits of some rows of a packed batch.

    Args:
        token_ids, positions: [num_tokens] int64.
        cache: written to by attention layers (``update``), and behind them (``attend``).
        rows: [n] int64, the rows whose logits are wanted; the head is computed for these only
            where the model can do so (19 % of a 512-token prefill of the default model).

    Returns:
        [n, vocab_size] in the model's dtype.
    """
    keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
    only = {"logits_to_keep": rows} if keeps_rows else {}
    with torch.inference_mode(), attending(cache):
        logits: Tensor = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            cache=cache,
            use_cache=True,
            **only,
        ).logits[0]
    return logits if keeps_rows else logits.index_select(0, rows)

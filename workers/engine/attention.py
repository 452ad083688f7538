"""Paged attention behind transformers' attention registry.

A model whose attention is set to :data:`IMPLEMENTATION` keeps transformers' own modelling code;
only the product of queries and cached keys and values is ours. The name is unknown to
transformers' mask code, so no mask is built: what a query sees follows from the step's spans.

Causal attention with grouped heads, a sliding window, a soft cap of the scores (gemma2) and
attention sinks (gpt_oss). Whatever else a model asks for is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from schemas.errors import ModelUnsupported

IMPLEMENTATION = "mesh_paged"
"""Our name in transformers' registry."""

_REFUSED = ("position_bias", "head_mask", "alibi", "block_mask")


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns queries and keys into weights."""

    scale: float
    window: int | None = None  # a query sees itself and the window - 1 tokens before it
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]: a score that takes weight and gives no value


class Attending(Protocol):
    """What stands behind a model's attention during one forward pass."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """The attention of one layer; shapes as in :func:`paged_attention`."""


_ATTENDING: ContextVar[Attending] = ContextVar("attending")


@contextmanager
def attending(target: Attending) -> Iterator[None]:
    """Within it, attention layers that run in this thread turn to ``target``. (Most models hand
    their cache's keyword arguments on to the attention function, some do not; so nothing relies
    on them.)"""
    token = _ATTENDING.set(target)
    try:
        yield
    finally:
        _ATTENDING.reset(token)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Softmax attention with grouped heads.

    Args:
        query: [n, num_kv_heads, group, num_queries, head_dim].
        keys, values: [n, num_kv_heads, num_keys, head_dim].
        mask: float32, 0 or -inf, broadcastable to [n, 1, 1, num_queries, num_keys].

    Returns:
        Like ``query``. Weights are computed in float32.
    """
    n, num_kv_heads, group, num_queries, head_dim = query.shape
    flat = query.reshape(n, num_kv_heads, group * num_queries, head_dim)
    scores = torch.matmul(flat, keys.transpose(2, 3)).float()
    scores = scores.view(n, num_kv_heads, group, num_queries, -1).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    scores.add_(mask)
    if scoring.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = scoring.sinks.float().view(1, num_kv_heads, group, 1, 1)
        column = sinks.expand(n, -1, -1, num_queries, -1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    weights = weights.to(values.dtype).reshape(n, num_kv_heads, group * num_queries, -1)
    return torch.matmul(weights, values).view(query.shape)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer of the model that runs; transformers' signature.

    Args:
        query: [1, num_heads, num_tokens, head_dim], the packed batch.
        key, value: [1, num_kv_heads, num_tokens, head_dim], in the pool already.

    Returns:
        [1, num_tokens, num_heads, head_dim], and no weights.

    Raises:
        ModelUnsupported: the model asks for attention of another kind.
    """
    _refuse_other_kinds(module, attention_mask, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scoring = Scoring(scale, sliding_window, softcap, s_aux)
    return _ATTENDING.get().attend(query, key, value, scoring), None


def _refuse_other_kinds(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    kind = type(module).__name__
    if mask is not None:
        raise ModelUnsupported(f"{kind} makes its own attention mask", param="model")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ModelUnsupported(f"{kind} looks at later tokens", param="model")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ModelUnsupported(f"{kind} needs {name}", param="model")


AttentionInterface.register(IMPLEMENTATION, paged_attention)

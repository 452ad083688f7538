"""What a loaded model keeps in its KV cache, found by running it, not by reading its settings.

Configurations name heads and dimensions in many ways, or not at all. The first keys and values
that a model hands over tell them all the same, and tell as well when it is a model of a kind that
this engine can't serve: then loading it fails, with the reason.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from schemas.errors import ModelUnsupported
from workers.engine.attention import IMPLEMENTATION, Scoring
from workers.engine.forward import packed_logits
from workers.engine.kv_layout import KvLayout
from workers.engine.kv_pool import KvPool
from workers.engine.paged_step import PagedStep, Span

_CHECK_EDGES = (0, 8, 20, 21, 22, 23, 24)  # two chunks, four decodes
_TOLERANCE = {"float32": 0.01}  # relative; rounding alone gives 1e-5
_HALF_TOLERANCE = 0.25  # rounding gives 0.03; a wrong mask or wrong positions about 1


class _Probe:
    """Stands where a step stands, and notes what the layers bring."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}
        self._layer: int | None = None

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        if keys.shape != values.shape or keys.dtype != values.dtype:
            raise ModelUnsupported("keys and values differ in shape", param="model")
        self.keys[layer_idx] = keys
        self._layer = layer_idx
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if self._layer is None:
            raise ModelUnsupported("a layer shares another layer's keys and values", param="model")
        if key.shape != self.keys[self._layer].shape:
            raise ModelUnsupported("keys are changed after they were cached", param="model")
        self.windows[self._layer] = scoring.window
        self._layer = None
        return query.transpose(1, 2)


def probe_layout(model: PreTrainedModel, *, revision: str, block_size: int) -> KvLayout:
    """Find the layout of a model's KV blocks; the model's attention is ours from here on.

    Raises:
        ModelUnsupported: its cache is not one of keys and values of one shape in all layers, or
            its attention does not go through transformers' registry.
    """
    kind = type(model).__name__
    probe = _Probe()
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        packed_logits(model, torch.tensor([1, 2]), torch.arange(2), probe, torch.tensor([1]))
    except ModelUnsupported as error:
        raise ModelUnsupported(f"{kind}: {error.message}", param="model") from error
    except Exception as error:  # any code may run inside a model; the reason is passed on
        reason = f"dry run failed: {error}"
        if isinstance(error, AttributeError) and error.obj is probe:
            reason = f"asks its cache for {error.name}, which a cache of pages has not"
        raise ModelUnsupported(f"{kind}: {reason}", param="model") from error
    num_layers = len(probe.keys)
    if num_layers == 0 or sorted(probe.keys) != list(range(num_layers)):
        raise ModelUnsupported(f"{kind}: keeps no keys and values in some layer", param="model")
    if len(probe.windows) != num_layers:
        raise ModelUnsupported(f"{kind}: attention outside of the registry", param="model")
    shapes = {(tuple(keys.shape), keys.dtype) for keys in probe.keys.values()}
    if len(shapes) != 1:
        raise ModelUnsupported(f"{kind}: layers differ in the shape of their keys", param="model")
    _check_windows(model, probe, kind)
    (_, num_kv_heads, _, head_dim), dtype = shapes.pop()
    return KvLayout(
        revision=revision,
        dtype=str(dtype).removeprefix("torch."),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )


def _check_windows(model: PreTrainedModel, probe: _Probe, kind: str) -> None:
    """A layer that the configuration calls a sliding one must say its window: some models put it
    into a mask alone, which is not built here."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for layer, layer_type in enumerate(layer_types):
        if layer_type == "sliding_attention" and probe.windows.get(layer) is None:
            raise ModelUnsupported(f"{kind}: layer {layer} hides its window", param="model")


def check_attention(model: PreTrainedModel, layout: KvLayout) -> None:
    """Compare our attention with transformers' own on one short prompt.

    Finds models that the rules above let through and that would answer wrongly, without a word.

    Raises:
        ModelUnsupported: the logits differ by more than rounding.
    """
    num_tokens = _CHECK_EDGES[-1]
    ids = torch.arange(num_tokens) * 37 % model.config.get_text_config().vocab_size
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    model.set_attn_implementation(IMPLEMENTATION)
    num_blocks = -(-num_tokens // layout.block_size)
    pool = KvPool(torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8), layout)
    got = []
    for start, end in pairwise(_CHECK_EDGES):
        step = PagedStep(pool, [Span(range(num_blocks), start, end - start)])
        rows = torch.arange(end - start)
        got.append(packed_logits(model, ids[start:end], torch.arange(start, end), step, rows))
    error = _relative_error(torch.cat(got).float(), expected.float())
    if not error <= _TOLERANCE.get(layout.dtype, _HALF_TOLERANCE):
        raise ModelUnsupported(
            f"{type(model).__name__}: its logits here are {error:.3g} away from transformers' own",
            param="model",
        )


def _relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest of three medians: over the first chunk, the second, the decodes. (Medians: one
    expert chosen otherwise by rounding is no difference.)"""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    errors = (got - expected).norm(dim=-1) / spread.clamp(min=1e-3 * float(spread.max()))
    _, first, second, *_ = _CHECK_EDGES
    parts = (errors[:first], errors[first:second], errors[second:])
    return max(float(part.median()) for part in parts)

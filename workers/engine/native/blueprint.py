"""What the native path has to know of a model beside its weights.

Read from the model as transformers loads it, so that nothing is guessed from settings, and plain
data from then on: with it and the weight files a model can be packed without transformers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from workers.engine.kv_layout import KvLayout
from workers.engine.native.supports import head_dim


class Blueprint(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, windows and rotations of a model of a supported family."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_epsilon: float
    is_tied: bool  # the head multiplies by the embedding
    windows: tuple[int | None, ...]  # by layer: how many tokens a query sees; None: all before it
    inv_freq: tuple[float, ...]  # [head_dim / 2], of the rotations; float32 numbers
    rope_scaling: float  # of cosines and sines

    def layout(self, *, revision: str, dtype: str, block_size: int, weights: str = "") -> KvLayout:
        """The layout of its blocks; the arguments are its fields."""
        return KvLayout(
            revision=revision,
            dtype=dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            weights=weights,
        )


def blueprint_of(model: Any) -> Blueprint:
    """Of a model that transformers has loaded."""
    config, inner = model.config, model.model
    return Blueprint(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        norm_epsilon=config.rms_norm_eps,
        is_tied=model.lm_head.weight is inner.embed_tokens.weight,
        windows=tuple(_window_of(layer.self_attn) for layer in inner.layers),
        inv_freq=tuple(inner.rotary_emb.inv_freq.float().tolist()),
        rope_scaling=inner.rotary_emb.attention_scaling,
    )


def _window_of(attention: Any) -> int | None:
    """Where layers differ they say it themselves, else it stands in the configuration alone."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    return getattr(attention.config, "sliding_window", None)

"""From transformers' modules to the library's packed form."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from workers.engine.kv_layout import KvLayout
from workers.engine.native.library import (
    KIND_OF_DTYPE,
    Kind,
    Linear,
    ModelShape,
    NativeLibrary,
    Role,
    Times,
    check,
)
from workers.engine.native.quantised import QuantisedWeights, Weights
from workers.engine.native.supports import head_dim


class NativeModel:
    """A model of the library; its memory is freed with this object."""

    def __init__(self, library: NativeLibrary, shape: ModelShape, num_threads: int) -> None:
        self.functions = library.functions
        error = ctypes.c_char_p()
        self.handle: int | None = self.functions.mesh_model_new(
            ctypes.byref(shape), num_threads, ctypes.byref(error)
        )
        check(error.value)

    def set_norm(self, layer: int, role: Role, weights: Tensor) -> None:
        """Copy a norm's weights."""
        values = weights.detach().float().contiguous()
        check(
            self.functions.mesh_model_set_norm(
                self.handle, layer, role, values.data_ptr(), len(values)
            )
        )

    def set_window(self, layer: int, window: int) -> None:
        """Let a layer's queries see themselves and the ``window - 1`` tokens before them."""
        self.functions.mesh_model_set_window(self.handle, layer, window)

    def wake(self) -> None:
        """Wake the model's threads: a step begins in some microseconds."""
        self.functions.mesh_model_wake(self.handle)

    def times(self) -> Times:
        """Seconds of all steps so far, by what was done."""
        times = Times()
        self.functions.mesh_model_times(self.handle, ctypes.byref(times))
        return times

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.functions.mesh_model_free(self.handle)
            self.handle = None


def shape_of(config: Any, layout: KvLayout) -> ModelShape:
    """What the library must know about a model. ``layout`` says how its pool lies."""
    size = head_dim(config)
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        block_size=layout.block_size,
        kv_kind=KIND_OF_DTYPE[getattr(torch, layout.dtype)],
        norm_epsilon=config.rms_norm_eps,
        score_scale=size**-0.5,
    )


def pack_model(
    library: NativeLibrary,
    model: Any,
    layout: KvLayout,
    num_threads: int,
    quantised: QuantisedWeights | None = None,
) -> NativeModel:
    """Pack a model of a supported family, layer after layer. What was packed is freed in
    ``model``, which is of no use afterwards: at no time are there two copies of all weights.

    Weights keep their dtype, but for those that ``quantised`` has as blocks.
    """
    native = NativeModel(library, shape_of(model.config, layout), num_threads)
    packer = _Packer(library, native, quantised)
    for number, layer in enumerate(model.model.layers):
        packer.pack_layer(number, layer)
    native.set_norm(0, Role.FINAL_NORM, model.model.norm.weight)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        packer.pack(0, Role.EMBEDDING, [model.model.embed_tokens])
    packer.pack(0, Role.HEAD, [model.lm_head])
    return native


class _Packer:
    def __init__(
        self, library: NativeLibrary, native: NativeModel, quantised: QuantisedWeights | None
    ) -> None:
        self._library = library
        self._native = native
        self._quantised = quantised

    def pack_layer(self, number: int, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.pack(
            number, Role.QUERY_KEY_VALUE, [attention.q_proj, attention.k_proj, attention.v_proj]
        )
        self.pack(number, Role.OUTPUT, [attention.o_proj])
        self.pack(number, Role.GATE_UP, [mlp.gate_proj, mlp.up_proj])
        self.pack(number, Role.DOWN, [mlp.down_proj])
        norms = {
            Role.INPUT_NORM: layer.input_layernorm,
            Role.POST_NORM: layer.post_attention_layernorm,
            Role.QUERY_NORM: getattr(attention, "q_norm", None),
            Role.KEY_NORM: getattr(attention, "k_norm", None),
        }
        for role, norm in norms.items():
            if norm is not None:
                self._native.set_norm(number, role, norm.weight)
        window = _window_of(attention)
        if window is not None:
            self._native.set_window(number, window)

    def pack(self, layer: int, role: Role, modules: Sequence[nn.Module]) -> None:
        """Pack modules of equal inputs as one layer of the library, outputs in their order; as
        several that follow each other where their kinds differ."""
        assert self._native.handle is not None
        for kind, group in groupby(map(self._weights_of, modules), lambda weights: weights.kind):
            made = self._packed(kind, list(group))
            made.give_to(self._native.handle, layer, role)
        for module in modules:
            module.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def _packed(self, kind: Kind, parts: Sequence[Weights]) -> Linear:
        num_outputs = sum(len(part.rows) for part in parts)
        packed = Linear(self._library, kind, num_outputs, parts[0].num_inputs)
        first = 0
        for part in parts:
            packed.fill(first, part.rows, part.bias, source=part.source)
            first += len(part.rows)
        return packed

    def _weights_of(self, module: Any) -> Weights:
        found = self._quantised.weights_of(module) if self._quantised is not None else None
        if found is not None:
            return found
        rows = module.weight
        kind = KIND_OF_DTYPE[rows.dtype]
        bias = getattr(module, "bias", None)
        return Weights(kind=kind, source=kind, rows=rows, num_inputs=rows.shape[1], bias=bias)


def _window_of(attention: Any) -> int | None:
    """How many tokens a query of this layer sees; None: all before it. Where layers differ they
    say it themselves, else it stands in the configuration alone."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    return getattr(attention.config, "sliding_window", None)

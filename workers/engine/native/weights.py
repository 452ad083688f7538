"""From a model's tensors to the library's packed form."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.kv_layout import KvLayout
from workers.engine.native.blueprint import Blueprint
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
from workers.engine.native.tensors import Tensors

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one linear layer, as they are packed."""

    kind: Kind
    source: Kind  # what ``rows`` hold
    rows: Tensor  # [num_outputs, num_inputs], or bytes of blocks
    num_inputs: int


class InBlocks(Protocol):
    """Weights in blocks, see ``native/quantised.py``."""

    def weights(self, name: str, tensors: Tensors) -> Weights:
        """Those of a parameter."""


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


def shape_of(blueprint: Blueprint, layout: KvLayout) -> ModelShape:
    """What the library must know about a model. ``layout`` says how its pool lies."""
    return ModelShape(
        num_layers=blueprint.num_layers,
        hidden_size=blueprint.hidden_size,
        num_heads=blueprint.num_heads,
        num_kv_heads=blueprint.num_kv_heads,
        head_dim=blueprint.head_dim,
        intermediate_size=blueprint.intermediate_size,
        vocab_size=blueprint.vocab_size,
        block_size=layout.block_size,
        kv_kind=KIND_OF_DTYPE[getattr(torch, layout.dtype)],
        norm_epsilon=blueprint.norm_epsilon,
        score_scale=blueprint.head_dim**-0.5,
    )


def pack_model(
    library: NativeLibrary,
    blueprint: Blueprint,
    tensors: Tensors,
    layout: KvLayout,
    num_threads: int,
    in_blocks: InBlocks | None = None,
) -> NativeModel:
    """Pack a model of a supported family, layer after layer.

    Args:
        in_blocks: has all linear layers in blocks; without it weights keep their dtype.

    Raises:
        KeyError: a tensor is missing.
    """
    native = NativeModel(library, shape_of(blueprint, layout), num_threads)
    packer = _Packer(library, native, tensors, in_blocks)
    for number, window in enumerate(blueprint.windows):
        packer.pack_layer(number)
        if window is not None:
            native.set_window(number, window)
    packer.set_norm(0, Role.FINAL_NORM, "model.norm")
    if blueprint.is_tied:
        packer.pack(0, Role.HEAD, [_EMBEDDING])
    else:
        packer.pack(0, Role.EMBEDDING, [_EMBEDDING])
        packer.pack(0, Role.HEAD, [_HEAD])
    return native


class _Packer:
    def __init__(
        self,
        library: NativeLibrary,
        native: NativeModel,
        tensors: Tensors,
        in_blocks: InBlocks | None,
    ) -> None:
        self._library = library
        self._native = native
        self._tensors = tensors
        self._in_blocks = in_blocks

    def pack_layer(self, number: int) -> None:
        layer = f"model.layers.{number}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        projections = [f"{attention}.{one}_proj" for one in "qkv"]
        self.pack(number, Role.QUERY_KEY_VALUE, projections)
        self.pack(number, Role.OUTPUT, [f"{attention}.o_proj"])
        self.pack(number, Role.GATE_UP, [f"{mlp}.gate_proj", f"{mlp}.up_proj"])
        self.pack(number, Role.DOWN, [f"{mlp}.down_proj"])
        self.set_norm(number, Role.INPUT_NORM, f"{layer}.input_layernorm")
        self.set_norm(number, Role.POST_NORM, f"{layer}.post_attention_layernorm")
        for role, name in ((Role.QUERY_NORM, "q_norm"), (Role.KEY_NORM, "k_norm")):
            norm = self._tensors.take(f"{attention}.{name}.weight")
            if norm is not None:  # some families have them
                self._native.set_norm(number, role, norm)

    def set_norm(self, layer: int, role: Role, name: str) -> None:
        """Pack the norm called ``name``."""
        self._native.set_norm(layer, role, self._take(f"{name}.weight"))

    def pack(self, layer: int, role: Role, names: Sequence[str]) -> None:
        """Pack linear layers of equal inputs as one layer of the library, outputs in their order;
        as several that follow each other where their kinds differ."""
        assert self._native.handle is not None
        parts = [(self._weights(name), self._tensors.take(f"{name}.bias")) for name in names]
        for kind, group in groupby(parts, lambda part: part[0].kind):
            self._packed(kind, list(group)).give_to(self._native.handle, layer, role)

    def _packed(self, kind: Kind, parts: Sequence[tuple[Weights, Tensor | None]]) -> Linear:
        num_outputs = sum(len(weights.rows) for weights, _ in parts)
        packed = Linear(self._library, kind, num_outputs, parts[0][0].num_inputs)
        first = 0
        for weights, bias in parts:
            packed.fill(first, weights.rows, bias, source=weights.source)
            first += len(weights.rows)
        return packed

    def _weights(self, name: str) -> Weights:
        if self._in_blocks is not None:
            return self._in_blocks.weights(f"{name}.weight", self._tensors)
        rows = self._take(f"{name}.weight")
        kind = KIND_OF_DTYPE[rows.dtype]
        return Weights(kind=kind, source=kind, rows=rows, num_inputs=rows.shape[1])

    def _take(self, name: str) -> Tensor:
        tensor = self._tensors.take(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

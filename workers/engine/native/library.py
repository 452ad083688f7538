"""The library's functions, as ``src/abi.h`` declares them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from workers.engine.native.compiler import NativeUnavailable


class Kind(IntEnum):
    """Kinds of weights, packed or as they come; ``WeightKind`` and ``SourceKind`` in C++."""

    FP32 = 0
    BF16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4
    EXACT_Q4_0 = 5
    EXACT_Q4_1 = 6
    EXACT_Q8_0 = 7


KIND_OF_DTYPE = {torch.float32: Kind.FP32, torch.bfloat16: Kind.BF16}


class Role(IntEnum):
    """Where a linear layer or a norm belongs; ``Role`` in C++."""

    QUERY_KEY_VALUE = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3
    EMBEDDING = 4
    HEAD = 5
    INPUT_NORM = 6
    POST_NORM = 7
    QUERY_NORM = 8
    KEY_NORM = 9
    FINAL_NORM = 10


class ModelShape(ctypes.Structure):
    """``mesh::ModelShape``."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate_size", c_int32),
        ("vocab_size", c_int32),
        ("block_size", c_int32),
        ("kv_kind", c_int32),
        ("norm_epsilon", c_float),
        ("score_scale", c_float),
    )


class Span(ctypes.Structure):
    """``mesh::Span``."""

    _fields_ = (
        ("first_row", c_int32),
        ("count", c_int32),
        ("start", c_int32),
        ("first_block", c_int32),
        ("logits_row", c_int32),
    )


class Batch(ctypes.Structure):
    """``mesh::Batch``."""

    _fields_ = (
        ("num_rows", c_int32),
        ("num_spans", c_int32),
        ("token_ids", c_void_p),
        ("spans", c_void_p),
        ("block_tables", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("pool", c_void_p),
        ("logits", c_void_p),
    )


class Times(ctypes.Structure):
    """``mesh::Times``: seconds of steps so far, by what was done."""

    _fields_ = (
        ("linear", ctypes.c_double),
        ("attention", ctypes.c_double),
        ("rows", ctypes.c_double),
    )


class LogitRows(ctypes.Structure):
    """``mesh::LogitRows``."""

    _fields_ = (("logits", c_void_p), ("num_rows", c_int32), ("vocab_size", c_int32))


class RunWeights(ctypes.Structure):
    """``mesh::RunWeights``."""

    _fields_ = (("temperatures", c_void_p), ("largest", c_void_p), ("sums", c_void_p))


class LikeliestTokens(ctypes.Structure):
    """``mesh::LikeliestTokens``."""

    _fields_ = (
        ("at_least", c_int32),
        ("capacity", c_int32),
        ("width", c_int32),
        ("ids", c_void_p),
        ("logits", c_void_p),
        ("counts", c_void_p),
        ("is_all", c_void_p),
    )


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "mesh_features": (c_int32, ()),
    "mesh_linear_new": (c_void_p, (c_int32, c_int32, c_int32, POINTER(c_char_p))),
    "mesh_linear_free": (None, (c_void_p,)),
    "mesh_linear_fill": (c_char_p, (c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p)),
    "mesh_linear_multiply": (c_char_p, (c_void_p, c_void_p, c_int32, c_void_p, c_int32)),
    "mesh_linear_unpack": (None, (c_void_p, c_int32, c_void_p)),
    "mesh_quantise": (c_char_p, (c_int32, c_void_p, c_int64, c_void_p)),
    "mesh_model_new": (c_void_p, (POINTER(ModelShape), c_int32, POINTER(c_char_p))),
    "mesh_model_free": (None, (c_void_p,)),
    "mesh_model_give": (None, (c_void_p, c_int32, c_int32, c_void_p)),
    "mesh_model_set_norm": (c_char_p, (c_void_p, c_int32, c_int32, c_void_p, c_int32)),
    "mesh_model_set_window": (None, (c_void_p, c_int32, c_int32)),
    "mesh_model_wake": (None, (c_void_p,)),
    "mesh_model_run": (c_char_p, (c_void_p, POINTER(Batch))),
    "mesh_model_times": (None, (c_void_p, POINTER(Times))),
    "mesh_model_find_largest": (c_char_p, (c_void_p, POINTER(LogitRows), c_void_p)),
    "mesh_model_weigh_runs": (c_char_p, (c_void_p, POINTER(LogitRows), POINTER(RunWeights))),
    "mesh_model_find_likeliest": (
        c_char_p,
        (c_void_p, POINTER(LogitRows), POINTER(LikeliestTokens)),
    ),
}


class NativeError(Exception):
    """The library refused or failed; the message says why."""


class NativeLibrary:
    """The loaded library. Calls release the interpreter lock while they run.

    Raises:
        NativeUnavailable: the file can't be loaded.
    """

    def __init__(self, file: Path) -> None:
        try:
            self.functions = ctypes.CDLL(str(file))
        except OSError as error:
            raise NativeUnavailable(f"{file} can't be loaded: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype = result
            function.argtypes = arguments

    @property
    def is_wide(self) -> bool:
        """Whether vectors have 16 lanes (AVX-512), not 8."""
        return bool(self.functions.mesh_features() & 1)

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs of bf16 layers are rounded to bf16 (``vdpbf16ps``)."""
        return bool(self.functions.mesh_features() & 2)


def check(message: bytes | None) -> None:
    """Raise what a function returned as :class:`NativeError`."""
    if message is not None:
        raise NativeError(message.decode())


class Linear:
    """A packed linear layer, [num_outputs, num_inputs]; to be filled row after row.

    It belongs to this object until :meth:`give_to`.

    Raises:
        NativeError: the kind can't hold rows of this length.
    """

    def __init__(
        self, library: NativeLibrary, kind: Kind, num_outputs: int, num_inputs: int
    ) -> None:
        self._functions = library.functions
        self.kind = kind
        self.num_outputs, self.num_inputs = num_outputs, num_inputs
        error = c_char_p()
        self._handle: int | None = self._functions.mesh_linear_new(
            kind, num_outputs, num_inputs, ctypes.byref(error)
        )
        check(error.value)

    def fill(
        self,
        first_output: int,
        weights: Tensor,
        bias: Tensor | None = None,
        *,
        source: Kind | None = None,
    ) -> None:
        """Pack rows of weights.

        Args:
            weights: [num_rows, num_inputs] float32 or bfloat16; or, when ``source`` says so, uint8
                rows of GGUF blocks.
            bias: [num_rows], of any float type.

        Raises:
            NativeError: too many rows, or a source that this kind can't be packed from.
        """
        rows = weights.detach().contiguous()
        values = None if bias is None else bias.detach().float().contiguous()
        check(
            self._functions.mesh_linear_fill(
                self._handle,
                first_output,
                len(rows),
                rows.data_ptr(),
                KIND_OF_DTYPE[rows.dtype] if source is None else source,
                None if values is None else values.data_ptr(),
            )
        )

    def multiply(self, inputs: Tensor, num_threads: int = 1) -> Tensor:
        """[num_rows, num_outputs] for ``inputs`` [num_rows, num_inputs]; both float32."""
        rows = inputs.float().contiguous()
        outputs = torch.empty(len(rows), self.num_outputs)
        check(
            self._functions.mesh_linear_multiply(
                self._handle, rows.data_ptr(), len(rows), outputs.data_ptr(), num_threads
            )
        )
        return outputs

    def row(self, output: int) -> Tensor:
        """[num_inputs] float32: the weights of one output as they are multiplied by."""
        values = torch.empty(self.num_inputs)
        self._functions.mesh_linear_unpack(self._handle, output, values.data_ptr())
        return values

    def give_to(self, model: int, layer: int, role: Role) -> None:
        """Hand it over to a model of the library; this object is of no use any more."""
        self._functions.mesh_model_give(model, layer, role, self._handle)
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._functions.mesh_linear_free(self._handle)

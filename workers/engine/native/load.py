"""From a model folder to a native model that has passed its self-test, or the reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
from safetensors import SafetensorError
from torch import Tensor

from infra.model_folder import ModelFolder, open_model_folder
from workers.engine.dtypes import QUANTISED, torch_dtype
from workers.engine.kv_layout import KvLayout
from workers.engine.native.blueprint import Blueprint
from workers.engine.native.compiler import NativeUnavailable, compiled_library
from workers.engine.native.library import NativeLibrary
from workers.engine.native.memory import Memory, holds_all
from workers.engine.native.quantised import QuantisedWeights
from workers.engine.native.rope import RopeTable
from workers.engine.native.runner import NativeRunner
from workers.engine.native.self_test import agrees, divergence, num_blocks_needed, probe_logits
from workers.engine.native.supports import reason_against
from workers.engine.native.tensors import FileTensors, ModelTensors, Tensors
from workers.engine.native.weights import NativeModel, pack_model

_log = structlog.get_logger(__name__)


@cache
def load_library() -> NativeLibrary:
    """The library for this processor, compiled first where that is needed.

    Raises:
        NativeUnavailable: it can't be compiled or loaded here.
    """
    return NativeLibrary(compiled_library())


def why_not_native(folder: Path) -> str | None:
    """Why the model in ``folder`` can't run natively on this machine; None if it can. Compiles the
    library where that was not done before."""
    reason = reason_against(folder)
    if reason is None:
        try:
            load_library()
        except NativeUnavailable as error:
            return str(error)
    return reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedNative:
    """A model in the library's memory."""

    model: NativeModel
    rope: RopeTable
    facts: ModelFolder
    layout: KvLayout

    def runner(self, slots: npt.NDArray[np.uint8]) -> NativeRunner:
        """A runner with a pool of ``slots``: [num_blocks, layout.block_bytes] uint8."""
        return NativeRunner(self.model, self.rope, self.facts, self.layout, slots)


def load_native(folder: Path, dtype: str, *, block_size: int, num_threads: int) -> LoadedNative:
    """Load a model's weights for the native path and ask it what the general path was asked, when
    it was loaded for the first time (``native/memory.py``).

    Args:
        dtype: of weights and KV cache; not "auto".

    Raises:
        NativeUnavailable: this model or this machine can't run it, or its answers differ from the
            general path's.
        ModelUnsupported: the model can't be served, or has weights that can't be had in blocks.
        ConfigError: an unknown dtype.
    """
    return _Loading(open_model_folder(folder), dtype, block_size, num_threads).load()


class _Loading:
    def __init__(self, facts: ModelFolder, dtype: str, block_size: int, num_threads: int) -> None:
        self._facts = facts
        self._form = dtype
        self._dtype = torch_dtype(dtype)
        self._block_size = block_size
        self._num_threads = num_threads
        self._memory = Memory(facts, dtype)

    def load(self) -> LoadedNative:
        return self._again() or self._first()

    def _again(self) -> LoadedNative | None:
        """Without transformers; None when it has to be done as if for the first time."""
        known = self._memory.recall()
        if known is None:
            return None
        load_library()  # if it can't be had the memory is not to blame
        try:
            tensors = FileTensors(self._facts.path, self._dtype)
            made = self._pack(known.blueprint, tensors, self._in_blocks())
            self._check(made, known.expected, "memory")
        except (NativeUnavailable, OSError, SafetensorError, KeyError) as error:
            _log.warning("native_memory_wrong", reason=str(error))
            self._memory.forget()
            return None
        return made

    def _first(self) -> LoadedNative:
        reason = why_not_native(self._facts.path)
        if reason is not None:
            raise NativeUnavailable(reason)
        from workers.engine.native.first_load import examine  # transformers

        in_blocks = self._in_blocks()
        loaded, known = examine(
            self._facts, self._form, block_size=self._block_size, in_blocks=in_blocks
        )
        shapes = FileTensors(self._facts.path, self._dtype).shapes()
        can_be_read = holds_all(shapes, dict(loaded.model.named_parameters()))
        made = self._pack(known.blueprint, ModelTensors(loaded.model), in_blocks)
        self._check(made, known.expected, "general path")
        if can_be_read:
            self._memory.write(known)
        return made

    def _in_blocks(self) -> QuantisedWeights | None:
        if self._form not in QUANTISED:
            return None
        is_exact = self._form == "q4-exact"
        return QuantisedWeights(load_library(), self._facts.path, is_exact=is_exact)

    def _pack(
        self, blueprint: Blueprint, tensors: Tensors, in_blocks: QuantisedWeights | None
    ) -> LoadedNative:
        layout = blueprint.layout(
            revision=self._facts.revision,
            dtype=str(self._dtype).removeprefix("torch."),
            block_size=self._block_size,
            weights=self._form if in_blocks is not None else "",
        )
        if in_blocks is not None:
            tensors = in_blocks.over(tensors, self._dtype)
        model = pack_model(load_library(), blueprint, tensors, layout, self._num_threads, in_blocks)
        rope = RopeTable(blueprint.inv_freq, blueprint.rope_scaling, self._facts.context_length)
        return LoadedNative(model=model, rope=rope, facts=self._facts, layout=layout)

    def _check(self, made: LoadedNative, expected: Tensor, source: str) -> None:
        layout = made.layout
        scratch = np.zeros((num_blocks_needed(self._block_size), layout.block_bytes), np.uint8)
        got = probe_logits(
            made.runner(scratch), block_size=self._block_size, vocab_size=self._facts.vocab_size
        )
        found = divergence(expected, got)
        if not agrees(expected, got, layout.weights or layout.dtype):
            raise NativeUnavailable(
                f"self-test failed: the divergence from the general path is {found:.3g}"
            )
        _log.info(
            "native_path_chosen",
            dtype=layout.weights or layout.dtype,
            divergence=found,
            threads=self._num_threads,
            checked_by=source,
        )

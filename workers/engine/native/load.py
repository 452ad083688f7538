"""From a loaded model to a native runner, or the reason why not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from workers.engine.kv_layout import KvLayout
from workers.engine.loader import LoadedModel
from workers.engine.native.compiler import NativeUnavailable, compiled_library
from workers.engine.native.library import NativeLibrary
from workers.engine.native.quantised import quantised_weights
from workers.engine.native.rope import RopeTable
from workers.engine.native.runner import NativeRunner
from workers.engine.native.self_test import (
    agrees,
    divergence,
    num_blocks_needed,
    probe_logits,
)
from workers.engine.native.supports import reason_against
from workers.engine.native.weights import pack_model
from workers.engine.runner import TorchRunner

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


def load_native(
    loaded: LoadedModel,
    layout: KvLayout,
    slots: npt.NDArray[np.uint8],
    *,
    num_threads: int,
) -> NativeRunner:
    """A native runner with the model's weights, which are taken out of ``loaded``: that is of no
    use afterwards, whatever the outcome. They are in blocks where ``layout.weights`` says so.

    Raises:
        NativeUnavailable: its answers differ from the general path's.
        ModelUnsupported: weights that can't be had in blocks.
    """
    facts, library = loaded.facts, load_library()
    quantised = None
    if layout.weights:
        is_exact = layout.weights == "q4-exact"
        quantised = quantised_weights(library, loaded.model, facts.path, is_exact=is_exact)
    size = {"block_size": layout.block_size, "vocab_size": facts.vocab_size}
    scratch = np.zeros((num_blocks_needed(layout.block_size), layout.block_bytes), np.uint8)
    expected = probe_logits(TorchRunner(loaded, layout, scratch), **size)
    rope = RopeTable(loaded.model.model.rotary_emb, facts.context_length)
    model = pack_model(library, loaded.model, layout, num_threads, quantised)
    got = probe_logits(NativeRunner(model, rope, facts, layout, scratch), **size)
    found = divergence(expected, got)
    if not agrees(expected, got, layout.weights or layout.dtype):
        raise NativeUnavailable(
            f"self-test failed: the divergence from the general path is {found:.3g}"
        )
    _log.info(
        "native_path_chosen",
        dtype=layout.weights or layout.dtype,
        divergence=found,
        threads=num_threads,
    )
    return NativeRunner(model, rope, facts, layout, slots)

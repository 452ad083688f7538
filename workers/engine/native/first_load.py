"""The first start of a model on the native path: transformers loads it, and says what is right.

Imports transformers, which takes seconds; :mod:`workers.engine.native.memory` spares all others.
"""

from __future__ import annotations

import numpy as np

from infra.model_folder import ModelFolder
from workers.engine.loader import LoadedModel, load_model
from workers.engine.native.blueprint import blueprint_of
from workers.engine.native.memory import Known
from workers.engine.native.quantised import QuantisedWeights
from workers.engine.native.self_test import num_blocks_needed, probe_logits
from workers.engine.runner import TorchRunner, layout_of


def examine(
    facts: ModelFolder, dtype: str, *, block_size: int, in_blocks: QuantisedWeights | None
) -> tuple[LoadedModel, Known]:
    """Load a model with transformers; what the general path answers to the self-test.

    Args:
        in_blocks: exchanged for what the model holds.

    Raises:
        ModelUnsupported: the model can't be served, or has weights that can't be had in blocks.
    """
    loaded = load_model(facts.path, dtype)
    layout = layout_of(loaded, block_size=block_size)
    if in_blocks is not None:
        in_blocks.put_into(loaded.model)
    scratch = np.zeros((num_blocks_needed(block_size), layout.block_bytes), np.uint8)
    runner = TorchRunner(loaded, layout, scratch)
    expected = probe_logits(runner, block_size=block_size, vocab_size=facts.vocab_size)
    blueprint = blueprint_of(loaded.model)
    found = blueprint.layout(revision=facts.revision, dtype=layout.dtype, block_size=block_size)
    assert found == layout, "the dry run sees the same blocks"
    return loaded, Known(blueprint=blueprint, expected=expected)

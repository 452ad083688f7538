"""What a runner tells about itself, put together from the model's facts and its blocks' layout."""

from __future__ import annotations

from infra.model_folder import ModelFolder
from workers.engine.api import EngineInfo
from workers.engine.kv_layout import KvLayout


def engine_info(kind: str, facts: ModelFolder, layout: KvLayout, num_blocks: int) -> EngineInfo:
    """The info of a runner of this kind with a pool of ``num_blocks``."""
    return EngineInfo(
        kind=kind,
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        block_size=layout.block_size,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        fingerprint=layout.fingerprint,
        dtype=layout.weights_dtype,
    )

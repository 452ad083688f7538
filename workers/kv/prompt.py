"""The blocks of a prompt, by the names that its engine gives them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.prefix_hash import iter_prefix_hashes, request_salt
from schemas.requests import RequestRecord
from workers.engine.api import EngineInfo
from workers.kv.api import BlockName

_ID_BYTES = 4  # of a token in a record


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The full blocks of a prompt that could be used (its last token is always computed)."""

    blocks: tuple[BlockName, ...]
    num_tokens: int


def prompt_of(record: RequestRecord, info: EngineInfo) -> Prompt:
    """The blocks of a request's prompt, as its engine hashes them. Where the prompt's logprobs are
    wanted none is of use: they come of computing it."""
    num_tokens = len(record.prompt_ids) // _ID_BYTES
    num_usable = (num_tokens - 1) // info.block_size
    if record.sampling.prompt_logprobs is not None:
        num_usable = 0
    salt = request_salt(record, info.fingerprint)
    usable = record.prompt_ids[: num_usable * info.block_size * _ID_BYTES]
    hashes = list(iter_prefix_hashes(usable, info.block_size, salt))
    blocks = tuple(
        BlockName(block_hash=own, parent=parent)
        for own, parent in zip(hashes, [salt, *hashes], strict=False)
    )
    return Prompt(blocks=blocks, num_tokens=num_tokens)

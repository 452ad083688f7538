"""Blocks for tests of the index: prompts by number, their blocks by depth."""

from __future__ import annotations

from functools import cache

from pipeline.prefix_hash import block_hash, salt_of
from workers.kv.api import BlockName

SALT = salt_of("r1", "f00d", "", "")


@cache
def name_of(prompt: int, depth: int) -> BlockName:
    """Block ``depth`` of prompt ``prompt``, which shares nothing with another."""
    parent = SALT if depth == 0 else name_of(prompt, depth - 1).block_hash
    return BlockName(block_hash=block_hash(parent, (prompt, depth)), parent=parent)


def names(count: int, prompt: int = 0) -> list[BlockName]:
    """The first ``count`` blocks of a prompt."""
    return [name_of(prompt, depth) for depth in range(count)]

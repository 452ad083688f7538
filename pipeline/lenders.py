"""Whom to ask for blocks that the worker of a prompt does not hold itself. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from pipeline.fleet import Fleet
from pipeline.prefix_walk import TIERS, Match
from pipeline.weighing import TOKENS_PER_SEQUENCE
from schemas.control import Beat
from schemas.kv import KvSource

MAX_SOURCES = 3  # one may be gone, one busy


def kv_sources(
    fleet: Fleet, placed: Sequence[Beat], matches: Mapping[str, Match]
) -> tuple[KvSource, ...]:
    """Those that hold more than whoever was placed: the most first, of equals in the fastest
    tier, then the least busy. None for workers of several layouts: each could read only its
    own."""
    fingerprints = {beat.fingerprint for beat in placed}
    if not matches or len(fingerprints) != 1:
        return ()
    own = min(_num_blocks(matches.get(beat.worker)) for beat in placed)
    more = [match for match in matches.values() if match.num_blocks > own]
    lenders = [
        (match, beat)
        for match in more
        if (beat := fleet.worker(match.worker)) and beat.fingerprint in fingerprints
    ]
    best = heapq.nsmallest(MAX_SOURCES, lenders, key=lambda one: _order(*one))
    return tuple(
        KvSource(worker=match.worker, num_blocks=match.num_blocks, tier=match.tier)
        for match, _ in best
    )


def _num_blocks(match: Match | None) -> int:
    return 0 if match is None else match.num_blocks


def _order(match: Match, beat: Beat) -> tuple[int, int, float, str]:
    load = beat.load
    busy = load.num_running + load.num_waiting + load.waiting_tokens / TOKENS_PER_SEQUENCE
    return -match.num_blocks, TIERS.index(match.tier), busy, match.worker

"""Whom to ask for blocks that the worker of a prompt does not hold itself. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pipeline.fleet import Fleet
from pipeline.prefix_walk import Found, Match
from pipeline.weighing import TOKENS_PER_SEQUENCE
from schemas.control import Beat
from schemas.kv import KvSource

MAX_SOURCES = 3  # one may be gone, one busy


def kv_sources(fleet: Fleet, placed: Sequence[Beat], found: Found) -> tuple[KvSource, ...]:
    """Those that hold more than whoever was placed: the most first, of equals in the fastest
    tier, then the least busy. None for workers of several layouts: each could read only its
    own."""
    if not found:
        return ()
    fingerprints = {beat.fingerprint for beat in placed}
    if len(fingerprints) != 1:
        return ()
    own = min(_num_blocks(found.get(beat.worker)) for beat in placed)
    best: list[KvSource] = []
    for num_blocks, tier, workers in found.furthest(own):
        beats = [
            beat
            for worker in workers
            if (beat := fleet.worker(worker)) and beat.fingerprint in fingerprints
        ]
        best += [
            KvSource(worker=beat.worker, num_blocks=num_blocks, tier=tier)
            for beat in heapq.nsmallest(MAX_SOURCES - len(best), beats, key=_order)
        ]
        if len(best) == MAX_SOURCES:
            break
    return tuple(best)


def _num_blocks(match: Match | None) -> int:
    return 0 if match is None else match.num_blocks


def _order(beat: Beat) -> tuple[float, str]:
    load = beat.load
    busy = load.num_running + load.num_waiting + load.waiting_tokens / TOKENS_PER_SEQUENCE
    return busy, beat.worker

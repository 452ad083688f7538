"""A step's chunks on a runner, and who is to blame when that fails."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import structlog

from schemas.errors import EngineFailed
from workers.engine.active_request import ActiveRequest
from workers.engine.api import Runner, RunnerLost, Sampled, ScheduledSequence
from workers.engine.scheduler import Chunk

_log = structlog.get_logger(__name__)

Outcome = Sampled | Exception | None  # None: computed, nothing to sample
Requests = Mapping[str, ActiveRequest]


def execute(runner: Runner, chunks: Seq[Chunk], requests: Requests) -> list[Outcome]:
    """Run the batch. If that raises, run its sequences one by one to find the guilty ones:
    computing a position again writes the same KV, so nobody is harmed by the second run.

    Args:
        requests: by key, those that the chunks belong to.

    Returns:
        What came of each chunk, in order.

    Raises:
        RunnerLost: nothing can be computed any more.
    """
    if not chunks:
        return []
    try:
        return _run(runner, chunks, requests)
    except RunnerLost:
        raise
    except Exception as error:
        keys = [chunk.sequence.group.key for chunk in chunks]
        _log.error("batch_failed", keys=keys, exc_info=True)
        if len(chunks) == 1:
            return [error]
    return [outcome for chunk in chunks for outcome in execute(runner, [chunk], requests)]


def allowed_ids(chunk: Chunk, requests: Requests) -> bytes | None:
    """What may come next, as ``ScheduledSequence.allowed``.

    Raises:
        EngineFailed: the grammar has lost its way.
    """
    active = requests.get(chunk.sequence.group.key)
    if active is None or not chunk.samples:
        return None
    matcher = active.choices[chunk.sequence.index].matcher
    return None if matcher is None else matcher.allowed()


def prefilled(chunks: Seq[Chunk]) -> list[tuple[int, int]]:
    """The positions ``[start, end)`` of each chunk of a step that is mostly prefill; of another
    step, none."""
    if sum([chunk.count for chunk in chunks]) < 8 * len(chunks):
        return []
    starts = [chunk.sequence.num_computed_tokens for chunk in chunks]
    return [(s, s + chunk.count) for s, chunk in zip(starts, chunks, strict=True)]


def _run(runner: Runner, chunks: Seq[Chunk], requests: Requests) -> list[Outcome]:
    batch = [
        _scheduled(chunk, allowed_ids(chunk, requests) if chunk.sequence.group.has_format else None)
        for chunk in chunks
    ]
    sampled = runner.execute(batch)
    num_wanted = sum([scheduled.sample for scheduled in batch])
    if len(sampled) != num_wanted:
        raise EngineFailed(f"the runner gave {len(sampled)} tokens, not one per sample")
    if num_wanted == len(batch):
        return list(sampled)
    tokens = iter(sampled)
    return [next(tokens) if scheduled.sample else None for scheduled in batch]


def _scheduled(chunk: Chunk, allowed: bytes | None) -> ScheduledSequence:
    sequence, group = chunk.sequence, chunk.sequence.group
    return ScheduledSequence(
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        block_table=sequence.block_table,
        start=sequence.num_computed_tokens,
        count=chunk.count,
        sample=chunk.samples,
        sampling=group.sampling,
        index=sequence.index,
        allowed=allowed,
        scores=None if group.scores is None else group.scores_to_fill,
    )

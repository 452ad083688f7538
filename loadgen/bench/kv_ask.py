"""Prompts of random tokens, asked of a mesh of our own, and how long their first token takes."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence

from loadgen.bench.own_mesh import OwnMesh
from loadgen.bench.stream import LoadFailed
from loadgen.measure import RequestResult
from loadgen.targets import HttpTarget
from loadgen.workload import LoadRequest

SERVED = "bench"
SHARED_TOKENS = 1024
NEW_TOKENS = 32
_VOCAB = (1000, 20000)  # ordinary words of every tokenizer that is likely here
_ANSWER_S = 120.0


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    """A prompt that shares nothing with any other."""
    return tuple(rng.randrange(*_VOCAB) for _ in range(count))


def ttft_ms(result: RequestResult) -> float:
    """From the request's first byte to the first token event, at the client."""
    return (result.event_s[0] - result.sent_s) * 1e3


def cached_tokens(result: RequestResult) -> int:
    """How much of the prompt was not computed, as its usage says."""
    return 0 if result.usage is None else result.usage.cached_tokens or 0


async def by_turns(
    mesh: OwnMesh, known: Sequence[tuple[int, ...]], rng: random.Random
) -> dict[str, float]:
    """Ask for each known beginning, with an end of its own, beside a prompt that is all new.

    Returns:
        ``ratio`` of TTFT, known ÷ new, the median of pairs; ``known_ms`` and ``new_ms``, medians.

    Raises:
        LoadFailed: a request failed, or a known beginning was computed again.
    """
    warm, cold = [], []
    for beginning in known:
        cold.append(await ask(mesh, random_tokens(rng, SHARED_TOKENS + NEW_TOKENS)))
        warm.append(await ask(mesh, beginning + random_tokens(rng, NEW_TOKENS)))
    if (least := min(map(cached_tokens, warm))) < SHARED_TOKENS:
        raise LoadFailed(f"of a known prompt only {least} of {SHARED_TOKENS} tokens were found")
    ratios = [ttft_ms(a) / ttft_ms(b) for a, b in zip(warm, cold, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "known_ms": round(statistics.median(map(ttft_ms, warm)), 2),
        "new_ms": round(statistics.median(map(ttft_ms, cold)), 2),
    }


async def ask(mesh: OwnMesh, prompt: Sequence[int], output_len: int = 2) -> RequestResult:
    """One request, to its end.

    Raises:
        LoadFailed: it was not answered, or not in time.
    """
    request = LoadRequest(
        number=0,
        request_id=f"bench-{random.getrandbits(64):x}",
        model=SERVED,
        prompt=tuple(prompt),
        input_len=len(prompt),
        output_len=output_len,
        seed=0,
    )
    result = RequestResult(number=0, output_len=output_len)
    target = HttpTarget(mesh.url, "completions")
    try:
        result.sent_s = time.monotonic()
        async with asyncio.timeout(_ANSWER_S):
            await target.run(request, result)
    except (TimeoutError, OSError) as error:
        raise LoadFailed(f"a request was not answered: {error!r}") from error
    finally:
        target.close()
    if result.state != "completed":
        raise LoadFailed(f"a request failed: {result.error_kind}: {result.error_message}")
    return result

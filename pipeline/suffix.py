"""Conditional disaggregation: a decode worker that holds most of a prompt computes the short rest.

It saves the hop to a prefill worker, its queue, and the way back of all the blocks; it costs the
streams that run there one longer step. So three things must hold: the rest is short, its time is
within what those streams may be held up, and the first token is predicted to come sooner than
through the prefill pool. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.prefix_walk import Found
from pipeline.weighing import Pool, Weighed

SUFFIX = "suffix"  # the role of a worker that does this
HOPS_MS = 3.0  # a handover's messages, beside its bytes: KvReady, DecodeTask, a claim


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixRule:
    """When a rest counts as short."""

    max_tokens: int = 256  # 0: never
    hold_ms: float = 100.0


def stay_place(
    pool: Pool,
    rule: SuffixRule,
    num_prompt: int,
    found: Found,
    elsewhere: Weighed,
) -> tuple[Weighed, int] | None:
    """Where a prompt stays; None: it goes to the prefill pool.

    Args:
        pool: of the role ``suffix``.
        elsewhere: the prefill pool's candidates for the same prompt.
    """
    if not rule.max_tokens or not found or not len(pool.table.rows_of(SUFFIX)):
        return None
    weighed = pool.weigh_prefill(num_prompt, found)
    is_fit = (num_prompt - weighed.cached <= rule.max_tokens) & (2 * weighed.cached >= num_prompt)
    if not is_fit.any():
        return None
    if not weighed.unit_ms:
        is_fit &= weighed.columns["waiting_tokens"] == 0
        first = np.where(is_fit, weighed.candidates.finish, math.inf)
        return (weighed, int(first.argmin())) if is_fit.any() else None
    own_ms = weighed.candidates.work * weighed.unit_ms
    there_ms = weighed.candidates.finish * weighed.unit_ms + weighed.columns.step_ms()
    is_fit &= (own_ms <= rule.hold_ms) & (there_ms < _elsewhere_ms(elsewhere))
    first = np.where(is_fit, there_ms, math.inf)
    return (weighed, int(first.argmin())) if is_fit.any() else None


def _elsewhere_ms(elsewhere: Weighed) -> float:
    """When the prefill pool's first worker would have handed over; for ever, where nobody has room
    or costs are not known."""
    if not len(elsewhere) or not elsewhere.unit_ms:
        return math.inf
    return float(elsewhere.candidates.finish.min()) * elsewhere.unit_ms + HOPS_MS

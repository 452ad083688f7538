"""What speaks for a worker, as one figure. Pure: arrays in, arrays out.

    score =  hit      * share of the prompt that it holds
           + queue    / (1 + how long the request would wait there)
           + load     * (1 - how full it is)
           - transfer * how long blocks would travel
           - finish   * how much later than at the best one the first token would be there
           - spread   * how far what it was sent lately is above ``share`` times the mean

Times have the unit of this request's own prefill by an average worker with nothing cached, so that
long and short prompts and slow and fast workers are weighed alike: workers of unequal speed compare
by predicted finish. Where costs are not known, the unit is one sequence (``pipeline/weighing.py``).

The first four terms are DESIGN's and the llm-d scorers'. ``finish`` is what Mooncake's Algorithm 1
decides by. Work that is saved shortens the wait of all who come after, too, so with a backlog the
weight of a hit grows by ``backlog`` for each unit that candidates wait on average. ``spread`` is
the bound of consistent hashing with bounded loads (Mirrokni et al. 2018): of a prefix that everyone
asks for, nobody keeps all.

Scores are sampled by a softmax, so that several routers, or one whose news is old, do not all go
to the same worker.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from pipeline.pool_table import Floats

_MAX_BACKLOG = 4.0  # units; beyond it nothing is served in time anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How much each term counts; ``temperature`` 0: always the best, of equals the first.

    ``finish``, ``backlog`` and ``spread`` 0: the design's own formula. Those three were chosen on
    the traces shared-prefix, hot-prefix and no-reuse of ``loadgen/scenarios``, by mean TTFT.
    """

    hit: float = 0.5
    queue: float = 0.3
    load: float = 0.2
    transfer: float = 0.2
    finish: float = 1.0
    backlog: float = 2.0
    spread: float = 16.0
    share: float = 1.2
    temperature: float = 0.02


@dataclass(slots=True, kw_only=True)
class Candidates:
    """[num_candidates] each, and finite."""

    hit: Floats  # 0 to 1
    wait: Floats
    work: Floats  # this request's own prefill there
    transfer: Floats  # of blocks, to it and from it
    used: Floats  # 0 to 1
    recent: Floats  # what it was sent lately, in terms of the mean
    backlog: float  # the mean wait; 0 where costs are not known

    @property
    def finish(self) -> Floats:
        """When the first token would be there."""
        return self.wait + self.work + self.transfer


def scores(candidates: Candidates, weights: Weights) -> Floats:
    """[num_candidates], of which there is at least one."""
    one = candidates
    hit = weights.hit + weights.backlog * min(one.backlog, _MAX_BACKLOG)
    values = hit * one.hit
    values += weights.queue / (1 + one.wait)
    values += weights.load * (1 - one.used)
    values -= weights.transfer * one.transfer
    late = one.finish
    late -= least(late)
    late *= weights.finish
    values -= late
    over = one.recent - weights.share
    np.maximum(0.0, over, out=over)
    over *= weights.spread
    values -= over
    return values


def sample(values: Floats, temperature: float, rng: random.Random) -> int:
    """The place of one of ``values``, the more likely the higher.

    Raises:
        ValueError: there are none.
    """
    if not len(values):
        raise ValueError("nobody to choose from")
    best = int(values.argmax())
    if temperature <= 0:
        return best
    chances = values - values.item(best)
    chances /= temperature
    np.exp(chances, out=chances)
    upto = chances.cumsum()
    drawn = rng.random() * upto.item(-1)
    return min(int(upto.searchsorted(drawn, "right")), len(values) - 1)


def least(values: Floats) -> float:
    """Of at least one. A third of the time of ``values.min()``, for a few hundred."""
    return values.item(values.argmin())

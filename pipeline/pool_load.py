"""How much room a pool's workers have for one request, as predicted. Pure.

    prefill   workers begin to be free one after the other; what nobody has yet flows to whoever is
              free first, like water into a vessel with steps:

                  wait      ▁▁▁▂▂▂▅▅▅        of three workers
                  level     ▃▃▃▃▃▃▅▅▅        after the queued work was shared out: a new prompt
                                             begins there at the earliest

    decode    what a batch's steps may still take (TBT target less what a step takes in any case),
              and the tokens that its KV cache has room for

A load is the used part of what a request could wait for or share: 1 is full, whatever the request's
own size is. So a long prompt is refused for what is before it, not for being long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import add
from typing import NamedTuple

import msgspec

from pipeline.budget_books import NOTHING_AHEAD, Ahead
from pipeline.cost_model import prefill_ms, prefill_step_ms
from pipeline.forecast import Forecast
from pipeline.verdict import Ask
from schemas.control import Beat
from schemas.profiles import StepCosts

MAX_WEIGHED = 32  # decode workers, for one request
UNSEEN_TOKENS = 512.0  # of an answer, that room is kept for, where no pace says how many


def level_ms(waits_ms: Sequence[float], queued_ms: float) -> float:
    """When the first worker is free after ``queued_ms`` of work was shared out: infinite when no
    worker is."""
    if not queued_ms:
        return min(waits_ms, default=math.inf)
    first, *others = sorted(waits_ms) or (math.inf,)
    if math.isinf(first):
        return math.inf
    level, left = first, queued_ms
    for number, wait in enumerate(others, 1):
        step = (wait - level) * number
        if left <= step:
            return level + left / number
        level, left = wait, left - step
    return level + left / (1 + len(others))


class PrefillRoom(msgspec.Struct, frozen=True, kw_only=True):
    """For one request: on the worker that would be done with its prompt first."""

    worker: str
    start_ms: float  # from now until it begins; infinite: no worker was heard lately
    own_ms: float  # its own computing there
    ahead: Ahead = NOTHING_AHEAD
    num_workers: int = 1  # that prefill

    @property
    def ttft_ms(self) -> float:
        """From now to its first token."""
        return self.start_ms + self.own_ms

    def load(self, target_ms: float) -> float:
        """How much of the time that it may wait is taken; infinite when it could not be served in
        time by an idle worker either."""
        return _ratio(self.start_ms, target_ms - self.own_ms)


class Costed(NamedTuple):
    """Workers of one role that tell their costs, and those, in the same order."""

    beats: list[Beat]
    costs: list[StepCosts]

    @classmethod
    def of(cls, beats: Sequence[Beat], forecast: Forecast) -> Costed:
        """Those of ``beats``."""
        found = [(beat, costs) for beat in beats if (costs := forecast.costs(beat)) is not None]
        return cls([beat for beat, _ in found], [costs for _, costs in found])


def prefill_room(
    workers: Costed, forecast: Forecast, ask: Ask, ahead: Callable[[float], Ahead]
) -> PrefillRoom | None:
    """Where ``ask`` would be prefilled first; None where no worker tells its costs.

    Args:
        ahead: the queued work that it stands behind, given its own milliseconds.
    """
    if not workers.beats:
        return None
    owns = _owns_ms(workers, ask)
    waits = [
        math.inf if wait is None else wait
        for wait in forecast.prefill_waits_ms(workers.beats, ask.now_s)
    ]
    before = ahead(min(owns))
    level = level_ms(waits, before.ms)
    starts = [wait if wait > level else level for wait in waits]
    _, own, at = min(zip(map(add, starts, owns), owns, count(), strict=False))
    return PrefillRoom(
        worker=workers.beats[at].worker,
        start_ms=starts[at],
        own_ms=own,
        ahead=before,
        num_workers=len(waits),
    )


def _owns_ms(workers: Costed, ask: Ask) -> list[float]:
    """How long each would compute the prompt."""
    num_prompt, num_cached = ask.num_prompt, ask.num_cached
    if not num_cached:
        squares = num_prompt * num_prompt
        return [prefill_step_ms(costs, num_prompt, squares) for costs in workers.costs]
    most = num_prompt - 1  # one is computed always
    cached = [min(num_cached.get(beat.worker, 0), most) for beat in workers.beats]
    return [
        prefill_ms(costs, num_prompt - held, held)
        for costs, held in zip(workers.costs, cached, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request takes of a decode worker."""

    num_choices: int
    num_prompt: int
    num_tokens: float  # that it will have generated while it shares the worker with today's others

    @property
    def kv_tokens(self) -> float:
        """Of KV memory; choices share their prompt."""
        return self.num_prompt + self.num_tokens


class DecodeRoom(NamedTuple):
    """One worker's batch at a moment to come."""

    costs: StepCosts
    num_sequences: float
    context_tokens: float
    used_tokens: float
    total_tokens: int  # 0: it does not say how much memory it has
    way_ms: float = 0.0  # that KV waits for before it can come in
    way_token_ms: float = 0.0  # that a token's KV takes to come
    num_steps: float = math.inf  # of an answer, which is later by all of that together

    @property
    def shared_ms(self) -> float:
        """What its sequences take of a step."""
        costs = self.costs
        return (
            costs.decode_context_ms * self.context_tokens
            + costs.decode_sequence_ms * self.num_sequences
        )

    def tbt_load(self, target_ms: float, need: Need | None = None) -> float:
        """How much of the time that a token may take others take, of what there is beside the
        request itself: of each step, and of the way in as much as there is for each token."""
        own = 0.0
        if need is not None:
            context = self.costs.decode_context_ms * need.num_prompt
            own = (context + self.costs.decode_sequence_ms) * need.num_choices
            own += need.num_prompt * self.way_token_ms / self.num_steps
        others = self.shared_ms + self.way_ms / self.num_steps
        return _ratio(others, target_ms - self.costs.decode_base_ms - own)

    def kv_load(self, need: Need | None = None) -> float:
        """How much memory others take, of what there is beside the request itself."""
        if not self.total_tokens:
            return 0.0
        own = 0.0 if need is None else need.kv_tokens
        return _ratio(self.used_tokens, max(self.total_tokens - own, 1.0))


class Joining(NamedTuple):
    """What nobody has yet and each decode worker will get before the request itself."""

    num_sequences: float = 0.0
    num_tokens: float = 0.0  # of their prompts
    growth_tokens: float = 0.0  # that its sequences, these included, will generate yet


def decode_rooms(
    beats: Sequence[Beat],
    forecast: Forecast,
    at_s: float,
    joining: Joining,
    num_steps: float = math.inf,
) -> list[DecodeRoom]:
    """Of each worker that tells its costs, as predicted for ``at_s``. Of many workers only those
    are weighed that have the least to do now.

    Args:
        num_steps: of an answer.
    """
    rooms = []
    if len(beats) > MAX_WEIGHED:
        beats = heapq.nsmallest(MAX_WEIGHED, beats, key=_burden)
    for beat in beats:
        costs = forecast.costs(beat)
        if costs is None:
            continue
        batch = forecast.decode_at(beat, at_s)
        total = beat.load.num_blocks * beat.block_size
        used = total - batch.free_tokens + joining.num_tokens + joining.growth_tokens
        rooms.append(
            DecodeRoom(
                costs=costs,
                num_sequences=batch.num_sequences + joining.num_sequences,
                context_tokens=batch.context_tokens + joining.num_tokens,
                used_tokens=max(0.0, used),
                total_tokens=total,
                way_ms=max(0.0, batch.way_ms + joining.num_tokens * batch.way_token_ms),
                way_token_ms=batch.way_token_ms,
                num_steps=max(1.0, num_steps),
            )
        )
    return rooms


def _burden(beat: Beat) -> tuple[int, int]:
    return beat.load.context_tokens, beat.load.num_running


def _ratio(used: float, room: float) -> float:
    """``used / room``; with no room at all infinite, even for the first."""
    if room <= 0:
        return math.inf
    return used / room


def token_ms(costs: Sequence[StepCosts], context_tokens: float) -> float:
    """Device time of one token of one sequence, as the workers have it on average: what it adds to
    a step. What a step takes in any case is no request's own."""
    if not costs:
        return 0.0
    each = [one.decode_context_ms * context_tokens + one.decode_sequence_ms for one in costs]
    return sum(each) / len(each)


def decode_capacity_ms(costs: Sequence[StepCosts], tbt_ms: float, horizon_ms: float) -> float:
    """Device time that the workers have for sequences within ``horizon_ms`` when each step keeps
    to ``tbt_ms``; infinite without a target."""
    if not tbt_ms:
        return math.inf
    return sum(max(0.0, 1 - one.decode_base_ms / tbt_ms) * horizon_ms for one in costs)


def horizon_tokens(num_tokens: float, tbt_ms: float, horizon_ms: float, num_choices: int) -> float:
    """How many of ``num_tokens`` come within the horizon."""
    room = num_choices * (horizon_ms / tbt_ms if tbt_ms else UNSEEN_TOKENS)
    return min(num_tokens, room)

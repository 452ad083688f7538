"""Whether a pool of workers could use another request soon. Pure: the time is passed in.

A request is let go only when some worker will have room before it would be missed: what lies in a
worker's queue has lost its place in the fair order. A worker is *open* when

    its prompts      the predicted wait there is at most ``ahead_ms``: with what it has it is busy
                     until the next beat, or the next request, reaches it
    its places       fewer tasks are on their way to it, placed and not yet claimed, than it has
                     free places, and some more that replace what ends meanwhile

Claims and ends are heard at once, so the second account is exact; the first is a prediction. Of a
worker whose costs are not known the number of waiting sequences takes the place of the time. One
whose beat is stale is not open. A pool without any worker is: the durable queue waits for them.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

import msgspec

from pipeline.fleet import Fleet
from pipeline.forecast import Forecast
from schemas.control import Beat
from schemas.profiles import StepCosts
from schemas.subjects import ANY

# How far ahead of a worker's need: what a tenant waits for whose turn has come. Simulated, eight
# workers, a tenant beside another one that sends ten times as much, over capacity: 250, 100 and
# 30 ms gave it a TTFT p50 of 439, 276 and 193 ms (64 alone), and the others together a mean of
# 3,639, 3,644 and 3,735. Workers say at once that they have nothing left.
AHEAD_MS = 100.0
# The same while several tenants or priorities share a pool. Who is far behind its share overtakes
# what lies there; who is not, waits for it. Over four traces 100 and 20 ms gave a small tenant a
# TTFT p99 of 522 and 495 ms (424 alone), and the large one beside it a mean of 4,705 and 4,867.
MIXED_AHEAD_MS = 20.0
MAX_AHEAD = 256  # tasks on their way to one worker that has places for them
_FULL_AHEAD = 4  # to one without a free place: its next ones, when some end at once
_UNKNOWN_DEPTH = 16  # sequences that may wait at a worker without costs
_MAX_HELD = 262_144  # requests whose end is awaited


class _Task(msgspec.Struct, frozen=True):
    """A request that was let go and that no worker has claimed."""

    served: str
    worker: str  # or ``any``
    num_uncached: int


@dataclass(slots=True)
class _Shared:
    """The prompts of tasks that lie in a pool's shared queue."""

    num_tokens: int = 0
    num_squares: int = 0

    def add(self, sign: int, num_tokens: int) -> None:
        self.num_tokens += sign * num_tokens
        self.num_squares += sign * num_tokens * num_tokens

    def part_ms(self, costs: StepCosts, num_workers: int) -> float:
        """What one of so many workers will have of it."""
        if not self.num_tokens:
            return 0.0
        squares = costs.prefill_square_ms * self.num_squares
        tokens = costs.prefill_token_ms * self.num_tokens
        return costs.prefill_base_ms + (tokens + squares) / num_workers


class Openings:
    """What is on its way to which worker, and who holds what.

    Args:
        ahead_ms: how much work a worker may have in front of it and still be open.
    """

    def __init__(self, fleet: Fleet, forecast: Forecast, *, ahead_ms: float = AHEAD_MS) -> None:
        self._fleet = fleet
        self._forecast = forecast
        self._ahead_ms = ahead_ms
        self._tasks: OrderedDict[str, _Task] = OrderedDict()
        self._num_tasks: dict[tuple[str, str], int] = {}  # by pool and worker
        self._shared: dict[str, _Shared] = {}  # those for ``any``, by pool
        self._held: OrderedDict[str, str] = OrderedDict()  # claimed request -> worker
        self._num_held: dict[str, int] = {}
        self._last_open: dict[str, tuple[str, int]] = {}  # by pool: a worker, of how many

    # What is heard ---------------------------------------------------------------------------

    def sent(self, request_id: str, served: str, worker: str, num_uncached: int = 0) -> None:
        """A task of a request was placed, here or by another control process."""
        self._forget_task(request_id)
        if request_id in self._held:
            return  # its claim was faster than this news
        self._tasks[request_id] = _Task(served, worker, num_uncached)
        key = served, worker
        self._num_tasks[key] = self._num_tasks.get(key, 0) + 1
        if worker == ANY:
            shared = self._shared.get(served)
            if shared is None:
                shared = self._shared[served] = _Shared()
            shared.add(1, num_uncached)
        if len(self._tasks) > _MAX_HELD:
            self._forget_task(next(iter(self._tasks)))

    def claimed(self, request_id: str, worker: str) -> None:
        """``worker`` holds a request from now on."""
        self._forget_task(request_id)
        self._let_go(request_id)
        self._held[request_id] = worker
        self._num_held[worker] = self._num_held.get(worker, 0) + 1
        if len(self._held) > _MAX_HELD:
            self._let_go(next(iter(self._held)))

    def ended(self, request_id: str) -> None:
        """A request is over."""
        self._forget_task(request_id)
        self._let_go(request_id)

    # What is asked ---------------------------------------------------------------------------

    def is_under_way(self, request_id: str) -> bool:
        """Whether a task of a request lies in a queue, or a worker holds it."""
        return request_id in self._tasks or request_id in self._held

    def is_open(self, served: str, now_s: float) -> bool:
        """Whether some worker of the pool will have room soon, or there is none at all."""
        return self.opens_s(served, now_s) <= now_s

    def opens_s(self, served: str, now_s: float, ahead_ms: float | None = None) -> float:
        """When some worker will be open, as far as time alone brings it: ``now_s`` if one is,
        infinite if none will be without news.

        Args:
            ahead_ms: in place of what all else goes by.
        """
        ahead_ms = self._ahead_ms if ahead_ms is None else ahead_ms
        if self._is_still_open(served, now_s, ahead_ms):
            return now_s
        beats = self._fleet.workers(served, "prefill")
        if not beats:
            return now_s
        first_s = math.inf
        for beat in beats:
            first_s = min(first_s, self._opens_s(beat, len(beats), now_s, ahead_ms))
            if first_s <= now_s:
                self._last_open[served] = beat.worker, len(beats)
                break
        return first_s

    def _is_still_open(self, served: str, now_s: float, ahead_ms: float) -> bool:
        """Whether the worker that was open when all were looked at is: mostly it is."""
        worker, num_workers = self._last_open.get(served, ("", 0))
        beat = self._fleet.worker(worker) if worker else None
        if beat is None or beat.state != "ready" or beat.served != served:
            return False
        if "prefill" not in beat.roles:
            return False
        return self._opens_s(beat, num_workers, now_s, ahead_ms) <= now_s

    def _opens_s(self, beat: Beat, num_workers: int, now_s: float, ahead_ms: float) -> float:
        if not self._has_place(beat, num_workers):
            return math.inf
        wait_ms = self._forecast.prefill_wait_ms(beat, now_s)
        depth = self._forecast.queue_depth(beat, now_s)
        if wait_ms is None:
            depth += self._num_tasks.get((beat.served, ANY), 0) / num_workers
            return now_s if depth < _UNKNOWN_DEPTH else math.inf
        if math.isinf(wait_ms):
            return math.inf  # it is stale
        wait_ms -= _shared_base_ms(beat, depth)
        shared = self._shared.get(beat.served)
        if shared is not None and beat.costs is not None:
            wait_ms += shared.part_ms(beat.costs, num_workers)
        return now_s + max(0.0, wait_ms - ahead_ms) / 1000

    def _has_place(self, beat: Beat, num_workers: int) -> bool:
        load = beat.load
        num_places = load.num_running + load.num_waiting + load.num_free_slots
        num_free = num_places - self._num_held.get(beat.worker, 0)
        num_shared = self._num_tasks.get((beat.served, ANY), 0) / num_workers
        num_coming = self._num_tasks.get((beat.served, beat.worker), 0) + num_shared
        return num_coming < min(max(num_free, _FULL_AHEAD), MAX_AHEAD)

    def _forget_task(self, request_id: str) -> None:
        task = self._tasks.pop(request_id, None)
        if task is None:
            return
        key = task.served, task.worker
        self._num_tasks[key] -= 1
        if not self._num_tasks[key]:
            del self._num_tasks[key]
        if task.worker == ANY:
            self._shared[task.served].add(-1, task.num_uncached)
            if key not in self._num_tasks:
                del self._shared[task.served]

    def _let_go(self, request_id: str) -> None:
        worker = self._held.pop(request_id, None)
        if worker is None:
            return
        self._num_held[worker] -= 1
        if not self._num_held[worker]:
            del self._num_held[worker]

    def check_invariants(self) -> None:
        """The counts are those of the lists; nothing is both on its way and held."""
        assert not self._tasks.keys() & self._held.keys()
        tasks = Counter((task.served, task.worker) for task in self._tasks.values())
        assert tasks == self._num_tasks
        assert Counter(self._held.values()) == self._num_held
        assert set(self._shared) == {served for served, worker in tasks if worker == ANY}


def _shared_base_ms(beat: Beat, depth: float) -> float:
    """What a prediction has too much of: it adds up whole prefills, and prompts that come together
    share steps. Of those sent since the beat each pays for a step of its own in it."""
    num_since = depth - beat.load.num_waiting
    if beat.costs is None or num_since <= 1:
        return 0.0
    return beat.costs.prefill_base_ms * (num_since - 1)

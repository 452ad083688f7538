"""A pool on virtual time: workers that compute what they are given, and a forecast that knows it.

Prefill workers take one prompt after the other, decode workers all at once: a step takes what
``StepCosts`` say, and every sequence gets one token of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipeline.budget import Budget
from pipeline.cost_model import decode_step_ms, prefill_ms
from pipeline.fleet import Fleet
from pipeline.forecast import DecodeForecast
from pipeline.policy import FixedPolicies, Policy
from pipeline.verdict import Ask
from schemas.control import Beat, Load
from schemas.profiles import StepCosts
from schemas.requests import Slo
from tests.pipeline.rig import SERVED, beat

COSTS = StepCosts(
    prefill_base_ms=0.0,
    prefill_token_ms=1.0,
    prefill_square_ms=0.0,
    decode_base_ms=10.0,
    decode_context_ms=0.0,
    decode_sequence_ms=1.0,
)
CHAT = Slo(ttft_ms=2000.0, tbt_ms=50.0, name="chat")


def policy(**more: Any) -> Policy:
    given = {"classes": {"chat": CHAT}, "default_class": "chat", **more}
    return Policy(**given)


def ask(request: str, now_s: float = 0.0, **more: Any) -> Ask:
    given = {"served": SERVED, "num_prompt": 500, "max_tokens": 100, "slo": CHAT, **more}
    return Ask(request_id=request, now_s=now_s, since_s=given.pop("since_s", now_s), **given)


@dataclass
class Prompt:
    request_id: str
    num_prompt: int
    num_answer: int
    left_ms: float


@dataclass
class Sequence:
    request_id: str
    context: int
    left: int


@dataclass
class Worker:
    """One of both roles, or of one; ``beat`` is what it says of itself."""

    name: str
    roles: tuple[str, ...]
    costs: StepCosts | None = COSTS
    num_blocks: int = 100_000
    prompts: deque[Prompt] = field(default_factory=deque)
    batch: list[Sequence] = field(default_factory=list)
    credit_ms: float = 0.0  # of the step that it is in

    @property
    def beat(self) -> Beat:
        told = beat(self.name, roles=self.roles)
        load = Load(num_blocks=self.num_blocks, num_free_blocks=self.num_blocks - self.num_used)
        return msgspec.structs.replace(told, costs=self.costs, block_size=16, load=load)

    @property
    def num_used(self) -> int:
        return sum(-(-one.context // 16) for one in self.batch)


class House:
    """The pool, its queue of requests that no worker has, and the budget over them."""

    def __init__(
        self, *workers: Worker, policy: Policy | None = None, mode: str = "predicted"
    ) -> None:
        self.now_s = 0.0
        self.workers = {worker.name: worker for worker in workers}
        self.queue: deque[Prompt] = deque()
        self.stale: set[str] = set()
        self.fleet = Fleet(1.5, 0.0)
        self.beat()
        policies = FixedPolicies({"*": policy or globals()["policy"]()})
        self.budget = Budget(self.fleet, self, policies, early_rejection=mode)  # type: ignore[arg-type]

    def beat(self) -> None:
        for worker in self.workers.values():
            self.fleet.hear(worker.beat, self.now_s)

    # Forecast: exact for what is there, as if nothing came -----------------------------------

    def costs(self, beat: Beat) -> StepCosts | None:
        return beat.costs

    def prefill_wait_ms(self, beat: Beat, now_s: float) -> float | None:
        if beat.worker in self.stale:
            return float("inf")
        if beat.costs is None:
            return None
        waiting = sum(prompt.left_ms for prompt in self.workers[beat.worker].prompts)
        return max(0.0, waiting - 1000 * (now_s - self.now_s))

    def prefill_waits_ms(self, beats: Iterable[Beat], now_s: float) -> list[float | None]:
        return [self.prefill_wait_ms(beat, now_s) for beat in beats]

    def queue_depth(self, beat: Beat, now_s: float) -> float:
        return len(self.workers[beat.worker].prompts)

    def decode_at(self, beat: Beat, at_s: float) -> DecodeForecast:
        worker = self.workers[beat.worker]
        costs = worker.costs or COSTS
        batch = [(one.context, one.left) for one in worker.batch]
        left_ms = max(0.0, 1000 * (at_s - self.now_s))
        while batch:
            step = decode_step_ms(costs, len(batch), sum(context for context, _ in batch))
            num = min(min(left for _, left in batch), int(left_ms / step))
            if num == 0:
                break
            left_ms -= num * step
            batch = [(context + num, left - num) for context, left in batch if left > num]
        context = sum(tokens for tokens, _ in batch)
        return DecodeForecast(
            num_sequences=len(batch),
            context_tokens=context,
            free_tokens=max(0, worker.num_blocks * 16 - context),
            step_ms=decode_step_ms(costs, len(batch), context),
        )

    def expected_tokens(self, served: str, max_tokens: int) -> float:
        return float(max_tokens)

    # What happens -----------------------------------------------------------------------------

    def admit(self, ask: Ask) -> None:
        """Charge it and let it wait for a worker."""
        self.budget.charge(ask)
        took = prefill_ms(COSTS, ask.num_prompt)
        self.queue.append(Prompt(ask.request_id, ask.num_prompt, ask.max_tokens, took))

    def run(self, seconds: float, tick_ms: float = 10.0) -> None:
        """Let time pass."""
        for _ in range(round(seconds * 1000 / tick_ms)):
            self._tick(tick_ms)

    def _tick(self, ms: float) -> None:
        prefillers = [worker for worker in self.workers.values() if "prefill" in worker.roles]
        for worker in prefillers:
            left = ms
            while left > 0 and (worker.prompts or self.queue):
                if not worker.prompts:
                    prompt = self.queue.popleft()
                    worker.prompts.append(prompt)
                    self.budget.place(prompt.request_id)
                prompt = worker.prompts[0]
                used = min(left, prompt.left_ms)
                prompt.left_ms -= used
                left -= used
                if prompt.left_ms <= 0:
                    worker.prompts.popleft()
                    self._decode(prompt)
        for worker in self.workers.values():
            self._steps(worker, ms)
        self.now_s += ms / 1000
        self.beat()

    def _decode(self, prompt: Prompt) -> None:
        decoders = [worker for worker in self.workers.values() if "decode" in worker.roles]
        worker = min(decoders, key=lambda one: len(one.batch))
        worker.batch.append(Sequence(prompt.request_id, prompt.num_prompt, prompt.num_answer))
        self.budget.books.begin(prompt.request_id, self.now_s)

    def _steps(self, worker: Worker, ms: float) -> None:
        worker.credit_ms = worker.credit_ms + ms if worker.batch else 0.0
        while worker.batch:
            context = sum(one.context for one in worker.batch)
            step = decode_step_ms(worker.costs or COSTS, len(worker.batch), context)
            if step > worker.credit_ms:
                return
            worker.credit_ms -= step
            for one in worker.batch:
                one.context, one.left = one.context + 1, one.left - 1
            for one in [one for one in worker.batch if one.left <= 0]:
                worker.batch.remove(one)
                self.budget.settle(one.request_id)


def prefiller(name: str = "p1", **more: Any) -> Worker:
    return Worker(name, ("prefill",), **more)


def decoder(name: str = "d1", **more: Any) -> Worker:
    return Worker(name, ("decode",), **more)

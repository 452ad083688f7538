"""The compute budget: may a request enter, and if not, what then. Pure: the time is passed in.

    judge     answers an Ask; remembers nothing but which budgets are over (hysteresis)
    charge    admission has admitted it
    place     a worker was named for it: from here on the forecast knows of it
    hear_*    the same, said by other control processes and by workers' claims
    settle    it ended, or left: its charge is given back

Four budgets, each only where the request (or its class) has a target and the workers tell their
costs; without either nothing is over budget, and only the queue's bound refuses.

    ttft     the wait of its prompt, of the time that the TTFT target leaves beside its own prefill
    tbt      the batch that it would join, of the time that the TBT target leaves for a step
    kv       memory of the worker that it would decode on
    decode   device time of all that was admitted, of what the workers can do within the horizon
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial

from pipeline.budget_books import Books, Charge
from pipeline.budget_case import Case, EarlyRejection, Pool, Reading
from pipeline.cost_model import prefill_ms
from pipeline.degradation import Drain, Overload, degrade, degrade_unreachable
from pipeline.fleet import Fleet
from pipeline.forecast import Forecast
from pipeline.gates import GateKey, Gates
from pipeline.policy import Policies, Policy
from pipeline.pool_load import (
    Costed,
    decode_capacity_ms,
    horizon_tokens,
    prefill_room,
    token_ms,
)
from pipeline.verdict import Admit, Ask, Shortage, Verdict
from schemas import subjects
from schemas.control import Placed
from schemas.tokens import Claim

_UNKNOWN_TOKENS = 2**20  # of an answer: as many as answers have had so far, if any was seen


class Budget:
    """The budgets of all pools, as admission, router and take-over use them.

    Calls are idempotent by request id: a repeat changes nothing.

    Args:
        fleet: who is alive.
        forecast: what they will be doing; told of beats, placements and claims by its owner.
        policies: asked with every request, so it may change at any time.
        early_rejection: for which moment the decode load is judged: when the request's prefill
            will be done, or now; ``off``: nothing is ever over budget.
        on_verdict: called with each verdict.
    """

    def __init__(
        self,
        fleet: Fleet,
        forecast: Forecast,
        policies: Policies,
        *,
        early_rejection: EarlyRejection = "predicted",
        on_verdict: Callable[[Ask, Verdict], None] = lambda ask, verdict: None,
    ) -> None:
        self._fleet = fleet
        self._forecast = forecast
        self._policies = policies
        self._mode = early_rejection
        self._on_verdict = on_verdict
        self._books = Books()
        self._gates = Gates()
        self._drains: dict[Hashable, Drain] = {}
        self._pools: dict[str, tuple[Policy, Pool]] = {}  # by model, until the next beat
        self._pools_version = -1  # of the fleet
        self._judged: Case | None = None  # the last one: who is admitted is charged by it at once

    @property
    def books(self) -> Books:
        """What was admitted and has not ended."""
        return self._books

    # What is asked ----------------------------------------------------------------------------

    def judge(self, ask: Ask) -> Verdict:
        """What is to become of a request that came now, or that has waited and is asked again.

        One that is charged already is admitted. For one that has waited the TTFT target counts
        from now: its policy lets it wait.
        """
        verdict = self._verdict(ask)
        self._on_verdict(ask, verdict)
        return verdict

    def _verdict(self, ask: Ask) -> Verdict:
        policy = self._policies.of(_model(ask.served))
        case = self._judged = self._case(ask, policy)
        has_target = ask.slo.ttft_ms or ask.slo.tbt_ms
        if self._mode == "off" or not has_target or ask.request_id in self._books:
            return Admit(forecast=case.forecasted)
        unreachable = case.unreachable
        if unreachable is not None:
            return degrade_unreachable(ask, policy, unreachable)
        share = policy.share_of(ask.priority)
        enter, leave = share * policy.enter, share * policy.leave
        readings = case.readings()
        over = self._over(ask, readings, share, enter, leave)
        short = [one.kind for one in readings if one.kind in over or one.own > enter]
        if not short:
            return Admit(forecast=case.forecasted)
        return degrade(
            Overload(
                case=case,
                policy=policy,
                short=short,
                over=over,
                enter=enter,
                leave=leave,
                drains=self._drains,
            )
        )

    def _over(
        self, ask: Ask, readings: list[Reading], share: float, enter: float, leave: float
    ) -> frozenset[Shortage]:
        """The budgets that are over for those who ask like ``ask``; every gate is told its load."""
        return frozenset(
            reading.kind
            for reading in readings
            if self._gates.tell(
                GateKey(ask.served, reading.kind, ask.slo.name, share, ask.tenant),
                reading.pool, enter, leave,
            )
        )  # fmt: skip

    def _case(self, ask: Ask, policy: Policy) -> Case:
        pool = self._pool(ask.served, policy)
        ahead = partial(self._books.ahead, ask.served, ask.tenant, ask.priority)
        room = prefill_room(pool.prefillers, self._forecast, ask, ahead)
        return Case(ask=ask, pool=pool, prefill=room)

    def _pool(self, served: str, policy: Policy) -> Pool:
        if self._pools_version != self._fleet.version:
            self._pools_version = self._fleet.version
            self._pools.clear()
        known = self._pools.get(served)
        if known is None or known[0] is not policy:
            pool = Pool(
                prefillers=Costed.of(self._fleet.workers(served, "prefill"), self._forecast),
                decoders=Costed.of(self._fleet.workers(served, "decode"), self._forecast),
                forecast=self._forecast,
                books=self._books,
                mode=self._mode,
                horizon_ms=policy.horizon_s * 1000,
            )
            known = self._pools[served] = (policy, pool)
        return known[1]

    def used(self, served: str, now_s: float) -> dict[str, tuple[float, float]]:
        """Of prefill and decode: device time that is used, and all that there is while the times
        of the model's default class are kept (infinite where it promises none), in milliseconds."""
        policy = self._policies.of(_model(served))
        slo = policy.default_slo
        beats = self._fleet.workers(served, "prefill")
        waits = [
            wait
            for wait in self._forecast.prefill_waits_ms(beats, now_s)
            if wait is not None and math.isfinite(wait)
        ]
        costs = self._pool(served, policy).decoders.costs
        horizon_ms = max(policy.horizon_s * 1000, slo.ttft_ms)
        step_ms = slo.tbt_ms or horizon_ms
        return {
            "prefill": (
                sum(waits) + self._books.queued_ms(served),
                len(waits) * slo.ttft_ms or math.inf,
            ),
            "decode": (
                self._books.decode_ms(served, now_s, now_s, step_ms),
                decode_capacity_ms(costs, slo.tbt_ms, horizon_ms),
            ),
        }

    # The books --------------------------------------------------------------------------------

    def charge(self, ask: Ask, max_tokens: int | None = None) -> None:
        """Charge a request that was admitted, with ``max_tokens`` where it was clamped.

        At once, before it waits for a worker: else those who come behind it are told that nobody
        is before them. One that :meth:`judge` told to wait is not charged.
        """
        if ask.request_id in self._books:
            return
        case, self._judged = self._judged, None
        if case is None or case.ask is not ask:
            case = self._case(ask, self._policies.of(_model(ask.served)))
        self._books.charge(
            Charge(
                request_id=ask.request_id,
                served=ask.served,
                tenant=ask.tenant,
                priority=ask.priority,
                num_prompt=ask.num_prompt,
                prefill_ms=0.0 if case.prefill is None else case.prefill.own_ms,
                num_tokens=case.num_tokens(ask.max_tokens if max_tokens is None else max_tokens),
                cap_tokens=case.cap_tokens,
                token_ms=case.token_ms(),
                num_choices=ask.num_choices,
                charged_s=ask.now_s,
                begins_s=case.begins_s,
            )
        )
        self._books.forget(ask.now_s)

    def place(self, request_id: str) -> None:
        """A worker was named for its prefill: its wait is now in the forecast, not in the queue
        of requests that nobody has yet."""
        self._books.place(request_id)

    def hear_placed(self, placed: Placed, now_s: float) -> None:
        """A control process, this one or another, gave a request to a worker by name. One that is
        not known yet is charged from that: its length from what answers were long before."""
        if placed.request_id in self._books:
            self._books.place(placed.request_id)
        elif placed.role == "prefill":
            beat = self._fleet.worker(placed.worker)
            wait_ms = None if beat is None else self._forecast.prefill_wait_ms(beat, now_s)
            if wait_ms is None or math.isinf(wait_ms):
                begins_s = None
            else:  # the forecast has heard of it, so its own prefill is in there
                begins_s = now_s + wait_ms / 1000
            self._charge_unseen(placed, _UNKNOWN_TOKENS, now_s, placed.prefill_ms, begins_s)

    def hear_claim(self, claim: Claim, now_s: float) -> None:
        """A worker has claimed one. It decodes from now on, or after its prefill."""
        charge, is_prefill = self._books.find(claim.request_id), claim.role == "prefill"
        if charge is not None:
            took_ms = charge.prefill_ms if is_prefill else 0.0
            self._books.begin(
                claim.request_id, now_s + took_ms / 1000, has_decoder=self._has_decoder(claim)
            )
        elif claim.num_tokens:
            took_ms = self._prefill_ms(claim) if is_prefill else 0.0
            self._charge_unseen(claim, claim.max_tokens, now_s, took_ms, now_s + took_ms / 1000)

    def _has_decoder(self, claim: Claim) -> bool:
        """Whether who claimed it decodes it, too."""
        beat = self._fleet.worker(claim.worker)
        return claim.role == "decode" or (beat is not None and "decode" in beat.roles)

    def settle(self, request_id: str) -> None:
        """It ended, was cut off, refused or moved away. Unknown ids are nothing."""
        self._books.settle(request_id)

    def _charge_unseen(
        self,
        heard: Placed | Claim,
        max_tokens: int,
        now_s: float,
        took_ms: float,
        begins_s: float | None,
    ) -> None:
        """Charge what another control process has admitted, by its model's default class. Some
        worker has it: of the prefill queue's work it is no part."""
        served = heard.served
        policy = self._policies.of(_model(served))
        slo = policy.default_slo
        num_prompt = max(1, heard.num_tokens)
        self._books.charge(
            Charge(
                request_id=heard.request_id,
                served=served,
                tenant="",
                priority=0,
                num_prompt=num_prompt,
                prefill_ms=took_ms,
                num_tokens=self._forecast.expected_tokens(served, max_tokens),
                cap_tokens=horizon_tokens(
                    math.inf, slo.tbt_ms, max(policy.horizon_s * 1000, slo.ttft_ms), 1
                ),
                token_ms=token_ms(self._pool(served, policy).decoders.costs, num_prompt),
                charged_s=now_s,
                begins_s=begins_s,
                has_decoder=isinstance(heard, Claim) and self._has_decoder(heard),
                is_queued=False,
            )
        )
        self._books.forget(now_s)

    def _prefill_ms(self, claim: Claim) -> float:
        """Of its prompt on the worker that claimed it; 0 where that is not known."""
        beat = self._fleet.worker(claim.worker)
        costs = None if beat is None else self._forecast.costs(beat)
        return 0.0 if costs is None else prefill_ms(costs, claim.num_tokens)


def _model(served: str) -> str:
    model, _ = subjects.split_served(served)
    return model

"""What decides in a control process, put together, and what it is told.

    beats, claims, ends, placements ──> index, outlook, budget, backlog, door
                                         │
              admission, router <── placement, budget, waiting room

Who hears first matters: a prediction is made of what the fleet and the outlook know, so the door,
which lets requests go, is told last.
"""

from __future__ import annotations

import logging
import random
import time
from typing import cast

from infra.config import ControlConfig
from infra.process import RoleContext
from infra.steady import Counter
from pipeline.backlog import Backlog
from pipeline.budget import Budget
from pipeline.budget_case import EarlyRejection
from pipeline.budget_meter import BudgetMeter
from pipeline.door_meter import DoorMeter
from pipeline.doorkeeper import Doorkeeper
from pipeline.fleet import Fleet
from pipeline.index_feed import IndexFeed
from pipeline.outlook import Outlook
from pipeline.placed_feed import PlacedFeed
from pipeline.placement import Decision, make_placement
from pipeline.policy import Policies
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from pipeline.route_settings import RouteSettings
from schemas.control import Beat, Placed
from schemas.tokens import ChainEntry, Claim, StreamEnd


class Decisions:
    """Fleet, predictions and whoever decides by them."""

    def __init__(self, ctx: RoleContext, config: ControlConfig, policies: Policies) -> None:
        bus = ctx.bus
        self._process = ctx.process
        self.fleet = Fleet(bus.times.dead_s, time.monotonic())
        index = RadixIndex(config.kv_index_blocks)
        self.index_feed = IndexFeed(bus, index, self.fleet, ctx.metrics, ctx.log)
        settings = RouteSettings.of(config)
        self.outlook = Outlook(self.fleet, beat_s=bus.times.beat_s, links=settings.links)
        self.placed_feed = PlacedFeed(bus, self._hear_placed, ctx.process, ctx.log)
        self.policies = policies
        self._meter = BudgetMeter(ctx.metrics, ctx.log)
        self.budget = Budget(
            self.fleet,
            self.outlook,
            policies,
            early_rejection=cast("EarlyRejection", config.early_rejection),
            on_verdict=self._meter.judged,
        )
        prefixes = Prefixes(index, self.fleet, ctx.metrics)
        self.placement = make_placement(
            settings.policy,
            self.fleet,
            prefixes,
            self.outlook,
            clock=time.monotonic,
            rng=random.Random(),
            settings=settings,
            process=ctx.process,
            on_placed=self.placed_feed.say,
            on_decision=_Notes(ctx).take,
        )
        self.door = Doorkeeper(
            self.fleet,
            self.outlook,
            self.budget,
            self.placement,
            prefixes,
            DoorMeter(ctx.metrics),
            ahead_ms=config.ahead_ms,
            mixed_ahead_ms=config.mixed_ahead_ms,
            aging_s=config.aging_s,
        )
        self.backlog = Backlog(bus, config.max_queued_requests, self.door.room.num_waiting)

    def hear_beat(self, beat: Beat) -> None:
        """A heartbeat, after the fleet has heard it."""
        self.index_feed.hear_beat(beat)
        if beat.kind == "control":  # ours come, too, so the end of another's is noticed
            self.placed_feed.has_others = self._has_other_routers()
        now_s = time.monotonic()
        self.outlook.hear_beat(beat, now_s)
        self.door.hear_beat()  # whosever: by the silence of workers, too, it may be who goes
        self._meter.show(self.budget, self._pools, now_s)

    def _has_other_routers(self) -> bool:
        members = self.fleet.members()
        return any(one.kind == "control" and one.process != self._process for one in members)

    def _pools(self) -> set[str]:
        return {member.served for member in self.fleet.members() if member.worker}

    def hear_claim(self, claim: Claim) -> None:
        """A worker has just claimed a request."""
        now_s = time.monotonic()
        self.backlog.note_claim(claim)
        self.outlook.hear_claim(claim, now_s)
        self.budget.hear_claim(claim, now_s)
        self.door.hear_claim(claim)

    def hear_end(self, request_id: str, num_tokens: int | None) -> None:
        """A request has just ended; ``num_tokens`` of all its choices, None when it was cut off."""
        self.outlook.hear_end(request_id, num_tokens, time.monotonic())
        self.budget.settle(request_id)
        self.door.hear_end(request_id, num_tokens)

    def hear_stored(self, entry: ChainEntry) -> None:
        """The last entry of a chain was read again, for it may have been missed: who holds what,
        and who need not wait any more."""
        if isinstance(entry, Claim):
            self.outlook.hear_stored(entry, time.monotonic())
            if entry.request_id not in self.budget.books:  # it began before this process did
                self.budget.hear_claim(entry, time.monotonic())
            self.door.hear_claim(entry)
            return
        num_tokens = sum(entry.num_tokens) if isinstance(entry, StreamEnd) else None
        self.hear_end(entry.request_id, num_tokens)

    def _hear_placed(self, placed: Placed, now_s: float) -> None:
        """Another control process has placed a request."""
        self.outlook.hear_placed(placed, now_s)
        self.budget.hear_placed(placed, now_s)
        self.door.hear_placed(placed)


class _Notes:
    """Why tasks go where they go, counted and logged."""

    def __init__(self, ctx: RoleContext) -> None:
        self._log = ctx.log
        self._tells = ctx.log.is_enabled_for(logging.DEBUG)
        self._placements = ctx.metrics.placements
        self._by_reason: dict[tuple[str, str], Counter] = {}

    def take(self, decision: Decision) -> None:
        """A task was placed."""
        place = decision.place
        kind = decision.role, place.reason
        counter = self._by_reason.get(kind)
        if counter is None:
            counter = self._by_reason[kind] = self._placements.labels(*kind)
        counter.inc()
        if not self._tells:
            return
        self._log.debug(
            "task_placed",
            request_id=decision.request_id,
            role=decision.role,
            worker=place.worker,
            reason=place.reason,
            wait_ms=round(place.wait_ms, 1),
            prefill_ms=round(place.prefill_ms, 1),
            num_cached=place.num_cached,
        )

"""Placements as tests make them: of beats, on a clock that stands still."""

from __future__ import annotations

import random
from typing import Any

from pipeline.fleet import Fleet
from pipeline.outlook import Outlook
from pipeline.placement import Placement, make_placement
from pipeline.prefixes import Prefixes
from pipeline.route_settings import RouteSettings
from pipeline.scoring import Weights
from schemas.control import Beat
from schemas.tokens import Claim
from tests.pipeline.rig import SERVED

NOW_S = 1.0


def fleet_of(*beats: Beat) -> Fleet:
    fleet = Fleet(3.0, 0.0)
    for one in beats:
        fleet.hear(one, NOW_S)
    return fleet


def outlook_of(fleet: Fleet) -> Outlook:
    """One that has heard the last beats of everybody."""
    outlook = Outlook(fleet)
    for one in fleet.members():
        outlook.hear_beat(one, NOW_S)
    return outlook


def placing(
    fleet: Fleet,
    prefixes: Prefixes | None = None,
    policy: str = "score",
    *,
    outlook: Outlook | None = None,
    seed: int = 1,
    temperature: float = 0.0,
    **more: Any,
) -> Placement:
    """A placement among the fleet's members as they are now."""
    more.setdefault("settings", RouteSettings(weights=Weights(temperature=temperature)))
    return make_placement(
        policy,
        fleet,
        prefixes,
        outlook or outlook_of(fleet),
        clock=more.pop("clock", lambda: NOW_S),
        rng=random.Random(seed),
        **more,
    )


def claimed(worker: str, request_id: str, role: str = "prefill", tokens: int = 100) -> Claim:
    """What a worker says that takes a task."""
    return Claim(
        request_id=request_id,
        epoch=1,
        worker=worker,
        role=role,
        served=SERVED,
        deadline_unix_ms=2**50,
        num_tokens=tokens,
    )

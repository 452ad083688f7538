"""Settings of the waiting room: in which order, and how early, requests are let go to workers.

What they mean is in ``pipeline/fair_queue.py`` and ``pipeline/openings.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.parse import number
from infra.route_config import RouteConfig
from infra.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomConfig(RouteConfig):
    """A part of :class:`infra.config.ControlConfig`, and those of the router."""

    ahead_ms: float = setting(
        100.0,
        number(0, 60_000),
        "requests wait in control, in fair order, while every worker has more than this in front "
        "of it, by prediction. Less is fairer, too little lets workers idle",
    )
    mixed_ahead_ms: float = setting(
        20.0,
        number(0, 60_000),
        "the same, where it is less, while requests of several tenants or priorities come",
    )
    aging_s: float = setting(
        30.0,
        number(0.1, 86_400),
        "after so long requests that wait count as one priority higher",
    )

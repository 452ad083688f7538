"""What admission asks of the compute budget, and what it may be told. Pure data.

``Budget.judge`` answers an :class:`Ask` with exactly one of

    Admit       it fits: charge it, place it
    Clamp       it fits with fewer tokens: charge and place it with ``max_tokens``
    Fallback    ask again as a request for ``model``
    Wait        not now: ask again at ``until_s``, or when a budget has changed
    Refuse      429: the same request would be admitted in ``retry_after_s``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from pipeline.prefix_walk import Found
from schemas.requests import Slo

# What a request is short of:
#   ttft      time to its first token: too much waits to be prefilled
#   tbt       time between tokens: too many sequences would decode when its prefill is done
#   decode    device time of the decode workers over the policy's horizon
#   kv        memory for its keys and values
Shortage = Literal["ttft", "tbt", "decode", "kv"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the budget sees it.

    Args:
        served: the pool: ``<model@rev>``.
        num_cached: prompt tokens that a worker holds already, by worker id; who is not named
            holds none. Only what is not cached is charged.
        found: what that was taken from, for whoever places it in the same moment.
        max_tokens: that it may generate, over all ``n`` choices.
        slo: resolved: see ``Policy.slo_of``; 0 where nothing is promised.
        since_s: when it was asked for first; waiting counts from there.
        now_s: monotonic; when it is asked.
        asked_model: what the client asked for, where this is a fallback already.
    """

    request_id: str
    served: str
    num_prompt: int
    max_tokens: int
    now_s: float
    since_s: float
    num_cached: Mapping[str, int] = msgspec.field(default_factory=dict)
    found: Found | None = None
    num_choices: int = 1
    min_tokens: int = 0  # of all choices: a clamp never goes below
    tenant: str = ""
    priority: int = 0
    slo: Slo = Slo()
    asked_model: str = ""


class Forecasted(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted for a request that may enter; None where no worker tells its costs."""

    ttft_ms: float | None = None  # from ``Ask.now_s`` to its first token
    prefill_ms: float | None = None  # of that, its own computing on the best worker
    worker: str = ""  # the best for its prefill, "": none is known


_UNKNOWN = Forecasted()


class Admit(msgspec.Struct, frozen=True, kw_only=True):
    """It fits."""

    forecast: Forecasted = _UNKNOWN


class Clamp(msgspec.Struct, frozen=True, kw_only=True):
    """It fits with ``max_tokens``, over all choices, instead of what it asked for."""

    max_tokens: int
    shortage: Shortage
    forecast: Forecasted = _UNKNOWN


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """Over budget; ``model`` is to answer instead, if it has room."""

    model: str
    shortage: Shortage


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Over budget; predicted to fit at ``until_s`` (monotonic)."""

    until_s: float
    shortage: Shortage


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Over budget, for good. ``reason`` is for people; None: it would never be admitted."""

    retry_after_s: float | None
    reason: str
    shortage: Shortage


Verdict = Admit | Clamp | Fallback | Wait | Refuse

"""Settings of the router: how control processes choose workers.

What each weight means is in ``pipeline/scoring.py``, the links in ``pipeline/topology.py``, the
suffix in ``pipeline/suffix.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.parse import choice, number, whole
from infra.settings import setting

_WEIGHT = number(0, 1000)
_SPEED = number(0.001, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    """A part of :class:`infra.config.ControlConfig`; its defaults are the score's own."""

    route_policy: str = setting(
        "score",
        choice("score", "random", "least-loaded", "power-of-two"),
        "how a worker is chosen; all but score are blind for prefixes, and there to compare with",
    )
    route_hit: float = setting(0.5, _WEIGHT, "score: weight of the prompt's share that it holds")
    route_queue: float = setting(0.3, _WEIGHT, "score: weight of 1 / (1 + predicted wait)")
    route_load: float = setting(0.2, _WEIGHT, "score: weight of its free blocks and slots")
    route_transfer: float = setting(0.2, _WEIGHT, "score: weight against time of transfers")
    route_finish: float = setting(
        1.0, _WEIGHT, "score: weight against a first token later than elsewhere"
    )
    route_backlog: float = setting(
        2.0, _WEIGHT, "score: by how much a hit weighs more while prompts wait"
    )
    route_spread: float = setting(
        16.0, _WEIGHT, "score: weight against who was sent over 1.2 times the mean lately"
    )
    route_temperature: float = setting(
        0.02, number(0, 100), "score: of the softmax that chooses; 0: always the best"
    )
    route_link_host: float = setting(6.5, _SPEED, "GB/s of KV between workers of one host")
    route_link_rack: float = setting(5.0, _SPEED, "GB/s between hosts of one rack")
    route_link_zone: float = setting(2.5, _SPEED, "GB/s between racks of one zone")
    route_link_other: float = setting(1.0, _SPEED, "GB/s between others")
    route_suffix_tokens: int = setting(
        256,
        whole(0, 1_000_000),
        "a decode worker that holds most of a prompt computes the rest itself up to so many "
        "tokens; 0: never",
    )
    route_suffix_hold_ms: float = setting(
        100.0, number(0, 60_000), "if that holds up its streams no longer than this"
    )

"""What the settings ``control.route_*`` say, in the words of whoever decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.route_config import RouteConfig
from pipeline.scoring import Weights
from pipeline.suffix import SuffixRule
from pipeline.topology import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """What the settings ``control.route_*`` say."""

    policy: str = "score"
    weights: Weights = field(default_factory=Weights)
    links: Links = field(default_factory=Links)
    suffix: SuffixRule = field(default_factory=SuffixRule)

    @classmethod
    def of(cls, config: RouteConfig) -> RouteSettings:
        """What a configuration says."""
        return cls(
            policy=config.route_policy,
            weights=Weights(
                hit=config.route_hit,
                queue=config.route_queue,
                load=config.route_load,
                transfer=config.route_transfer,
                finish=config.route_finish,
                backlog=config.route_backlog,
                spread=config.route_spread,
                temperature=config.route_temperature,
            ),
            links=Links(
                host=config.route_link_host,
                rack=config.route_link_rack,
                zone=config.route_link_zone,
                other=config.route_link_other,
            ),
            suffix=SuffixRule(
                max_tokens=config.route_suffix_tokens, hold_ms=config.route_suffix_hold_ms
            ),
        )

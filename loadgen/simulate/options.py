"""What a simulation is told beside its fleet and its trace."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.simulate.fleet_plan import EarlyRejection, PlacementPolicy
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How a run goes; None: as the fleet's plan says.

    Args:
        max_tokens: what the mesh is told that each answer may be long; 0: as the longest of the
            trace. How long one is, it learns at its end.
        scale: lengths of the trace times this.
        drain_s: virtual seconds that the last requests get.

    Raises:
        ConfigError: a value that can't be used; ``param`` names it.
    """

    placement: PlacementPolicy | None = None
    early_rejection: EarlyRejection | None = None
    slo_ttft_ms: float | None = None
    slo_tbt_ms: float | None = None
    waiting_room: bool | None = None
    routers: int | None = None
    max_tokens: int = 0
    scale: float = 1.0
    seed: int = 0
    drain_s: float = 600.0
    sample_s: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("slo_ttft_ms", 0.0, 1e7), ("slo_tbt_ms", 0.0, 1e7), ("routers", 1, 64),
            ("max_tokens", 0, 1_000_000), ("scale", 0.01, 100.0), ("seed", 0, 2**31 - 1),
            ("drain_s", 0.0, 1e6), ("sample_s", 0.01, 1e6),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value:g}, not within {low:g} and {high:g}",
                                  param=name)  # fmt: skip

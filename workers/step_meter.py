"""How long this worker's steps take, as far as it knows."""

from __future__ import annotations

from schemas.profiles import StepCosts


class StepMeter:
    """The costs of one engine's steps.

    Attributes:
        costs: None: nothing is known.
    """

    def __init__(self) -> None:
        self.costs: StepCosts | None = None

    @classmethod
    def of_known(cls, costs: StepCosts) -> StepMeter:
        """Of an engine whose costs are chosen, not measured."""
        meter = cls()
        meter.costs = costs
        return meter

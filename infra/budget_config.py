"""Settings of the compute budget; what they mean is in ``pipeline/budget.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.parse import choice, path
from infra.room_config import RoomConfig
from infra.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig(RoomConfig):
    """A part of :class:`infra.config.ControlConfig`, and those of waiting room and router."""

    policies: Path | None = setting(
        None, path, "TOML file of SLO classes and of what each model does over budget; read again "
        "when it changes. Equal in all control processes",
    )  # fmt: skip
    early_rejection: str = setting(
        "predicted",
        choice("predicted", "now", "off"),
        "for which moment decode workers are judged: when the request's prefill will be done, or "
        "now; off: nothing is ever over the compute budget",
    )

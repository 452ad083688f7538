"""What a control process is told reaches whoever decides by it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from infra.config import BusConfig, ControlConfig
from infra.log import make_logger
from infra.metrics import Metrics
from infra.process import RoleContext
from infra.times import Times
from pipeline.decisions import Decisions
from pipeline.policy import FixedPolicies
from schemas.control import Beat, ProcessState
from tests.pipeline.rig import LogLines


def control_beat(process: str, state: ProcessState = "ready") -> Beat:
    return Beat(process=process, kind="control", state=state, host="here", pid=1, started_unix_ms=1)


def test_placements_are_said_while_another_router_is_there(tmp_path: Path) -> None:
    """Until the first beat of a router, its own, nobody knows whether one is; then it is known."""
    log = make_logger("test", stream=LogLines().stream)
    ctx = SimpleNamespace(
        bus=SimpleNamespace(times=Times()), metrics=Metrics(), log=log, process="control-1"
    )
    config = ControlConfig(bus=BusConfig(data=tmp_path))
    decisions = Decisions(cast(RoleContext, ctx), config, FixedPolicies())

    def says_after(beat: Beat) -> bool:
        decisions.fleet.hear(beat, 0.0)
        decisions.hear_beat(beat)
        return decisions.placed_feed.has_others

    assert decisions.placed_feed.has_others
    assert not says_after(control_beat("control-1"))
    assert says_after(control_beat("control-2", "starting"))
    assert says_after(control_beat("control-1"))
    assert not says_after(control_beat("control-2", "gone"))

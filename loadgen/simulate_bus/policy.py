"""What control processes are told, so that they decide as the fleet's file says."""

from __future__ import annotations

from pathlib import Path

from infra.room_config import RoomConfig
from loadgen.simulate.fleet_plan import FleetPlan

_NEVER_WAIT_MS = 60_000.0  # more than this must be in front of every worker for one to wait


def control_flags(plan: FleetPlan, folder: Path, speed: float) -> tuple[str, ...]:
    """The flags of ``mesh control``: times in those of workers that are ``speed`` times as fast.
    A promise is written to a file in ``folder``."""
    policy, links, usual = plan.policy, plan.links, RoomConfig()
    waits = policy.has_waiting_room
    ahead_ms, mixed_ahead_ms = (
        min(ms / speed, _NEVER_WAIT_MS) if waits else _NEVER_WAIT_MS
        for ms in (usual.ahead_ms, usual.mixed_ahead_ms)
    )
    flags = [
        f"--route-policy={policy.placement}",
        f"--early-rejection={policy.early_rejection}",
        f"--ahead-ms={ahead_ms}",
        f"--mixed-ahead-ms={mixed_ahead_ms}",
        f"--aging-s={min(86_400.0, max(0.1, usual.aging_s / speed))}",
        f"--route-suffix-hold-ms={min(60_000.0, usual.route_suffix_hold_ms / speed)}",
        f"--route-link-host={links.host.gb_s * speed}",
        f"--route-link-rack={links.rack.gb_s * speed}",
        f"--route-link-zone={links.zone.gb_s * speed}",
        f"--route-link-other={links.far.gb_s * speed}",
    ]
    promised = {"ttft_ms": policy.slo_ttft_ms / speed, "tbt_ms": policy.slo_tbt_ms / speed}
    if policy.early_rejection != "off" and any(promised.values()):
        path = folder / "policies.toml"
        path.write_text(_policies(promised))
        flags.append(f"--policies={path}")
    return tuple(flags)


def _policies(promised: dict[str, float]) -> str:
    """In the form of ``pipeline/policies.py``: all requests are promised this, or refused."""
    times = ", ".join(f"{name} = {max(1.0, ms)}" for name, ms in promised.items() if ms)
    lines = (
        '[models."*"]',
        'over_budget = ["refuse"]',
        'default_class = "all"',
        f"classes.all = {{ {times} }}",
    )
    return "\n".join(lines) + "\n"

"""From a fleet file to the workers of a crew."""

from __future__ import annotations

import math

from loadgen.simulate.fleet_plan import FleetPlan, WorkerSpec
from schemas.errors import ConfigError
from workers.crew.plan import CrewWorker


def crew_of(plan: FleetPlan) -> tuple[CrewWorker, ...]:
    """The workers of ``plan``.

    Raises:
        ConfigError: a profile that there is not; or something that only virtual time can do.
    """
    if plan.router != "mesh":
        raise ConfigError(f"router: there is no {plan.router} on the bus", param="fleet")
    return tuple(_worker(spec, plan.block_size) for spec in plan.specs())


def _worker(spec: WorkerSpec, block_size: int) -> CrewWorker:
    if spec.from_s > 0 or spec.until_s < math.inf:
        raise ConfigError(
            f"{spec.name}: on the bus workers do not come and go: no from_s, no until_s",
            param="fleet",
        )
    return CrewWorker(
        name=spec.name,
        role=spec.role,
        costs=spec.costs,
        num_blocks=max(1, spec.kv_tokens // block_size),
        max_num_sequences=spec.max_num_sequences,
        max_batch_tokens=spec.max_batch_tokens,
        profile=spec.profile,
        kv_token_bytes=spec.kv_token_bytes,
        host=spec.host,
        rack=spec.rack,
        zone=spec.zone,
    )

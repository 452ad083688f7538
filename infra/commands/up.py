"""``mesh up``: a whole mesh on this machine."""

from __future__ import annotations

import asyncio

import typer

from infra.commands.keys import check_key_file
from infra.commands.policies import check_policy_file
from infra.config import BridgeConfig, ControlConfig, UpConfig, WorkerConfig
from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from infra.options import takes
from schemas.errors import MeshError

ALSO = {
    BridgeConfig: ("host", "port", "tls_cert", "tls_key", "cors_origins", "api_keys", "auth"),
    ControlConfig: ("policies",),
    WorkerConfig: (
        "engine",
        "device",
        "dtype",
        "kernels",
        "kv_memory",
        "kv_host_memory",
        "kv_disk",
        "kv_disk_quota",
        "kv_transports",
        "kv_ucx_host",
        "threads",
        "speed",
        "profile",
    ),
}


@takes(UpConfig, also=ALSO)
def up(config: UpConfig) -> None:
    """Start a mesh: broker, control, workers, bridge; Ctrl-C stops it.

    Without options: one prefill and one decode worker with the model smollm2-135m. Settings of
    the roles that have no option here come from --config or MESH_* variables.
    """
    from infra.supervisor import run_up

    check_key_file(config.bridge)
    check_policy_file(config.control.policies, [model.name for model in config.models])
    try:
        run_up(config)
    except asyncio.CancelledError as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh up", ours)) from error

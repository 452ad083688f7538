"""``/health``, ``/ready`` and ``/metrics`` of a process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infra.metrics import CONTENT_TYPE, Metrics


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold before the process is ready."""

    ok: bool
    reason: str


class Health:
    """Named checks; ready when there is at least one and all hold.

    ``changed`` is set whenever a check changes; whoever waits for it clears it.
    """

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self.changed = asyncio.Event()

    def set(self, name: str, ok: bool, reason: str = "") -> None:
        """Say how ``name`` stands; ``reason`` is shown while it does not hold."""
        check = Check(ok, "" if ok else reason)
        if self._checks.get(name) != check:
            self._checks[name] = check
            self.changed.set()

    @property
    def is_ready(self) -> bool:
        """Whether all checks hold."""
        return bool(self._checks) and all(check.ok for check in self._checks.values())

    @property
    def failing(self) -> dict[str, str]:
        """What does not hold, and why."""
        return {name: check.reason for name, check in self._checks.items() if not check.ok}

    @property
    def reason(self) -> str:
        """``failing`` in one line; empty when ready."""
        return "; ".join(f"{name}: {why}" if why else name for name, why in self.failing.items())


def health_routes(process: str, health: Health, metrics: Metrics) -> list[Route]:
    """The three routes, also for an application that serves others beside them.

    ``/health`` answers 200 while the loop runs; ``/ready`` answers 200, or 503 with what is not
    ready and why.
    """

    async def alive(_: Request) -> Response:
        return JSONResponse({"status": "alive", "process": process})

    async def ready(_: Request) -> Response:
        status = "ready" if health.is_ready else "not ready"
        body = {"status": status, "process": process, "failing": health.failing}
        return JSONResponse(body, status_code=200 if health.is_ready else 503)

    async def exposition(_: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    return [
        Route("/health", alive),
        Route("/ready", ready),
        Route("/metrics", exposition),
    ]


def health_app(process: str, health: Health, metrics: Metrics) -> Starlette:
    """An application with these routes only."""
    return Starlette(routes=health_routes(process, health, metrics))

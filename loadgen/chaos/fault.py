"""What a fault is. The kinds are in ``loadgen.chaos.faults``.

A new one: derive from :class:`Fault`, say its name, role and points, write ``inject`` and, where
something must be mended, ``heal``; decorate it with :func:`register`.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from loadgen.chaos.answer import Answer
from loadgen.chaos.cases import Case
from loadgen.chaos.clients import Client
from loadgen.chaos.mesh import ChaosMesh, Target
from loadgen.chaos.own_mesh import Starter
from loadgen.chaos.points import POINTS
from loadgen.chaos.witness import Trace

ALL_POINTS = tuple(POINTS)


@dataclass(slots=True, kw_only=True)
class Stream:
    """One request under way."""

    label: str
    case: Case
    client: Client
    trace: Trace
    answer: Answer
    home: Callable[[], str]  # the bridge that it reads from now; "" on the bus
    left_s: float | None = None  # when its client was told to leave, monotonic
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, kw_only=True)
class Scene:
    """What a fault works with. ``starter`` is None for a mesh that is not our own."""

    mesh: ChaosMesh
    client_nats_url: str
    control_nats_url: str
    model: str
    rng: random.Random
    time_scale: float
    starter: Starter | None = None


class Fault(ABC):
    """One kind of fault; a new object each time it happens.

    ``role`` is whose process is struck: prefill, decode, control, bridge, broker, workers, or ""
    for a fault of another kind. ``kind`` groups figures: kill, freeze, term, other, and
    "freeze-broker": while the only broker is frozen nothing can pass, so its recovery is counted
    ``from_thaw`` on.
    """

    name: ClassVar[str]
    role: ClassVar[str] = ""
    kind: ClassVar[str] = "other"
    points: ClassVar[tuple[str, ...]] = ALL_POINTS
    client_stays: ClassVar[bool] = True  # of the marked request
    from_thaw: ClassVar[bool] = False  # recovery counts from the end of the fault

    def why_not(self, scene: Scene) -> str:
        """Why it can't happen in this mesh; "" when it can."""
        return ""

    async def prepare(self, scene: Scene) -> None:  # noqa: B027 - most need nothing
        """Before any load."""

    def choose(self, scene: Scene, marked: Stream) -> Target | None:
        """The process to strike, once the marked request is at its point; None when the fault
        strikes none, or several.

        Raises:
            NotWhole: there is none.
        """
        return None

    def affects(self, scene: Scene, target: Target | None, stream: Stream) -> bool:
        """Whether ``stream`` can't go on until the mesh has noticed."""
        return False

    @abstractmethod
    async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
        """Strike. Returns at once."""

    async def heal(self, scene: Scene) -> None:  # noqa: B027 - the mesh mends itself, mostly
        """Mend what the mesh can't mend itself; returns when the fault is over."""

    async def end(self, scene: Scene) -> None:  # noqa: B027 - most leave nothing
        """After the round, whatever happened in it."""


FAULTS: dict[str, type[Fault]] = {}


def register(fault: type[Fault]) -> type[Fault]:
    """Let ``fault`` be found by its name."""
    FAULTS[fault.name] = fault
    return fault

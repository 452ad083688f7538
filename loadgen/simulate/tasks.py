"""What goes from control processes to simulated workers, and what these meet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from loadgen.simulate.events import EventQueue
from loadgen.simulate.fleet_plan import FleetPlan
from loadgen.simulate.network import Network
from loadgen.simulate.request import Request
from loadgen.simulate.sequence import Sequence
from schemas.control import Beat
from schemas.kv import KvSource
from schemas.kv_events import KvEvents
from schemas.tokens import Claim

if TYPE_CHECKING:
    from loadgen.simulate.worker import SimulatedWorker


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """Work for a worker: a prompt, or where ``source`` holds what was computed, its answer."""

    request: Request
    role: str
    sources: tuple[KvSource, ...] = ()
    overtakes: bool = False
    source: SimulatedWorker | None = None
    held: Sequence | None = None


class Surroundings(Protocol):
    """What a worker meets."""

    queue: EventQueue
    network: Network
    plan: FleetPlan
    served: str
    shared: dict[str, deque[Task]]  # by role

    def worker(self, name: str) -> SimulatedWorker | None:
        """Somebody who is there."""

    def say_beat(self, beat: Beat) -> None:
        """To all control processes."""

    def say_events(self, events: KvEvents) -> None:
        """To all control processes."""

    def say_claim(self, claim: Claim) -> None:
        """To all control processes."""

    def kv_ready(self, task: Task) -> None:
        """A prompt was computed: find a worker to decode."""

    def ended(self, request: Request) -> None:
        """It has its last token."""

    def left(self, worker: SimulatedWorker, tasks: list[Task]) -> None:
        """It is gone; ``tasks`` it did not take."""

"""How long messages and blocks of KV are on their way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeVarTuple, Unpack

from loadgen.simulate.events import EventQueue
from loadgen.simulate.fleet_plan import FleetPlan, LinkSpeed, WorkerSpec

Args = TypeVarTuple("Args")


class Network:
    """The bus, on which every message takes equally long, and the links between workers.

    A worker sends its blocks one request's after the other's, and takes them in so as well: a busy
    one is waited for.

    Attributes:
        num_bytes: of KV that went from worker to worker.
    """

    def __init__(self, queue: EventQueue, plan: FleetPlan) -> None:
        self.num_bytes = 0
        self._queue = queue
        self._hop_s = plan.hop_ms / 1e3
        self._links = plan.links
        self._free_s: defaultdict[tuple[str, str], float] = defaultdict(float)

    @property
    def hop_s(self) -> float:
        """How long a message takes."""
        return self._hop_s

    def hop(self, call: Callable[[Unpack[Args]], object], *args: *Args) -> None:
        """Call it when a message that is sent now is there."""
        self._queue.after(self._hop_s, call, *args)

    def link(self, one: WorkerSpec, other: WorkerSpec) -> LinkSpeed:
        """The way between two workers, by what they have in common."""
        if one.host == other.host:
            return self._links.host
        if one.rack and (one.rack, one.zone) == (other.rack, other.zone):
            return self._links.rack
        same_zone = one.zone and one.zone == other.zone
        return self._links.zone if same_zone else self._links.far

    def seconds(self, source: WorkerSpec, target: WorkerSpec, num_bytes: int) -> float:
        """How long so many bytes take on a way that is free."""
        link = self.link(source, target)
        return link.latency_ms / 1e3 + num_bytes / (link.gb_s * 1e9)

    def promotion_s(self, num_bytes: int) -> float:
        """How long so many bytes take from a worker's own host memory."""
        link = self._links.host_memory
        return link.latency_ms / 1e3 + num_bytes / (link.gb_s * 1e9)

    def transfer(self, source: WorkerSpec, target: WorkerSpec, num_bytes: int) -> float:
        """Send them now, or as soon as both are free; when they are there."""
        ways = (("out", source.name), ("in", target.name))
        begin_s = max(self._queue.now_s, *(self._free_s[way] for way in ways))
        end_s = begin_s + self.seconds(source, target, num_bytes)
        for way in ways:
            self._free_s[way] = end_s
        self.num_bytes += num_bytes
        return end_s

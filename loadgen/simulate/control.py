"""A control process of a simulated fleet: the mesh's own fleet, index, outlook, budget, waiting
room and placement, put together as ``pipeline/decisions.py`` does.

Each has its own copies and hears the same messages, a hop after they were said. What it decides
costs no virtual time; what it costs this machine is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Protocol

from infra.metrics import Metrics
from loadgen.simulate.door import Exits, Minds, VirtualDoor
from loadgen.simulate.events import EventQueue
from loadgen.simulate.fleet_plan import FleetPlan
from loadgen.simulate.request import FINGERPRINT, Request
from pipeline.budget import Budget
from pipeline.fleet import Fleet
from pipeline.index_book import IndexBook
from pipeline.outlook import Outlook
from pipeline.placement import make_placement
from pipeline.policy import FixedPolicies, Policy
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from pipeline.route_settings import RouteSettings
from pipeline.topology import Links
from schemas.control import Beat, Placed
from schemas.kv import KvHandle, KvReady
from schemas.kv_events import KvEvents
from schemas.requests import RequestRecord, Slo
from schemas.tokens import Claim

_INDEX_BLOCKS = 4_000_000
_SWEEP_STEPS = 20_000
_DEAD_BEATS = 3


class Surroundings(Exits, Protocol):
    """What a control process meets."""

    queue: EventQueue
    plan: FleetPlan
    served: str

    def request(self, request_id: str) -> Request:
        """One of the trace."""

    def say_placed(self, placed: Placed) -> None:
        """To all control processes."""


class Control:
    """One control process.

    Attributes:
        door: lets requests go.
    """

    def __init__(self, name: str, mesh: Surroundings, rng: Random) -> None:
        plan, queue = mesh.plan, mesh.queue
        self.name = name
        self.fleet = Fleet(_DEAD_BEATS * plan.beat_s, queue.now_s)
        self.index = RadixIndex(_INDEX_BLOCKS)
        settings = _route_settings(plan)
        self.outlook = Outlook(self.fleet, beat_s=plan.beat_s, links=settings.links)
        self._mesh = mesh
        self._book = IndexBook(self.index)
        prefixes = Prefixes(self.index, self.fleet, Metrics(), runs_of=self._runs_of)
        self._placement = make_placement(
            plan.policy.placement,
            self.fleet,
            prefixes,
            self.outlook,
            clock=queue.clock,
            rng=rng,
            settings=settings,
            process=name,
            on_placed=mesh.say_placed,
        )
        minds = Minds(
            fleet=self.fleet,
            outlook=self.outlook,
            prefixes=prefixes,
            placement=self._placement,
            budget=_make_budget(plan, self.fleet, self.outlook),
            has_room=plan.policy.has_waiting_room,
        )
        self.door = VirtualDoor(minds, mesh.served, queue, mesh)

    # ---- what is heard: the door last, for it decides by what the others know -------------

    def hear_beat(self, beat: Beat) -> None:
        """A worker's heartbeat."""
        now_s = self._mesh.queue.now_s
        self.fleet.hear(beat, now_s)
        if beat.state == "gone":
            self._book.drop(beat.worker)
            self.index.sweep(_SWEEP_STEPS)
        elif beat.kv_seq:
            self._book.hear_seq(beat.worker, beat.kv_seq)
        self.outlook.hear_beat(beat, now_s)
        self.door.look()

    def hear_events(self, events: KvEvents) -> None:
        """What a worker's cache holds."""
        if self.fleet.worker(events.worker) is not None:
            self._book.hear(events)

    def hear_placed(self, placed: Placed) -> None:
        """A control process has placed a request; what it said itself it knows."""
        if placed.process != self.name:
            self.outlook.hear_placed(placed, self._mesh.queue.now_s)
            self.door.hear_placed(placed)

    def hear_claim(self, claim: Claim) -> None:
        """A worker has taken one."""
        self.outlook.hear_claim(claim, self._mesh.queue.now_s)
        self.door.hear_claim(claim)

    def hear_end(self, request_id: str, num_tokens: int) -> None:
        """One has its last token."""
        self.outlook.hear_end(request_id, num_tokens, self._mesh.queue.now_s)
        self.door.hear_end(request_id, num_tokens)

    # ---- what is decided -----------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """A request came."""
        self.door.come(request)

    def place_decode(self, request: Request, owner: str) -> str:
        """Where its answer is generated."""
        served = self._mesh.served
        return self._placement.decode_worker(served, _kv_ready(request, owner, served))

    def _runs_of(
        self, record: RequestRecord, block_size: int, salt: bytes
    ) -> Iterable[Sequence[bytes]]:
        """Of a request's pieces: its tokens are only told by number here."""
        return self._mesh.request(record.request_id).runs()


def _route_settings(plan: FleetPlan) -> RouteSettings:
    """The policy, and the links as routers are told them."""
    links = plan.links
    return RouteSettings(
        policy=plan.policy.placement,
        links=Links(
            host=links.host.gb_s, rack=links.rack.gb_s, zone=links.zone.gb_s, other=links.far.gb_s
        ),
    )


def _make_budget(plan: FleetPlan, fleet: Fleet, outlook: Outlook) -> Budget | None:
    """One that refuses what is over it; None: nothing is promised."""
    policy = plan.policy
    if policy.early_rejection == "off":
        return None
    slo = Slo(ttft_ms=policy.slo_ttft_ms, tbt_ms=policy.slo_tbt_ms)
    promised = Policy(classes={"all": slo}, default_class="all", rungs=("refuse",))
    return Budget(
        fleet,
        outlook,
        FixedPolicies({"*": promised}),
        early_rejection=policy.early_rejection,
    )


def _kv_ready(request: Request, owner: str, served: str) -> KvReady:
    return KvReady(
        request_id=request.request_id,
        epoch=1,
        after_seq=1,
        reader="bridge",
        worker=owner,
        handle=KvHandle(
            lease_id=request.request_id,
            secret=b"",
            owner=owner,
            fingerprint=FINGERPRINT,
            num_tokens=request.num_prompt,
            blocks=b"",
            generations=b"",
            checksums=b"",
            addresses=(),
            expires_unix_ms=0,
        ),
        tokens=(b"\0\0\0\0",),
        finished=("",),
        num_cached_tokens=request.num_cached,
        record=request.record(served),
    )

"""A control process of a simulated fleet: the mesh's own fleet, index, outlook and placement.

Each has its own copies and hears the same messages, a hop after they were said. What it decides
costs no virtual time; what it costs this machine is measured.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from infra.metrics import Metrics
from loadgen.simulate.fleet_plan import FleetPlan
from loadgen.simulate.request import FINGERPRINT, Request
from pipeline.fleet import Fleet
from pipeline.index_book import IndexBook
from pipeline.outlook import Outlook
from pipeline.placement import PrefillPlace, RouteSettings, make_placement
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from pipeline.topology import Links
from schemas.control import Beat, Placed
from schemas.kv import KvHandle, KvReady
from schemas.kv_events import KvEvents
from schemas.requests import RequestRecord
from schemas.tokens import Claim

_INDEX_BLOCKS = 4_000_000
_SWEEP_STEPS = 20_000
_DEAD_BEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """What all control processes have in common.

    Args:
        request: finds a request by its id.
        clock: virtual time.
        say_placed: to all of them.
        send: a prompt was placed.
        refuse: a request is not served, and why.
    """

    plan: FleetPlan
    served: str
    request: Callable[[str], Request]
    clock: Callable[[], float]
    say_placed: Callable[[Placed], None]
    send: Callable[[Request, PrefillPlace], None]
    refuse: Callable[[Request, str], None]


class Control:
    """One control process.

    Attributes:
        decisions_s: CPU time of each placement of a prompt.
    """

    def __init__(self, name: str, spec: ControlSpec, rng: Random) -> None:
        self.name = name
        self.decisions_s: array[float] = array("d")
        plan = spec.plan
        self.fleet = Fleet(_DEAD_BEATS * plan.beat_s, spec.clock())
        self.index = RadixIndex(_INDEX_BLOCKS)
        self.outlook = Outlook(self.fleet, beat_s=plan.beat_s)
        self._spec = spec
        self._book = IndexBook(self.index)
        prefixes = Prefixes(self.index, self.fleet, Metrics(), runs_of=self._runs_of)
        self._placement = make_placement(
            plan.policy.placement,
            self.fleet,
            prefixes,
            self.outlook,
            clock=spec.clock,
            rng=rng,
            settings=RouteSettings(policy=plan.policy.placement, links=_links(plan)),
            process=name,
            on_placed=spec.say_placed,
        )

    # ---- what is heard -------------------------------------------------------------------

    def hear_beat(self, beat: Beat) -> None:
        """A worker's heartbeat."""
        now_s = self._spec.clock()
        self.fleet.hear(beat, now_s)
        self.outlook.hear_beat(beat, now_s)
        if beat.state == "gone":
            self._book.drop(beat.worker)
            self.index.sweep(_SWEEP_STEPS)
        elif beat.kv_seq:
            self._book.hear_seq(beat.worker, beat.kv_seq)

    def hear_events(self, events: KvEvents) -> None:
        """What a worker's cache holds."""
        if self.fleet.worker(events.worker) is not None:
            self._book.hear(events)

    def hear_placed(self, placed: Placed) -> None:
        """Another one has placed a request."""
        if placed.process != self.name:
            self.outlook.hear_placed(placed, self._spec.clock())

    def hear_claim(self, claim: Claim) -> None:
        """A worker has taken one."""
        self.outlook.hear_claim(claim, self._spec.clock())

    def hear_end(self, request_id: str, num_tokens: int) -> None:
        """One has its last token."""
        self.outlook.hear_end(request_id, num_tokens, self._spec.clock())

    # ---- what is decided -----------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """A request came."""
        self._spec.send(request, self._place_prefill(request))

    def _place_prefill(self, request: Request) -> PrefillPlace:
        record = request.record(self._spec.served)
        begun_ns = time.thread_time_ns()
        place = self._placement.place_prefill(record)
        self.decisions_s.append((time.thread_time_ns() - begun_ns) / 1e9)
        return place

    def place_decode(self, request: Request, owner: str) -> str:
        """Where its answer is generated."""
        return self._placement.decode_worker(
            self._spec.served, _kv_ready(request, owner, self._spec.served)
        )

    def _runs_of(
        self, record: RequestRecord, block_size: int, salt: bytes
    ) -> Iterable[Sequence[bytes]]:
        """Of a request's pieces: its tokens are only told by number here."""
        return self._spec.request(record.request_id).runs()


def _links(plan: FleetPlan) -> Links:
    """The speeds of the plan, as routers are told them."""
    links = plan.links
    return Links(
        host=links.host.gb_s, rack=links.rack.gb_s, zone=links.zone.gb_s, other=links.far.gb_s
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

"""Which worker gets a task: what it holds of the prompt, and how much it has to do.

    who has room, and was heard lately     pipeline/weighing.py, from the outlook's tables
    one of them                            pipeline/route_policies.py
    or a decode worker itself              when it holds most of the prompt and the rest is short
    and whom to fetch blocks from          those that hold more than it does

A task is placed by name when there is a reason to; else it goes to ``any`` and whoever pulls
first has it: where there is nobody, one alone, or none with room. What is placed by name counts
from that moment on, here and, as ``Placed`` on the bus, with the other routers.

Pure but for the fleet, the index and the outlook that it reads: time and chance are passed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from pipeline.fleet import Fleet
from pipeline.lenders import kv_sources
from pipeline.outlook import Outlook
from pipeline.pool_table import PoolTable
from pipeline.prefix_hash import ID_BYTES
from pipeline.prefix_walk import NOBODY, Found
from pipeline.prefixes import Prefixes
from pipeline.route_policies import RoutePolicy, make_policy
from pipeline.route_settings import RouteSettings
from pipeline.suffix import SUFFIX, stay_place
from pipeline.topology import Distances
from pipeline.weighing import Pool, Weighed
from schemas.control import Placed
from schemas.kv import KvReady, KvSource
from schemas.requests import RequestRecord
from schemas.subjects import ANY

_UNKNOWN_ANSWER = 256  # tokens of an answer whose record is too large to come along

Reason = Literal["any", "prefix", "load", "suffix"]


class PrefillPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task goes, and whom a prefill asks for what that worker does not hold itself.

    The times are predictions, 0 where costs are not known or nobody is named; for a decode
    ``wait_ms`` is that of the whole answer.
    """

    worker: str  # or ``any``
    sources: tuple[KvSource, ...] = ()
    reason: Reason = "any"
    wait_ms: float = 0.0
    prefill_ms: float = 0.0
    num_cached: int = 0  # tokens of the prompt that the worker holds, as far as is known
    overtakes: bool = False  # others that wait there
    alone: str = ""  # with ``any``: the only worker that may pull it now; "": there is another


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What was placed where, and why; for logs and metrics."""

    request_id: str
    role: Literal["prefill", "decode"]
    place: PrefillPlace


class Placement(Protocol):
    """Chooses workers."""

    def place_prefill(
        self, record: RequestRecord, *, hurries: bool = False, found: Found | None = None
    ) -> PrefillPlace:
        """Where ``record`` is computed.

        Args:
            hurries: nobody is behind it for whom work would be saved by finding its prefix, so
                that it goes where it is done first.
            found: what is held of its prompt, where that was looked up a moment ago.
        """

    def decode_worker(self, served: str, ready: KvReady) -> str:
        """A worker id, or ``any``."""

    def max_sequence_tokens(self, served: str) -> int | None:
        """How long prompt and answer together may be, so that any worker could take them; None
        when no worker is there to ask."""

    @property
    def knows_prefixes(self) -> bool:
        """Whether a record would make a difference to a place."""


def make_placement(
    policy: str,
    fleet: Fleet,
    prefixes: Prefixes | None,
    outlook: Outlook,
    *,
    clock: Callable[[], float],
    rng: random.Random,
    settings: RouteSettings | None = None,
    process: str = "",
    on_placed: Callable[[Placed], None] = lambda placed: None,
    on_decision: Callable[[Decision], None] = lambda decision: None,
) -> Placement:
    """The placement of that name: one of ``route_policies.POLICIES``.

    Args:
        fleet: knows who is alive; the outlook is filled beside it.
        prefixes: None: nothing is known of what workers hold.
        clock: monotonic seconds, the same that the outlook is fed with.
        process: who places, for the other routers.
        on_placed: hears what was placed by name; the outlook here has counted it already.
        on_decision: hears each decision and its reason.

    Raises:
        ConfigError: there is no such policy.
    """
    settings = settings or RouteSettings()
    chosen = make_policy(policy, settings.weights)
    return PolicyPlacement(
        chosen, fleet, prefixes if chosen.sees_prefixes else None, outlook, settings,
        clock=clock, rng=rng, process=process, on_placed=on_placed, on_decision=on_decision,
    )  # fmt: skip


class PolicyPlacement:
    """See :func:`make_placement`."""

    def __init__(
        self,
        policy: RoutePolicy,
        fleet: Fleet,
        prefixes: Prefixes | None,
        outlook: Outlook,
        settings: RouteSettings,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        process: str,
        on_placed: Callable[[Placed], None],
        on_decision: Callable[[Decision], None],
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._prefixes = prefixes
        self._outlook = outlook
        self._suffix = settings.suffix
        self._distances = Distances(settings.links)
        self._clock = clock
        self._rng = rng
        self._process = process
        self._on_placed = on_placed
        self._on_decision = on_decision
        self._anybody: dict[str, tuple[int, PrefillPlace]] = {}  # by model: see _to_any

    @property
    def knows_prefixes(self) -> bool:
        """See :class:`Placement`."""
        return self._prefixes is not None and not self._prefixes.is_empty

    def max_sequence_tokens(self, served: str) -> int | None:
        """See :class:`Placement`."""
        return self._fleet.max_sequence_tokens(served)

    # Prefill ---------------------------------------------------------------------------------

    def place_prefill(
        self, record: RequestRecord, *, hurries: bool = False, found: Found | None = None
    ) -> PrefillPlace:
        """See :class:`Placement`."""
        now_s = self._clock()
        if found is None or self._prefixes is None:
            found = self._find(record)
        num_prompt = len(record.prompt_ids) // ID_BYTES
        place, table = None, self._outlook.table(record.served)
        if len(table.rows_of("prefill")) > 1 or len(table.rows_of(SUFFIX)):
            weighed = self._pool(record.served, "prefill", now_s).weigh_prefill(num_prompt, found)
            if hurries:
                weighed.candidates.backlog = 0.0
            place = self._stay(record, weighed, found, now_s) or self._choose(weighed, found)
        if place is None:
            return self._to_any(record, table, found)
        beat = self._fleet.worker(place.worker)
        if beat is None:  # given up a moment ago
            self._outlook.drop(place.worker)
            return self.place_prefill(record, hurries=hurries)
        placed = Placed(
            process=self._process,
            request_id=record.request_id,
            served=record.served,
            worker=place.worker,
            role="prefill",
            prefill_ms=place.prefill_ms,
            num_tokens=num_prompt,
        )
        self._tell(placed, now_s)
        if sources := kv_sources(self._fleet, [beat], found):
            place = msgspec.structs.replace(place, sources=sources)
        return self._decide(record.request_id, "prefill", place)

    def _to_any(self, record: RequestRecord, table: PoolTable, found: Found) -> PrefillPlace:
        """Whoever pulls first; the same place for all until somebody comes or goes, but for whom
        they may ask."""
        version, place = self._anybody.get(record.served, (-1, None))
        if place is None or version != table.version:
            workers = [table.workers[row] for row in table.rows_of("prefill").tolist()]
            place = PrefillPlace(worker=ANY, alone=workers[0] if len(workers) == 1 else "")
            self._anybody[record.served] = table.version, place
        if found:
            beats = [table.beats[row] for row in table.rows_of("prefill").tolist()]
            if sources := kv_sources(self._fleet, beats, found):
                place = msgspec.structs.replace(place, sources=sources)
        return self._decide(record.request_id, "prefill", place)

    def _choose(self, weighed: Weighed, found: Found) -> PrefillPlace | None:
        """None: nothing to choose, the queue reaches whoever comes."""
        if not len(weighed) or len(weighed.table.rows_of("prefill")) < 2:
            return None
        at = self._policy.prefill(weighed, self._rng)
        return _place_at(weighed, at, "prefix" if weighed.worker(at) in found else "load")

    def _stay(
        self, record: RequestRecord, weighed: Weighed, found: Found, now_s: float
    ) -> PrefillPlace | None:
        pool = self._pool(record.served, SUFFIX, now_s)
        num_prompt = len(record.prompt_ids) // ID_BYTES
        stays = stay_place(pool, self._suffix, num_prompt, found, weighed)
        return None if stays is None else _place_at(*stays, "suffix")

    # Decode ----------------------------------------------------------------------------------

    def decode_worker(self, served: str, ready: KvReady) -> str:
        """See :class:`Placement`. Only workers that can read the handle are asked."""
        now_s = self._clock()
        record, handle = ready.record, ready.handle
        pool = self._pool(served, "decode", now_s)
        everyone = pool.table.rows_of("decode")
        layouts = pool.table.column("layout")[everyone]
        num_readers = int((layouts == pool.table.layout_of(handle.fingerprint)).sum())
        is_mixed = 0 < num_readers < len(everyone)  # ``any`` may be one that can't read it
        found = self._find(record) if record is not None and num_readers > 1 else NOBODY
        weighed = pool.weigh_decode(
            handle.fingerprint,
            ready.worker,
            handle.num_tokens,
            self._answer_tokens(served, record),
            found,
            must_have_room=not is_mixed,
        )
        if not len(weighed) or (num_readers < 2 and not is_mixed):
            self._tell(self._placed_decode(served, ready, ANY), now_s)
            return self._decide(ready.request_id, "decode", PrefillPlace(worker=ANY)).worker
        at = self._policy.decode(weighed, self._rng)
        worker = weighed.worker(at)
        if self._fleet.worker(worker) is None:
            self._outlook.drop(worker)
            return self.decode_worker(served, ready)
        there_ms = float(weighed.candidates.transfer[at]) * weighed.unit_ms
        self._tell(self._placed_decode(served, ready, worker, there_ms), now_s)
        place = _place_at(weighed, at, "prefix" if worker in found else "load")
        return self._decide(ready.request_id, "decode", place).worker

    def _placed_decode(
        self, served: str, ready: KvReady, worker: str, there_ms: float = 0.0
    ) -> Placed:
        return Placed(
            process=self._process,
            request_id=ready.request_id,
            served=served,
            worker=worker,
            role="decode",
            num_tokens=ready.handle.num_tokens,
            there_ms=there_ms,
        )

    def _answer_tokens(self, served: str, record: RequestRecord | None) -> float:
        """How many are to come, over all choices."""
        asked = _UNKNOWN_ANSWER
        if record is not None:
            asked = (record.sampling.max_tokens or _UNKNOWN_ANSWER) * record.sampling.n
        return max(1.0, self._outlook.expected_tokens(served, asked))

    # Both ------------------------------------------------------------------------------------

    def _pool(self, served: str, role: str, now_s: float) -> Pool:
        return Pool(self._outlook, self._distances, served, role, now_s)

    def _find(self, record: RequestRecord) -> Found:
        return NOBODY if self._prefixes is None else self._prefixes.find(record)

    def _tell(self, placed: Placed, now_s: float) -> None:
        self._outlook.hear_placed(placed, now_s)
        self._on_placed(placed)

    def _decide(
        self, request_id: str, role: Literal["prefill", "decode"], place: PrefillPlace
    ) -> PrefillPlace:
        self._on_decision(Decision(request_id=request_id, role=role, place=place))
        return place


def _place_at(weighed: Weighed, at: int, reason: Reason) -> PrefillPlace:
    candidates, unit_ms = weighed.candidates, weighed.unit_ms
    return PrefillPlace(
        worker=weighed.worker(at),
        reason=reason,
        wait_ms=float(candidates.wait[at]) * unit_ms,
        prefill_ms=max(0.0, float(candidates.work[at])) * unit_ms,
        num_cached=int(weighed.cached[at]),
    )

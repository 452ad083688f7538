"""Which worker gets a task: what it holds of the prompt, and how much it has to do.

    burden of a worker    its sequences, waiting ones included, and those sent since its last beat,
                          + its waiting prompt tokens / 256
    credit                what it holds of this prompt / 256 (on disk: half), at most 4

The least burden minus credit wins. So a worker that holds the prompt is preferred until it has four
sequences more to do than another; then that one computes or fetches the prompt, holds it from then
on, and is preferred as well: a hot prefix spreads, and a cold worker gets its share.

A task is placed by name when there is a reason to; else it goes to ``any`` and whoever pulls
first has it. Pure but for the fleet and the index that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.fleet import Fleet
from pipeline.prefix_walk import TIERS, Match
from pipeline.prefixes import Prefixes
from schemas.control import Beat
from schemas.kv import KvReady, KvSource
from schemas.requests import RequestRecord
from schemas.subjects import ANY

MAX_SOURCES = 3  # workers named to fetch from: one may be gone, one busy
_TOKENS_PER_SEQUENCE = 256  # prompt tokens that weigh as much as one sequence
_MAX_CREDIT = 4.0
_DISK_SHARE = 0.5  # of the worth of a block in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlace:
    """Where a prefill task goes, and whom to ask for what that worker does not hold itself."""

    worker: str  # or ``any``
    sources: tuple[KvSource, ...] = ()


class Placement(Protocol):
    """Chooses workers."""

    def place_prefill(self, record: RequestRecord) -> PrefillPlace:
        """Where ``record`` is computed. Equal fleets and indexes give equal places."""

    def decode_worker(self, served: str, ready: KvReady) -> str:
        """A worker id, or ``any``."""

    def max_sequence_tokens(self, served: str) -> int | None:
        """How long prompt and answer together may be, so that any worker could take them; None
        when no worker is there to ask."""

    @property
    def knows_prefixes(self) -> bool:
        """Whether a record would make a difference to a place."""


@dataclass(slots=True)
class LeastLoaded:
    """The worker with the least to do, as far as its last beat and what we sent since tell, and
    with some credit for what it holds.

    With no worker known, or none with a free slot, a task goes to ``any``: the first worker that
    has room takes it.

    Args:
        prefixes: None: nothing is known of what workers hold.
    """

    fleet: Fleet
    prefixes: Prefixes | None = None
    _sent: dict[str, tuple[int, Beat]] = field(default_factory=dict)  # since that beat

    @property
    def knows_prefixes(self) -> bool:
        """See :class:`Placement`."""
        return self.prefixes is not None and not self.prefixes.is_empty

    def place_prefill(self, record: RequestRecord) -> PrefillPlace:
        """See :class:`Placement`."""
        beats = self.fleet.workers(record.served, "prefill")
        matches = self._find(record)
        credit = {beat.worker: _credit(matches.get(beat.worker), beat) for beat in beats}
        worker = self._least_loaded(beats, credit)
        chosen = [beat for beat in beats if worker in (beat.worker, ANY)]
        return PrefillPlace(worker=worker, sources=self._sources(record, chosen, matches))

    def decode_worker(self, served: str, ready: KvReady) -> str:
        """See :class:`Placement`. Only workers that can read the handle are asked; of those with
        equally much to do, the one that holds most of the prompt."""
        everyone = self.fleet.workers(served, "decode")
        able = [beat for beat in everyone if beat.fingerprint == ready.handle.fingerprint]
        if able and len(able) < len(everyone):  # ``any`` may be one that can't
            return self._send(self._of_equals(able, ready))
        return self._least_loaded(able, {}, ready)

    def max_sequence_tokens(self, served: str) -> int | None:
        """See :class:`Placement`."""
        return self.fleet.max_sequence_tokens(served)

    def _find(self, record: RequestRecord | None) -> Mapping[str, Match]:
        return {} if self.prefixes is None or record is None else self.prefixes.find(record)

    def _least_loaded(
        self, beats: list[Beat], credit: Mapping[str, float], ready: KvReady | None = None
    ) -> str:
        if len(beats) < 2:
            return ANY  # nothing to choose; the queue reaches whoever comes
        able = [beat for beat in beats if beat.load.num_free_slots > self._num_sent(beat)]
        if not able:
            return ANY
        if ready is not None:
            return self._send(self._of_equals(able, ready))
        return self._send(
            min(able, key=lambda b: (self._burden(b) - credit.get(b.worker, 0.0), b.worker))
        )

    def _of_equals(self, beats: list[Beat], ready: KvReady) -> Beat:
        """Of those with the least burden, the one that holds most of the prompt."""
        least = min(map(self._burden, beats))
        equals = [beat for beat in beats if self._burden(beat) == least]
        matches = self._find(ready.record) if len(equals) > 1 else {}
        return min(equals, key=lambda b: (-_credit(matches.get(b.worker), b), b.worker))

    def _sources(
        self, record: RequestRecord, placed: list[Beat], matches: Mapping[str, Match]
    ) -> tuple[KvSource, ...]:
        """Those that hold more than whoever was placed: the most first, of equals in the fastest
        tier, then the least busy. None for workers of several layouts: each could read only its
        own."""
        fingerprints = {beat.fingerprint for beat in placed}
        if not matches or len(fingerprints) != 1:
            return ()
        own = min(_num_blocks(matches.get(beat.worker)) for beat in placed)
        lenders = [
            (beat, matches[beat.worker])
            for beat in self.fleet.serving(record.served)
            if beat.fingerprint in fingerprints and _num_blocks(matches.get(beat.worker)) > own
        ]
        lenders.sort(
            key=lambda one: (
                -one[1].num_blocks, TIERS.index(one[1].tier), self._burden(one[0]), one[0].worker,
            )
        )  # fmt: skip
        return tuple(
            KvSource(worker=match.worker, num_blocks=match.num_blocks, tier=match.tier)
            for _, match in lenders[:MAX_SOURCES]
        )

    def _send(self, beat: Beat) -> str:
        if beat.worker not in self._sent:  # somebody new: forget who is gone
            alive = {member.worker for member in self.fleet.members()}
            self._sent = {worker: sent for worker, sent in self._sent.items() if worker in alive}
        self._sent[beat.worker] = (self._num_sent(beat) + 1, beat)
        return beat.worker

    def _burden(self, beat: Beat) -> float:
        load = beat.load
        busy = load.num_running + load.num_waiting + self._num_sent(beat)
        return busy + load.waiting_tokens / _TOKENS_PER_SEQUENCE

    def _num_sent(self, beat: Beat) -> int:
        number, since = self._sent.get(beat.worker, (0, beat))
        return number if since is beat else 0


def _num_blocks(match: Match | None) -> int:
    return 0 if match is None else match.num_blocks


def _credit(match: Match | None, beat: Beat) -> float:
    """What ``beat``'s worker need not compute, in sequences' worth."""
    if match is None:
        return 0.0
    num_on_disk = match.num_blocks - match.num_memory
    num_tokens = (match.num_memory + _DISK_SHARE * num_on_disk) * beat.block_size
    return min(num_tokens / _TOKENS_PER_SEQUENCE, _MAX_CREDIT)

"""Which worker gets a task. The interface that scoring fills; today: least loaded.

A task is placed by name when there is a reason to; else it goes to ``any`` and whoever pulls
first has it. Pure but for the fleet that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pipeline.fleet import Fleet
from schemas.control import Beat
from schemas.kv import KvReady
from schemas.requests import RequestRecord
from schemas.subjects import ANY


class Placement(Protocol):
    """Chooses workers."""

    def prefill_worker(self, record: RequestRecord) -> str:
        """A worker id, or ``any``."""

    def decode_worker(self, served: str, ready: KvReady) -> str:
        """A worker id, or ``any``."""

    def max_sequence_tokens(self, served: str) -> int | None:
        """How long prompt and answer together may be, so that any worker could take them; None
        when no worker is there to ask."""


@dataclass(slots=True)
class LeastLoaded:
    """The worker with the least to do, as far as its last beat and what we sent since tell.

    With no worker known, or none with a free slot, a task goes to ``any``: the first worker that
    has room takes it.
    """

    fleet: Fleet
    _sent: dict[str, tuple[int, Beat]] = field(default_factory=dict)  # since that beat

    def prefill_worker(self, record: RequestRecord) -> str:
        """See :class:`Placement`."""
        return self._least_loaded(self.fleet.workers(record.served, "prefill"))

    def decode_worker(self, served: str, ready: KvReady) -> str:
        """See :class:`Placement`. Only workers that can read the handle are asked."""
        everyone = self.fleet.workers(served, "decode")
        able = [beat for beat in everyone if beat.fingerprint == ready.handle.fingerprint]
        if able and len(able) < len(everyone):
            return self._send(min(able, key=self._burden))  # ``any`` may be one that can't
        return self._least_loaded(able)

    def max_sequence_tokens(self, served: str) -> int | None:
        """See :class:`Placement`."""
        return self.fleet.max_sequence_tokens(served)

    def _least_loaded(self, beats: list[Beat]) -> str:
        if len(beats) < 2:
            return ANY  # nothing to choose; the queue reaches whoever comes
        best = min(beats, key=self._burden)
        if best.load.num_free_slots - self._num_sent(best) <= 0:
            return ANY
        return self._send(best)

    def _send(self, beat: Beat) -> str:
        if beat.worker not in self._sent:  # somebody new: forget who is gone
            alive = {member.worker for member in self.fleet.members()}
            self._sent = {worker: sent for worker, sent in self._sent.items() if worker in alive}
        self._sent[beat.worker] = (self._num_sent(beat) + 1, beat)
        return beat.worker

    def _burden(self, beat: Beat) -> tuple[float, str]:
        load = beat.load
        busy = load.num_running + load.num_waiting + self._num_sent(beat)
        return busy + load.waiting_tokens / 256, beat.worker

    def _num_sent(self, beat: Beat) -> int:
        number, since = self._sent.get(beat.worker, (0, beat))
        return number if since is beat else 0

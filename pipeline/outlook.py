"""What workers will be doing, told from beats and from what was placed since. Pure.

    prefill queue   a fluid that flows off by itself: what the worker said it would wait, less the
                    time since, plus the predicted time of each prompt that was placed there
    decode batch    what the worker said, plus who was handed over since, to it or to whoever has
                    room first, plus who will have been prefilled until then (shared out among the
                    decode workers), less who will have ended (``pipeline/decode_flow.py``)
    the way there   taken until the KV of all who were placed there, or come, is predicted to have
                    come

What was placed stays in the account until a beat whose load was measured after its claim, for then
the worker itself has counted it. What nobody claims is not forgotten, however long it waits for
room: it stays until its request ends or is placed elsewhere. When its worker goes a decode is the
pool's again, as it is on the bus. A restarted router needs one beat of each worker.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.answer_lengths import AnswerLengths
from pipeline.cost_model import prefill_ms
from pipeline.decode_flows import DecodeFlows, Told
from pipeline.fleet import Fleet
from pipeline.forecast import DecodeForecast
from pipeline.pool_table import PoolTable
from pipeline.sent import Sent, SharedLine, count, discount
from pipeline.topology import Distances, Links
from schemas.control import Beat, Placed
from schemas.profiles import StepCosts
from schemas.subjects import ANY
from schemas.tokens import Claim

STALE_BEATS = 2.4  # two missed, and some grace
MAX_SENT = 4096  # requests that one worker may have been sent since its last beat
MAX_AGE_S = 900.0  # of what nobody claimed; no request has a later deadline
_MAX_ENDED = 8192  # whose placing may still be told, by a router that was slow to say it
_MANY = 16  # workers; of fewer, one after the other is looked up sooner than all at once
_FORGET_S = 60.0  # a worker that was not heard for so long; dead long before


@dataclass(slots=True)
class _Known:
    """One worker: its last beat, and what no beat of its own has told of."""

    beat: Beat
    heard_s: float
    load_s: float  # when its load was measured
    told: Told
    sent: dict[str, Sent] = field(default_factory=dict)  # by request
    prompts: dict[str, int] = field(default_factory=dict)  # to be handed over: tokens, by request


class Outlook:
    """Predicts, for the workers of ``fleet``; implements :class:`pipeline.forecast.Forecast`.

    Whoever hears the bus calls the ``hear_`` methods: a beat after the fleet has heard it.

    Args:
        fleet: who is alive. A worker that it does not know is dropped.
        beat_s: how often workers beat.
        links: how fast KV goes from worker to worker.
    """

    def __init__(self, fleet: Fleet, *, beat_s: float = 0.5, links: Links | None = None) -> None:
        self.stale_s = STALE_BEATS * beat_s  # the age from which a beat says nothing any more
        self._fleet = fleet
        self._known: dict[str, _Known] = {}
        self._tables: dict[str, PoolTable] = {}
        self._lines: dict[str, SharedLine] = {}
        self._unclaimed: dict[str, str] = {}  # request -> worker that has its task, or ``any``
        self._prefills: dict[str, str] = {}  # request -> worker that will hand it over
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._lengths = AnswerLengths()
        self._decodes = DecodeFlows(Distances(links or Links()), self._lengths)
        self._due: dict[str, tuple[float, float]] = {}  # placed when, predicted ms; oldest first
        self._now_s = -math.inf

    def table(self, served: str) -> PoolTable:
        """The workers of a model that are ready, as last heard."""
        found = self._tables.get(served)
        if found is None:
            found = self._tables[served] = PoolTable()
        return found

    # What is heard ---------------------------------------------------------------------------

    def hear_beat(self, beat: Beat, now_s: float) -> None:
        """A heartbeat of anybody, after the fleet has heard it."""
        if not beat.worker:
            return
        self._turn(now_s)
        if beat.state != "ready" or self._fleet.worker(beat.worker) is None:
            self.drop(beat.worker)
            return
        known = self._known.get(beat.worker)
        if known is None:
            self._forget(now_s)
            known = self._known[beat.worker] = _Known(beat, now_s, now_s, Told.by(beat))
        if known.beat.served != beat.served:
            self.drop(beat.worker)
            known = self._known[beat.worker] = _Known(beat, now_s, now_s, Told.by(beat))
        known.beat, known.heard_s, known.told = beat, now_s, Told.by(beat)
        known.load_s = now_s - beat.load.age_ms / 1000
        self._keep_untold(known, now_s)
        table = self.table(beat.served)
        row = table.put(beat, now_s)
        if not beat.load.num_running + beat.load.num_waiting:
            for request_id in known.prompts.keys() - known.sent.keys():
                self._hand_over(request_id)  # that was missed
        for sent in known.sent.values():  # as of when it was sent: some of it is done by now
            count(table, row, sent, max(sent.sent_s, known.load_s))

    def hear_placed(self, placed: Placed, now_s: float) -> None:
        """A router, this one or another, gave a request to a worker by name, or its decode to
        ``any``."""
        self._turn(now_s)
        if placed.request_id in self._ended:
            return
        if placed.role == "decode":
            self._hand_over(placed.request_id)
        sent = Sent(
            served=placed.served,
            role=placed.role,
            sent_s=now_s,
            num_tokens=placed.num_tokens,
            prefill_ms=placed.prefill_ms,
        )
        self._send(placed.worker, placed.request_id, sent, now_s)
        known = self._known.get(placed.worker)
        if known is not None and placed.there_ms > 0:
            there_s = now_s + placed.there_ms / 1000
            self.table(known.beat.served).note_link(placed.worker, there_s)
        if known is not None and placed.prefill_ms > 0:
            self._due[placed.request_id] = (now_s, self.prefill_wait_ms(known.beat, now_s) or 0.0)
            if len(self._due) > MAX_SENT:
                del self._due[next(iter(self._due))]

    def hear_claim(self, claim: Claim, now_s: float) -> None:
        """A worker took a request, placed there by name or not."""
        self._turn(now_s)
        self._lengths.begin(claim.request_id, claim.served)
        if claim.role == "decode":
            self._hand_over(claim.request_id)
        if self._unclaimed.get(claim.request_id) != claim.worker:
            self._take_back(claim.request_id, now_s)  # it lay elsewhere, or in the shared queue
        known = self._known.get(claim.worker)
        if known is None:
            return
        if claim.request_id not in known.sent:
            took_ms = 0.0
            if claim.role == "prefill" and known.beat.costs is not None:
                took_ms = prefill_ms(known.beat.costs, claim.num_tokens)
            sent = Sent(
                served=claim.served,
                role=claim.role,
                sent_s=now_s,
                num_tokens=claim.num_tokens,
                prefill_ms=took_ms,
            )
            self._send(claim.worker, claim.request_id, sent, now_s)
        self._unclaimed.pop(claim.request_id, None)
        if (sent_before := known.sent.get(claim.request_id)) is not None:
            sent_before.claimed_s = now_s

    def hear_stored(self, claim: Claim, now_s: float) -> None:
        """A claim was read again that may have been missed when it was made."""
        if claim.request_id in self._unclaimed:
            self.hear_claim(claim, now_s)

    def hear_end(self, request_id: str, num_tokens: int | None, now_s: float) -> None:
        """A request ended; ``num_tokens`` of all its choices, None when it was cut off."""
        self._turn(now_s)
        self._due.pop(request_id, None)
        self._lengths.end(request_id, num_tokens)
        self._hand_over(request_id)
        self._take_back(request_id, now_s)
        self._ended[request_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def drop(self, worker: str) -> None:
        """It takes nothing more. The decodes that it has not claimed are anybody's."""
        known = self._known.pop(worker, None)
        if known is None:
            return
        self.table(known.beat.served).drop(worker)
        for request_id in known.prompts:
            del self._prefills[request_id]
        for request_id, sent in known.sent.items():
            if self._unclaimed.get(request_id) == worker:
                del self._unclaimed[request_id]
                if sent.role == "decode":
                    self._share(request_id, sent)

    # What is asked ---------------------------------------------------------------------------

    def costs(self, beat: Beat) -> StepCosts | None:
        """See :class:`pipeline.forecast.Forecast`."""
        return beat.costs

    def is_stale(self, worker: str, now_s: float) -> bool:
        """Whether what is known of ``worker`` is too old to say anything."""
        known = self._known.get(worker)
        return known is None or now_s - known.heard_s > self.stale_s

    def prefill_wait_ms(self, beat: Beat, now_s: float) -> float | None:
        """See :class:`pipeline.forecast.Forecast`."""
        self._turn(now_s)
        known = self._known.get(beat.worker)
        if known is None or now_s - known.heard_s > self.stale_s:
            return math.inf
        if beat.costs is None:
            return None
        table = self._tables[beat.served]
        row = table.row(beat.worker)
        assert row is not None, "whoever is known has a row"
        return table.wait_ms(row, now_s)

    def prefill_waits_ms(self, beats: Sequence[Beat], now_s: float) -> list[float | None]:
        """See :class:`pipeline.forecast.Forecast`."""
        if len(beats) < _MANY:
            return [self.prefill_wait_ms(beat, now_s) for beat in beats]
        table = self.table(beats[0].served)
        rows = table.find_rows([beat.worker for beat in beats])
        if rows is None:
            return [self.prefill_wait_ms(beat, now_s) for beat in beats]
        self._turn(now_s)
        columns = table.take(rows)
        is_stale = now_s - columns["heard_s"] > self.stale_s
        waits = np.where(is_stale, math.inf, columns.wait_ms(now_s))
        waits_ms: list[float | None] = waits.tolist()
        if table.all_have_costs:
            return waits_ms
        return [
            wait if beat.costs is not None or wait == math.inf else None
            for beat, wait in zip(beats, waits_ms, strict=True)
        ]

    def queue_depth(self, beat: Beat, now_s: float) -> float:
        """See :class:`pipeline.forecast.Forecast`."""
        self._turn(now_s)
        if self.is_stale(beat.worker, now_s):
            return math.inf
        table = self._tables[beat.served]
        row = table.row(beat.worker)
        assert row is not None, "whoever is known has a row"
        return beat.load.num_waiting + table.num_prompts_since(row)

    def decode_at(self, beat: Beat, at_s: float) -> DecodeForecast:
        """See :class:`pipeline.forecast.Forecast`."""
        known = self._known.get(beat.worker)
        now_s = min(self._now_s, at_s)
        if known is None or now_s - known.heard_s > self.stale_s:
            return DecodeForecast(
                num_sequences=beat.load.num_running,
                context_tokens=beat.load.context_tokens,
                free_tokens=0,
                step_ms=None if beat.costs is None else math.inf,
            )
        table, line = self._tables[beat.served], self._lines.get(beat.served)
        flow = self._decodes.flow(table, line, known.beat, known.told, known.load_s, at_s, now_s)
        return flow.after(at_s - known.load_s)

    def expected_tokens(self, served: str, max_tokens: int) -> float:
        """See :class:`pipeline.forecast.Forecast`."""
        mean = self._lengths.mean(served)
        return float(max_tokens) if mean is None else min(mean, float(max_tokens))

    def take_ratio(self, request_id: str, now_s: float) -> float | None:
        """How long the prompt took that is done now, since it was placed by name, divided by what
        was predicted then; None when nothing was."""
        placed_s, predicted_ms = self._due.pop(request_id, (now_s, 0.0))
        return 1000 * (now_s - placed_s) / predicted_ms if predicted_ms > 0 else None

    # The books -------------------------------------------------------------------------------

    def _turn(self, now_s: float) -> None:
        if now_s > self._now_s:
            self._now_s = now_s

    def _send(self, worker: str, request_id: str, sent: Sent, now_s: float) -> None:
        known = self._known.get(worker)
        if known is not None and request_id in known.sent:
            return
        self._take_back(request_id, now_s)
        if worker == ANY and sent.role == "decode":
            self._share(request_id, sent)
        if known is None or len(known.sent) >= MAX_SENT:
            return
        known.sent[request_id] = sent
        self._unclaimed[request_id] = worker
        table = self._tables[known.beat.served]
        row = table.row(worker)
        if row is None:
            return
        count(table, row, sent, now_s)
        if sent.role == "prefill":
            table.note_work(row, sent.prefill_ms or 1.0, now_s)
            self._note_prompt(known, row, request_id, sent)

    def _note_prompt(self, known: _Known, row: int, request_id: str, sent: Sent) -> None:
        """It will be handed over, if its worker does not decode it itself."""
        if "decode" in known.beat.roles or len(known.prompts) >= MAX_SENT:
            return
        self._hand_over(request_id)  # by another worker, which lost it
        known.prompts[request_id] = sent.num_tokens
        self._prefills[request_id] = known.beat.worker
        self._tables[known.beat.served].note_prompt(row, 1, sent.num_tokens)

    def _hand_over(self, request_id: str) -> None:
        """Its prefill is done, or not to be done any more."""
        worker = self._prefills.pop(request_id, None)
        if worker is None:
            return
        known = self._known[worker]
        num_tokens, table = known.prompts.pop(request_id), self._tables[known.beat.served]
        row = table.row(worker)
        if row is not None:
            table.note_prompt(row, -1, -num_tokens)

    def _share(self, request_id: str, sent: Sent) -> None:
        line = self._lines.setdefault(sent.served, SharedLine())
        if len(line) < MAX_SENT:
            line.add(request_id, sent)
            self._unclaimed[request_id] = ANY

    def _take_back(self, request_id: str, now_s: float) -> None:
        """Take a task out that nobody has claimed."""
        worker = self._unclaimed.pop(request_id, None)
        if worker is None:
            return
        if worker == ANY:
            for line in self._lines.values():
                line.remove(request_id)
            return
        known = self._known[worker]
        sent, table = known.sent.pop(request_id), self._tables[known.beat.served]
        row = table.row(worker)
        if row is not None:
            discount(table, row, sent, now_s)

    def _keep_untold(self, known: _Known, now_s: float) -> None:
        """Of what was sent to a worker that has just beaten."""
        told = [
            request_id
            for request_id, sent in known.sent.items()
            if sent.is_told(known.load_s) or now_s - sent.sent_s > MAX_AGE_S
        ]
        for request_id in told:
            del known.sent[request_id]
            if self._unclaimed.get(request_id) == known.beat.worker:
                del self._unclaimed[request_id]
        line = self._lines.get(known.beat.served)
        while line is not None and line.oldest_s < now_s - MAX_AGE_S:
            self._take_back(line.oldest, now_s)

    def _forget(self, now_s: float) -> None:
        for worker, known in list(self._known.items()):
            if now_s - known.heard_s > _FORGET_S:
                self.drop(worker)

    def check_invariants(self) -> None:
        """Raise AssertionError when rows and workers don't belong together."""
        for served, table in self._tables.items():
            table.check_invariants()
            for worker in table.workers:
                assert self._known[worker].beat.served == served, "a row of another model"
        rows = sum(table.num_rows for table in self._tables.values())
        assert rows == len(self._known), "a worker without a row"
        lying = {request for line in self._lines.values() for request in line.sent}
        for line in self._lines.values():
            line.check_invariants()
        for request_id, worker in self._prefills.items():
            assert request_id in self._known[worker].prompts, "a prompt that nobody computes"
        for request_id, worker in self._unclaimed.items():
            place = lying if worker == ANY else self._known[worker].sent
            assert request_id in place, "a task that lies nowhere"

"""What workers will be doing, told from beats and from what was placed since. Pure.

    prefill queue   a fluid that flows off by itself: what the worker said it would wait, less the
                    time since, plus the predicted time of each prompt that was placed there
    decode batch    what the worker said, plus who was placed there since, plus who will have been
                    prefilled until then (shared out among the decode workers), less who will have
                    ended. An answer takes the mean length of those seen, at the present step time:
                    a prediction for the whole pool, not for each request (Mooncake, section 7)
    the way there   taken until the KV of all who were placed there is predicted to have come

What was placed stays in the account until a beat whose load was measured after its claim, for then
the worker itself has counted it; without a claim until it is two beats old (a claim was missed, the
request ended on the way), so nothing stays for ever. A restarted router needs one beat of each
worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.answer_lengths import AnswerLengths
from pipeline.cost_model import decode_step_ms, prefill_ms
from pipeline.fleet import Fleet
from pipeline.forecast import DecodeForecast
from pipeline.pool_table import PoolTable
from schemas.control import Beat, Placed
from schemas.profiles import StepCosts
from schemas.tokens import Claim

STALE_BEATS = 2.4  # two missed, and some grace
MAX_SENT = 4096  # requests that one worker may have been sent since its last beat
_MANY = 16  # workers; of fewer, one after the other is looked up sooner than all at once
_FORGET_S = 60.0  # a worker that was not heard for so long; dead long before


@dataclass(slots=True)
class _Sent:
    """A request that is on its way to a worker, or there since its last beat."""

    served: str
    role: str
    prefill_ms: float
    num_tokens: int
    sent_s: float
    claimed_s: float | None = None

    def is_told(self, load_s: float) -> bool:
        """Whether a load that was measured at ``load_s`` counts it."""
        return self.claimed_s is not None and self.claimed_s <= load_s


@dataclass(slots=True)
class _Known:
    """One worker: its last beat, and what no beat of its own has told of."""

    beat: Beat
    heard_s: float
    load_s: float  # when its load was measured
    sent: dict[str, _Sent] = field(default_factory=dict)  # by request


class Outlook:
    """Predicts, for the workers of ``fleet``; implements :class:`pipeline.forecast.Forecast`.

    Whoever hears the bus calls the ``hear_`` methods: a beat after the fleet has heard it.

    Args:
        fleet: who is alive. A worker that it does not know is dropped.
        beat_s: how often workers beat.
    """

    def __init__(self, fleet: Fleet, *, beat_s: float = 0.5) -> None:
        self.stale_s = STALE_BEATS * beat_s  # the age from which a beat says nothing any more
        self._fleet = fleet
        self._beat_s = beat_s
        self._known: dict[str, _Known] = {}
        self._tables: dict[str, PoolTable] = {}
        self._lengths = AnswerLengths()
        self._due: dict[str, tuple[float, float]] = {}  # placed when, predicted ms; oldest first
        self._now_s = -math.inf
        self._inflow: tuple[str, float, float, tuple[float, float]] | None = None

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
            known = self._known[beat.worker] = _Known(beat, now_s, now_s)
        if known.beat.served != beat.served:
            self.table(known.beat.served).drop(beat.worker)
        known.beat, known.heard_s = beat, now_s
        known.load_s = now_s - beat.load.age_ms / 1000
        known.sent = {
            request_id: sent
            for request_id, sent in known.sent.items()
            if not sent.is_told(known.load_s) and now_s - sent.sent_s < 2 * self._beat_s
        }
        table = self.table(beat.served)
        row = table.put(beat, now_s)
        for sent in known.sent.values():  # as of when it was sent: some of it is done by now
            _count(table, row, sent, max(sent.sent_s, known.load_s))

    def hear_placed(self, placed: Placed, now_s: float) -> None:
        """A router, this one or another, gave a request to a worker by name."""
        self._turn(now_s)
        sent = _Sent(placed.served, placed.role, placed.prefill_ms, placed.num_tokens, now_s)
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
        known = self._known.get(claim.worker)
        if known is None:
            return
        sent = known.sent.get(claim.request_id)
        if sent is None:
            took_ms = 0.0
            if claim.role == "prefill" and known.beat.costs is not None:
                took_ms = prefill_ms(known.beat.costs, claim.num_tokens)
            sent = _Sent(claim.served, claim.role, took_ms, claim.num_tokens, now_s)
            self._send(claim.worker, claim.request_id, sent, now_s)
        sent.claimed_s = now_s

    def hear_end(self, request_id: str, num_tokens: int | None, now_s: float) -> None:
        """A request ended; ``num_tokens`` of all its choices, None when it was cut off."""
        self._turn(now_s)
        self._due.pop(request_id, None)
        self._lengths.end(request_id, num_tokens)

    def drop(self, worker: str) -> None:
        """It takes nothing more."""
        known = self._known.pop(worker, None)
        if known is not None:
            self.table(known.beat.served).drop(worker)

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
        table = self.table(beats[0].served) if beats else None
        rows = [] if table is None else [table.row(beat.worker) for beat in beats]
        if table is None or len(rows) < _MANY or None in rows:
            return [self.prefill_wait_ms(beat, now_s) for beat in beats]
        self._turn(now_s)
        columns = table.take(np.array(rows, dtype=np.intp))
        is_stale = now_s - columns["heard_s"] > self.stale_s
        waits_ms = np.where(is_stale, math.inf, columns.wait_ms(now_s)).tolist()
        return [
            wait if beat.costs is not None or wait == math.inf else None
            for beat, wait in zip(beats, waits_ms, strict=True)
        ]

    def queue_depth(self, beat: Beat, now_s: float) -> float:
        """See :class:`pipeline.forecast.Forecast`."""
        self._turn(now_s)
        if self.is_stale(beat.worker, now_s):
            return math.inf
        return beat.load.num_waiting + self._num_since(beat.worker, "prefill")

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
        return _predict(self._batch(known, at_s, now_s), beat)

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

    def _send(self, worker: str, request_id: str, sent: _Sent, now_s: float) -> None:
        known = self._known.get(worker)
        if known is None or request_id in known.sent or len(known.sent) >= MAX_SENT:
            return
        known.sent[request_id] = sent
        table = self._tables[known.beat.served]
        row = table.row(worker)
        if row is None:
            return
        _count(table, row, sent, now_s)
        if sent.role == "prefill":
            table.note_work(row, sent.prefill_ms or 1.0, now_s)

    def _num_since(self, worker: str, role: str) -> int:
        known = self._known.get(worker)
        return 0 if known is None else sum(sent.role == role for sent in known.sent.values())

    def _forget(self, now_s: float) -> None:
        for worker, known in list(self._known.items()):
            if now_s - known.heard_s > _FORGET_S:
                self.drop(worker)

    # The batch to come -----------------------------------------------------------------------

    def _batch(self, known: _Known, at_s: float, now_s: float) -> _Batch:
        beat, load = known.beat, known.beat.load
        joined = [sent for sent in known.sent.values() if sent.role == "decode"]
        num_coming, tokens_coming = self._coming(beat.served, at_s, now_s)
        return _Batch(
            num_old=load.num_running if "decode" in beat.roles else 0,
            context_tokens=load.context_tokens,
            passed_s=at_s - known.load_s,
            num_new=len(joined) + num_coming,
            tokens_new=sum(sent.num_tokens for sent in joined) + tokens_coming,
            answer_tokens=self._lengths.mean(beat.served),
        )

    def _coming(self, served: str, at_s: float, now_s: float) -> tuple[float, float]:
        """How many sequences, with how many tokens, each decode worker will get from prefills that
        are over between ``now_s`` and ``at_s``. One sum for all of a pool's workers."""
        if self._inflow is not None and self._inflow[:3] == (served, at_s, now_s):
            return self._inflow[3]
        table = self.table(served)
        rows, num_decoders = table.rows_of("prefill"), len(table.rows_of("decode"))
        share = (0.0, 0.0)
        if len(rows) and num_decoders and at_s > now_s:
            total_ms = table.column("wait_ms")[rows]
            passed_ms = 1000 * (now_s - table.column("wait_s")[rows])
            left_ms = np.maximum(0.0, total_ms - np.maximum(0.0, passed_ms))
            done = np.minimum(left_ms, 1000 * (at_s - now_s)) / np.maximum(total_ms, 1e-9)
            num = table.column("waiting")[rows] + table.column("since")[rows]
            tokens = table.column("waiting_tokens")[rows] + self._tokens_since(table, rows.tolist())
            share = (
                float((num * done).sum()) / num_decoders,
                float((tokens * done).sum()) / num_decoders,
            )
        self._inflow = (served, at_s, now_s, share)
        return share

    def _tokens_since(self, table: PoolTable, rows: list[int]) -> list[int]:
        sent = [self._known[table.workers[row]].sent.values() for row in rows]
        return [sum(one.num_tokens for one in some if one.role == "prefill") for some in sent]

    def check_invariants(self) -> None:
        """Raise AssertionError when rows and workers don't belong together."""
        for served, table in self._tables.items():
            table.check_invariants()
            for worker in table.workers:
                assert self._known[worker].beat.served == served, "a row of another model"
        rows = sum(table.num_rows for table in self._tables.values())
        assert rows == len(self._known), "a worker without a row"


def _count(table: PoolTable, row: int, sent: _Sent, now_s: float) -> None:
    """Put one that no beat has told of into its worker's row."""
    table.add("since", row, 1)
    if sent.claimed_s is None or sent.claimed_s > table.heard_s(row):
        table.add("slots", row, -1)
    if sent.role == "prefill":
        table.set("wait_ms", row, table.wait_ms(row, now_s) + sent.prefill_ms)
        table.set("wait_s", row, now_s)
    else:
        table.add("num_since", row, 1)
        table.add("since_tokens", row, sent.num_tokens)
        table.add("free_tokens", row, -sent.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """What a worker's batch consists of, before time passes."""

    num_old: int  # in its last beat
    context_tokens: int  # of those
    passed_s: float  # since that beat, until the moment that is asked for
    num_new: float  # placed there since, or coming
    tokens_new: float
    answer_tokens: float | None


def _predict(batch: _Batch, beat: Beat) -> DecodeForecast:
    """Let time pass: the old ones end one after the other, as if begun at even intervals, and who
    stays grows by a token per step."""
    costs = beat.costs
    staying, num_steps = 1.0, 0.0
    if costs is not None and batch.num_old:
        step_ms = decode_step_ms(costs, batch.num_old, batch.context_tokens)
        num_steps = 1000 * max(0.0, batch.passed_s) / step_ms if step_ms > 0 else 0.0
        if batch.answer_tokens is not None:
            staying = max(0.0, 1 - num_steps / max(1.0, batch.answer_tokens))
            num_steps = min(num_steps, batch.answer_tokens)
    old = batch.num_old * staying
    grown = batch.context_tokens * staying + old * num_steps
    num_sequences = math.ceil(old + batch.num_new - 1e-9)
    context = round(grown + batch.tokens_new)
    total = beat.load.num_blocks * beat.block_size
    free = beat.load.num_free_blocks * beat.block_size - (context - batch.context_tokens)
    return DecodeForecast(
        num_sequences=num_sequences,
        context_tokens=context,
        free_tokens=min(max(0, free), total),
        step_ms=None if costs is None else decode_step_ms(costs, num_sequences, context),
    )

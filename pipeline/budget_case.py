"""One request against the budgets of its pool, now and later. Pure.

A case predicts; what follows from it is decided in ``budget.py`` (is it over?) and
``degradation.py`` (what then?).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeline.budget_books import Books
from pipeline.forecast import Forecast
from pipeline.pool_load import (
    Costed,
    DecodeRoom,
    Joining,
    Need,
    PrefillRoom,
    decode_capacity_ms,
    decode_rooms,
    horizon_tokens,
    token_ms,
)
from pipeline.verdict import Ask, Forecasted, Shortage

EarlyRejection = Literal["predicted", "now", "off"]
MAX_DRAIN_S = 300.0  # further nobody looks: workers may have come by then
_FIRST_LOOK_S = 0.02
_LOOKS = 4  # halvings between the last moment without room and the first with it


class Reading(NamedTuple):
    """One budget's load: as all see it, and beside this request's own part."""

    kind: Shortage
    pool: float
    own: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The live workers of a model that tell their costs, and what was admitted for them."""

    prefillers: Costed
    decoders: Costed
    forecast: Forecast
    books: Books
    mode: EarlyRejection
    horizon_ms: float


@dataclass(slots=True, kw_only=True)
class Case:
    """What there is of room for ``ask``.

    Args:
        prefill: None where no worker that prefills tells its costs.
    """

    ask: Ask
    pool: Pool
    prefill: PrefillRoom | None
    _rooms: tuple[float, list[DecodeRoom]] | None = None
    _pace: float | None = None

    @property
    def forecasted(self) -> Forecasted:
        """For the log, and for who places it."""
        if self.prefill is None or not math.isfinite(self.prefill.start_ms):
            return Forecasted()
        return Forecasted(
            ttft_ms=self.prefill.ttft_ms,
            prefill_ms=self.prefill.own_ms,
            worker=self.prefill.worker,
        )

    @property
    def begins_s(self) -> float | None:
        """When its prefill will be done; None: nobody can tell."""
        if self.prefill is None or not math.isfinite(self.prefill.start_ms):
            return None
        return self.ask.now_s + self.prefill.ttft_ms / 1000

    @property
    def horizon_ms(self) -> float:
        """The decode budget's: never shorter than a request may take to begin."""
        return max(self.pool.horizon_ms, self.ask.slo.ttft_ms)

    def token_ms(self) -> float:
        """Device time of one of its tokens."""
        return token_ms(self.pool.decoders.costs, self.ask.num_prompt)

    def num_tokens(self, max_tokens: int) -> float:
        """That it is likely to generate."""
        return self.pool.forecast.expected_tokens(self.ask.served, max_tokens)

    @property
    def cap_tokens(self) -> float:
        """How many of its tokens the horizon has room for."""
        tbt, num = self.ask.slo.tbt_ms, self.ask.num_choices
        return horizon_tokens(math.inf, tbt, self.horizon_ms, num)

    @property
    def unreachable(self) -> Shortage | None:
        """The target that an idle pool could not keep either."""
        slo = self.ask.slo
        if slo.ttft_ms and self.prefill and self.prefill.own_ms >= slo.ttft_ms:
            return "ttft"
        if slo.tbt_ms and self.pool.decoders.costs and self.pool.mode != "off":
            need = self._need(self.ask.max_tokens)
            least = min(
                one.decode_base_ms
                + (one.decode_context_ms * need.num_prompt + one.decode_sequence_ms)
                * need.num_choices
                for one in self.pool.decoders.costs
            )
            if least >= slo.tbt_ms:
                return "tbt"
        return None

    # Loads ------------------------------------------------------------------------------------

    def readings(self, wait_s: float = 0.0, max_tokens: int | None = None) -> list[Reading]:
        """The loads of all budgets that its targets ask for, if it came ``wait_s`` later and
        nobody before it."""
        tokens = self.ask.max_tokens if max_tokens is None else max_tokens
        return [*self._prefill(wait_s), *self._decode(wait_s, tokens)]

    def _prefill(self, wait_s: float) -> Iterator[Reading]:
        target, room = self.ask.slo.ttft_ms, self.prefill
        if not target or room is None:
            return
        start = max(0.0, room.start_ms - wait_s * 1000)
        later = PrefillRoom(worker=room.worker, start_ms=start, own_ms=room.own_ms)
        yield Reading("ttft", start / target, later.load(target))

    def _decode(self, wait_s: float, max_tokens: int) -> Iterator[Reading]:
        slo = self.ask.slo
        need = self._need(max_tokens)
        rooms = self._rooms_at(self.ask.now_s + wait_s, wait_s) if self.pool.decoders.costs else []
        if rooms:
            room = min(rooms, key=lambda one: self._worst(one, need))
            if slo.tbt_ms:
                yield Reading("tbt", room.tbt_load(slo.tbt_ms), room.tbt_load(slo.tbt_ms, need))
            yield Reading("kv", room.kv_load(), room.kv_load(need))
        if slo.tbt_ms and self.pool.decoders.costs:
            yield self._device_time(self.ask.now_s + wait_s, need)

    def _worst(self, room: DecodeRoom, need: Need) -> float:
        tbt = self.ask.slo.tbt_ms
        return max(room.tbt_load(tbt, need) if tbt else 0.0, room.kv_load(need))

    def _device_time(self, at_s: float, need: Need) -> Reading:
        capacity = decode_capacity_ms(
            self.pool.decoders.costs, self.ask.slo.tbt_ms, self.horizon_ms
        )
        served, books = self.ask.served, self.pool.books
        used = books.whole_ms(served)
        if used > capacity / 2:  # else it does not matter how far they have run down
            used = books.decode_ms(served, self.ask.now_s, at_s, self._step_ms())
        if capacity <= 0:
            return Reading("decode", math.inf, math.inf)
        left = max(capacity - need.num_tokens * self.token_ms(), capacity * 1e-3)
        return Reading("decode", used / capacity, used / left)

    def _need(self, max_tokens: int) -> Need:
        ask = self.ask
        return Need(
            num_choices=ask.num_choices,
            num_prompt=ask.num_prompt,
            num_tokens=min(self.num_tokens(max_tokens), self.cap_tokens),
        )

    def _rooms_at(self, now_s: float, wait_s: float) -> list[DecodeRoom]:
        """The batches that it would join: when its prefill is done, with those that are before it
        in the queue or overtake it; in mode ``now`` those of the moment when it is admitted."""
        at_s, joining = now_s, Joining()
        if self.pool.mode == "predicted" and self.prefill is not None:
            start = max(0.0, self.prefill.start_ms - wait_s * 1000)
            if math.isfinite(start):
                at_s += (start + self.prefill.own_ms) / 1000
                ahead = self._joining(self.prefill, at_s - self.ask.now_s)
                others = self._overtaking(self.prefill, wait_s)
                joining = Joining(
                    ahead.num_sequences + others.num_sequences,
                    ahead.num_tokens + others.num_tokens,
                )
            growth = self._growth(at_s) / max(1, len(self.pool.decoders.beats))
            joining = joining._replace(growth_tokens=growth)
        if self._rooms is None or self._rooms[0] != at_s:
            rooms = decode_rooms(
                self.pool.decoders.beats, self.pool.forecast, at_s, joining, self._num_steps
            )
            self._rooms = (at_s, rooms)
        return self._rooms[1]

    def _overtaking(self, room: PrefillRoom, wait_s: float) -> Joining:
        """Each decode worker's part of those who are admitted after this request and are there
        before it, if as much is admitted as of late: other workers are done with shorter prompts
        sooner. Without them the moment when a long one is done would always seem a quiet one."""
        pace = self.pool.books.pace(self.ask.served, self.ask.now_s + wait_s)
        ahead_s = (room.own_ms - pace.prefill_ms) / 1000
        if ahead_s <= 0 or not pace.num:
            return Joining()
        life_s = self._num_steps * self._step_ms() / 1000
        part = min(ahead_s, life_s) * (1 - 1 / room.num_workers) / len(self.pool.decoders.beats)
        return Joining(pace.num * part, pace.tokens * part)

    @property
    def _num_steps(self) -> float:
        """For which it decodes."""
        return self.num_tokens(self.ask.max_tokens) / self.ask.num_choices

    def _joining(self, room: PrefillRoom, later_s: float) -> Joining:
        """Each decode worker's part of those in the queue that will have been prefilled and will
        not have ended in ``later_s``. Their prefills end evenly until this request's begins."""
        ahead, until_ms = room.ahead, max(room.start_ms, 1e-9)
        if not ahead.num:
            return Joining()
        lifetime_ms = self._lifetime_ms(ahead.num, ahead.steps / ahead.num, until_ms)
        last_ms = min(until_ms, later_s * 1000)
        first_ms = max(0.0, later_s * 1000 - lifetime_ms)
        part = max(0.0, last_ms - first_ms) / until_ms / len(self.pool.decoders.beats)
        return Joining(ahead.num * part, ahead.tokens * part)

    def _growth(self, at_s: float) -> float:
        """Tokens that all who were admitted will yet need memory for; where that is little it is
        not looked up how far they are."""
        served, books = self.ask.served, self.pool.books
        most = books.whole_tokens(served)
        if most <= _LITTLE * sum(
            one.load.num_blocks * one.block_size for one in self.pool.decoders.beats
        ):
            return most
        return books.left_tokens(served, self.ask.now_s, at_s, self._step_ms())

    def _lifetime_ms(self, num: float, num_steps: float, until_ms: float) -> float:
        """How long each of ``num`` sequences decodes that come evenly until then. Each makes the
        steps of all longer, so the fewer of them are there at once the sooner they go."""
        step_ms, each_ms = self._step_ms(), self.token_ms() / len(self.pool.decoders.beats)
        if num_steps * (step_ms + num * each_ms) >= until_ms:
            return num_steps * (step_ms + num * each_ms)  # the first is still there with the last
        return num_steps * step_ms / (1 - num_steps * num * each_ms / until_ms)

    def _step_ms(self) -> float:
        """How long a decode step takes now."""
        if self._pace is None:
            rooms = decode_rooms(
                self.pool.decoders.beats, self.pool.forecast, self.ask.now_s, Joining()
            )
            room = min(rooms, key=lambda one: one.shared_ms)
            self._pace = room.costs.decode_base_ms + room.shared_ms
        return self._pace

    # Later ------------------------------------------------------------------------------------

    def drain_s(self, limits: Mapping[Shortage, float], own_load: float) -> float | None:
        """Until when, from now, it would be admitted if nobody else is.

        Args:
            limits: of each budget's load; those that are not named have ``own_load``.
            own_load: the limit beside the request's own part.

        Returns:
            None when nobody can tell: no worker is heard. When no end of the decode load is in
            sight (no answer has been seen, so none is expected to end), the time of the prefill
            queue alone, which is certain; ``MAX_DRAIN_S`` without one.
        """
        flown_off_s = self._prefill_drain_s(limits, own_load)
        if not math.isfinite(flown_off_s):
            return None
        last, look = 0.0, max(_FIRST_LOOK_S, flown_off_s)
        while not self._fits(look, limits, own_load):
            if look >= MAX_DRAIN_S:
                return flown_off_s or MAX_DRAIN_S
            last, look = look, min(look * 2, MAX_DRAIN_S)
        for _ in range(_LOOKS if last else 0):
            middle = (last + look) / 2
            if self._fits(middle, limits, own_load):
                look = middle
            else:
                last = middle
        return look

    def _fits(self, wait_s: float, limits: Mapping[Shortage, float], own_load: float) -> bool:
        return all(
            reading.pool <= limits.get(reading.kind, own_load) + _ROUNDING
            and reading.own <= own_load + _ROUNDING
            for reading in self.readings(wait_s)
        )

    def _prefill_drain_s(self, limits: Mapping[Shortage, float], own_load: float) -> float:
        """The prefill queue flows off evenly: no need to look for that."""
        target, room = self.ask.slo.ttft_ms, self.prefill
        if not target or room is None:
            return 0.0
        may_start = min(
            limits.get("ttft", own_load) * target, own_load * max(0.0, target - room.own_ms)
        )
        return max(0.0, room.start_ms - may_start) / 1000


_ROUNDING = 1e-9
_LITTLE = 0.05  # of the pool's memory

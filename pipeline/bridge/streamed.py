"""An answer that is written as its tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from infra.metrics import Metrics
from pipeline.alarms import Alarm
from pipeline.bridge.call import Call
from pipeline.bridge.generate import Generation
from pipeline.bridge.sse import KEEP_ALIVE, Events
from schemas.tokens import TokenDelta

_HEAD_S = 0.2


class StreamedAnswer:
    """Writes events as their tokens come.

    The head of the answer leaves with the first of them, in one write, or alone after ``_HEAD_S``,
    once the request is stored: a client that waits for its first token knows at least the id then,
    under which it can read on elsewhere.

    Args:
        metrics: where the pace of tokens is noted; None for a stream that is resumed, whose pace
            says nothing of the mesh.
    """

    def __init__(
        self,
        call: Call,
        generation: Generation,
        events: Events,
        *,
        metrics: Metrics | None,
        keep_alive_s: float,
    ) -> None:
        self._call = call
        self._generation = generation
        self._events = events
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._last_write_s = call.started_s
        self._last_token_s: dict[int, float] = {}  # by first choice of a prompt
        self._is_waiting = False  # to write what must go before all else
        self._rest = b""  # the last events: they leave with the end
        self._silence: Alarm | None = None

    async def run(self) -> None:
        """Headers, all events, the end.

        Raises:
            MeshError: a stream failed; the client has not been told yet (``Call.fail`` does).
        """
        await self._call.open_stream(self._events.failure)
        self._last_write_s = time.perf_counter()
        delay_s = min(_HEAD_S, self._keep_alive_s)
        self._silence = self._call.alarms.set(delay_s, self._watch_silence)
        try:
            if self._generation.num_prompts == 1:
                await self._generation.run(self._write, self._write_now)
            else:
                turn = asyncio.Lock()  # event numbers leave in order
                await self._generation.run(partial(self._write_in_turn, turn))
            end = self._events.end(self._generation.reasons, self._generation.usage)
        except BaseException:
            if self._rest:
                self._call.write_now(self._rest)
            raise
        finally:
            self._silence.cancel()
        await self._call.write(self._rest + end, last=True)

    async def _write_in_turn(
        self, turn: asyncio.Lock, first: int, deltas: Sequence[TokenDelta]
    ) -> None:
        async with turn:
            await self._write(first, deltas)

    async def _write(self, first: int, deltas: Sequence[TokenDelta]) -> None:
        data = self._events.deltas(first, deltas)
        if not data:
            return
        if self._generation.is_ending:
            self._rest += data
        else:
            self._is_waiting = True
            try:
                await self._call.write(data)
            finally:
                self._is_waiting = False
        self._note_write(first)

    def _write_now(self, first: int, deltas: Sequence[TokenDelta]) -> bool:
        """The same where nothing is to be waited for; whether it was."""
        exchange = None if self._is_waiting else self._call.writable
        if exchange is None:
            return False
        data = self._events.deltas(first, deltas)
        if data:
            if self._generation.is_ending:
                self._rest += data
            else:
                exchange.put(data)
            self._note_write(first)
        return True

    def _note_write(self, first: int) -> None:
        now_s = self._last_write_s = time.perf_counter()
        if self._metrics is None:
            return
        before_s = self._last_token_s.get(first)
        if before_s is not None:
            self._metrics.itl_seconds.observe(now_s - before_s)
        elif not self._last_token_s:
            ttft_s = now_s - self._call.started_s
            self._call.facts["ttft_ms"] = round(ttft_s * 1000, 3)
            self._metrics.ttft_seconds.observe(ttft_s)
        self._last_token_s[first] = now_s

    def _watch_silence(self) -> None:
        """A comment after each ``keep_alive_s`` without an event. One that finds the connection
        full is left out: there is enough on its way."""
        now_s, is_durable = time.perf_counter(), self._generation.is_durable
        if is_durable:
            self._call.flush()
        if now_s - self._last_write_s >= self._keep_alive_s:
            self._call.write_now(KEEP_ALIVE)
            self._last_write_s = now_s
        left_s = self._keep_alive_s - (now_s - self._last_write_s)
        if not is_durable:
            left_s = min(left_s, _HEAD_S)
        self._silence = self._call.alarms.set(left_s, self._watch_silence)

"""Requests that the engine has begun before they are ours: while the claim is being stored.

    plan       it is about to be claimed
    begin      the claim has left this process; the engine computes, and what it reports is kept
    take       it was claimed: what was kept is told now, what follows is not kept
    give_up    it was not: computed for nothing

So what a request waits for is the longer of the two, not their sum. Nobody hears of it before the
claim is stored, so nothing is to be taken back when it is lost. A request whose computing kills
the process has been claimed by then, and so it is counted: see ``workers/stored_tokens.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from schemas.errors import EngineFailed, QueueFull
from workers.engine.api import EngineRequest, StepReport
from workers.engine.thread import EngineThread


class _Part(Protocol):
    """Of a report: about one request."""

    @property
    def key(self) -> str: ...


P = TypeVar("P", bound=_Part)


class Begun(msgspec.Struct, frozen=True):
    """A request that was given to the engine, and what it has reported of it."""

    adding: asyncio.Future[None]  # done when the engine has taken it; or why it has not
    since_s: float
    report: StepReport

    @property
    def is_taken(self) -> bool:
        """Whether the engine has it."""
        return self.adding.done() and self.adding.exception() is None


class Ahead:
    """What the engine has begun ahead of its claim; in number, what is being claimed. What is kept
    of each is bounded by what it may generate."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._planned: dict[str, EngineRequest] = {}
        self._begun: dict[str, Begun] = {}

    def __len__(self) -> int:
        return len(self._begun) + len(self._planned)

    def plan(self, request: EngineRequest) -> None:
        """It may :meth:`begin` before it is taken."""
        self._planned[request.key] = request

    def begin(self, key: str) -> None:
        """Give what was planned to the engine; twice is fine, and so is too late. One that can't
        take any more now may after the claim."""
        request = self._planned.pop(key, None)
        if request is None:
            return
        try:
            adding = self._engine.ask(lambda engine: engine.add(request))
        except (QueueFull, EngineFailed):
            return
        self._begun[key] = Begun(adding, time.perf_counter(), StepReport())

    def keep(self, report: StepReport) -> None:
        """Take out of ``report`` what is about requests of here."""
        if self._begun:
            report.outputs = self._rest_of(report.outputs, lambda kept: kept.outputs)
            report.held = self._rest_of(report.held, lambda kept: kept.held)
            report.finished = self._rest_of(report.finished, lambda kept: kept.finished)
            report.failed = self._rest_of(report.failed, lambda kept: kept.failed)

    def _rest_of(self, parts: list[P], of: Callable[[StepReport], list[P]]) -> list[P]:
        rest = [part for part in parts if part.key not in self._begun]
        if len(rest) < len(parts):
            for part in parts:
                if (begun := self._begun.get(part.key)) is not None:
                    of(begun.report).append(part)
        return rest

    def find(self, key: str) -> Begun | None:
        """The one that was begun under ``key``."""
        return self._begun.get(key)

    def take(self, key: str) -> Begun | None:
        """Nothing more is kept of this one; None when it was not begun, and never will be."""
        self._planned.pop(key, None)
        return self._begun.pop(key, None)

    def give_up(self, key: str) -> None:
        """Have the engine forget this one, if it was begun."""
        self._planned.pop(key, None)
        begun = self._begun.pop(key, None)
        if begun is None:
            return
        if not begun.adding.cancel() and not begun.adding.cancelled():
            begun.adding.exception()  # nobody else looks
        self._engine.release(key)

    def give_up_all(self) -> None:
        """All of them."""
        self._planned.clear()
        for key in list(self._begun):
            self.give_up(key)

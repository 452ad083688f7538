"""Where each of our requests is, from what passes on the bus. Listens; never speaks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.bus import Bus, Msg
from schemas import subjects
from schemas.codec import decode
from schemas.errors import SchemaError
from schemas.headers import REQUEST
from schemas.kv import KvReady
from schemas.requests import InferenceRequest
from schemas.tokens import Accepted, Claim, TokenBatch, decode_stream_message

_WORK = ("admission", "prefill", "kv-ready", "decode")


@dataclass(slots=True)
class Trace:
    """One request, as far as was seen.

    ``waits_for`` is the stage whose queue holds its newest task; "" once that was claimed.
    ``placed`` is the worker that the task names, "" when any may take it.
    """

    label: str
    request_id: str = ""
    reader: str = ""
    waits_for: str = ""
    placed: str = ""
    claim: Claim | None = None
    prefiller: str = ""  # who computed, or computes, its prompt
    is_offered: bool = False  # its blocks are announced, and no decode worker has claimed it
    reads_from: str = ""  # whose blocks its decode worker copies, or may still copy
    num_tokens: int = 0  # of all choices, in any epoch
    ended_s: float | None = None  # when its end was heard, monotonic

    @property
    def has_ended(self) -> bool:
        """Its end was heard."""
        return self.ended_s is not None

    def is_claimed_by(self, role: str) -> bool:
        """The present owner plays ``role``."""
        return self.claim is not None and self.claim.role == role

    def depends_on(self, worker: str) -> bool:
        """Whether the request stands still when ``worker`` does."""
        if self.has_ended:
            return False
        owner = self.claim.worker if self.claim is not None else ""
        return worker in (owner, self.placed, self.reads_from)


class Witness:
    """Follows the requests that were announced to it with :meth:`expect`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._by_label: dict[str, Trace] = {}
        self._by_id: dict[str, Trace] = {}
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Listen from now on.

        Raises:
            BusForbidden: the user may not hear all of the mesh; the control's may.
        """
        for stage in _WORK:
            work = f"{subjects.ROOT}.{stage}.>"
            await self._bus.subscribe(work, self.on_work)
            await self._bus.subscribe(subjects.direct(work), self.on_work)
        await self._bus.subscribe(subjects.live(f"{subjects.ROOT}.token-stream.>"), self.on_stream)

    def expect(self, label: str) -> Trace:
        """Follow the request that carries ``label``."""
        trace = self._by_label[label] = Trace(label)
        return trace

    def forget_all(self) -> None:
        """Follow none of them any more."""
        self._by_label.clear()
        self._by_id.clear()

    async def until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``is_so()`` holds at some news; False when it did not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    def on_work(self, message: Msg) -> None:
        """A task was queued, or said directly."""
        with contextlib.suppress(SchemaError):  # of others; ours can be read
            stage, _, worker = subjects.split_work(subjects.queued(message.subject))
            if stage == "admission":
                self._on_admission(decode(message.data, InferenceRequest))
            elif trace := self._by_id.get((message.headers or {}).get(REQUEST, "")):
                self._on_task(trace, stage, worker or "", message.data)
        self._changed.set()

    def _on_admission(self, request: InferenceRequest) -> None:
        trace = self._by_label.get(request.label)
        if trace is None:
            return
        if trace.request_id != request.request_id:  # new, or sent anew by an HTTP client
            self._by_id.pop(trace.request_id, None)
            self._by_label[trace.label] = self._by_id[request.request_id] = trace
            trace.request_id, trace.claim, trace.num_tokens = request.request_id, None, 0
            trace.is_offered, trace.ended_s = False, None
        trace.reader = request.reader or subjects.default_reader(request.request_id)
        trace.waits_for = "admission"

    @staticmethod
    def _on_task(trace: Trace, stage: str, worker: str, data: bytes) -> None:
        owner = decode(data, KvReady).handle.owner if stage == "kv-ready" else ""
        trace.waits_for = stage
        trace.placed = owner or ("" if worker == subjects.ANY else worker)
        if owner:
            trace.is_offered, trace.prefiller = True, owner

    def on_stream(self, message: Msg) -> None:
        """A claim, tokens, or an end."""
        with contextlib.suppress(SchemaError):
            entry = decode_stream_message(message.data)
            if isinstance(entry, TokenBatch):
                for delta in entry.deltas:
                    if trace := self._by_id.get(delta.request_id):
                        trace.num_tokens += len(delta.ids)
                        trace.reads_from = ""
            elif trace := self._by_id.get(entry.request_id):
                if isinstance(entry, Claim):
                    self._on_claim(trace, entry)
                elif not isinstance(entry, Accepted):
                    trace.ended_s = time.monotonic()
        self._changed.set()

    @staticmethod
    def _on_claim(trace: Trace, claim: Claim) -> None:
        trace.claim = claim
        trace.waits_for = trace.placed = ""
        trace.is_offered = False
        if claim.role == "prefill":
            trace.prefiller, trace.reads_from = claim.worker, ""
        else:
            trace.reads_from = trace.prefiller

"""Who is alive, as one listener judges from heartbeats. Pure: beats and the time are passed in.

Silent for ``dead_s`` is dead; a closed socket says nothing. A listener that did not hear the bus
itself may not judge: after its own pause every count starts anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.control import Beat

Layout = tuple[str, int]  # fingerprint, tokens per block


@dataclass(slots=True)
class Member:
    """A process and when it was last heard."""

    beat: Beat
    heard_s: float  # monotonic


class Fleet:
    """The processes of the mesh.

    Args:
        dead_s: silence after which a process is dead.
        now_s: monotonic time at which this listener began to listen.
    """

    def __init__(self, dead_s: float, now_s: float) -> None:
        self._dead_s = dead_s
        self._members: dict[str, Member] = {}  # by process
        self._process_of: dict[str, str] = {}  # by worker
        self._dead_workers: dict[str, float] = {}  # verdicts and when; ids never come back
        self._drained: set[str] = set()  # those of them that said before that they would go
        self._verdicts: list[Beat] = []
        self._listening_since_s = now_s
        self.version = 0  # of what is known of the living: another one after every beat
        # By model, until somebody changes: of each worker, and those that there are.
        self._layouts: dict[str, tuple[dict[str, Layout], list[Layout]]] = {}
        # By model and role, until somebody changes: the last beat by process, sorted by worker.
        self._ready: dict[tuple[str, str], dict[str, Beat]] = {}
        # By model, until somebody changes: see max_sequence_tokens.
        self._longest: dict[str, int | None] = {}

    def hear(self, beat: Beat, now_s: float) -> None:
        """Take a heartbeat. One that says "gone" is a verdict: no need to wait for silence."""
        self.version += 1
        known = self._members.get(beat.process)
        if known is not None and known.beat.worker != beat.worker:
            self._bury(known.beat, now_s)  # it came back under another id: the old one is over
        if beat.state == "gone":
            self._forget(beat.process)
            if known is not None and known.beat.state == "draining":
                self._drained.add(beat.worker)
            self._bury(beat, now_s)
        elif not (beat.worker and beat.worker in self._dead_workers):
            if known is not None and _is_alike(known.beat, beat):
                self._renew(beat)
            else:
                self._changed()
            self._members[beat.process] = Member(beat, now_s)
            if beat.worker:
                self._process_of[beat.worker] = beat.process

    def listen_anew(self, now_s: float) -> None:
        """The listener was away: nobody is judged by what it did not hear."""
        self._listening_since_s = now_s

    def judge(self, now_s: float) -> None:
        """Declare dead who has been silent for too long."""
        for process, member in list(self._members.items()):
            last_s = max(member.heard_s, self._listening_since_s)
            if now_s - last_s > self._dead_s:
                self._forget(process)
                self._bury(member.beat, now_s)

    def take_verdicts(self) -> list[Beat]:
        """The last beats of workers and control processes that were declared dead, or left,
        since the last call."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def is_dead(self, worker: str, now_s: float) -> bool:
        """Whether ``worker`` was declared dead, or has never been heard although we listened
        for long enough."""
        if worker in self._dead_workers:
            return True
        if worker in self._process_of:
            return False
        return now_s - self._listening_since_s > self._dead_s

    def died_s(self, worker: str) -> float | None:
        """When ``worker`` was declared dead, or left; None when it was not."""
        return self._dead_workers.get(worker)

    def has_drained(self, worker: str) -> bool:
        """Whether a worker that is gone had announced it."""
        return worker in self._drained

    def workers(self, served: str, role: str) -> list[Beat]:
        """Live workers that take tasks of ``role`` for ``served``, by worker id. Who they are is
        kept until somebody comes, goes or changes: every request asks, several times."""
        found = self._ready.get((served, role))
        if found is None:
            ready = [
                member.beat
                for member in self._members.values()
                if member.beat.served == served
                and role in member.beat.roles
                and member.beat.state == "ready"
            ]
            ready.sort(key=lambda beat: beat.worker)
            found = self._ready[served, role] = {beat.process: beat for beat in ready}
        return list(found.values())

    def serving(self, served: str) -> list[Beat]:
        """Live workers of ``served``, whatever they do for it, by worker id."""
        found = [
            member.beat
            for member in self._members.values()
            if member.beat.served == served and member.beat.worker and member.beat.state == "ready"
        ]
        return sorted(found, key=lambda beat: beat.worker)

    def layouts(self, served: str) -> Mapping[str, Layout]:
        """Fingerprint and block size of each live worker of ``served``, whatever it does for it.
        Kept until somebody comes, goes or changes: a prompt that is looked up asks."""
        return self._known_layouts(served)[0]

    def distinct_layouts(self, served: str) -> Sequence[Layout]:
        """The different ones among them, sorted."""
        return self._known_layouts(served)[1]

    def _known_layouts(self, served: str) -> tuple[dict[str, Layout], list[Layout]]:
        found = self._layouts.get(served)
        if found is None:
            by_worker = {
                one.worker: (one.fingerprint, one.block_size) for one in self.serving(served)
            }
            found = self._layouts[served] = (by_worker, sorted(set(by_worker.values())))
        return found

    def max_sequence_tokens(self, served: str) -> int | None:
        """What a sequence may be long so that each live worker of ``served`` could hold it; None
        when none says so. One that drains is not asked: nothing new goes there."""
        if served not in self._longest:
            said = [
                member.beat.max_sequence_tokens
                for member in self._members.values()
                if member.beat.served == served and member.beat.state != "draining"
            ]
            self._longest[served] = min((tokens for tokens in said if tokens > 0), default=None)
        return self._longest[served]

    def worker(self, worker: str) -> Beat | None:
        """The last beat of a live worker."""
        process = self._process_of.get(worker)
        return None if process is None else self._members[process].beat

    def members(self) -> list[Beat]:
        """The last beat of everybody alive, by process id."""
        return [self._members[process].beat for process in sorted(self._members)]

    def forget_verdicts(self, older_than_s: float) -> None:
        """Drop verdicts from before ``older_than_s``: their requests are long over."""
        self._dead_workers = {w: s for w, s in self._dead_workers.items() if s >= older_than_s}
        self._drained &= self._dead_workers.keys()

    def _renew(self, beat: Beat) -> None:
        """The same worker, in the same place and state, says how it is."""
        for role in beat.roles:
            ready = self._ready.get((beat.served, role))
            if ready is not None and beat.process in ready:
                ready[beat.process] = beat

    def _changed(self) -> None:
        self.version += 1
        self._layouts.clear()
        self._ready.clear()
        self._longest.clear()

    def _forget(self, process: str) -> None:
        self._changed()
        member = self._members.pop(process, None)
        if member is not None:
            self._process_of.pop(member.beat.worker, None)

    def _bury(self, beat: Beat, now_s: float) -> None:
        if self._process_of.get(beat.worker) == beat.process:
            del self._process_of[beat.worker]
        if beat.kind == "control":
            self._verdicts.append(beat)
        if beat.worker and beat.worker not in self._dead_workers:
            self._dead_workers[beat.worker] = now_s
            self._verdicts.append(beat)


def _is_alike(one: Beat, other: Beat) -> bool:
    """Whether a process is in the same place and state as before, whatever its load."""
    return _facts(one) == _facts(other)


def _facts(beat: Beat) -> tuple[object, ...]:
    return (
        beat.worker,
        beat.served,
        beat.state,
        beat.roles,
        beat.fingerprint,
        beat.block_size,
        beat.max_sequence_tokens,
    )

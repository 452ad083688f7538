"""A simulated worker as the mesh knows it: what it pulls, hands over, lends and says.

The rules are those of ``workers/incarnation.py``: tasks are pulled from its own queue and from the
shared one while there is room, sixteen prompts at most wait inside, what was computed is held until
it was read, and a worker that drains pulls nothing more and leaves when it has nothing left.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial

import msgspec

from loadgen.simulate.engine import StepResult, VirtualEngine
from loadgen.simulate.fetching import best_fetch, best_promotion
from loadgen.simulate.fleet_plan import WorkerSpec
from loadgen.simulate.holdings import EngineSpec
from loadgen.simulate.host_tier import HostTier
from loadgen.simulate.kv_log import KvLog
from loadgen.simulate.request import FINGERPRINT, Request
from loadgen.simulate.sequence import Sequence
from loadgen.simulate.tasks import Surroundings, Task
from pipeline.suffix import SUFFIX
from schemas.control import Beat, Load, ProcessState
from schemas.kv_events import KvEvents
from schemas.tokens import Claim
from workers.engine.line import place_in_line

_MAX_WAITING_PREFILLS = 16
_LEAST_NEWS_S = 0.05
_NUM_PREFETCHED = 4  # how far back in line blocks are brought from the host tier
_ROLES = {  # as beats say; "suffix": a decode worker computes short rests of prompts itself
    "prefill": ("prefill",),
    "decode": ("decode", SUFFIX),
    "both": ("prefill", "decode"),
}


class SimulatedWorker:
    """One worker from when it comes until it is gone.

    Attributes:
        num_taken: tasks that it pulled.
        num_fetches: prompts of which it brought a part from another worker.
        host_tier: what it keeps beside its pool.
    """

    def __init__(self, spec: WorkerSpec, mesh: Surroundings, blocks_per_piece: int) -> None:
        self.spec = spec
        self.num_taken = 0
        self.num_fetches = 0
        self.state: ProcessState = "ready"
        self.came_s = mesh.queue.now_s
        self.left_s: float | None = None
        self.engine = VirtualEngine(
            EngineSpec(
                costs=spec.costs,
                num_blocks=spec.kv_tokens // mesh.plan.block_size,
                block_size=mesh.plan.block_size,
                blocks_per_piece=blocks_per_piece,
                max_num_sequences=spec.max_num_sequences,
                max_batch_tokens=spec.max_batch_tokens,
            )
        )
        self._mesh = mesh
        self._own: deque[Task] = deque()
        self._tasks: dict[str, Task] = {}  # taken and not held, by request
        self._held: dict[str, Task] = {}
        self._num_decoding = 0
        self._num_arrived = 0
        self._turn = 0  # of the event that ends the run of steps
        self._measured = self._said = Load()  # when it was asked last; with the last beat
        self._measured_s = 0.0
        self._news_s = -math.inf  # when it last said something early
        self._is_between = False  # two runs: the next one begins when all who wait are in line
        self._log = KvLog(spec.name, mesh.plan.kv_events_ms / 1e3, mesh.queue, self._tell)
        self.host_tier = HostTier(
            spec.host_tokens // mesh.plan.block_size,
            blocks_per_piece,
            partial(self._log.stored, "host"),
            partial(self._log.removed, "host"),
        )
        self.engine.pool.on_stored = self._found_on_device
        self.engine.pool.on_removed = partial(self._log.removed, "device")
        self.measure()

    # ---- pulling -------------------------------------------------------------------------

    def offer(self, task: Task) -> None:
        """A task on its own queue."""
        if self.state == "gone":
            self._mesh.left(self, [task])
            return
        self._own.append(task)
        self.pull()

    def pull(self) -> None:
        """Take what there is room for."""
        while self.state == "ready" and self._take_one(self._own, None):
            pass
        for role in self.spec.queues:
            while self.state == "ready" and self._take_one(self._mesh.shared[role], role):
                pass

    def _take_one(self, line: deque[Task], role: str | None) -> bool:
        if not line or not self._has_room(line[0].role if role is None else role):
            return False
        task = line[0]
        if task.role == "decode" and not self._reserve(task):
            return False
        line.popleft()
        self._claim(task)
        return True

    def _has_room(self, role: str) -> bool:
        free = self.num_free_slots
        if role == "prefill":
            waiting = self._num_prompts + len(self._held) // 4
            free = min(free, _MAX_WAITING_PREFILLS - waiting)
        return free > 0

    @property
    def num_free_slots(self) -> int:
        """How many more sequences it would run."""
        return self.spec.max_num_sequences - len(self._tasks)

    @property
    def _num_prompts(self) -> int:
        """What waits for its first token here."""
        return len(self._tasks) - self._num_decoding

    @property
    def num_offered(self) -> int:
        """Tasks on its own queue that it has not taken."""
        return len(self._own)

    @property
    def num_findable_blocks(self) -> int:
        """Blocks that others are told of, in each of its tiers."""
        return self.engine.pool.num_findable + self.host_tier.num_used

    def _reserve(self, task: Task) -> bool:
        if self.engine.is_running:
            self._run_until(self.engine.cut(self._mesh.queue.now_s))
        return self.engine.reserve(task.request.num_prompt)

    def _claim(self, task: Task) -> None:
        request = task.request
        self.num_taken += 1
        self._tasks[request.request_id] = task
        claim = Claim(
            request_id=request.request_id,
            epoch=1 if task.role == "prefill" else 2,
            worker=self.spec.name,
            role=task.role,
            served=self._mesh.served,
            deadline_unix_ms=0,
            num_tokens=request.num_prompt + (task.role == "decode"),
            max_tokens=request.max_tokens,
        )
        self._mesh.say_claim(claim)
        if task.role == "decode":
            self._receive(task)
        else:
            self._fetch_or_start(task)

    # ---- prompts -------------------------------------------------------------------------

    def _fetch_or_start(self, task: Task) -> None:
        """Bring what others have of the prompt, where that is faster than computing it."""
        fetch = best_fetch(task, self, self._mesh)
        if fetch is None:
            self._start(task)
            return
        there_s = self._mesh.network.transfer(fetch.lender.spec, self.spec, fetch.num_bytes)
        self.num_fetches += 1
        self._mesh.queue.at(there_s, self._fetched, task, fetch.num_blocks)

    def _fetched(self, task: Task, num_blocks: int) -> None:
        """Into the host tier, from where it is brought when its turn is near; else, without one,
        right into the pool."""
        pieces = task.request.pieces
        if self.host_tier.num_blocks:
            self.host_tier.copy_all(pieces, num_blocks)
        else:
            self._store(pieces, num_blocks)
        self._start(task)

    def _store(self, pieces: tuple[bytes, ...], num_blocks: int) -> None:
        if self.engine.is_running:
            self._run_until(self.engine.cut(self._mesh.queue.now_s))
        self.engine.store(pieces, num_blocks)

    def _promote(self) -> None:
        """Bring what the host tier has of those next in line, as far as there is room."""
        if not self.host_tier.num_blocks:
            return
        room = self.engine.num_free_to_promote
        for sequence in self.engine.waiting[:_NUM_PREFETCHED]:
            room -= -(-sequence.num_tokens // self._mesh.plan.block_size) - sequence.num_blocks
            if room < 0:
                return
            if sequence.has_looked_below or sequence.num_blocks:
                continue
            sequence.has_looked_below = True
            num_blocks = best_promotion(sequence, self, self._mesh)
            if num_blocks:
                sequence.is_coming = True
                self.host_tier.touch(sequence.pieces)
                own = self.engine.pool.num_found(sequence.pieces, num_blocks)
                num_tokens = (num_blocks - own) * self._mesh.plan.block_size
                takes_s = self._mesh.network.promotion_s(num_tokens * self.spec.kv_token_bytes)
                self._mesh.queue.after(takes_s, self._promoted, sequence, num_blocks)

    def _promoted(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.is_coming = False
        self._store(sequence.pieces, num_blocks)
        self._go_on()

    def _start(self, task: Task) -> None:
        request = task.request
        sequence = self._sequence(
            request, holds=self.spec.role == "prefill", overtakes=task.overtakes
        )
        self.engine.enqueue(sequence)
        self._go_on()

    def _sequence(self, request: Request, *, holds: bool, overtakes: bool = False) -> Sequence:
        self._num_arrived += 1
        return Sequence(
            key=request.request_id,
            age=place_in_line(self._num_arrived, overtakes=overtakes),
            overtakes=overtakes,
            pieces=request.pieces,
            num_prompt=request.num_prompt,
            num_output=request.num_output,
            holds=holds,
            segments=request.segments,
        )

    # ---- handing over --------------------------------------------------------------------

    def _receive(self, task: Task) -> None:
        """Room is there: copy the blocks."""
        assert task.source is not None, "a decode comes from somewhere"
        num_bytes = task.request.num_prompt * self.spec.kv_token_bytes
        there_s = self._mesh.network.transfer(task.source.spec, self.spec, num_bytes)
        self._mesh.queue.at(there_s, self._received, task)

    def _received(self, task: Task) -> None:
        request, source = task.request, task.source
        assert source is not None, "a decode comes from somewhere"
        self._mesh.network.hop(source.release, request.request_id)
        if self.engine.is_running:
            self._run_until(self.engine.cut(self._mesh.queue.now_s))
        sequence = self._sequence(request, holds=False)
        sequence.num_tokens = request.num_prompt + 1
        self._num_decoding += 1
        self.engine.adopt(sequence, request.num_prompt)
        self._go_on()

    def release(self, request_id: str) -> None:
        """Somebody has read what was held for it."""
        task = self._held.pop(request_id)
        assert task.held is not None, "nothing is held"
        self.engine.release(task.held)
        self.pull()
        self._go_on()
        self._tell_news()
        self._leave_if_done()

    # ---- steps ---------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Something has come: let the engine take it with its next step."""
        if self._is_between:
            return
        self._promote()
        now_s = self._mesh.queue.now_s
        if self.engine.is_running:
            self._run_until(self.engine.cut(now_s))
        else:
            self._run_until(self.engine.start(now_s))

    def _run_until(self, end_s: float | None) -> None:
        self._turn += 1
        if end_s is not None:
            self._mesh.queue.at(end_s, self._step, self._turn)

    def _step(self, turn: int) -> None:
        if turn != self._turn:
            return  # it was cut, and ends earlier
        self._is_between = True
        self._take_results(self.engine.finish())
        self.pull()
        self._is_between = False
        self._go_on()
        self._tell_news()
        self._leave_if_done()

    def _take_results(self, result: StepResult) -> None:
        for sequence in result.sampled:
            task = self._tasks[sequence.key]
            if task.role == "prefill" and sequence.num_tokens == sequence.num_prompt + 1:
                task.request.num_cached = max(0, sequence.num_cached)
                self._num_decoding += 1
        for sequence in result.held:
            task = self._tasks.pop(sequence.key)
            self._num_decoding -= 1
            task.held = sequence
            self._held[sequence.key] = task
            self._mesh.kv_ready(
                Task(request=task.request, role="decode", source=self, held=sequence)
            )
        for sequence in result.ended:
            task = self._tasks.pop(sequence.key)
            self._num_decoding -= 1
            self._mesh.ended(task.request)

    # ---- life ----------------------------------------------------------------------------

    def drain(self) -> None:
        """Pull nothing more, and leave when all is done."""
        if self.state == "ready":
            self.state = "draining"
            self._mesh.say_beat(self.beat())
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self.state == "draining" and not self._tasks and not self._held:
            self.state = "gone"
            self.left_s = self._mesh.queue.now_s
            self._mesh.say_beat(self.beat())
            tasks, self._own = list(self._own), deque()
            self._mesh.left(self, tasks)

    def measure(self) -> None:
        """Ask the engine how busy it is; beats tell what it said last."""
        self._measured, self._measured_s = self.load(), self._mesh.queue.now_s

    def answers_s(self) -> float:
        """When it can say how busy it is: it computes prompts until then."""
        return self.engine.busy_until_s(self._mesh.queue.now_s)

    def _tell_news(self) -> None:
        """Say at once that there is room again, or nothing left to compute, where the last beat
        said otherwise."""
        said, now_s = self._said, self._mesh.queue.now_s
        has_ended = bool(said.waiting_tokens) and self._num_prompts == 0
        has_room = not said.num_free_slots and self.num_free_slots > 0
        if self.state != "ready" or not (has_ended or has_room):
            return
        if now_s - self._news_s >= _LEAST_NEWS_S:
            self._news_s = now_s
            self.measure()
            self._mesh.say_beat(self.beat())

    def beat(self) -> Beat:
        """What it says of itself now."""
        free = max(0, self.num_free_slots)
        age_ms = 1000 * (self._mesh.queue.now_s - self._measured_s)
        self._said = msgspec.structs.replace(self._measured, num_free_slots=free, age_ms=age_ms)
        spec, size = self.spec, self._mesh.plan.block_size
        return Beat(
            process=spec.name,
            kind="worker",
            state=self.state,
            host=spec.host,
            pid=1,
            started_unix_ms=round(self.came_s * 1e3),
            worker=spec.name,
            roles=_ROLES[spec.role],
            served=self._mesh.served,
            engine="simulated",
            fingerprint=FINGERPRINT,
            load=self._said,
            max_sequence_tokens=spec.kv_tokens // size * size,
            block_size=size,
            kv_seq=self._log.seq,
            costs=spec.costs,
            profile=spec.profile,
            kv_token_bytes=spec.kv_token_bytes,
            rack=spec.rack,
            zone=spec.zone,
        )

    def load(self) -> Load:
        """How busy it is."""
        return self.engine.load(self._mesh.queue.now_s, max(0, self.num_free_slots))

    def num_lendable(self, pieces: tuple[bytes, ...], most: int) -> int:
        """How many of a prompt's first ``most`` blocks others could have from here."""
        return max(self.engine.pool.num_found(pieces, most), self.host_tier.num_found(pieces, most))

    def _found_on_device(self, name: bytes, parent: bytes, num_blocks: int) -> None:
        self._log.stored("device", name, parent, num_blocks)
        if self.host_tier.num_blocks:
            self.host_tier.copy(name, parent, num_blocks)

    def _tell(self, events: KvEvents) -> None:
        if self.state != "gone":
            self._mesh.say_events(events)

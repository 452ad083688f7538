"""A simulated fleet at work: its workers, its control processes, and what goes between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from random import Random
from typing import TypeVar

from loadgen.simulate.control import Control
from loadgen.simulate.events import EventQueue
from loadgen.simulate.fleet_plan import FleetPlan, WorkerSpec
from loadgen.simulate.network import Network
from loadgen.simulate.pool_samples import PoolSamples, take_sample
from loadgen.simulate.request import REVISION, Request
from loadgen.simulate.tasks import Task
from loadgen.simulate.worker import SimulatedWorker
from pipeline.placement import PrefillPlace
from schemas import subjects
from schemas.control import Beat, Placed
from schemas.kv_events import KvEvents
from schemas.subjects import ANY
from schemas.tokens import Claim

M = TypeVar("M")

_ANSWER_S = 0.05  # that a beat waits for the engine


class SimulatedMesh:
    """One run's fleet.

    Attributes:
        everyone: all workers that ever came, also those that are gone.
    """

    def __init__(self, plan: FleetPlan, rng: Random, sample_s: float) -> None:
        self.plan = plan
        self.queue = EventQueue()
        self.network = Network(self.queue, plan)
        self.served = subjects.served(plan.model, REVISION)
        self.shared: dict[str, deque[Task]] = {"prefill": deque(), "decode": deque()}
        self.everyone: list[SimulatedWorker] = []
        self.samples = PoolSamples()
        self._sample_s = sample_s
        self._workers: dict[str, SimulatedWorker] = {}  # that are there
        self._known: dict[str, SimulatedWorker] = {}  # and were
        self._requests: dict[str, Request] = {}
        self._num_open = 0
        self._blocks_per_piece = 1
        num_controls = plan.routers if plan.router == "mesh" else 0
        self.controls = [
            Control(f"control-{number}", self, Random(rng.random()))
            for number in range(num_controls)
        ]
        self._next_control = cycle(self.controls)
        self._turn = 0  # of the round robin

    def request(self, request_id: str) -> Request:
        """See :class:`loadgen.simulate.control.Surroundings`."""
        return self._requests[request_id]

    def run(self, requests: Sequence[Request], until_s: float) -> None:
        """Send the requests at their times, until all have ended or the time is over."""
        self._blocks_per_piece = requests[0].blocks_per_piece
        self._num_open = len(requests)
        for spec in self.plan.specs():
            self.queue.at(spec.from_s, self._come, spec)
        for request in requests:
            self._requests[request.request_id] = request
            self.queue.at(request.due_s, self._arrive, request)
        self.queue.at(0.0, self._sample)
        self.queue.run(until_s, lambda: self._num_open == 0)

    # ---- requests ------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        if self.controls:
            self.network.hop(next(self._next_control).admit, request)
        else:
            self.network.hop(self._take_turns, request)

    def _take_turns(self, request: Request) -> None:
        """Without a mesh: whoever is next, of those that are there."""
        ready = [one for one in self._workers.values() if one.state == "ready"]
        if not ready:
            self.refuse(request, "no worker is there")
            return
        self._turn += 1
        ready[self._turn % len(ready)].offer(Task(request=request, role="prefill"))

    def send_prefill(self, request: Request, place: PrefillPlace) -> None:
        """See :class:`loadgen.simulate.door.Exits`. Its record is written, then its task."""
        task = Task(
            request=request,
            role="prefill",
            sources=place.sources,
            overtakes=place.overtakes,
        )
        self.queue.after(2 * self.network.hop_s, self._offer, task, place.worker)

    def kv_ready(self, task: Task) -> None:
        """See :class:`loadgen.simulate.tasks.Surroundings`."""
        self.network.hop(self._place_decode, task)

    def _place_decode(self, task: Task) -> None:
        assert task.source is not None, "a decode comes from somewhere"
        control = next(self._next_control)
        place = control.place_decode(task.request, task.source.spec.name)
        self.network.hop(self._offer, task, place)

    def _offer(self, task: Task, place: str) -> None:
        if place == ANY:
            self.shared[task.role].append(task)
            for worker in list(self._workers.values()):
                worker.pull()
        else:
            self._known[place].offer(task)

    def refuse(self, request: Request, reason: str) -> None:
        """See :class:`loadgen.simulate.door.Exits`."""
        request.result.fail("refused", reason)
        self._num_open -= 1

    def ended(self, request: Request) -> None:
        """See :class:`loadgen.simulate.tasks.Surroundings`."""
        self._num_open -= 1
        self.network.hop(self._say_end, request)

    # ---- workers -------------------------------------------------------------------------

    def worker(self, name: str) -> SimulatedWorker | None:
        """See :class:`loadgen.simulate.tasks.Surroundings`."""
        return self._workers.get(name)

    def _come(self, spec: WorkerSpec) -> None:
        worker = SimulatedWorker(spec, self, self._blocks_per_piece)
        self._workers[spec.name] = self._known[spec.name] = worker
        self.everyone.append(worker)
        self._beat(worker)
        worker.pull()
        if math.isfinite(spec.until_s):
            self.queue.at(spec.until_s, worker.drain)

    def _beat(self, worker: SimulatedWorker) -> None:
        """The engine is asked how busy it is, and answers between two steps; the beat waits for
        that, but not long."""
        if worker.state == "gone":
            return
        answers_s, now_s = worker.answers_s(), self.queue.now_s
        self.queue.at(answers_s, worker.measure)
        last_s = now_s + min(_ANSWER_S, self.plan.beat_s / 4)
        self.queue.at(min(answers_s, last_s), self._say_beat_of, worker)
        self.queue.after(self.plan.beat_s, self._beat, worker)

    def _say_beat_of(self, worker: SimulatedWorker) -> None:
        if worker.state != "gone":
            self.say_beat(worker.beat())

    def left(self, worker: SimulatedWorker, tasks: list[Task]) -> None:
        """See :class:`loadgen.simulate.tasks.Surroundings`. What it did not take is placed
        again."""
        self._workers.pop(worker.spec.name, None)
        for task in tasks:
            if task.role == "decode":
                self.kv_ready(task)
            else:
                self._arrive(task.request)

    # ---- what is said --------------------------------------------------------------------

    def say_beat(self, beat: Beat) -> None:
        """See :class:`loadgen.simulate.tasks.Surroundings`."""
        self.network.hop(self._tell, Control.hear_beat, beat)

    def say_events(self, events: KvEvents) -> None:
        """See :class:`loadgen.simulate.tasks.Surroundings`."""
        self.network.hop(self._tell, Control.hear_events, events)

    def say_claim(self, claim: Claim) -> None:
        """See :class:`loadgen.simulate.tasks.Surroundings`."""
        self.network.hop(self._tell, Control.hear_claim, claim)

    def say_placed(self, placed: Placed) -> None:
        """See :class:`loadgen.simulate.control.Surroundings`."""
        self.network.hop(self._tell, Control.hear_placed, placed)

    def _say_end(self, request: Request) -> None:
        for control in self.controls:
            control.hear_end(request.request_id, request.num_output)

    def _tell(self, hear: Callable[[Control, M], None], message: M) -> None:
        for control in self.controls:
            hear(control, message)

    def _sample(self) -> None:
        num_waiting = len(self.shared["prefill"]) + sum(
            one.door.num_waiting for one in self.controls
        )
        take_sample(self.samples, self.queue.now_s, list(self._workers.values()), num_waiting)
        self.queue.after(self._sample_s, self._sample)

"""One round: load, a request brought to its point, the blow, and a judgement of every stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loadgen.chaos.answer import Answer, compare
from loadgen.chaos.cases import Case
from loadgen.chaos.clients import BusClient, Client, SseClient
from loadgen.chaos.fault import Fault, Scene, Stream
from loadgen.chaos.leaks import leaked_blocks
from loadgen.chaos.mesh import Target
from loadgen.chaos.points import EARLY_POINTS, POINTS, Hunt
from loadgen.chaos.report import Tally
from loadgen.chaos.witness import Trace, Witness
from pipeline.claim_chain import ClaimChain
from schemas.errors import BusUnavailable
from schemas.tokens import ChainEntry, StreamEnd

WHOLE_S = 90.0
LEFT_S = 10.0  # after its client left, a request has so long to end
_LATE_S = 1.0  # after its deadline a request may end so much later; then it hangs
_STAGGER_S = 0.4
_POLL_S = 0.05
_ON_ITS_WAY_S = 1.0  # what ends sooner after its client left may have been ending already


@dataclass(slots=True, kw_only=True)
class Blow:
    """One fault of a round: planned, then struck."""

    fault: Fault
    point: str
    struck_s: float = 0.0
    ended_s: float = 0.0
    target: Target | None = None
    affected: list[Stream] = field(default_factory=list)
    has_missed: bool = False


@dataclass(slots=True, kw_only=True)
class RoundResult:
    """What came of it. ``problems`` names each stream that was not right, and why."""

    tally: Tally
    blows: list[Blow]
    problems: list[str] = field(default_factory=list)


class Rounds:
    """Plays rounds in one mesh.

    Args:
        cases: what is asked, with the undisturbed answer to each.
    """

    def __init__(
        self,
        scene: Scene,
        witness: Witness,
        *,
        cases: dict[str, tuple[Case, Answer]],
        bus: BusClient,
        http: SseClient,
        num_streams: int,
        timeout_s: float,
    ) -> None:
        self._scene = scene
        self._witness = witness
        self._cases = cases
        self._bus = bus
        self._http = http
        self._num_streams = num_streams
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._chain = ClaimChain(scene.mesh.bus)

    async def play(self, blows: list[Blow]) -> RoundResult:
        """Wait for a whole mesh, load it, strike, wait for every stream, judge.

        Raises:
            NotWhole: the mesh did not come back from an earlier fault.
            MeshError: a fault could not be prepared.
        """
        mesh = self._scene.mesh
        await mesh.until_whole(WHOLE_S)
        self._witness.forget_all()
        self._http.homes.clear()
        self._http.not_coming_back.clear()
        strikes_bridge = any(blow.fault.role == "bridge" for blow in blows)
        self._http.stall_s = mesh.bus.times.dead_s if strikes_bridge else self._timeout_s
        try:
            for blow in blows:
                await blow.fault.prepare(self._scene)
            streams = await self._load_and_strike(blows)
        finally:
            mesh.wake_all()
            for blow in blows:
                await blow.fault.end(self._scene)
        result = await self._judge(blows, streams)
        result.tally.leaked_blocks = await leaked_blocks(mesh)
        if result.tally.leaked_blocks:
            result.problems.append(f"{result.tally.leaked_blocks} blocks or leases stayed")
        return result

    # -- load -----------------------------------------------------------------------------------

    async def _load_and_strike(self, blows: list[Blow]) -> list[Stream]:
        rng = self._scene.rng
        cases = [case for case, _ in self._cases.values() if not case.is_lasting]
        streams: list[Stream] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._num_streams):
                case = cases[number % len(cases)]
                stream = self._new(case, self._http if number % 2 else self._bus, streams)
                start = self._starter(stream, tasks, delay_s=rng.uniform(0, _STAGGER_S))
                start()
            for blow in blows:
                tasks.create_task(self._strike(blow, streams, tasks), name=blow.fault.name)
        return streams

    def _new(self, case: Case, client: Client, streams: list[Stream]) -> Stream:
        label = f"chaos-{self._scene.rng.randrange(2**32):08x}-{next(self._numbers)}"
        is_http = client is self._http
        stream = Stream(
            label=label,
            case=case,
            client=client,
            trace=self._witness.expect(label),
            answer=Answer(case.sampling.n),
            home=lambda: self._http.homes.get(label, "") if is_http else "",
        )
        streams.append(stream)
        return stream

    def _starter(
        self, stream: Stream, tasks: asyncio.TaskGroup, *, delay_s: float = 0.0
    ) -> Callable[[], None]:
        async def run() -> None:
            await asyncio.sleep(delay_s)
            try:
                async with asyncio.timeout(self._timeout_s + _LATE_S):
                    await stream.client.run(stream.case, stream.label, stream.answer)
            except TimeoutError:
                pass  # judged as hung: it has not ended

        def start() -> None:
            stream.task = tasks.create_task(run(), name=stream.label)

        return start

    # -- strike ---------------------------------------------------------------------------------

    async def _strike(self, blow: Blow, streams: list[Stream], tasks: asyncio.TaskGroup) -> None:
        fault, scene = blow.fault, self._scene
        marked = self._marked(blow, streams)
        hunt = Hunt(
            scene.mesh,
            self._witness,
            scene.rng,
            role=fault.role,
            trace=marked.trace,
            num_tokens=self._cases[marked.case.name][1].num_tokens,
            start=self._starter(marked, tasks),
        )
        try:
            await asyncio.sleep(_STAGGER_S)
            await POINTS[blow.point](hunt)
            blow.target = fault.choose(scene, marked)
            blow.affected = [s for s in streams if fault.affects(scene, blow.target, s)]
            blow.struck_s = time.monotonic()
            await fault.inject(scene, blow.target, marked)
        finally:
            hunt.release(but=blow.target if fault.kind.startswith("freeze") else None)
        blow.has_missed = hunt.has_missed
        await fault.heal(scene)
        blow.ended_s = time.monotonic()

    def _marked(self, blow: Blow, streams: list[Stream]) -> Stream:
        rng = self._scene.rng
        lasts = not blow.fault.client_stays
        cases = [case for case, _ in self._cases.values() if case.is_lasting is lasts]
        if blow.point in EARLY_POINTS:
            cases = [case for case in cases if case.is_long]
        uses_http = blow.fault.role == "bridge" or rng.random() < 0.5
        marked = self._new(rng.choice(cases), self._http if uses_http else self._bus, streams)
        if not blow.fault.client_stays:
            self._http.not_coming_back.add(marked.label)
        return marked

    # -- judge ----------------------------------------------------------------------------------

    async def _judge(self, blows: list[Blow], streams: list[Stream]) -> RoundResult:
        result = RoundResult(tally=Tally(faults=len(blows)), blows=blows)
        for stream in streams:
            expected = self._cases[stream.case.name][1]
            if stream.left_s is not None:
                problem = await self._judge_left(expected, stream, result.tally)
            else:
                problem = result.tally.judge(expected, stream.answer)
            if problem:
                where = "http" if stream.home() else "bus"
                result.problems.append(
                    f"{stream.answer.request_id} ({stream.case.name}, {where}): {problem}"
                )
        for blow in blows:
            since_s = blow.ended_s if blow.fault.from_thaw else blow.struck_s
            for stream in blow.affected:
                recovery_s = stream.answer.recovery_s(since_s)
                if recovery_s is not None and stream.left_s is None:
                    result.tally.recoveries_s.append(recovery_s)
        return result

    async def _judge_left(self, expected: Answer, stream: Stream, tally: Tally) -> str:
        """What it had read must be how the answer begins, and the request must be cancelled."""
        tally.streams += 1
        got, trace = stream.answer, stream.trace
        if not got.has_ended:
            found = compare(expected.beginning(got), got)
            tally.wrong_tokens += found.lost + found.duplicate + found.wrong
            if found:
                return "what was read before its client left is wrong"
        if not trace.request_id:
            return ""  # it left before anybody had heard of it
        end = await self._end_of(trace)
        so_late_s = (trace.ended_s or 0.0) - (stream.left_s or 0.0)
        if end is None or (isinstance(end, StreamEnd) and so_late_s > _ON_ITS_WAY_S):
            tally.hung_requests += 1
            return "went on although its client had left"
        return ""

    async def _end_of(self, trace: Trace) -> ChainEntry | None:
        """How a request ended; None when it has not, long after."""
        ends_s = time.monotonic() + LEFT_S
        while time.monotonic() < ends_s:
            with contextlib.suppress(BusUnavailable):
                tip = await self._chain.tip(trace.reader, trace.request_id)
                if tip.has_ended:
                    return tip.entry
            await asyncio.sleep(_POLL_S)
        return None


def plan(
    faults: list[type[Fault]], count: int, point: str, overlap: int, rng: random.Random
) -> list[list[Blow]]:
    """``count`` blows, fault after fault in turn, ``overlap`` of them in a round."""
    kinds = itertools.islice(itertools.cycle(faults), count)
    blows = [
        Blow(fault=kind(), point=point if point in POINTS else rng.choice(kind.points))
        for kind in kinds
    ]
    return [blows[i : i + overlap] for i in range(0, len(blows), overlap)]

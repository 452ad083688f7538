"""What a run of a fleet on the bus is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from infra.config import num_cores
from infra.times import Times
from loadgen.simulate.fleet_plan import FleetPlan, read_fleet
from loadgen.simulate.options import SimulationOptions
from loadgen.simulate.run import told as told_plan
from loadgen.simulate.trace_rate import read_trace_at
from loadgen.simulate_bus.crew import crew_of
from loadgen.traces import TraceEntry
from schemas.errors import ConfigError
from workers.crew.plan import MAX_CREW, CrewWorker

MODEL = "simulated"
ENGINES = "simulated engines on the real bus"

_WORKERS_AT_BEAT = 200  # whose beats and pulls of twice a second cost a fifth of a core
_LEAST_SCALE, _MOST_SCALE = 0.25, 100.0
_MOST_CONTROLS = 16
_FEW_WORKERS, _MANY_WORKERS = 6, 100  # of one process


def _or_one(told: float | None) -> float:
    return 1 if told is None else told


@dataclass(frozen=True, slots=True, kw_only=True)
class BusOptions:
    """How a fleet is run here.

    At a ``speed`` of 2 the workers' steps take half their time and requests come twice as fast;
    what is then measured is told in the fleet's time. The bus and its processes do not get faster:
    the higher the speed, the more of what is measured is theirs.

    Raises:
        ConfigError: a value that can't be used; ``param`` is the name of the option.
    """

    speed: float = 1.0
    workers_per_process: int | None = None  # None: see :attr:`BusRun.num_processes`
    time_scale: float | None = None  # of the protocol; None: see :attr:`BusRun.time_scale`
    trace_scale: float = 1.0  # of the trace's lengths
    drain_s: float = 600.0  # that the last requests get, in the fleet's time
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, value, high in (
            ("speed", 0.01, self.speed, 1000.0),
            ("workers_per_process", 1, _or_one(self.workers_per_process), MAX_CREW),
            ("time_scale", 0.05, _or_one(self.time_scale), _MOST_SCALE),
            ("scale", 0.01, self.trace_scale, 100.0),
        ):
            if not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value:g}, not within {low:g} and {high:g}", param=name
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class BusRun:
    """A fleet, a trace, and how.

    Attributes:
        workers: all of the plan, at the speed of the fleet they stand for.

    Raises:
        ConfigError: something in the plan that only virtual time can do.
    """

    plan: FleetPlan
    trace: tuple[TraceEntry, ...]
    trace_name: str
    options: BusOptions
    workers: tuple[CrewWorker, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.trace:
            raise ConfigError("the trace has no requests", param="trace")
        if self.plan.routers > _MOST_CONTROLS:
            raise ConfigError(
                f"routers is {self.plan.routers}; on the bus {_MOST_CONTROLS} at most",
                param="routers",
            )
        object.__setattr__(self, "workers", crew_of(self.plan))

    @property
    def crews(self) -> tuple[tuple[CrewWorker, ...], ...]:
        """The workers of each process, dealt out like cards: a process has some of each role."""
        num = self.num_processes
        return tuple(self.workers[number::num] for number in range(num))

    @property
    def num_processes(self) -> int:
        """Of workers: one per core unless they would be very few each, or over a hundred."""
        num_workers, told = len(self.workers), self.options.workers_per_process
        if told is not None:
            return -(-num_workers // told)
        shared = min(num_cores(), -(-num_workers // _FEW_WORKERS))
        return max(shared, -(-num_workers // _MANY_WORKERS))

    @property
    def context_length(self) -> int:
        """Of the model: what the smallest worker holds, less the block that is set aside."""
        return (min(worker.num_blocks for worker in self.workers) - 1) * self.plan.block_size

    @property
    def time_scale(self) -> float:
        """What all times of the protocol are multiplied by: as the fleet's beats want it, but not
        so fast that beats are what the machine does."""
        if self.options.time_scale is not None:
            return self.options.time_scale
        wanted = self.plan.beat_s / Times().beat_s / self.options.speed
        affordable = len(self.workers) / _WORKERS_AT_BEAT
        return min(_MOST_SCALE, max(_LEAST_SCALE, affordable, wanted))

    @property
    def slo_ms(self) -> dict[str, float]:
        """What the plan promises, as a load run names it, in the fleet's time."""
        policy = self.plan.policy
        told = {"ttft": policy.slo_ttft_ms, "tpot": policy.slo_tbt_ms}
        return {name: ms for name, ms in told.items() if ms}


def bus_run(
    fleet: Path,
    trace: Path,
    rate: float | None,
    num_requests: int,
    told: SimulationOptions,
    options: BusOptions,
) -> BusRun:
    """The run that a command line asks for.

    Raises:
        ConfigError: fleet or trace can't be used; or an option that only virtual time has.
    """
    if told.max_tokens:
        raise ConfigError("on the bus a request says how long its answer is", param="max_tokens")
    return BusRun(
        plan=told_plan(read_fleet(fleet), told),
        trace=read_trace_at(trace, rate)[:num_requests],
        trace_name=str(trace),
        options=options,
    )

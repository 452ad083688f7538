"""Simulated engines with a host tier whose copies a test makes itself, when it likes."""

from __future__ import annotations

from dataclasses import dataclass

from tests.workers.engine.simulated_engines import StrictRunner, make_engine
from workers.engine.api import StepReport
from workers.engine.engine import Engine
from workers.engine.simulated import SimulatedRunner
from workers.kv.api import BlockEvents
from workers.kv.host_tier import HostPool
from workers.kv.mover import BlockMover
from workers.kv.tally import TierTally
from workers.kv.tiers import Tiers, make_tiers


@dataclass
class TieredEngine:
    """The mover's thread is not started: ``move`` does what it would do."""

    engine: Engine
    tiers: Tiers

    @property
    def host(self) -> HostPool:
        assert self.tiers.host is not None
        return self.tiers.host

    @property
    def mover(self) -> BlockMover:
        assert self.tiers.mover is not None
        return self.tiers.mover

    @property
    def tally(self) -> TierTally:
        return self.tiers.tally

    def move(self) -> int:
        """Every copy that waits; how many batches."""
        count = 0
        while self.mover.work():
            count += 1
        return count

    def step(self, total: StepReport) -> None:
        report = self.engine.step()
        total.outputs += report.outputs
        total.held += report.held
        total.finished += report.finished
        total.failed += report.failed
        total.num_computed_tokens += report.num_computed_tokens

    def run(self, *, most_steps: int = 3000) -> StepReport:
        """All steps and all copies until neither is left; the books are checked at each step."""
        total = StepReport()
        for _ in range(most_steps):
            if not self.engine.has_work() and not self.move():
                return total
            self.step(total)
            self.move()
            self.check()
        raise AssertionError("the engine found no end")

    def check(self) -> None:
        """Both tiers' books are right, and sum to their sizes."""
        self.engine.check_invariants()
        self.host.check_invariants()
        states = self.engine.block_states()
        total = states.free + states.cached + states.active + states.leased + states.arriving
        assert total == self.engine.blocks.num_blocks
        assert min(states.active, states.leased, states.arriving) >= 0
        counts = self.host.counts()
        assert counts.free + counts.filling + counts.cached + counts.pinned == self.host.num_slots

    def check_idle(self) -> None:
        """Nothing is held anywhere: every block is free or cached."""
        self.check()
        states, counts = self.engine.block_states(), self.host.counts()
        assert states.free + states.cached == self.engine.blocks.num_blocks
        assert counts.filling == counts.pinned == 0


def make_tiered(
    num_blocks: int,
    num_host_blocks: int,
    events: BlockEvents | None = None,
    runner_class: type[SimulatedRunner] = StrictRunner,
    **options: int,
) -> TieredEngine:
    engine = make_engine(
        num_blocks, num_host_blocks=num_host_blocks, runner_class=runner_class, **options
    )
    return TieredEngine(engine, make_tiers(engine, events=events, evicted_share=0.5))

"""Whether a prompt's beginning is fetched; as ``workers/kv/worth.py`` weighs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.simulate.fleet_plan import WorkerSpec
from loadgen.simulate.sequence import Sequence
from loadgen.simulate.tasks import Surroundings, Task
from pipeline.cost_model import prefill_ms

if TYPE_CHECKING:
    from loadgen.simulate.worker import SimulatedWorker

_WAIT_SHARE = 0.5  # of the computing that it saves: what a fetch may take


@dataclass(frozen=True, slots=True)
class Fetch:
    """The first ``num_blocks`` blocks of a prompt will be here when ``num_bytes`` have come."""

    lender: SimulatedWorker
    num_blocks: int
    num_bytes: int


def best_fetch(task: Task, worker: SimulatedWorker, mesh: Surroundings) -> Fetch | None:
    """Of the workers that the task names, the one whose blocks bring the first token soonest; None:
    computing them does. What a lender has lost meanwhile it does not lend."""
    request, size, spec = task.request, mesh.plan.block_size, worker.spec
    most = (request.num_prompt - 1) // size
    own = worker.num_lendable(request.pieces, most)
    best, best_s = None, 0.0
    for source in task.sources:
        lender = mesh.worker(source.worker)
        if lender is None or lender is worker:
            continue
        there = min(lender.num_lendable(request.pieces, most), source.num_blocks)
        num_bytes = (there - own) * size * spec.kv_token_bytes
        takes_s = mesh.network.seconds(lender.spec, spec, num_bytes)
        gains_s = _gain_s(spec, size, own, there, takes_s)
        if gains_s > best_s:
            best, best_s = Fetch(lender, there, num_bytes), gains_s
    return best


def best_promotion(sequence: Sequence, worker: SimulatedWorker, mesh: Surroundings) -> int:
    """How many blocks of a prompt are to be had from the worker's own host memory, those on the
    device included; 0: it is computed sooner."""
    size, spec = mesh.plan.block_size, worker.spec
    most = (sequence.num_tokens - 1) // size
    own = worker.engine.pool.num_found(sequence.pieces, most)
    there = worker.host_tier.num_found(sequence.pieces, most)
    takes_s = mesh.network.promotion_s((there - own) * size * spec.kv_token_bytes)
    return there if _gain_s(spec, size, own, there, takes_s) > 0 else 0


def _gain_s(spec: WorkerSpec, size: int, own: int, there: int, takes_s: float) -> float:
    """What it saves to have ``there`` blocks in place of ``own``; negative, where it does not."""
    if there <= own:
        return -1.0
    saves_s = prefill_ms(spec.costs, (there - own) * size, own * size, num_steps=0) / 1e3
    return saves_s - takes_s if takes_s <= _WAIT_SHARE * saves_s else -1.0

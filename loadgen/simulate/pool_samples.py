"""How loaded the pools of a simulated fleet are, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.simulate.worker import SimulatedWorker
from pipeline.cost_model import decode_step_ms


@dataclass(slots=True)
class PoolSamples:
    """Moments, and how loaded the pools were then: means over their workers."""

    time_s: list[float] = field(default_factory=list)
    prefill_wait_ms: list[float] = field(default_factory=list)  # to compute what a worker has
    prefill_waiting: list[float] = field(default_factory=list)  # prompts, also those on no worker
    decode_step_ms: list[float] = field(default_factory=list)  # of a step of the batch
    decode_running: list[float] = field(default_factory=list)  # sequences
    kv_used: list[float] = field(default_factory=list)  # share of the decode workers' blocks


def take_sample(
    samples: PoolSamples,
    now_s: float,
    workers: Sequence[SimulatedWorker],
    num_unplaced: int,
) -> None:
    """Note how things are now; ``num_unplaced`` requests are on no worker yet."""
    loads = [(worker, worker.load()) for worker in workers]
    prefill = [(one, load) for one, load in loads if "prefill" in one.spec.queues]
    decode = [(one, load) for one, load in loads if "decode" in one.spec.queues]
    steps_ms = [
        decode_step_ms(one.spec.costs, len(one.engine.batch), load.context_tokens)
        for one, load in decode
    ]
    waiting = sum(load.num_waiting + one.num_offered for one, load in prefill)
    samples.time_s.append(now_s)
    samples.prefill_wait_ms.append(_mean([load.waiting_ms for _, load in prefill]))
    samples.prefill_waiting.append((waiting + num_unplaced) / max(1, len(prefill)))
    samples.decode_step_ms.append(_mean(steps_ms))
    samples.decode_running.append(_mean([len(one.engine.batch) for one, _ in decode]))
    used = [1 - load.num_free_blocks / max(1, load.num_blocks) for _, load in decode]
    samples.kv_used.append(_mean(used))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""Everything that ``mesh bench engine`` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from infra.model_folder import open_model_folder
from schemas.errors import ConfigError
from schemas.requests import SamplingParams
from workers.engine.api import ScheduledSequence
from workers.engine.bench.fidelity import Fidelity, chat_token_ids, compare
from workers.engine.bench.ours import Workbench
from workers.engine.bench.plan import EnginePlan
from workers.engine.bench.reference import Reference
from workers.engine.bench.timing import Turns, median_ms
from workers.engine.build import build_torch_engine
from workers.engine.engine import Engine
from workers.engine.sampler import sample
from workers.engine.scan import Scan

OURS = "ours"
SAMPLING_BATCH = 32
_SAMPLING_TURNS = 9

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What was measured. Times by who took them: "ours", and the dtypes of transformers.

    Attributes:
        decode_ms: by batch, one decode step.
        prefill_ms: one prompt of ``prompt_len`` tokens.
        sampling_ms: 32 rows of a real text's logits, temperature 0.8, top-p 0.9.
        fidelity: of ours and of transformers' other dtypes to transformers in float32.
        shares: what our steps spend on their parts, by batch and "prefill"; empty for a runner
            that does not know.
    """

    kind: str  # which runner it was
    dtype: str  # of its weights
    decode_ms: dict[int, dict[str, float]]
    prefill_ms: dict[str, float]
    sampling_ms: float
    fidelity: dict[str, Fidelity]
    shares: dict[str, dict[str, float]] = field(default_factory=dict)


def measure_engine(
    plan: EnginePlan, after_round: Callable[[], object] = lambda: None
) -> EngineFigures:
    """Load the model into our engine and into transformers, and measure. Takes a minute or more.

    Args:
        after_round: called after each of the plan's rounds, to measure something else by turns.

    Raises:
        ModelUnsupported: the model can't be served.
        ConfigError: its context is shorter than the plan's.
    """
    text_ids = chat_token_ids(plan.folder)
    token_ids = _prompt_ids(plan)
    engine = _our_engine(plan, text_ids)
    bench = Workbench(engine.runner, token_ids, context=plan.context, max_batch=max(plan.batches))
    hf = {name: Reference(plan.folder, name, token_ids) for name in plan.references}
    decodes = {batch: bench.decode(batch) for batch in plan.batches}
    prefill = bench.prefill(plan.prompt_len)
    decode_turns = {
        batch: _turns(plan, ours, {n: one.decode(batch, plan.context) for n, one in hf.items()})
        for batch, ours in decodes.items()
    }
    prefill_turns = _turns(
        plan, prefill, {n: one.prefill(plan.prompt_len) for n, one in hf.items()}
    )
    for _ in range(plan.rounds):
        for turns in (*decode_turns.values(), prefill_turns):
            turns.run_round()
        after_round()
    exact = hf.get("fp32") or Reference(plan.folder, "fp32", token_ids)
    expected = exact.teacher_forced(text_ids)
    others = {name: one.teacher_forced(text_ids) for name, one in hf.items() if one is not exact}
    steps = {**{str(batch): step for batch, step in decodes.items()}, "prefill": prefill}
    return EngineFigures(
        kind=engine.info.kind,
        dtype=engine.info.dtype,
        decode_ms={batch: turns.median_ms() for batch, turns in decode_turns.items()},
        prefill_ms=prefill_turns.median_ms(),
        sampling_ms=_sampling_ms(expected, bench.runner.scan),
        fidelity={
            OURS: compare(expected, bench.teacher_forced(text_ids)),
            **{name: compare(expected, got) for name, got in others.items()},
        },
        shares={name: parts for name, step in steps.items() if (parts := bench.shares(step))},
    )


def _prompt_ids(plan: EnginePlan) -> list[int]:
    """Random ids, enough for the longest step of the plan."""
    facts = open_model_folder(plan.folder)
    num_ids = max(plan.context, plan.prompt_len) + 1
    if num_ids > facts.context_length:
        raise ConfigError(f"the model's context has {facts.context_length} tokens", param="context")
    ids: list[int] = np.random.default_rng(0).integers(0, facts.vocab_size, num_ids).tolist()
    return ids


def _our_engine(plan: EnginePlan, text_ids: list[int]) -> Engine:
    num_blocks = Workbench.num_blocks_needed(
        context=plan.context,
        prompt_len=max(plan.prompt_len, len(text_ids)),
        max_batch=max(plan.batches),
        block_size=plan.block_size,
    )
    return build_torch_engine(
        plan.folder,
        dtype=plan.dtype,
        kernels=plan.kernels,
        device=plan.device,
        num_blocks=num_blocks,
        block_size=plan.block_size,
        num_threads=plan.threads,
    )


def _turns(plan: EnginePlan, ours: Step, others: dict[str, Step]) -> Turns:
    steps = {OURS: ours, **others}
    return Turns(steps, num_turns=plan.turns, budget_s=plan.budget_s, least_s=plan.least_s)


def _sampling_ms(logits: Tensor, scan: Scan) -> float:
    """logits: [n, vocab_size] float32; its rows are taken again where it has fewer than 32."""
    rows = logits[torch.arange(SAMPLING_BATCH) % len(logits)].clone()
    sequences = [
        ScheduledSequence(
            token_ids=(0,),
            num_prompt_tokens=1,
            block_table=(0,),
            start=0,
            count=1,
            sample=True,
            sampling=SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=1),
            index=0,
        )
        for seed in range(SAMPLING_BATCH)
    ]
    step = {OURS: lambda: sample(rows, sequences, frozenset(), scan)}
    return median_ms(step, num_turns=_SAMPLING_TURNS, budget_s=1.0)[OURS]

"""Torch engines for tests: building, running, and transformers' own answers to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from schemas.requests import SamplingParams
from workers.engine.api import EngineRequest, FinishedRequest, HeldRequest, StepReport
from workers.engine.build import build_torch_engine
from workers.engine.engine import Engine, EngineConfig

NUM_TOKENS = 20
MAX_STEPS = 2000


def small_engine(
    folder: Path,
    *,
    num_blocks: int = 96,
    max_batch_tokens: int = 13,
    kernels: str = "general",
) -> Engine:
    """fp32, blocks of 4 tokens, chunks of at most 13: everything happens soon."""
    config = EngineConfig(max_batch_tokens=max_batch_tokens, max_num_sequences=13)
    return build_torch_engine(
        folder,
        dtype="fp32",
        kernels=kernels,
        num_blocks=num_blocks,
        block_size=4,
        config=config,
    )


def greedy(max_tokens: int = NUM_TOKENS, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def prompts(lengths: Sequence[int], *, vocab_size: int, seed: int = 1) -> list[tuple[int, ...]]:
    """Random prompts of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist())
        for length in lengths
    ]


class Run:
    """Steps an engine and keeps what it reports."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishedRequest] = {}
        self.held: dict[str, HeldRequest] = {}

    def add(
        self, key: str, prompt: Sequence[int], sampling: SamplingParams, **more: object
    ) -> None:
        request = EngineRequest(key=key, prompt_ids=tuple(prompt), sampling=sampling, **more)  # type: ignore[arg-type]
        self.engine.add(request)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._take(self.engine.step())

    def to_end(self) -> dict[str, list[int]]:
        """Step until there is no work; nothing may be left. Returns choice 0's tokens by key."""
        for _ in range(MAX_STEPS):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work()
        self.engine.check_invariants()
        if not self.held:
            assert self.engine.blocks.num_available == self.engine.blocks.num_blocks
        return self.tokens

    def _take(self, report: StepReport) -> None:
        assert not report.failed, report.failed
        for output in report.outputs:
            self.tokens.setdefault(output.key, []).append(output.token_id)
        self.finished |= {request.key: request for request in report.finished}
        self.held |= {request.key: request for request in report.held}


def hand_over(run: Run, key: str, request: EngineRequest, target: Run) -> None:
    """Move a held request to another engine: bytes of its blocks, and the token it has."""
    held = run.held.pop(key)
    blocks = target.engine.reserve(key, held.num_tokens)
    assert blocks is not None
    target.engine.pool.slots[list(blocks)] = run.engine.pool.slots[list(held.blocks)]
    run.engine.release(key)
    target.tokens[key] = list(run.tokens[key])
    target.add(
        key,
        request.prompt_ids,
        request.sampling,
        tokens=(tuple(run.tokens[key]),),
        imported_blocks=blocks,
        num_imported_tokens=held.num_tokens,
    )


def reference_model(folder: Path) -> PreTrainedModel:
    """The model as transformers runs it, with its plainest attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config = GenerationConfig()  # else its end token is put into ours
    return model.eval()


def generate(
    model: PreTrainedModel, prompt: Sequence[int], num_tokens: int, eos: int | None = None
) -> list[int]:
    """Greedy answer of ``transformers.generate``."""
    return generate_all(model, [prompt], num_tokens, eos)[0]


def generate_all(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    eos: int | None = None,
) -> list[list[int]]:
    """Greedy answers of ``transformers.generate`` to prompts in one batch, which it pads on the
    left. A model of real size is read once per token then, not once per token and prompt."""
    settings = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * n + list(one) for n, one in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
    answers = model.generate(ids, attention_mask=mask, generation_config=settings)
    return [_to_end(answer, eos) for answer in answers[:, width:].tolist()]


def _to_end(answer: list[int], eos: int | None) -> list[int]:
    return answer[: answer.index(eos) + 1] if eos in answer else answer

"""Measuring an engine beside transformers, on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from schemas.errors import ConfigError
from tests.workers.engine.torch_engines import reference_model
from workers.engine.bench.fidelity import MAX_TOKENS, chat_token_ids, compare
from workers.engine.bench.measure import OURS, measure_engine
from workers.engine.bench.ours import Workbench
from workers.engine.bench.plan import EnginePlan
from workers.engine.bench.reference import Reference
from workers.engine.bench.timing import LEAST_TURNS, Turns, median_ms
from workers.engine.build import build_torch_engine
from workers.engine.engine import Engine

TinyFolder = Callable[[str], Path]


def general_engine(folder: Path, num_blocks: int) -> Engine:
    return build_torch_engine(
        folder, dtype="fp32", kernels="general", num_blocks=num_blocks, block_size=4
    )


def test_everything_is_measured_in_one_run(tiny_folder: TinyFolder) -> None:
    """Each batch and the prefill have a time of ours and of each of transformers' dtypes; ours in
    float32 is the reference's arithmetic, bf16 is close to it and not equal."""
    plan = EnginePlan(
        folder=tiny_folder("llama"),
        dtype="fp32",
        kernels="general",
        batches=(1, 3),
        context=21,
        prompt_len=40,
        rounds=2,
        turns=1,
        least_s=0.0,
    )
    rounds: list[int] = []
    figures = measure_engine(plan, lambda: rounds.append(1))
    assert len(rounds) == 2
    assert figures.kind == "torch"
    assert figures.dtype == "fp32"
    for times in (*figures.decode_ms.values(), figures.prefill_ms):
        assert set(times) == {OURS, "bf16", "fp32"}
        assert min(times.values()) > 0
    assert set(figures.decode_ms) == {1, 3}
    assert figures.sampling_ms > 0
    assert figures.fidelity[OURS].kl_mean < 1e-6
    assert figures.fidelity[OURS].argmax_agree == 1.0
    assert 1e-9 < figures.fidelity["bf16"].kl_mean < 0.1


def test_only_fidelity_needs_no_reference(tiny_folder: TinyFolder) -> None:
    """Without references nothing of transformers is timed; logits are compared all the same."""
    plan = EnginePlan(
        folder=tiny_folder("qwen2"),
        dtype="fp32",
        kernels="general",
        batches=(2,),
        context=5,
        prompt_len=6,
        rounds=1,
        turns=1,
        least_s=0.0,
        references=(),
    )
    figures = measure_engine(plan)
    assert set(figures.prefill_ms) == {OURS}
    assert set(figures.fidelity) == {OURS}


def test_native_steps_tell_their_parts(tiny_folder: TinyFolder) -> None:
    """Products, attention and rows together make a step; a runner of torch does not know."""
    folder = tiny_folder("llama")
    ids = [5 + 3 * number % 200 for number in range(30)]
    for kernels, parts in (("native", {"linear", "attention", "rows"}), ("general", set())):
        engine = build_torch_engine(
            folder, dtype="fp32", kernels=kernels, num_blocks=24, block_size=4
        )
        bench = Workbench(engine.runner, ids, context=17, max_batch=3)
        shares = bench.shares(bench.decode(3))
        assert set(shares) == parts
        assert all(0 < share < 1 for share in shares.values())
        assert not parts or sum(shares.values()) == pytest.approx(1)


def test_a_step_decodes_what_stands_behind_its_context(tiny_folder: TinyFolder) -> None:
    """Every sequence of the batch has the whole context: each gets the token that transformers
    finds behind it, and a second step finds the same."""
    folder = tiny_folder("llama")
    ids = [5 + 3 * number % 200 for number in range(30)]
    engine = general_engine(folder, 24)
    bench = Workbench(engine.runner, ids, context=17, max_batch=3)
    logits = reference_model(folder)(torch.tensor([ids[:18]])).logits[0, -1]
    for _ in range(2):
        sampled = bench.decode(3)()
        assert isinstance(sampled, list)
        assert [one.token_id for one in sampled] == [int(logits.argmax())] * 3
    chosen = Reference(folder, "fp32", ids).decode(3, 17)()
    assert isinstance(chosen, torch.Tensor)
    assert chosen.tolist() == [int(logits.argmax())] * 3


def test_teacher_forcing_gives_the_logits_of_every_position(tiny_folder: TinyFolder) -> None:
    """Position by position, batch by batch, they are those of one forward pass."""
    folder = tiny_folder("llama")
    ids = chat_token_ids(folder)
    assert 0 < len(ids) <= MAX_TOKENS
    engine = general_engine(folder, 40)
    bench = Workbench(engine.runner, ids, context=4, max_batch=1)
    got = torch.stack(bench.teacher_forced(ids, batch=5))
    expected = Reference(folder, "fp32", ids).teacher_forced(ids)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_divergence_is_that_of_the_definition() -> None:
    """Two tokens, p = (3/4, 1/4) against (1/2, 1/2); and once the likeliest differs."""
    expected = torch.tensor([[math.log(3), 0.0], [1.0, 0.0]])
    found = compare(expected, [torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0])])
    first = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    second = math.tanh(0.5)  # (p - q) * (1 - 0) with p - q = tanh(1/2)
    assert found.kl_mean == pytest.approx((first + second) / 2)
    assert found.argmax_agree == 0.5
    assert found.num_positions == 2


class Bench:
    """Steps that take what they say, by a clock of ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.ran = 0.0, ""
        monkeypatch.setattr("workers.engine.bench.timing.time.perf_counter", lambda: self.now_s)

    def step(self, name: str, *taken_s: float) -> Callable[[], None]:
        """Each of ``taken_s`` in turn, then the last one again and again."""
        left = list(taken_s)

        def run() -> None:
            self.now_s += left.pop(0) if len(left) > 1 else left[0]
            self.ran += name

        return run


def test_steps_take_turns_and_slow_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn is not counted, then all go by turns; who has used up its budget stops after
    three."""
    bench = Bench(monkeypatch)
    steps = {"a": bench.step("a", 0.25), "b": bench.step("b", 2.0)}
    times = median_ms(steps, num_turns=5, budget_s=5.0)
    assert times == {"a": 250.0, "b": 2000.0}
    assert bench.ran == "ab" * (1 + LEAST_TURNS) + "aa"


def test_short_steps_have_as_much_time_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round; the median is over all of them, so that a slow moment is no figure. A
    budget is for all rounds together."""
    bench = Bench(monkeypatch)
    steps = {"a": bench.step("a", 1.0, 1.0, 1.0, 0.25), "b": bench.step("b", 2.0)}
    turns = Turns(steps, num_turns=2, budget_s=5.0, least_s=1.0)
    turns.run_round()
    assert bench.ran == "ab" * 3
    turns.run_round()
    assert bench.ran == "ab" * 3 + "ab" + "ab" + "aaa"
    assert turns.median_ms() == {"a": 250.0, "b": 2000.0}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"context": 0}, "context"),
        ({"batches": ()}, "batches"),
        ({"batches": (1, 0)}, "batches"),
        ({"references": ("fp64",)}, "references"),
    ],
)
def test_plans_that_cannot_be_measured_are_refused(more: dict[str, object], param: str) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError) as caught:
        EnginePlan(folder=Path(), **more)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_context_longer_than_the_models_is_refused(tiny_folder: TinyFolder) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match="512 tokens"):
        measure_engine(EnginePlan(folder=tiny_folder("llama"), prompt_len=512))

"""The simulated runner: what its steps are said to take, and what its tokens hang on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from infra.transport.shm import SharedPool
from pipeline.cost_model import FREE
from schemas.errors import ModelUnsupported
from schemas.requests import SamplingParams
from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tiny_tokenizer
from tests.workers.engine.simulated_engines import (
    BLOCK_SIZE,
    PROMPT,
    answer_of,
    engines,
    make_engine,
    make_runner,
    request_of,
    run,
    tokens_of,
)
from workers.engine.api import ScheduledSequence
from workers.engine.simulated import ENTRY_BYTES, batch_ms, build_simulated


def test_a_simulated_engine_is_built_from_a_tokenizer_folder(tmp_path: Path) -> None:
    """Any folder with a tokenizer will do; eos comes from its configuration, and two engines of
    one folder and block size can read each other's blocks."""
    write_tiny_tokenizer(tmp_path)
    built = [build_simulated(tmp_path, costs=FREE) for _ in range(2)]
    assert built[0].info == built[1].info
    assert built[0].info.eos_token_ids == {EOS_TOKEN_ID}
    other = build_simulated(tmp_path, block_size=32)
    assert other.info.fingerprint != built[0].info.fingerprint


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The error says what is missing, or what is wrong with the file."""
    with pytest.raises(ModelUnsupported, match=r"no tokenizer\.json"):
        build_simulated(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json of"):
        build_simulated(tmp_path)


def scheduled(start: int, count: int) -> ScheduledSequence:
    return ScheduledSequence(
        token_ids=[3] * (start + count),
        num_prompt_tokens=1,
        block_table=range(99),
        start=start,
        count=count,
        sample=True,
        sampling=SamplingParams(),
        index=0,
    )


def test_a_prompt_in_chunks_costs_its_tokens_and_squares_once() -> None:
    """The cost model counts each token and each pair of positions once, however it is cut."""
    costs = replace(FREE, prefill_token_ms=1, prefill_square_ms=0.5)
    whole = batch_ms(costs, [scheduled(0, 8)])
    assert whole == 8 + 0.5 * 64
    assert batch_ms(costs, [scheduled(0, 3)]) + batch_ms(costs, [scheduled(3, 5)]) == whole


def test_a_decode_step_costs_by_context_and_batch() -> None:
    """``A + B * sum(context) + C * batch``, and nothing when the model is instant."""
    costs = replace(FREE, decode_base_ms=10, decode_context_ms=1, decode_sequence_ms=2)
    assert batch_ms(costs, [scheduled(4, 1), scheduled(6, 1)]) == 10 + (5 + 7) + 2 * 2
    assert batch_ms(FREE, [scheduled(0, 8), scheduled(4, 1)]) == 0


def test_a_long_prompt_at_once_leaves_what_its_tokens_leave_one_by_one() -> None:
    """However a prompt is cut, its KV is the same, over blocks and pieces of the arithmetic."""
    num_tokens, num_blocks = 2500, 2500 // BLOCK_SIZE
    token_ids = [(7 * position) % 250 for position in range(num_tokens)]
    pools = []
    for cuts in ([0, num_tokens], [0, 1, 2, 3, 1100, *range(1101, num_tokens + 1)]):
        pool = SharedPool(num_blocks, BLOCK_SIZE * ENTRY_BYTES)
        runner = make_runner(pool)
        for start, end in pairwise(cuts):
            whole = scheduled(start, end - start)
            whole.token_ids = token_ids
            whole.block_table = range(num_blocks - 1, -1, -1)
            runner.execute([whole])
        pools.append(pool.slots.copy())
        pool.close()
    assert (pools[0] == pools[1]).all()
    assert pools[0].any(axis=1).all()


def test_many_at_once_get_what_each_would_get_alone() -> None:
    """Nobody's tokens depend on who else is in the batch, whatever seeds and temperatures."""
    engine = make_engine(num_blocks=256, max_batch_tokens=512, max_num_sequences=64)
    samplings: dict[str, dict[str, object]] = {
        f"r{i}": {"seed": (-1) ** i * i * 2**61, "temperature": i % 3 / 2, "max_tokens": 8 + i % 5}
        for i in range(40)
    }
    with engines(engine):
        for i, (key, sampling) in enumerate(samplings.items()):
            engine.add(request_of(key, (*PROMPT, 20 + i), **sampling))
        report = run(engine)
        for i, (key, sampling) in enumerate(samplings.items()):
            assert tokens_of(report, key) == answer_of((*PROMPT, 20 + i), **sampling)

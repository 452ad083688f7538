from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from infra.transport.shm import SharedPool
from pipeline.cost_model import FREE, prefill_ms
from schemas.errors import ContextTooLong, InvalidRequest, ModelUnsupported, NoCapacity
from schemas.requests import SamplingParams
from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tiny_tokenizer
from tests.workers.engine.simulated_engines import (
    BLOCK_SIZE,
    CONTEXT_LENGTH,
    StrictRunner,
    copy_blocks,
    engines,
    expected_answer,
    make_engine,
    make_runner,
    request_of,
    run,
    text_of,
    tokens_of,
    vocabulary,
)
from workers.engine.api import FinishedRequest, Sampled, ScheduledSequence
from workers.engine.engine import Engine
from workers.engine.simulated import ENTRY_BYTES, batch_ms, build_simulated

PROMPT = (10, 11, 12, 13, 14)


def answer_of(
    prompt_ids: tuple[int, ...] = PROMPT, index: int = 0, **sampling: object
) -> list[int]:
    fields = {"seed": 1, "max_tokens": 12, **sampling}
    return expected_answer(prompt_ids, SamplingParams(**fields), index)[0]  # type: ignore[arg-type]


# ---- one request -------------------------------------------------------------------------


def test_a_request_gets_its_tokens_in_order_and_one_end() -> None:
    """The life of a request: numbered outputs, the last with its reason, one FinishedRequest."""
    engine = make_engine()
    with engines(engine):
        engine.add(request_of("a"))
        report = run(engine)
        assert tokens_of(report, "a") == answer_of()
        assert [output.number for output in report.outputs] == list(range(12))
        assert [output.finish_reason for output in report.outputs] == [None] * 11 + ["length"]
        assert report.finished == [
            FinishedRequest(
                key="a", num_tokens=(12,), finish_reasons=("length",), num_cached_tokens=0
            )
        ]
        assert text_of(report, "a") == vocabulary().decode(answer_of())


def test_answers_end_by_themselves_unless_told_not_to() -> None:
    """The simulated model samples eos now and then; it counts as a token and shows no text."""
    engine = make_engine(128)
    prompt, answer = next(
        ((n, n), answer_of((n, n), max_tokens=80))
        for n in range(3, 300)
        if len(answer_of((n, n), max_tokens=80)) < 60
    )
    with engines(engine):
        engine.add(request_of("a", prompt, max_tokens=80))
        engine.add(request_of("b", prompt, max_tokens=80, ignore_eos=True))
        report = run(engine)
        assert answer[-1] == EOS_TOKEN_ID
        assert tokens_of(report, "a") == answer
        assert report.outputs[-1].key == "b"
        assert text_of(report, "a") == vocabulary().decode(answer[:-1])
        assert len(tokens_of(report, "b")) == 80


def test_stop_token_ends_the_answer_without_text() -> None:
    """A stop id belongs to the tokens, not to the text; before min_tokens it ends nothing."""
    third = answer_of()[2]
    engine = make_engine()
    with engines(engine):
        engine.add(request_of("a", stop_token_ids=(third,)))
        engine.add(request_of("b", stop_token_ids=(third,), min_tokens=3))
        report = run(engine)
        assert tokens_of(report, "a") == answer_of()[:3]
        assert text_of(report, "a") == vocabulary().decode(answer_of()[:2])
        assert len(tokens_of(report, "b")) > 3


def test_stop_string_cuts_the_text() -> None:
    """The answer ends with the token that completes a stop string, which is never shown."""
    text = vocabulary().decode(answer_of())
    stop = text[6:9]
    engine = make_engine()
    with engines(engine):
        engine.add(request_of("a", stop=(stop,)))
        report = run(engine)
        assert text_of(report, "a") == text[: text.index(stop)]
        assert report.finished[0].finish_reasons == ("stop",)


def test_text_held_back_comes_with_the_last_token() -> None:
    """When the limit ends the answer, what could have become a stop string is shown after all."""
    text = vocabulary().decode(answer_of())
    engine = make_engine()
    with engines(engine):
        engine.add(request_of("a", stop=(text[-5:] + "never",)))
        report = run(engine)
        assert text_of(report, "a") == text
        assert len(report.outputs[-1].text) >= 5


def test_the_end_of_the_context_ends_the_answer() -> None:
    """Prompt and answer together never exceed the context: "length"."""
    engine = make_engine()
    with engines(engine):
        prompt = tuple(range(3, 3 + CONTEXT_LENGTH - 4))
        engine.add(request_of("a", prompt, max_tokens=None, ignore_eos=True))
        report = run(engine)
        assert len(tokens_of(report, "a")) == 4
        assert report.finished[0].finish_reasons == ("length",)


def test_logprobs_come_with_their_texts() -> None:
    """With logprobs=k every token has its own logprob and k alternatives; without, none."""
    engine = make_engine()
    with engines(engine):
        engine.add(request_of("a", logprobs=2, max_tokens=3))
        engine.add(request_of("b", max_tokens=3))
        report = run(engine)
        for output in report.outputs:
            if output.key == "b":
                assert output.logprob is None
                continue
            assert output.logprob is not None
            assert output.logprob.token_id == output.token_id
            assert output.logprob.token == vocabulary().token_text(output.token_id)
            assert len(output.logprob.top) == 2


# ---- many requests -----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_the_batch(temperature: float) -> None:
    """Sixteen seeded requests at once give the tokens that each gives alone."""
    engine = make_engine(256, max_batch_tokens=32, max_num_sequences=16)
    with engines(engine):
        prompts = {str(n): tuple(range(3, 8 + n)) for n in range(16)}
        for key, prompt in prompts.items():
            engine.add(request_of(key, prompt, temperature=temperature, seed=int(key)))
        report = run(engine)
        for key, prompt in prompts.items():
            assert tokens_of(report, key) == answer_of(
                prompt, temperature=temperature, seed=int(key)
            )


def test_choices_share_the_prompt() -> None:
    """The prompt of n choices is computed once; each choice then has tokens of its own."""
    engine = make_engine()
    prompt = tuple(range(3, 25))
    with engines(engine):
        engine.add(request_of("a", prompt, n=4, max_tokens=6))
        report = run(engine)
        answers = [tokens_of(report, "a", index) for index in range(4)]
        assert answers == [answer_of(prompt, index, max_tokens=6) for index in range(4)]
        assert len({tuple(answer) for answer in answers}) == 4
        # each choice computes the prompt's last position again, and 5 tokens after it
        assert report.num_computed_tokens == len(prompt) + 4 * 6


def test_more_choices_than_places_run_one_after_the_other() -> None:
    """n may exceed max_num_sequences."""
    engine = make_engine(max_num_sequences=2)
    with engines(engine):
        engine.add(request_of("a", n=5, max_tokens=3))
        report = run(engine)
        assert len(report.outputs) == 15
        assert report.finished[0].num_tokens == (3,) * 5


def test_a_repeated_prompt_is_found_in_the_cache() -> None:
    """The second request of equal prompt and salt skips the full blocks; another salt does not."""
    engine = make_engine()
    prompt = tuple(range(3, 24))
    with engines(engine):
        for key, salt in (("a", b"x"), ("b", b"x"), ("c", b"y")):
            engine.add(request_of(key, prompt, salt=salt, max_tokens=2))
            report = run(engine)
            assert tokens_of(report, key) == answer_of(prompt, max_tokens=2)
            assert report.finished[0].num_cached_tokens == (20 if key == "b" else 0)


def test_a_small_pool_preempts_and_changes_nothing() -> None:
    """Six requests in a pool for about two: preempted, computed again, the same tokens."""
    engine = make_engine(12)
    with engines(engine):
        for n in range(6):
            engine.add(request_of(str(n), tuple(range(n + 3, n + 16)), max_tokens=20))
        report = run(engine)
        assert engine.scheduler.num_preemptions > 0
        for n in range(6):
            assert tokens_of(report, str(n)) == answer_of(
                tuple(range(n + 3, n + 16)), max_tokens=20
            )


def test_load_tells_how_busy_it_is() -> None:
    """Heartbeats carry running, waiting, free places and blocks, and tokens to compute."""
    engine = make_engine(max_num_sequences=2)
    with engines(engine):
        for n in range(3):
            engine.add(request_of(str(n), max_tokens=2))
        assert engine.load().waiting_tokens == 15
        engine.step()
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.num_free_slots) == (2, 1, 0)
        assert load.num_free_blocks == load.num_blocks - 4
        run(engine)
        assert engine.load().num_free_slots == 2


def test_load_counts_who_is_on_its_way_with_its_kv() -> None:
    """Blocks that are being filled belong to a sequence that will run as soon as it has them: with
    slow links there may be many, and routers would send as many again."""
    engine = make_engine()
    with engines(engine):
        assert engine.reserve("a", 2 * BLOCK_SIZE) is not None
        assert engine.reserve("b", BLOCK_SIZE) is not None
        load = engine.load()
        assert (load.num_running, load.context_tokens) == (2, 3 * BLOCK_SIZE)
        for key in "ab":
            engine.release(key)
        load = engine.load()
        assert (load.num_running, load.context_tokens) == (0, 0)


def test_kv_that_keeps_arriving_does_not_starve_who_was_preempted() -> None:
    """A preempted sequence gets the blocks that come free, however many reservations ask for them
    first; when it runs again, KV from outside has its room again."""
    engine = make_engine(12)
    with engines(engine):
        for key in ("old", "young"):
            engine.add(request_of(key, tuple(range(30, 41)), max_tokens=30, ignore_eos=True))
        while engine.scheduler.num_preemptions == 0:
            engine.step()
        ends: dict[str, int] = {}
        arrivals: list[int] = []
        for number in range(120):
            engine.release(f"arrival {number - 8}")  # its copy failed, or it ended elsewhere
            if engine.reserve(f"arrival {number}", BLOCK_SIZE) is not None:
                arrivals.append(number)
            if engine.has_work():
                ends |= {finished.key: number for finished in engine.step().finished}
            engine.check_invariants()
        assert list(ends) == ["old", "young"]
        assert any(ends["old"] < number < ends["young"] for number in arrivals)
        for number in arrivals[-8:]:
            engine.release(f"arrival {number}")


def test_load_tells_how_long_what_waits_will_take() -> None:
    """By its own costs: every prompt that waits or is half computed, as far as it must be computed,
    and the base once per step; contexts are those of what decodes."""
    engine = make_engine(max_batch_tokens=8, max_num_sequences=2)
    assert engine.load().waiting_ms == 0, "without costs nothing is said"
    costs = replace(FREE, prefill_base_ms=3, prefill_token_ms=2, prefill_square_ms=0.5)
    engine.meter.costs = costs
    with engines(engine):
        engine.add(request_of("a", tuple(range(3, 15)), max_tokens=3))
        assert engine.load().waiting_ms == prefill_ms(costs, 12, num_steps=2)
        engine.step()
        assert engine.load().waiting_ms == prefill_ms(costs, 4, 8)
        engine.step()
        load = engine.load()
        assert (load.waiting_ms, load.context_tokens) == (0, 13)
        engine.add(request_of("b", tuple(range(3, 17)), max_tokens=1))
        assert engine.load().waiting_ms == prefill_ms(costs, 2, 12), "three blocks are in the pool"
        run(engine)


# ---- refusals and failures ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (request_of("a", tuple(range(3, 3 + CONTEXT_LENGTH))), ContextTooLong),
        (request_of("a", tuple(range(3, 60)), max_tokens=40), NoCapacity),
        (request_of("a", ()), InvalidRequest),
        (request_of("a", (3, 4000)), InvalidRequest),
        (request_of("a", tokens=((1,), (2,))), ValueError),
        (request_of("a", imported_blocks=(1,), num_imported_tokens=4), ValueError),
    ],
)
def test_what_can_never_run_is_refused(request_: object, error: type[Exception]) -> None:
    """Refused when added, with the reason; nothing of it stays, and it is never retried."""
    engine = make_engine(16)
    with engines(engine):
        with pytest.raises(error):
            engine.add(request_)  # type: ignore[arg-type]
        assert not engine.has_work()


def test_a_request_that_just_fits_the_pool_runs() -> None:
    """Refusal is exact: the last token is sampled and never computed, so it needs no room."""
    engine = make_engine(4)
    with engines(engine):
        engine.add(request_of("a", max_tokens=12))
        assert tokens_of(run(engine), "a") == answer_of()
        with pytest.raises(NoCapacity):
            engine.add(request_of("b", max_tokens=13))


def test_holding_several_choices_needs_room_for_prompt_and_one_fork() -> None:
    """The prompt stays while its choices sample, so one more block is needed; they take turns."""
    prompt = tuple(range(20, 28))
    small, enough = make_engine(2), make_engine(3)
    with engines(small, enough):
        with pytest.raises(NoCapacity):
            small.add(request_of("a", prompt, n=2, hold_after_first=True))
        enough.add(request_of("a", prompt, n=2, hold_after_first=True))
        report = run(enough)
        assert len(report.outputs) == 2
        assert len(report.held) == 1
        enough.release("a")


def test_a_held_request_needs_room_for_its_prompt_only() -> None:
    """The prefill role never decodes, so a long answer is no reason to refuse there."""
    engine = make_engine(4)
    with engines(engine):
        engine.add(request_of("a", tuple(range(3, 18)), max_tokens=70, hold_after_first=True))
        assert len(run(engine).held) == 1
        engine.release("a")


class FaultyRunner(StrictRunner):
    """Raises when a certain token is in the batch's input, or always."""

    fatal_id: int | None = None

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        for scheduled in batch:
            if self.fatal_id is None or scheduled.token_ids[0] == self.fatal_id:
                raise RuntimeError("device says no")
        return super().execute(batch)


class OneFaultRunner(FaultyRunner):
    fatal_id = 77


def test_only_the_guilty_request_fails() -> None:
    """When a batch raises, its sequences run one by one; the others never notice."""
    engine = make_engine(runner_class=OneFaultRunner)
    with engines(engine):
        engine.add(request_of("a"))
        engine.add(request_of("bad", (77, 78, 79), n=2))
        engine.add(request_of("c", (20, 21)))
        report = run(engine)
        assert [failed.key for failed in report.failed] == ["bad"]
        assert "device says no" in report.failed[0].message
        assert tokens_of(report, "a") == answer_of()
        assert tokens_of(report, "c") == answer_of((20, 21))


def test_when_everything_fails_all_of_the_batch_fail() -> None:
    """A broken device ends every request of the batch, each once, and holds no block."""
    engine = make_engine(runner_class=FaultyRunner)
    with engines(engine):
        engine.add(request_of("a"))
        engine.add(request_of("b", (20, 21)))
        assert sorted(failed.key for failed in run(engine).failed) == ["a", "b"]


class NoCopyRunner(StrictRunner):
    def copy_block(self, source: int, target: int) -> None:
        raise RuntimeError("no copy")


def test_a_failed_fork_fails_its_request_alone() -> None:
    """The copy with which a fork begins is the request's own business."""
    engine = make_engine(runner_class=NoCopyRunner)
    with engines(engine):
        engine.add(request_of("a"))
        engine.add(request_of("b", (20, 21, 22), n=3))  # the fork begins within a block
        report = run(engine)
        assert [failed.key for failed in report.failed] == ["b"]
        assert tokens_of(report, "a") == answer_of()


class ShortRunner(StrictRunner):
    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        return super().execute(batch)[:-1]


def test_a_runner_that_loses_a_token_is_noticed() -> None:
    """Results are matched to sequences by count: one too few is an error, not a shift."""
    engine = make_engine(runner_class=ShortRunner)
    with engines(engine):
        engine.add(request_of("a"))
        assert "EngineFailed" in run(engine).failed[0].message


# ---- release -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("n", [1, 3])
def test_release_at_any_time_frees_everything(num_steps: int, n: int) -> None:
    """Waiting, computing its prompt, forking, decoding: afterwards no block is held, and no output
    of it comes any more. Releasing again is fine."""
    engine = make_engine(max_batch_tokens=8)
    with engines(engine):
        engine.add(request_of("a", tuple(range(3, 16)), n=n))
        for _ in range(num_steps):
            engine.step()
        engine.release("a")
        assert engine.blocks.counts().active == 0
        assert not run(engine).outputs
        engine.release("a")


# ---- hold, handover, take-over -----------------------------------------------------------


def held(engine: Engine, **fields: object) -> tuple[list[int], tuple[int, ...], int]:
    """Let ``engine`` prefill request "a"; its first tokens, held blocks, and how many tokens."""
    engine.add(request_of("a", hold_after_first=True, **fields))
    report = run(engine)
    [request] = report.held
    return [output.token_id for output in report.outputs], request.blocks, request.num_tokens


def test_held_blocks_stay_until_release() -> None:
    """A held request computes nothing more; its blocks are pinned, whatever else comes."""
    engine = make_engine(8)
    with engines(engine):
        tokens, blocks, num_tokens = held(engine)
        assert tokens == answer_of()[:1]
        assert num_tokens == len(PROMPT)
        generations = engine.pool.generations.copy()
        for n in range(20):
            engine.add(request_of(str(n), (30 + n,) * 8, max_tokens=4))
        run(engine)
        assert (engine.pool.generations[list(blocks)] == generations[list(blocks)]).all()
        engine.release("a")


def test_a_request_that_ends_with_its_first_token_is_not_held() -> None:
    """FinishedRequest instead of HeldRequest, and the blocks are back."""
    engine = make_engine()
    with engines(engine):
        engine.add(request_of("a", max_tokens=1, hold_after_first=True, n=2))
        report = run(engine)
        assert not report.held
        assert report.finished[0].num_tokens == (1, 1)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9])
def test_handover_goes_on_with_the_same_tokens(n: int, length: int) -> None:
    """Prefill in one engine, bytes copied, decode in another: the tokens of one engine alone, and
    no position of the prompt is computed again."""
    prefill, decode = make_engine(), make_engine(max_batch_tokens=64)
    prompt = tuple(range(3, 3 + length))
    with engines(prefill, decode):
        first, blocks, num_tokens = held(prefill, prompt_ids=prompt, n=n)
        assert num_tokens == length
        decode.add(request_of("other"))
        decode.step()
        target = decode.reserve("a", num_tokens)
        assert target is not None
        copy_blocks(prefill, blocks, decode, target)
        prefill.release("a")
        decode.add(
            request_of(
                "a",
                prompt,
                n=n,
                tokens=tuple((token,) for token in first),
                imported_blocks=target,
                num_imported_tokens=num_tokens,
            )
        )
        report = run(decode)
        answers = [answer_of(prompt, index) for index in range(n)]
        for index, answer in enumerate(answers):
            assert [first[index], *tokens_of(report, "a", index)] == answer
        num_others = len(tokens_of(report, "other"))
        assert report.num_computed_tokens - num_others == sum(len(a) - 1 for a in answers)


def test_a_corrupted_handover_shows() -> None:
    """The simulated KV is read back: blocks that never arrived change the tokens. This is what
    makes the equality in the other tests mean something."""
    prefill, decode = make_engine(), make_engine()
    with engines(prefill, decode):
        first, _, num_tokens = held(prefill)
        prefill.release("a")
        target = decode.reserve("a", num_tokens)
        assert target is not None
        decode.add(
            request_of(
                "a",
                tokens=(tuple(first),),
                imported_blocks=target,
                num_imported_tokens=num_tokens,
            )
        )
        assert [*first, *tokens_of(run(decode), "a")] != answer_of()


def test_import_of_everything_computes_the_last_token_again() -> None:
    """KV of all tokens is there, but logits are not: the last position is computed."""
    source, target = make_engine(), make_engine()
    with engines(source, target):
        _, blocks, num_tokens = held(source)
        there = target.reserve("a", num_tokens)
        assert there is not None
        copy_blocks(source, blocks, target, there)
        source.release("a")
        target.add(request_of("a", imported_blocks=there, num_imported_tokens=num_tokens))
        assert tokens_of(run(target), "a") == answer_of()


def import_of(
    source: Engine, target: Engine, key: str, prompt: tuple[int, ...], **fields: object
) -> list[int]:
    """Prefill in ``source``, hand over to ``target``; returns the first token in a list."""
    first, blocks, num_tokens = held(source, prompt_ids=prompt, **fields)
    there = target.reserve(key, num_tokens)
    assert there is not None
    copy_blocks(source, blocks, target, there)
    source.release("a")
    target.add(
        request_of(
            key,
            prompt,
            tokens=(tuple(first),),
            imported_blocks=there,
            num_imported_tokens=num_tokens,
            **fields,
        )
    )
    return first


def test_imported_blocks_are_found_by_later_requests() -> None:
    """Imported KV is as good as computed KV: full blocks are shared by hash."""
    source, target = make_engine(), make_engine()
    prompt = tuple(range(3, 16))
    with engines(source, target):
        import_of(source, target, "a", prompt)
        run(target)
        target.add(request_of("b", prompt))
        report = run(target)
        assert tokens_of(report, "b") == answer_of(prompt)
        assert report.finished[0].num_cached_tokens == 12


def test_import_that_waits_for_room_keeps_its_blocks() -> None:
    """An import whose next token does not fit yet waits as it is; nothing is computed twice."""
    source, target = make_engine(), make_engine(4)
    prompt = tuple(range(3, 11))
    with engines(source, target):
        pinned = target.reserve("pinned", 2 * BLOCK_SIZE)
        assert pinned is not None
        first = import_of(source, target, "a", prompt, max_tokens=5)
        assert run(target).outputs == []
        assert target.reserve("other", 1) is None
        target.release("pinned")
        report = run(target)
        assert first + tokens_of(report, "a") == answer_of(prompt, max_tokens=5)
        assert report.num_computed_tokens == 4


def test_a_reservation_leaves_room_for_prompts_half_computed() -> None:
    """What a running prompt still needs is not given to an import."""
    engine = make_engine(6, max_batch_tokens=8)
    with engines(engine):
        engine.add(request_of("a", tuple(range(3, 19)), max_tokens=1))
        engine.step()
        assert engine.reserve("b", 3 * BLOCK_SIZE) is None
        assert engine.reserve("b", 2 * BLOCK_SIZE) is not None
        run(engine)
        assert engine.scheduler.num_preemptions == 0
        engine.release("b")


def test_an_engine_without_room_has_no_work() -> None:
    """When only held blocks are in the way there is nothing to do until a release: has_work says
    so, or the engine's thread would spin."""
    engine = make_engine(4)
    with engines(engine):
        assert engine.reserve("pinned", 3 * BLOCK_SIZE) is not None
        engine.add(request_of("a", (3, 4, 5, 6, 7)))
        assert engine.has_work()
        engine.step()
        assert not engine.has_work()
        engine.release("pinned")
        assert engine.has_work()
        assert tokens_of(run(engine), "a") == answer_of((3, 4, 5, 6, 7))


def test_import_that_waits_may_lose_its_blocks_to_older_requests() -> None:
    """Imported KV is as good as computed KV, no better: it is given up, and computed again."""
    source, target = make_engine(), make_engine(6, max_num_sequences=1)
    with engines(source, target):
        first, blocks, num_tokens = held(source, prompt_ids=tuple(range(3, 15)))
        target.add(request_of("old", (40, 41), max_tokens=18, ignore_eos=True))
        [output] = target.step().outputs
        there = target.reserve("a", num_tokens)
        assert there is not None
        copy_blocks(source, blocks, target, there)
        source.release("a")
        target.add(
            request_of(
                "a",
                tuple(range(3, 15)),
                tokens=(tuple(first),),
                imported_blocks=there,
                num_imported_tokens=num_tokens,
            )
        )
        report = run(target)
        assert target.scheduler.num_preemptions == 1
        assert [*first, *tokens_of(report, "a")] == answer_of(tuple(range(3, 15)))
        old = [output.token_id, *tokens_of(report, "old")]
        assert old == answer_of((40, 41), max_tokens=18, ignore_eos=True)


def test_prompt_that_will_be_held_is_computed_again_when_it_was_evicted() -> None:
    """An older request takes the blocks of a prompt whose choices have not run yet; in the end it
    is held with correct blocks all the same."""
    prefill, decode = make_engine(4), make_engine()
    prompt = tuple(range(20, 28))
    with engines(prefill, decode):
        prefill.add(request_of("old", tuple(range(3, 10)), max_tokens=4))
        prefill.step()
        prefill.add(request_of("a", prompt, n=2, hold_after_first=True))
        report = run(prefill)
        assert prefill.scheduler.num_preemptions == 1
        [request] = report.held
        first = [tokens_of(report, "a", index) for index in range(2)]
        target = decode.reserve("a", request.num_tokens)
        assert target is not None
        copy_blocks(prefill, request.blocks, decode, target)
        prefill.release("a")
        decode.add(
            request_of(
                "a",
                prompt,
                n=2,
                tokens=tuple(tuple(tokens) for tokens in first),
                imported_blocks=target,
                num_imported_tokens=request.num_tokens,
            )
        )
        report = run(decode)
        for index in range(2):
            assert first[index] + tokens_of(report, "a", index) == answer_of(prompt, index)


def test_no_room_for_an_import_is_none_and_too_large_is_an_error() -> None:
    """None can be tried again later; NoCapacity never will do."""
    engine = make_engine(4)
    with engines(engine):
        assert engine.reserve("a", 3 * BLOCK_SIZE) is not None
        assert engine.reserve("b", 2 * BLOCK_SIZE) is None
        with pytest.raises(NoCapacity):
            engine.reserve("c", 5 * BLOCK_SIZE)
        engine.release("a")
        assert engine.reserve("b", 2 * BLOCK_SIZE) is not None
        engine.release("b")


@pytest.mark.parametrize("num_existing", range(12))
def test_take_over_from_any_token_gives_the_same_answer(num_existing: int) -> None:
    """Tokens and the text pieces after a take-over are those of an undisturbed run."""
    engine = make_engine()
    with engines(engine):
        stop = ("zz", "never there")
        engine.add(request_of("whole", stop=stop))
        whole = run(engine)
        existing = tuple(answer_of()[:num_existing])
        engine.add(request_of("rest", stop=stop, tokens=(existing,)))
        rest = run(engine)
        assert [(o.number, o.token_id, o.text, o.finish_reason) for o in rest.outputs] == [
            (o.number, o.token_id, o.text, o.finish_reason) for o in whole.outputs[num_existing:]
        ]
        assert rest.finished[0].num_tokens == (12,)


@pytest.mark.parametrize(
    "ending",
    [{"max_tokens": 3}, {"stop_token_ids": (answer_of()[2],)}, {"stop": ("stop string",)}],
)
def test_an_answer_that_is_complete_already_only_ends(ending: dict[str, object]) -> None:
    """The owner died between the last token and saying that it was the last: nothing is computed,
    the next step reports the end, and a release before it forgets it."""
    engine = make_engine()
    tokens = tuple(answer_of()[:3])
    if "stop" in ending:
        ending = {"stop": (vocabulary().decode(tokens[1:]),)}
    with engines(engine):
        for key in ("a", "b"):
            engine.add(request_of(key, tokens=(tokens,), hold_after_first=key == "a", **ending))
        engine.release("b")
        assert engine.has_work()
        report = engine.step()
        assert [finished.key for finished in report.finished] == ["a"]
        assert report.finished[0].num_tokens == (3,)
        assert report.num_computed_tokens == 0
        assert not engine.has_work()


def test_finished_choices_are_not_run_again() -> None:
    """Only the choices that were running go on; the others keep their ends."""
    engine = make_engine()
    answers = [answer_of(index=index) for index in range(3)]
    with engines(engine):
        engine.add(
            request_of(
                "a",
                n=3,
                tokens=(tuple(answers[0][:4]), tuple(answers[1][:2]), ()),
                finished=("stop", "", ""),
            )
        )
        report = run(engine)
        assert tokens_of(report, "a", 0) == []
        assert tokens_of(report, "a", 1) == answers[1][2:]
        assert tokens_of(report, "a", 2) == answers[2]
        assert report.finished[0].num_tokens == (4, 12, 12)
        assert report.finished[0].finish_reasons == ("stop", "length", "length")


# ---- the runner itself -------------------------------------------------------------------


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

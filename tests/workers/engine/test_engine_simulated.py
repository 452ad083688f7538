"""The engine's own promises, without a model."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from msgspec.structs import replace

from pipeline.cost_model import FREE, prefill_ms
from schemas.errors import ContextTooLong, InvalidRequest, NoCapacity
from tests.tiny_tokenizer import EOS_TOKEN_ID
from tests.workers.engine.simulated_engines import (
    BLOCK_SIZE,
    CONTEXT_LENGTH,
    StrictRunner,
    answer_of,
    engines,
    make_engine,
    request_of,
    run,
    text_of,
    tokens_of,
    vocabulary,
)
from workers.engine.api import FinishedRequest, Sampled, ScheduledSequence

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

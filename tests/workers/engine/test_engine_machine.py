"""Everything at once: two engines with small pools, and whatever can happen to requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from schemas.requests import SamplingParams
from schemas.tokens import TokenLogprob
from tests.workers.engine.simulated_engines import (
    answer_ids,
    copy_blocks,
    expected_answer,
    expected_scores,
    make_engine,
)
from workers.engine.api import EngineRequest, HeldRequest, StepReport
from workers.engine.engine import Engine

STOP_IDS = tuple(token_id for token_id in answer_ids() if token_id % 11 == 0)


@dataclass
class Expected:
    """A request under test: its right answers, and how far its reader is."""

    request: EngineRequest
    answers: list[tuple[list[int], str]]
    num_seen: list[int] = field(default_factory=list)

    @property
    def scores(self) -> tuple[TokenLogprob, ...] | None:
        num_top = self.request.sampling.prompt_logprobs
        return None if num_top is None else expected_scores(self.request.prompt_ids, num_top)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        seen = zip(self.answers, self.num_seen, strict=True)
        return tuple(tuple(tokens[:count]) for (tokens, _), count in seen)

    @property
    def finished(self) -> tuple[str, ...]:
        seen = zip(self.answers, self.num_seen, strict=True)
        return tuple(why if count == len(tokens) else "" for (tokens, why), count in seen)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        seed=draw(st.integers(0, 3)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        max_tokens=draw(st.integers(1, 14)),
        min_tokens=draw(st.sampled_from([0, 3])),
        stop_token_ids=draw(st.sampled_from([(), STOP_IDS])),
        n=draw(st.sampled_from([1, 1, 2, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
    )


class EngineMachine(RuleBasedStateMachine):
    """Adds, releases, holds, handovers and take-overs in any order. Every token of every choice is
    the one that a run alone would give, in order, once, and so are a prompt's logprobs; nothing is
    left at the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engines = [
            make_engine(14, max_batch_tokens=9, max_num_sequences=4),
            make_engine(12, max_batch_tokens=13, max_num_sequences=5),
        ]
        self.live: list[dict[str, Expected]] = [{}, {}]
        self.held: list[dict[str, HeldRequest]] = [{}, {}]
        self.num_added = 0

    def teardown(self) -> None:
        for number, engine in enumerate(self.engines):
            for key in self.held[number]:
                engine.release(key)
                del self.live[number][key]
            self.held[number].clear()
            for _ in range(3000):
                if not engine.has_work():
                    break
                self._step(number)
                self._release_held(number)
            assert not self.live[number], "a request was never finished"
            engine.check_invariants()
            assert engine.blocks.counts().active == 0
            engine.pool.close()

    def _release_held(self, number: int) -> None:
        for key in list(self.held[number]):
            self.engines[number].release(key)
            del self.held[number][key], self.live[number][key]

    @rule(
        number=st.integers(0, 1),
        stem=st.integers(3, 5),
        length=st.integers(1, 22),
        sampling=sampling_params(),
        hold=st.booleans(),
        data=st.data(),
    )
    def add(
        self,
        number: int,
        stem: int,
        length: int,
        sampling: SamplingParams,
        hold: bool,
        data: st.DataObject,
    ) -> None:
        """Prompts of one stem share their beginning. A part of the answer may exist already."""
        prompt_ids = tuple(stem + position // 6 for position in range(length))
        answers = [expected_answer(prompt_ids, sampling, index) for index in range(sampling.n)]
        is_taken_over = data.draw(st.booleans(), label="take over")
        most = [len(tokens) if is_taken_over else 0 for tokens, _ in answers]
        num_seen = [data.draw(st.integers(0, count)) for count in most]
        request = EngineRequest(key=f"r{self.num_added}", prompt_ids=prompt_ids, sampling=sampling)
        expected = Expected(request, answers, num_seen)
        knows_ends = data.draw(st.booleans(), label="knows finish reasons")
        self._add(
            number,
            expected,
            EngineRequest(
                key=request.key,
                prompt_ids=prompt_ids,
                sampling=sampling,
                tokens=expected.tokens if is_taken_over else (),
                finished=expected.finished if knows_ends else (),
                hold_after_first=hold,
                overtakes=data.draw(st.booleans(), label="overtakes"),
            ),
        )

    def _add(self, number: int, expected: Expected, request: EngineRequest) -> None:
        self.num_added += 1
        self.engines[number].add(request)
        self.live[number][request.key] = expected

    @precondition(lambda self: any(engine.has_work() for engine in self.engines))
    @rule(number=st.integers(0, 1), count=st.integers(1, 5))
    def step(self, number: int, count: int) -> None:
        for _ in range(count):
            self._step(number)

    def _step(self, number: int) -> None:
        had_work = self.engines[number].has_work()
        report = self.engines[number].step()
        assert had_work or report == StepReport()
        assert not report.failed
        assert report != StepReport() or not self.engines[number].has_work(), "it runs in circles"
        live = self.live[number]
        for output in report.outputs:
            expected = live[output.key]
            tokens, why = expected.answers[output.index]
            assert output.number == expected.num_seen[output.index]
            assert output.token_id == tokens[output.number]
            is_last = output.number == len(tokens) - 1
            assert output.finish_reason == (why if is_last else None)
            assert output.prompt_logprobs == (expected.scores if output.number == 0 else None)
            expected.num_seen[output.index] += 1
        for finished in report.finished:
            expected = live.pop(finished.key)
            assert (
                expected.finished
                == finished.finish_reasons
                == tuple(why for _, why in expected.answers)
            )
            assert finished.num_tokens == tuple(len(tokens) for tokens, _ in expected.answers)
        for held in report.held:
            self.held[number][held.key] = held

    @precondition(lambda self: any(self.live))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n in (0, 1) if self.live[n]]))
        key = data.draw(st.sampled_from(sorted(self.live[number])))
        self.engines[number].release(key)
        del self.live[number][key]
        self.held[number].pop(key, None)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """What a decode worker does with a handle; without room it leaves the request held."""
        number = data.draw(st.sampled_from([n for n in (0, 1) if self.held[n]]))
        key = data.draw(st.sampled_from(sorted(self.held[number])))
        held, expected = self.held[number][key], self.live[number][key]
        source, target = self.engines[number], self.engines[1 - number]
        new_key = f"h{self.num_added}"
        blocks = target.reserve(new_key, held.num_tokens)
        if blocks is None:
            return
        copy_blocks(source, held.blocks, target, blocks)
        source.release(key)
        del self.held[number][key], self.live[number][key]
        request = EngineRequest(
            key=new_key,
            prompt_ids=expected.request.prompt_ids,
            sampling=expected.request.sampling,
            tokens=expected.tokens,
            finished=expected.finished,
            imported_blocks=blocks,
            num_imported_tokens=held.num_tokens,
        )
        self._add(1 - number, expected, request)

    @invariant()
    def books_are_right(self) -> None:
        for engine in self.engines:
            engine.check_invariants()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)


def test_machine_reaches_what_it_is_for() -> None:
    """The pools are small enough for preemption: else the machine would prove little."""
    engine: Engine = make_engine(14, max_batch_tokens=9, max_num_sequences=4)
    for number in range(4):
        sampling = SamplingParams(seed=number, max_tokens=14, n=2, ignore_eos=True)
        engine.add(
            EngineRequest(key=str(number), prompt_ids=(20 + number,) * 20, sampling=sampling)
        )
    while engine.has_work():
        engine.step()
    assert engine.scheduler.num_preemptions > 0
    engine.pool.close()

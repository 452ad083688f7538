"""KV that is held, handed over or taken over, between engines without a model."""

from __future__ import annotations

import pytest

from schemas.errors import NoCapacity
from tests.workers.engine.simulated_engines import (
    BLOCK_SIZE,
    PROMPT,
    answer_of,
    copy_blocks,
    engines,
    make_engine,
    request_of,
    run,
    tokens_of,
    vocabulary,
)
from workers.engine.engine import Engine


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

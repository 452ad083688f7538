"""What a chaos run counts as lost, repeated and wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.chaos.answer import Answer, Differences, compare, differences, is_usage_wrong
from schemas.tokens import Usage

RUN = st.lists(st.integers(), min_size=2, max_size=40, unique=True)


def answer(*ids: int, text: str = "", reason: str = "length") -> Answer:
    made = Answer(1)
    made.ids[0] = list(ids)
    made.texts[0] = text
    made.reasons[0] = reason
    made.is_complete = True
    return made


@given(run=RUN, data=st.data())
def test_what_is_missing_is_lost(run: list[int], data: st.DataObject) -> None:
    """Any part taken out is counted, in its full length and as nothing else."""
    start = data.draw(st.integers(0, len(run) - 1))
    stop = data.draw(st.integers(start + 1, len(run)))
    assert differences(run, run[:start] + run[stop:]) == Differences(lost=stop - start)


@given(run=RUN, data=st.data())
def test_what_comes_twice_is_duplicate(run: list[int], data: st.DataObject) -> None:
    """Any part said again right behind itself is counted, as nothing else."""
    start = data.draw(st.integers(0, len(run) - 1))
    stop = data.draw(st.integers(start + 1, len(run)))
    assert differences(run, run[:stop] + run[start:]) == Differences(duplicate=stop - start)


@given(run=RUN, data=st.data())
def test_another_token_is_wrong(run: list[int], data: st.DataObject) -> None:
    """A token that should be another one is counted once."""
    at = data.draw(st.integers(0, len(run) - 1))
    changed = list(run)
    changed[at] = max(run) + 1
    assert differences(run, changed) == Differences(wrong=1)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_only_equal_runs_have_no_difference(one: list[int], other: list[int]) -> None:
    """Whatever the two are: no difference is found exactly when there is none."""
    assert bool(differences(one, other)) == (one != other)


def test_two_tokens_that_changed_places_are_a_difference() -> None:
    """Order counts."""
    assert differences([1, 2, 3, 4], [1, 3, 2, 4])


def test_text_counts_in_tokens_and_never_less_than_one() -> None:
    """An HTTP client sees no ids: characters are converted at the answer's mean."""
    expected = answer(1, 2, 3, 4, text="the sea is big ")
    got = answer(text="the sea is ")
    assert compare(expected, got) == Differences(lost=2)
    got.texts[0] = "the sea is big"
    assert compare(expected, got) == Differences(lost=1)


@pytest.mark.parametrize(
    "got",
    [
        answer(1, 2, 3, text="abX"),
        answer(1, 2, 3, text="abc", reason="stop"),
    ],
)
def test_right_tokens_with_a_wrong_text_or_end_are_wrong(got: Answer) -> None:
    """Text and finish reason belong to an answer as its tokens do."""
    assert compare(answer(1, 2, 3, text="abc"), got) == Differences(wrong=1)


def test_logprobs_are_compared() -> None:
    """A token whose logprob differs came from another state of the engine."""
    expected, got = answer(1, 2), answer(1, 2)
    expected.logprobs[0] = [(1, -0.5), (2, -0.25)]
    got.logprobs[0] = [(1, -0.5), (2, -0.75)]
    assert compare(expected, got) == Differences(wrong=1)
    got.logprobs[0] = []
    assert compare(expected, got) == Differences(wrong=1)


def test_each_choice_is_compared_with_its_own() -> None:
    """n > 1: choices do not stand in for each other."""
    expected, got = Answer(2), Answer(2)
    expected.ids, got.ids = [[1, 2], [3, 4]], [[3, 4], [1, 2]]
    assert compare(expected, got).wrong == 4


@pytest.mark.parametrize(
    ("got", "is_wrong"),
    [
        (Usage(prompt_tokens=3, completion_tokens=5), False),
        (Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2), False),
        (Usage(prompt_tokens=3, completion_tokens=6), True),
        (Usage(prompt_tokens=8, completion_tokens=5), True),
        (None, True),
    ],
)
def test_usage_counts_every_token_once(got: Usage | None, is_wrong: bool) -> None:
    """What a take-over computed again is not charged; cached tokens may differ."""
    assert is_usage_wrong(Usage(prompt_tokens=3, completion_tokens=5), got) is is_wrong


def test_recovery_ends_with_the_longest_pause() -> None:
    """Tokens that were on their way when the blow fell are no recovery."""
    made = Answer(1)
    made.event_s = [9.0, 10.01, 10.02, 12.5, 12.52, 12.54]
    assert made.recovery_s(10.0) == pytest.approx(2.5)
    assert made.recovery_s(13.0) is None


def test_recovery_of_a_stream_that_had_not_begun() -> None:
    """From the blow to its first token."""
    made = Answer(1)
    made.event_s = [11.0, 11.1]
    assert made.recovery_s(10.0) == pytest.approx(1.0)


def test_the_first_failure_stays_and_an_end_is_an_end() -> None:
    """What follows a failure explains nothing; a complete answer can't fail any more."""
    failed, ended = Answer(1), Answer(1)
    failed.fail("first", "a")
    failed.fail("second", "b")
    assert (failed.error, failed.message) == ("first", "a")
    ended.complete(None, 1.0)
    ended.fail("late", "c")
    assert ended.error == ""


def test_what_was_read_so_far_is_compared_with_the_beginning() -> None:
    """A client that leaves early has lost nothing; a wrong token among what it read is wrong."""
    expected = answer(1, 2, 3, text="abc")
    part = answer(1, 2, text="ab", reason="")
    assert not compare(expected.beginning(part), part)
    part.ids[0][1] = 9
    assert compare(expected.beginning(part), part).wrong == 1

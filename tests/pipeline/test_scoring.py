from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.scoring import Candidates, Weights, sample, scores

DESIGN = Weights(finish=0.0, backlog=0.0, spread=0.0, transfer=0.0)


def candidates(num: int, backlog: float = 0.0, **columns: list[float]) -> Candidates:
    base: dict[str, Any] = {
        name: np.zeros(num) for name in ("hit", "wait", "work", "transfer", "used")
    }
    given_columns = {name: np.array(column) for name, column in columns.items()}
    return Candidates(**{**base, "recent": np.ones(num), "backlog": backlog, **given_columns})


def test_the_first_terms_are_the_designs() -> None:
    """0.5 hit + 0.3 / (1 + queue) + 0.2 (1 - utilisation)."""
    one = candidates(2, hit=[1.0, 0.0], wait=[2.0, 0.0], used=[0.5, 0.0])
    assert scores(one, DESIGN) == pytest.approx([0.5 + 0.1 + 0.1, 0.0 + 0.3 + 0.2])


def test_with_a_backlog_a_hit_weighs_more() -> None:
    """Work that is saved is waited for by nobody behind it."""
    weights = Weights(finish=1.0, spread=0.0, load=0.0, queue=0.0)
    busy = {"hit": [0.5, 0.0], "wait": [2.0, 0.5], "work": [0.5, 1.0]}
    assert scores(candidates(2, **busy), weights).argmax() == 1
    assert scores(candidates(2, backlog=1.25, **busy), weights).argmax() == 0


def test_who_was_sent_too_much_lately_falls_back() -> None:
    """Though it holds the prompt: what is above the share counts against it."""
    one = candidates(2, hit=[1.0, 0.0], recent=[1.9, 0.1])
    assert scores(one, Weights()).argmax() == 1
    assert scores(candidates(2, hit=[1.0, 0.0], recent=[1.2, 0.8]), Weights()).argmax() == 0


def test_a_long_way_speaks_against_a_worker() -> None:
    """Of equals the nearer one."""
    assert scores(candidates(2, transfer=[0.2, 0.1]), Weights()).argmax() == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.integers(0, 2**32))
def test_cold_sampling_takes_the_best(values: list[float], seed: int) -> None:
    """Temperature 0, whatever the chance; and anything sampled is one of them."""
    array = np.array(values)
    assert array[sample(array, 0.0, random.Random(seed))] == array.max()
    assert 0 <= sample(array, 0.3, random.Random(seed)) < len(values)


def test_warm_sampling_follows_the_softmax() -> None:
    """e to one, when they differ by one temperature."""
    rng = random.Random(5)
    drawn = [sample(np.array([0.0, 0.1]), 0.1, rng) for _ in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(np.e / (1 + np.e), abs=0.03)


def test_equals_get_equal_shares() -> None:
    """A cold worker among equals gets its share and no more."""
    rng = random.Random(6)
    drawn = [sample(np.zeros(8), 0.02, rng) for _ in range(8000)]
    assert max(drawn.count(n) for n in range(8)) < 1.15 * 1000
    assert min(drawn.count(n) for n in range(8)) > 0.85 * 1000


def test_nobody_to_choose_from_is_an_error() -> None:
    """The caller has to ask first."""
    with pytest.raises(ValueError, match="nobody"):
        sample(np.zeros(0), 0.1, random.Random(1))

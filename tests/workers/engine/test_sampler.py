"""The sampler against a plain reference that sorts everything, one row at a time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.requests import SamplingParams
from workers.engine.api import ScheduledSequence
from workers.engine.sampler import NUM_CANDIDATES, draw, sample, uniform

EOS = frozenset({2})


def row(
    prompt: tuple[int, ...] = (1,), answer: tuple[int, ...] = (), *, index: int = 0, **sampling: Any
) -> ScheduledSequence:
    ids = prompt + answer
    return ScheduledSequence(
        token_ids=ids,
        num_prompt_tokens=len(prompt),
        block_table=(0,),
        start=len(ids) - 1,
        count=1,
        sample=True,
        sampling=SamplingParams(**{"seed": 0, "max_tokens": 99, **sampling}),
        index=index,
    )


def plain_draw(logits: torch.Tensor, one: ScheduledSequence) -> int:
    """What the rules say, word by word: sort all, cut by k, then by p, then by min-p, draw."""
    sampling = one.sampling
    scaled = (logits - logits.max()) / sampling.temperature
    weight = dict(enumerate(scaled.exp().double().tolist()))
    is_filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    value = logits.tolist()
    kept = list(weight)
    if is_filtered:
        kept.sort(key=lambda token_id: (-value[token_id], token_id))
        kept = kept[: sampling.top_k or None]
        mass, before = math.fsum(weight[t] for t in kept), 0.0
        within: list[int] = []
        for token_id in kept:
            if before < sampling.top_p * mass or sampling.top_p >= 1 or not within:
                within.append(token_id)
            before += weight[token_id]
        kept = [t for t in within if weight[t] >= sampling.min_p * weight[within[0]]]
    assert sampling.seed is not None
    target = uniform(sampling.seed, one.index, one.token_number) * sum(weight[t] for t in kept)
    total = 0.0
    for token_id in kept:
        total += weight[token_id]
        if total > target:
            return token_id
    return [token_id for token_id in kept if weight[token_id] > 0][-1]


@st.composite
def filtered(draw_: st.DrawFn) -> dict[str, Any]:
    return {
        "temperature": draw_(st.sampled_from([0.3, 0.8, 1.0, 1.7])),
        "top_k": draw_(st.sampled_from([0, 1, 3, 40, NUM_CANDIDATES[0], 300, 5000])),
        "top_p": draw_(st.sampled_from([0.05, 0.51, 0.93, 0.999, 1.0])),
        "min_p": draw_(st.sampled_from([0.0, 0.0, 0.03, 0.4])),
        "seed": draw_(st.integers(0, 2**64 - 1)),
        "index": draw_(st.integers(0, 3)),
    }


@st.composite
def logits_and_rows(
    draw_: st.DrawFn, num_rows: int = 4
) -> tuple[torch.Tensor, list[ScheduledSequence]]:
    """Flat and peaked rows, with and without equal logits, vocabularies around the 256."""
    vocab_size = draw_(st.sampled_from([5, 256, 257, 1500, 2048, 2049, 5000]))
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 2**31)))
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits *= torch.tensor(
        draw_(st.lists(st.sampled_from([0.01, 1.0, 8.0]), min_size=4, max_size=4))
    )[:, None]
    if draw_(st.booleans()):
        logits = (logits * 2).round() / 2  # many equals
    return logits, [row(**draw_(filtered())) for _ in range(num_rows)]


@given(logits_and_rows())
@settings(max_examples=150, deadline=None)
def test_draws_are_those_of_the_plain_reference(
    case: tuple[torch.Tensor, list[ScheduledSequence]],
) -> None:
    """Top-k, top-p and min-p keep what a full sort keeps, also where the 256 likeliest tokens do
    not hold it or end among equals, and the draw is the inverse CDF over it."""
    logits, rows = case
    expected = [plain_draw(one, of) for one, of in zip(logits, rows, strict=True)]
    assert draw(logits, rows) == expected


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0])
def test_wide_prefixes_are_those_of_the_plain_reference(scale: float) -> None:
    """The same with a vocabulary that all steps of the search are made for: prefixes of 256, of
    thousands and of nearly all tokens; all tokens equal; a row of few beside them."""
    logits = torch.randn(5, 33_000, generator=torch.Generator().manual_seed(8)) * scale
    logits[4] = torch.where(torch.arange(33_000) % 8000 == 3, logits[4], -torch.inf)
    rows = [
        row(seed=1, top_p=0.9),
        row(seed=2, top_p=0.5, temperature=1.4),
        row(seed=3, top_k=3000, top_p=0.8),
        row(seed=4, min_p=0.02),
        row(seed=5, top_p=0.99, top_k=300),
    ]
    expected = [plain_draw(one, of) for one, of in zip(logits, rows, strict=True)]
    assert draw(logits, rows) == expected


@given(logits_and_rows(), st.permutations(range(6)))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(
    case: tuple[torch.Tensor, list[ScheduledSequence]], order: list[int]
) -> None:
    """Rows alone and rows in any batch, greedy and unfiltered ones among them, give equal tokens
    and equal logprobs, bit for bit."""
    logits, rows = case
    logits = torch.cat([logits, logits[:2]])
    rows = [
        *rows,
        row(temperature=0.0, logprobs=3, repetition_penalty=1.3),
        row((3, 4), (1, 1, 3), temperature=1.2, logprobs=2, frequency_penalty=0.3, index=1),
    ]
    alone = [sample(logits[n : n + 1], [rows[n]], EOS)[0] for n in range(6)]
    assert sample(logits[order], [rows[n] for n in order], EOS) == [alone[n] for n in order]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 6},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(sampling: dict[str, Any]) -> None:
    """Over 20,000 seeds each token comes as often as its share of what the filters keep, within
    five standard deviations; what they cut never comes."""
    num_draws = 20_000
    logits = torch.linspace(2.5, -2.5, 12)
    weights = (logits.double() / sampling["temperature"]).exp()
    weights /= weights.sum()
    keep = torch.ones(12, dtype=torch.bool)
    if "top_k" in sampling:
        keep = torch.arange(12) < sampling["top_k"]
    if "top_p" in sampling:
        keep = weights.cumsum(0) - weights < sampling["top_p"]
    if "min_p" in sampling:
        keep = weights >= sampling["min_p"] * weights[0]
    expected = (weights * keep) / (weights * keep).sum()
    rows = [row(seed=seed, **sampling) for seed in range(num_draws)]
    counts = Counter(draw(logits.expand(num_draws, -1), rows))
    for token_id, share in enumerate(expected.tolist()):
        deviation = math.sqrt(num_draws * share * (1 - share))
        assert abs(counts[token_id] - num_draws * share) <= 5 * deviation


def test_random_numbers_depend_on_seed_choice_and_number() -> None:
    """Each of the three changes the random number; all lie in [0, 1) and fill it evenly; a seed
    may be any integer."""
    numbers = [uniform(s, i, n) for s in (0, 1, 2**63) for i in range(20) for n in range(50)]
    assert len(set(numbers)) == 3000
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert abs(sum(numbers) / 3000 - 0.5) < 0.03
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    """Temperature 0, or so little that it would overflow, is argmax; filters do not matter."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]]).bfloat16()
    for temperature in (0.0, 1e-9):
        assert sample(logits, [row(temperature=temperature, top_p=0.3)], EOS)[0].token_id == 1


def test_penalties_come_in_order_and_count_what_they_should() -> None:
    """Bias first; then repetition over prompt and answer (positive logits divided, negative
    multiplied); presence and frequency over the answer alone. Logprobs are those afterwards."""
    logits = torch.tensor([[1.0, -1.0, 0.5, 2.0, 0.0, 4.0]])
    one = row(
        (0, 1),
        (3, 3, 5),
        temperature=0.0,
        logit_bias={2: 3.0, 5: -5.0, 77: 1.0},
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logprobs=6,
    )
    adjusted = torch.tensor([0.5, -2.0, 3.5, 1.0 - 0.25 - 1.0, 0.0, -2.0 - 0.75])
    expected = adjusted.log_softmax(0)
    got = sample(logits, [one], EOS)[0]
    assert got.token_id == 2
    assert got.logprob == pytest.approx(expected[2].item())
    assert [token_id for token_id, _ in got.top] == [2, 0, 4, 3, 1, 5]
    assert dict(got.top) == pytest.approx(dict(enumerate(expected.tolist())))
    assert logits.tolist() == [[1.0, -1.0, 0.5, 2.0, 0.0, 4.0]]  # the caller's stay as they were


def test_logprobs_are_those_before_temperature() -> None:
    """Temperature and filters change what is drawn, not the logprobs; without ``logprobs`` there
    are none, with 0 there is that of the chosen token only."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    chosen = sample(logits, [row(temperature=5.0, top_k=1, logprobs=0)], EOS)[0]
    assert (chosen.token_id, chosen.top) == (0, ())
    assert chosen.logprob == pytest.approx(logits[0].log_softmax(0)[0].item())
    assert sample(logits, [row(temperature=5.0)], EOS)[0].logprob == 0.0


@pytest.mark.parametrize(
    ("sampling", "answer", "expected"),
    [
        ({"min_tokens": 2}, (), 1),  # eos (2) and the stop id (0) may not come yet
        ({"min_tokens": 2}, (5, 5), 2),
        ({"min_tokens": 2, "ignore_eos": True}, (5,), 2),  # eos ends nothing, so it may come
        ({}, (), 2),
    ],
)
def test_nothing_ends_before_min_tokens(
    sampling: dict[str, Any], answer: tuple[int, ...], expected: int
) -> None:
    """Before ``min_tokens`` end tokens and stop ids are not chosen, however likely."""
    logits = torch.tensor([[5.0, 1.0, 6.0, 0.0]])
    one = row((1,), answer, temperature=0.0, stop_token_ids=(0, 99), **sampling)
    assert sample(logits, [one], EOS)[0].token_id == expected


def test_a_broken_row_does_not_break_its_neighbours() -> None:
    """A row of NaN gives some token of the vocabulary; the row beside it what it gives alone."""
    good = torch.randn(1, 600, generator=torch.Generator().manual_seed(3))
    logits = torch.cat([torch.full((1, 600), torch.nan), good])
    cases: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"temperature": 0.0}]
    for sampling in cases:
        rows = [row(seed=5, **sampling), row(seed=6, **sampling)]
        broken, kept = draw(logits, rows)
        assert 0 <= broken < 600
        assert kept == draw(good, rows[1:])[0]

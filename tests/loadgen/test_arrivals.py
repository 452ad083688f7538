import math
import random
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from loadgen.arrivals import Rate, arrivals


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    return arrivals(Rate.constant(rate), 1.0, rng)


def test_gaps_are_exponential_with_the_asked_mean() -> None:
    """Mean gap 1/rate, and as much spread as an exponential distribution has."""
    offsets = list(islice(poisson(50.0, random.Random(1)), 20_000))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *offsets])]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert variance**0.5 / mean == pytest.approx(1.0, rel=0.05)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)


def test_counts_per_second_have_the_variance_of_their_mean() -> None:
    """Arrivals in separate seconds are Poisson counts, not a smooth or bursty stream."""
    counts = [0] * 1000
    for offset in poisson(20.0, random.Random(2)):
        if offset >= len(counts):
            break
        counts[int(offset)] += 1
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert mean == pytest.approx(20, rel=0.03)
    assert variance / mean == pytest.approx(1.0, abs=0.15)


def test_same_seed_gives_the_same_arrivals() -> None:
    """A run can be repeated: arrivals depend on rate and seed alone."""
    first = list(islice(poisson(3.0, random.Random(7)), 100))
    assert first == list(islice(poisson(3.0, random.Random(7)), 100))
    assert first != list(islice(poisson(3.0, random.Random(8)), 100))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    """A rate must be positive and finite."""
    with pytest.raises(ValueError, match="positive and finite"):
        next(poisson(rate, random.Random(0)))


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    """The mean stays, the deviation is 1 / sqrt(burstiness) of it."""
    offsets = list(islice(arrivals(Rate.constant(50.0), burstiness, random.Random(3)), 20_000))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *offsets])]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert deviation / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_burstiness_is_a_clock() -> None:
    """All gaps are equal."""
    offsets = list(islice(arrivals(Rate.constant(4.0), math.inf, random.Random(0)), 8))
    assert offsets == pytest.approx([number / 4 for number in range(1, 9)])


def test_a_ramp_goes_evenly_from_one_rate_to_the_other() -> None:
    """So many arrivals in each second as the rate there says, and the end's rate afterwards."""
    counts = [0] * 40
    for offset in arrivals(Rate(start=100.0, end=500.0, over_s=20.0), 1.0, random.Random(4)):
        if offset >= len(counts):
            break
        counts[int(offset)] += 1
    for second, count in enumerate(counts):
        expected = 100 + 400 * min((second + 0.5) / 20, 1)
        assert count == pytest.approx(expected, abs=5 * math.sqrt(expected))


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan])
def test_a_burstiness_that_is_none_is_refused(burstiness: float) -> None:
    """It must be positive."""
    with pytest.raises(ValueError, match="burstiness"):
        next(arrivals(Rate.constant(1.0), burstiness, random.Random(0)))

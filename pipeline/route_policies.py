"""Policies of placement: one worker of those that may be chosen. Pure; chance is passed in.

    score          hit, queue, utilisation, transfer and predicted finish (pipeline/scoring.py)
    least-loaded   who has the least to do before it; blind for prefixes
    power-of-two   the better of two at random, so that no two routers herd
    random         anybody

The last three are there to be compared with.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from pipeline.pool_table import Floats
from pipeline.scoring import Weights, sample, scores
from pipeline.weighing import Weighed
from schemas.errors import ConfigError

_HELD = 0.5  # a decode's whole prompt that a worker holds weighs like so many sequences less
_EQUAL = 1e-9


class RoutePolicy(Protocol):
    """Chooses among candidates; there is at least one."""

    @property
    def sees_prefixes(self) -> bool:
        """Whether it makes a difference to it who holds what."""

    def prefill(self, weighed: Weighed, rng: random.Random) -> int:
        """The place of the one that computes a prompt."""

    def decode(self, weighed: Weighed, rng: random.Random) -> int:
        """The place of the one that goes on with it."""


@dataclass(frozen=True, slots=True)
class Score:
    """The best score, with some chance for those that are about as good."""

    weights: Weights
    sees_prefixes: bool = True

    def prefill(self, weighed: Weighed, rng: random.Random) -> int:
        """See :class:`RoutePolicy`."""
        return sample(scores(weighed.candidates, self.weights), self.weights.temperature, rng)

    def decode(self, weighed: Weighed, rng: random.Random) -> int:
        """See :class:`RoutePolicy`. Who ends the whole answer first, its transfer counted; of
        about equals the one that holds most of it."""
        finish = weighed.candidates.finish
        values = _HELD * weighed.candidates.hit - (finish - finish.min())
        return sample(values, self.weights.temperature, rng)


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The least to do, of equals anyone."""

    sees_prefixes: bool = False

    def prefill(self, weighed: Weighed, rng: random.Random) -> int:
        """See :class:`RoutePolicy`."""
        return _least(weighed.candidates.wait, rng)

    decode = prefill


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The better of two."""

    sees_prefixes: bool = False

    def prefill(self, weighed: Weighed, rng: random.Random) -> int:
        """See :class:`RoutePolicy`."""
        two = rng.sample(range(len(weighed)), min(2, len(weighed)))
        return two[int(weighed.candidates.wait[two].argmin())]

    decode = prefill


@dataclass(frozen=True, slots=True)
class Anybody:
    """No reason at all."""

    sees_prefixes: bool = False

    def prefill(self, weighed: Weighed, rng: random.Random) -> int:
        """See :class:`RoutePolicy`."""
        return rng.randrange(len(weighed))

    decode = prefill


_MAKERS: Final[dict[str, Callable[[Weights], RoutePolicy]]] = {
    "score": Score,
    "random": lambda weights: Anybody(),
    "least-loaded": lambda weights: LeastLoaded(),
    "power-of-two": lambda weights: PowerOfTwo(),
}
POLICIES: Final = tuple(_MAKERS)


def make_policy(name: str, weights: Weights) -> RoutePolicy:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _MAKERS:
        raise ConfigError(
            f"no policy {name!r} among {', '.join(POLICIES)}", param="control.route_policy"
        )
    return _MAKERS[name](weights)


def _least(values: Floats, rng: random.Random) -> int:
    equals = np.flatnonzero(values <= values.min() + _EQUAL)
    return int(equals[rng.randrange(len(equals))])

"""What is known of workers' time to come: the seam between whoever predicts and whoever decides.

``pipeline/outlook.py`` predicts; placement (``pipeline/placement.py``), the compute budget
(``pipeline/budget.py``) and the waiting room (``pipeline/waiting_room.py``) ask. All times are
monotonic seconds of this process and are passed in, so that a simulation can run on a clock of
its own. A worker whose load is stale counts as busy: infinite wait, no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from schemas.control import Beat
from schemas.profiles import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one request asks of a pool of workers.

    ``num_cached`` is what the worker in question holds of the prompt already.
    """

    num_prompt: int
    num_cached: int
    max_tokens: int  # that it may generate, over all choices
    expected_tokens: float  # that it is likely to


class DecodeForecast(NamedTuple):
    """A worker's running batch as predicted for a moment."""

    num_sequences: int
    context_tokens: int
    free_tokens: int  # of its KV cache; below 0: so many find no room
    step_ms: float | None  # None: its costs are not known
    way_ms: float = 0.0  # that KV waits which is sent there then; below 0: the way was idle
    way_token_ms: float = 0.0  # that a token's KV takes on it


class Forecast(Protocol):
    """Predicts what workers will be doing."""

    def costs(self, beat: Beat) -> StepCosts | None:
        """What the worker says its steps cost; None: nothing is known."""

    def prefill_wait_ms(self, beat: Beat, now_s: float) -> float | None:
        """When the worker would begin with a prompt that came now, in milliseconds from now:
        what it told with its last beat, less what it has done since, plus what was placed there
        since, by whichever router. None: its costs are not known; infinite: it is stale."""

    def prefill_waits_ms(self, beats: Sequence[Beat], now_s: float) -> list[float | None]:
        """The same of each of ``beats``, workers of one model: at once, for there may be many."""

    def queue_depth(self, beat: Beat, now_s: float) -> float:
        """Sequences that wait there, those placed since its beat included."""

    def decode_at(self, beat: Beat, at_s: float) -> DecodeForecast:
        """Its batch at ``at_s``: today's, plus what waits to join it and what will have been
        prefilled for it by then, less what will have ended. ``at_s`` is now, or later."""

    def expected_tokens(self, served: str, max_tokens: int) -> float:
        """How many tokens a request that may generate ``max_tokens`` is likely to, as far as
        answers of this model have been seen; ``max_tokens`` until then."""

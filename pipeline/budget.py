"""The compute budget: may a request enter, and if not, what then. Pure: the time is passed in.

judge     answers an Ask; remembers nothing but which pools are over their budget (hysteresis)
charge    admission has admitted it
place     a worker was named for it: from here on the forecast knows of it
hear_*    the same, said by other control processes and by workers' claims
settle    it ended, or left: its charge is given back, its true length is learnt
"""

from __future__ import annotations

from typing import Literal, Protocol

from pipeline.verdict import Ask, Verdict
from schemas.control import Placed
from schemas.tokens import Claim

EarlyRejection = Literal["predicted", "now", "off"]


class ComputeBudget(Protocol):
    """The budgets of all pools, as admission, router and take-over use them.

    All calls are idempotent by request id: a repeat changes nothing.
    """

    def judge(self, ask: Ask) -> Verdict:
        """What is to become of a request that came now, or that has waited and is asked again."""

    def charge(self, ask: Ask, max_tokens: int | None = None) -> None:
        """Charge a request that was admitted, with ``max_tokens`` where it was clamped. A request
        that :meth:`judge` told to wait is not charged."""

    def place(self, request_id: str) -> None:
        """A worker was named for its prefill: its wait is now in the forecast, not in the queue
        of requests that nobody has yet."""

    def hear_placed(self, placed: Placed, now_s: float) -> None:
        """Another control process has placed a request."""

    def hear_claim(self, claim: Claim, now_s: float) -> None:
        """A worker has claimed one. A request that is not known yet is charged from the claim."""

    def settle(self, request_id: str, num_tokens: int | None = None) -> None:
        """It ended with ``num_tokens`` generated, over all choices; None: it was cut off, refused
        or moved away, which says nothing of lengths. Unknown ids are nothing."""

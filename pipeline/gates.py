"""Which budgets are over, with hysteresis. Pure.

    load   ─────────────╮ enter            ╭───── over from here on
                        ╰───── leave ──────╯      under again from there on

In between a budget stays what it was. A gate belongs to a budget of a pool, as one group of
requests sees it (class, share, tenant): what one group waits for says nothing of another's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from pipeline.verdict import Shortage

MAX_OVER = 4096  # gates that are over; the one that was not asked for longest is forgotten


class GateKey(NamedTuple):
    """Whose gate."""

    served: str
    kind: Shortage
    slo: str  # class name; "" for requests with times of their own
    share: float
    tenant: str


class Gates:
    """Only gates that are over are kept."""

    def __init__(self) -> None:
        self._over: OrderedDict[GateKey, None] = OrderedDict()

    def is_over(self, key: GateKey) -> bool:
        """As last told."""
        return key in self._over

    def tell(self, key: GateKey, load: float, enter: float, leave: float) -> bool:
        """Take the load of a budget; whether it is over now."""
        is_over = load > (leave if key in self._over else enter)
        if not is_over:
            self._over.pop(key, None)
            return False
        self._over[key] = None
        self._over.move_to_end(key)
        if len(self._over) > MAX_OVER:
            self._over.popitem(last=False)
        return True

    def __len__(self) -> int:
        return len(self._over)

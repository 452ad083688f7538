"""How long to wait before a child that died is started again. Pure."""

from __future__ import annotations

FIRST_S = 0.1
LONGEST_S = 10.0
HEALTHY_AFTER_S = 30.0


class Backoff:
    """Doubles from 0.1 s to 10 s; a child that lived for 30 s, or ended in order, starts the
    count anew."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def after(self, lived_s: float, *, is_clean: bool = False) -> float:
        """Seconds to wait, now that the child ended after ``lived_s``; ``is_clean``: it drained
        because somebody asked it to."""
        if is_clean or lived_s >= HEALTHY_AFTER_S:
            self._next_s = FIRST_S
        wait_s = self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_S)
        return wait_s

"""Where a request stands in an engine's line. Pure."""

from __future__ import annotations

HEAD_START = 64  # requests; four times as many as wait for their first chunk in one worker


def place_in_line(number: int, *, overtakes: bool) -> int:
    """The place of the request that came as the ``number``-th: less is earlier, no two are equal.

    One that ``overtakes`` stands before the last ``HEAD_START`` that came before it, and behind
    those of them that do as well. So nobody is overtaken by more than the next ``HEAD_START``, and
    there is one order, that never changes: the first in it always gets on.
    """
    return 2 * (number - HEAD_START) - 1 if overtakes else 2 * number

"""How often Python looks for garbage cycles in a process of ours.

Its defaults look after every 700 new objects, and each request makes hundreds that live while it
runs: a tenth of a busy bridge's CPU went into walking them. What a role has imported by the time
it starts stays for ever and is walked no more.
"""

from __future__ import annotations

import gc

_NEW_OBJECTS = 20_000  # more than are there than at the last look: some megabytes
_YOUNG_LOOKS = 20  # between two at what outlived one look, and between two at all


def collect_rarely() -> None:
    """Look less often, and never again at what is there now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG_LOOKS, _YOUNG_LOOKS)

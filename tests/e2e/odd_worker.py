"""``mesh worker`` with a simulated engine that prompts can harm: for tests of what follows.

    python odd_worker.py worker --name … (as ``mesh worker``; the engine must be simulated)

A prompt that holds ``DIE`` kills the process that computes it, as early as can be: its threads
take turns all the time, so that the engine's does not wait for the loop's. The first process that
computes one that holds ``BLOCK`` makes the file ``blocked`` in its data directory and stands still
until that is removed again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import workers.engine.simulated
from infra.cli import main
from workers.engine.api import Sampled, ScheduledSequence
from workers.engine.simulated import SimulatedRunner

DIE = (21, 22, 21, 22)
BLOCK = (22, 21, 22, 21)
BLOCKED = "blocked"


class OddRunner(SimulatedRunner):
    """Computes as any other, but for these prompts."""

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[Sampled]:
        for scheduled in batch:
            prompt = tuple(scheduled.token_ids[: scheduled.num_prompt_tokens])
            if _holds(prompt, DIE):
                os.kill(os.getpid(), signal.SIGKILL)
            if _holds(prompt, BLOCK):
                _stand_still(Path(os.environ["MESH_DATA"]) / BLOCKED)
        return super().execute(batch)


def _holds(prompt: tuple[int, ...], marker: tuple[int, ...]) -> bool:
    size = len(marker)
    return any(prompt[start : start + size] == marker for start in range(len(prompt) - size + 1))


def _stand_still(file: Path) -> None:
    try:
        file.open("x").close()
    except FileExistsError:
        return  # another one did, or we did before
    while file.exists():
        time.sleep(0.01)
    file.touch()  # once is enough


if __name__ == "__main__":
    sys.setswitchinterval(1e-6)
    workers.engine.simulated.SimulatedRunner = OddRunner  # type: ignore[misc]
    main()

"""How far the marked request is when the blow falls.

A point is a function that starts the request and returns once it is there. To keep it there it may
hold processes still, for a moment: less than the silence after which they would be dead.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Awaitable, Callable

from loadgen.chaos.mesh import ChaosMesh, Target
from loadgen.chaos.witness import Trace, Witness

REACH_S = 15.0  # for a request to come to its point
_HOLD_SHARE = 0.5  # of dead_s


class Hunt:
    """Brings one request to a point.

    Args:
        role: whose process will be struck; decides between two places of the same name.
        num_tokens: of the request's undisturbed answer, all choices.
        start: sends the request.
    """

    def __init__(
        self,
        mesh: ChaosMesh,
        witness: Witness,
        rng: random.Random,
        *,
        role: str,
        trace: Trace,
        num_tokens: int,
        start: Callable[[], None],
    ) -> None:
        self.mesh = mesh
        self.rng = rng
        self.role = role
        self.trace = trace
        self.num_tokens = num_tokens
        self.start = start
        self.has_missed = False  # the request did not come to its point, or went past it
        self._witness = witness
        self._held: list[Target] = []

    async def until(self, is_so: Callable[[Trace], bool], timeout_s: float = REACH_S) -> None:
        """Wait for the request; one that ends first has missed its point."""
        trace = self.trace
        await self._witness.until(lambda: is_so(trace) or trace.has_ended, timeout_s)
        self.has_missed = self.has_missed or not is_so(trace)

    async def until_held(self, is_so: Callable[[Trace], bool]) -> None:
        """As :meth:`until`, for no longer than a process may stand still."""
        await self.until(is_so, _HOLD_SHARE * self.mesh.bus.times.dead_s)

    def hold(self, targets: list[Target]) -> None:
        """Let processes stand still until :meth:`release`."""
        for target in targets:
            self._held.append(target)
            self.mesh.send(target, signal.SIGSTOP)

    def hold_all(self, kind: str, role: str = "") -> None:
        """Let all processes of a kind and role stand still."""
        self.hold([self.mesh.target(beat) for beat in self.mesh.ready(kind, role)])

    def release(self, *, but: Target | None = None) -> None:
        """Let them go on; ``but`` is frozen now and stays."""
        while self._held:
            target = self._held.pop()
            if but is None or target.pid != but.pid:
                self.mesh.send(target, signal.SIGCONT)


Point = Callable[[Hunt], Awaitable[None]]


async def queued(hunt: Hunt) -> None:
    """Its task lies in a queue and nobody has claimed it: at admission before control is struck,
    at decode before a decode worker is, else at prefill."""
    if hunt.role == "control":
        hunt.hold_all("control")
        hunt.start()
        await hunt.until_held(lambda trace: trace.waits_for == "admission")
    elif hunt.role == "decode":
        hunt.start()
        await hunt.until(lambda trace: trace.claim is not None)
        hunt.hold_all("worker", "decode")
        await hunt.until_held(lambda trace: trace.waits_for == "decode")
    else:
        hunt.hold_all("worker", "prefill")
        hunt.start()
        await hunt.until_held(lambda trace: trace.waits_for == "prefill")


async def mid_prefill(hunt: Hunt) -> None:
    """A prefill worker has just claimed it."""
    hunt.start()
    await hunt.until(lambda trace: trace.is_claimed_by("prefill"))


async def kv_ready_unread(hunt: Hunt) -> None:
    """Its blocks are announced, and no router has read it."""
    hunt.start()
    await hunt.until(lambda trace: trace.is_claimed_by("prefill"))
    hunt.hold_all("control")
    await hunt.until_held(lambda trace: trace.is_offered)


async def mid_transfer(hunt: Hunt) -> None:
    """A decode worker has claimed it while the owner of the blocks stands still."""
    hunt.start()
    await hunt.until(lambda trace: trace.is_offered)
    owner = hunt.mesh.worker(hunt.trace.prefiller)
    if owner is not None:
        hunt.hold([owner])
    await hunt.until_held(lambda trace: trace.is_claimed_by("decode"))


async def decoding(hunt: Hunt) -> None:
    """Somewhere in its answer."""
    least = hunt.rng.randint(2, max(2, int(0.7 * hunt.num_tokens)))
    hunt.start()
    await hunt.until(lambda trace: trace.is_claimed_by("decode") and trace.num_tokens >= least)


async def last_token(hunt: Hunt) -> None:
    """Its last token but one is on the stream."""
    hunt.start()
    await hunt.until(lambda trace: trace.num_tokens >= hunt.num_tokens - 1)


POINTS: dict[str, Point] = {
    "queued": queued,
    "mid-prefill": mid_prefill,
    "kv-ready": kv_ready_unread,
    "mid-transfer": mid_transfer,
    "decoding": decoding,
    "last-token": last_token,
}
EARLY_POINTS = ("queued", "mid-prefill", "kv-ready", "mid-transfer")  # a long prompt helps

"""What a chaos run breaks, how often, in which mesh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.transport.plan import CHOICES
from loadgen.chaos.faults import FAULTS
from loadgen.chaos.points import POINTS
from schemas.errors import ConfigError

RANDOM = "random"
MAX_COUNT = 10_000
QUICK_FAULTS = (
    "kill-decode", "kill-bridge", "freeze-prefill", "term-decode", "kill-control",
    "client-leaves", "freeze-decode", "kill-broker",
)  # fmt: skip
# Processes with the real engine take longer to start: what must come back comes last.
QUICK_TORCH_FAULTS = (
    "freeze-decode", "client-leaves", "freeze-prefill", "kill-decode",
)  # fmt: skip
QUICK_TIME_SCALE = 0.25  # a freeze takes 2.5 s then
QUICK_SPEED = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """A chaos run.

    Attributes:
        faults: names, struck in turn.
        point: of the marked request, or "random": one that fits the fault.
        count: faults in all.
        engine: of a mesh of our own.
        model: NAME=SOURCE for a mesh of our own, NAME of a running one.
        num_streams: requests beside the marked one, half over HTTP.
        num_tokens: of most answers.
        timeout_s: deadline of each request.
        overlap: faults at a time.
        nats_url: client's url of a running mesh on this host; "" starts one.
        control_nats_url: the same broker as a user who may hear all.
        bridges: addresses of a running mesh's bridges.
        folder: data directory of a mesh of our own; None: a temporary one.
        kv_transports: of the workers of a mesh of our own.

    Raises:
        ConfigError: a value that can't be used; ``param`` is the flag's name.
    """

    faults: tuple[str, ...]
    point: str = RANDOM
    count: int = 1
    engine: str = "simulated"
    model: str
    seed: int = 0
    time_scale: float = 1.0
    speed: float = 1.0
    num_streams: int = 10
    num_tokens: int = 60
    num_controls: int = 2
    timeout_s: float = 60.0
    overlap: int = 1
    nats_url: str = ""
    control_nats_url: str = ""
    bridges: tuple[str, ...] = ()
    folder: Path | None = None
    kv_transports: str = "auto"

    def __post_init__(self) -> None:
        for name in self.faults:
            if name not in FAULTS:
                known = ", ".join(FAULTS)
                raise ConfigError(f"no fault is called {name!r}; there are {known}", param="fault")
        if self.kv_transports not in CHOICES:
            known = ", ".join(CHOICES)
            raise ConfigError(f"{self.kv_transports!r} is none of {known}", param="kv-transports")
        if not self.faults:
            raise ConfigError("give --all, --quick or --fault NAME", param="fault")
        self._check_point()
        for name, value, most in (
            ("count", self.count, MAX_COUNT),
            ("streams", self.num_streams, 1000),
            ("tokens", self.num_tokens, 1000),
            ("overlap", self.overlap, 8),
            ("controls", self.num_controls, 8),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}, it must be 1 to {most}", param=name)
        if self.is_attached and not self.bridges:
            raise ConfigError("a running mesh needs --bridge URL", param="bridge")

    def _check_point(self) -> None:
        if self.point == RANDOM:
            return
        if self.point not in POINTS:
            known = ", ".join(POINTS)
            raise ConfigError(
                f"no point is called {self.point!r}; there are {known}", param="point"
            )
        for name in self.faults:
            if self.point not in FAULTS[name].points:
                fits = ", ".join(FAULTS[name].points)
                raise ConfigError(f"{name} strikes at {fits}, not at {self.point}", param="point")

    @property
    def is_attached(self) -> bool:
        """Whether the mesh is somebody else's."""
        return bool(self.nats_url)

    @property
    def model_name(self) -> str:
        """As requests name it."""
        return self.model.partition("=")[0]

"""One frozen configuration per role, built once and passed down.

    WorkerConfig, ControlConfig, BridgeConfig    one process each
    UpConfig                                     ``mesh up``: how many of them, and theirs
    BusConfig                                    part of each: the bus and the data directory

Values come from defaults < ``--config FILE`` (TOML) < ``MESH_*`` variables < flags; the mechanism
and the spelling of names are in ``infra/settings.py``. Times of the protocol (beats, leases,
windows) are no settings: they stand in ``infra/times.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from infra.access_config import AccessConfig
from infra.budget_config import BudgetConfig
from infra.bus.topology import MAX_QUEUED, Limits
from infra.mesh_file import read_mesh_file
from infra.parse import (
    ModelSource,
    any_text,
    choice,
    device,
    memory_bytes,
    model,
    models,
    number,
    path,
    process_name,
    profile_name,
    size_bytes,
    text,
    whole,
)
from infra.settings import SHARED_TABLE, Sources, load, setting
from infra.transport.plan import CHOICES, TransportPlan, plan_transports
from schemas.errors import ConfigError

DEFAULT_MODEL = ModelSource("smollm2-135m", "smollm2-135m")
BUS_ENV = "bus.env"
_PORT = whole(0, 65535)


def _default_data() -> Path:
    return path(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "inference-mesh"


def _default_cache() -> Path:
    return path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "inference-mesh" / "models"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class BusConfig:
    """Where the bus and the data are."""

    table: ClassVar[str] = SHARED_TABLE

    nats_url: str = setting(
        "", text, "broker URL; default: the one in DATA/bus.env", flag="--nats", secret=True
    )
    data: Path = setting(_default_data, path, "data directory (embedded broker, bus.env, logs)")
    model_cache: Path = setting(_default_cache, path, "where converted models are kept")
    log_level: str = setting(
        "info", choice("debug", "info", "warning", "error"), "least severe lines to log"
    )
    log_format: str = setting("json", choice("json", "console"), "log lines for machines or people")

    time_scale: float = setting(
        1.0,
        number(0.05, 100),
        "all times of the protocol (beats, leases, windows) are multiplied by this; "
        "must be equal in all processes",
    )

    def url(self, role: str) -> str:
        """The URL to connect to as ``role``: the one given, else the one for this role in
        ``<data>/bus.env``, else the client's there, else that of a mesh which runs in ``data`` on
        somebody else's broker.

        Raises:
            ConfigError: neither is there.
        """
        if self.nats_url:
            return self.nats_url
        found = read_bus_env(self.data / BUS_ENV)
        url = found.get(f"MESH_NATS_URL_{role.upper()}") or found.get("NATS_URL")
        if not url:
            running = read_mesh_file(self.data)
            url = running.nats_url if running else None
        if not url:
            raise ConfigError(
                f"no broker: no mesh runs in {self.data} (no {BUS_ENV} there); "
                "start one with 'mesh up', or give --nats URL or MESH_NATS_URL",
                param="mesh.nats_url",
            )
        return url


def read_bus_env(file: Path) -> dict[str, str]:
    """The ``KEY=value`` lines of a ``bus.env``; nothing when the file is not there.

    Raises:
        ConfigError: the file is there and can't be read.
    """
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}", param="mesh.data") from error
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {key.strip(): value.strip().strip("'\"") for key, equals, value in pairs if equals}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig(BudgetConfig):
    """The control process: admission and router."""

    table: ClassVar[str] = "control"

    bus: BusConfig
    name: str = setting("control", process_name, "name of this process, part of its id")
    models: tuple[ModelSource, ...] = setting(
        (DEFAULT_MODEL,), models, "a model to admit requests for, NAME=SOURCE", flag="--model",
        many=True,
    )  # fmt: skip
    max_queued_requests: int = setting(
        MAX_QUEUED, whole(1, 1_000_000), "requests of one model that may wait for a worker; more "
        "are refused with 429. Equal in all control processes",
    )  # fmt: skip
    kv_index_blocks: int = setting(
        1_000_000, whole(1, 100_000_000), "KV blocks, on whatever workers, that it remembers the "
        "place of; 150 bytes each",
    )  # fmt: skip
    replicas: int = setting(
        1, whole(1, 5), "servers of the broker's cluster that keep each message: 1 or 3. Equal in "
        "all control processes",
    )  # fmt: skip
    health_host: str = setting("127.0.0.1", text, "where /health, /ready, /metrics listen")
    health_port: int = setting(0, _PORT, "port of /health, /ready, /metrics; 0: any free one")
    grace_s: float = setting(8.0, number(0.1, 600), "how long a drain may take")

    @property
    def limits(self) -> Limits:
        """What the broker keeps. Queues of single workers and of admission are as long as that
        of a model may be: our own limit refuses first, with better words."""
        return Limits(queue_msgs=max(MAX_QUEUED, self.max_queued_requests), replicas=self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker: an engine with one model, and the roles it plays."""

    table: ClassVar[str] = "worker"

    bus: BusConfig
    name: str = setting("worker", process_name, "name of this process, part of its id")
    role: str = setting("both", choice("prefill", "decode", "both"), "which tasks it takes")
    model: ModelSource = setting(DEFAULT_MODEL, model, "the model it serves, NAME=SOURCE")
    engine: str = setting(
        "torch", choice("torch", "simulated"), "simulated: tokens from a hash, times from a model"
    )
    device: str = setting(
        "auto", device, "what it computes on: cpu, cuda, cuda:N; auto: CUDA where there is one"
    )
    dtype: str = setting(
        "auto",
        choice("auto", "fp32", "bf16", "q4", "q4-exact"),
        "numbers of weights and KV cache; auto: bf16 with native kernels, on CUDA, or where the "
        "processor multiplies it; q4: 4-bit weights, KV cache in bf16; q4-exact: the same, "
        "slower, without other rounding, KV cache in fp32",
    )
    kernels: str = setting(
        "auto",
        choice("auto", "native", "general"),
        "native: compiled C++, for the Llama family; general: transformers; auto: native if it can",
    )
    kv_memory: int = setting(
        2**30, memory_bytes(2**20), "size of the KV cache: 2GB, 512MiB, or a share of memory, 25%"
    )
    kv_host_memory: int = setting(
        2**30, memory_bytes(0), "host memory that keeps what the KV cache has no room for; 0: off"
    )
    kv_evicted_share: float = setting(
        0.1, number(0.001, 1), "of that memory, the most that makes room for others at once"
    )
    kv_disk: Path | None = setting(
        None, path, "directory that keeps KV blocks over restarts, in a folder per worker name; "
        "default: none are kept",
    )  # fmt: skip
    kv_disk_quota: int = setting(
        10 * 10**9, size_bytes(2**20), "what one worker may take there, such as 10GB"
    )
    kv_transports: str = setting(
        "auto",
        choice(*CHOICES),
        "how KV blocks go to other workers: shm, ucx, or both; auto: shm, and ucx as well if "
        "kv_ucx_host is given",
    )
    kv_ucx_host: str | None = setting(
        None, text, "address of this machine at which other hosts' workers read KV over UCX; for "
        "kv_transports ucx: 127.0.0.1 unless given",
    )  # fmt: skip
    kv_ucx_port: int = setting(0, _PORT, "TCP port at that address; 0: any free one")
    rack: str = setting("", any_text, "rack it stands in: KV goes to workers near by, if it can")
    zone: str = setting("", any_text, "zone it stands in, of several racks")
    block_size: int = setting(16, whole(1, 256), "tokens per KV block; equal on all workers")
    max_num_sequences: int = setting(64, whole(1, 4096), "sequences in one running batch")
    max_batch_tokens: int = setting(512, whole(16, 65536), "tokens computed in one step")
    threads: int = setting(num_cores, whole(1, 1024), "threads of the engine; default: all cores")
    max_step_s: float = setting(
        60.0, number(0.1, 3600), "a step of the engine that takes longer counts as stuck: the "
        "worker is not ready, and others go on with its requests",
    )  # fmt: skip
    speed: float = setting(
        1.0, number(0.001, 1000), "simulated engine: times of the cost model are divided by this"
    )
    profile: str | None = setting(
        None, profile_name, "what its steps cost at first, NAME or FILE as of mesh profile; a "
        "simulated engine runs on it. Default: what is registered for such workers",
    )  # fmt: skip
    crew: Path | None = setting(
        None, path, "file of simulated workers that this process is, in place of one"
    )
    crew_figures: Path | None = setting(
        None, path, "file in which a crew's process notes what each worker has done"
    )
    health_host: str = setting("127.0.0.1", text, "where /health, /ready, /metrics listen")
    health_port: int = setting(0, _PORT, "port of /health, /ready, /metrics; 0: any free one")
    grace_s: float = setting(8.0, number(0.1, 600), "how long a drain may take")

    def __post_init__(self) -> None:
        if self.crew is not None and self.engine != "simulated":
            raise ConfigError(
                "worker.crew: only simulated workers share a process (worker.engine simulated)",
                param="worker.crew",
            )
        if self.max_batch_tokens < self.max_num_sequences:
            raise ConfigError(
                f"worker.max_batch_tokens {self.max_batch_tokens} is less than "
                f"worker.max_num_sequences {self.max_num_sequences}: a decode step would not fit",
                param="worker.max_batch_tokens",
            )
        if self.kv_disk is not None:
            self._check_disk(self.kv_disk)

    def _check_disk(self, directory: Path) -> None:
        """What is wrong for good; a disk that fails, now or later, is done without."""
        if not self.kv_host_memory:
            raise ConfigError(
                "worker.kv_disk needs worker.kv_host_memory: blocks go by way of it",
                param="worker.kv_host_memory",
            )
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise ConfigError(f"worker.kv_disk {directory} is no directory", param="worker.kv_disk")

    @property
    def transports(self) -> TransportPlan:
        """How its KV blocks travel.

        Raises:
            ConfigError: UCX is asked for, and not installed.
        """
        return plan_transports(self.kv_transports, self.kv_ucx_host or "", self.kv_ucx_port)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles as beats and subjects name them."""
        return ("prefill", "decode") if self.role == "both" else (self.role,)

    @property
    def told_roles(self) -> tuple[str, ...]:
        """The roles in beats: a decode worker also computes short rests of prompts that are placed
        with it by name ("suffix"), and takes no other prefills."""
        return ("decode", "suffix") if self.role == "decode" else self.roles

    def thread_environment(self) -> dict[str, str]:
        """Variables that must stand in the environment before torch is imported.

        PASSIVE: an OpenMP thread that waits sleeps; two workers that share the cores would
        otherwise spin against each other.
        """
        return {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig(AccessConfig):
    """The HTTP bridge."""

    table: ClassVar[str] = "bridge"

    bus: BusConfig
    name: str = setting("bridge", process_name, "name of this process, part of its id")
    request_timeout_s: float = setting(
        300.0, number(0.1, 780), "deadline of a request that names none"
    )
    accept_timeout_s: float = setting(
        10.0, number(0.1, 600), "how long admission may take to accept before the client gets 503"
    )
    health_host: str = setting("127.0.0.1", text, "where /health, /ready, /metrics listen")
    health_port: int = setting(0, _PORT, "port of /health, /ready, /metrics; 0: any free one")
    grace_s: float = setting(8.0, number(0.1, 600), "how long a drain may take")

    def __post_init__(self) -> None:
        self.check_edge()
        self.check_access()


RoleConfig = ControlConfig | WorkerConfig | BridgeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """``mesh up``: how many of which role, and the configuration each of them gets."""

    table: ClassVar[str] = "up"

    bus: BusConfig
    control: ControlConfig
    worker: WorkerConfig
    bridge: BridgeConfig
    controls: int = setting(
        2, whole(1, 16), "number of control processes; one goes on at once where another died"
    )
    prefill: int = setting(-1, whole(0, 256), "number of prefill workers per model")
    decode: int = setting(-1, whole(0, 256), "number of decode workers per model")
    both: int = setting(0, whole(0, 256), "number of workers per model that do both")
    bridges: int = setting(
        -1, whole(1, 256), "number of bridge processes behind one port; default: bridge.processes"
    )
    models: tuple[ModelSource, ...] = setting(
        (DEFAULT_MODEL,), models, "a model to serve, NAME=SOURCE; may be repeated", flag="--model",
        many=True,
    )  # fmt: skip
    drain_s: float = setting(10.0, number(0.1, 600), "Ctrl-C: how long the drain may take")

    def __post_init__(self) -> None:
        for role in ("prefill", "decode"):
            if self.both == 0 and getattr(self, f"num_{role}") == 0:
                raise ConfigError(
                    f"no worker would do {role}: give --{role} N or --both N", param=f"up.{role}"
                )

    @property
    def num_prefill(self) -> int:
        """Prefill workers per model: as given, else one unless ``both`` workers do it."""
        return self.prefill if self.prefill >= 0 else int(self.both == 0)

    @property
    def num_decode(self) -> int:
        """Decode workers per model: as given, else one unless ``both`` workers do it."""
        return self.decode if self.decode >= 0 else int(self.both == 0)

    @property
    def num_bridges(self) -> int:
        """Bridge processes: as given, else what a bridge started alone would make of itself."""
        return self.bridges if self.bridges > 0 else self.bridge.processes

    @property
    def num_workers(self) -> int:
        """Workers of all models together."""
        return (self.num_prefill + self.num_decode + self.both) * len(self.models)


def load_up(
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> UpConfig:
    """``UpConfig``, with the cores shared out between the workers unless threads were given.

    Raises:
        ConfigError: as ``infra.settings.load``.
    """
    first = load(UpConfig, Sources.gather(file=file, env=env, flags=flags))
    shared: dict[str, Any] = {"threads": max(1, num_cores() // first.num_workers)}
    return load(UpConfig, Sources.gather(file=file, env=env, flags=flags, defaults=shared))

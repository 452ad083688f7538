"""The file that says what a simulated fleet is made of: TOML.

    model = "llama-8b"
    routers = 2                     # control processes, each with its own fleet and index

    [[workers]]
    name = "prefill"                # prefill-0, prefill-1, …
    count = 8
    role = "prefill"                # prefill, decode or both
    profile = "h100-llama-8b"       # a shipped one, or costs = { prefill_base_ms = …, … }
    speed = 1.0                     # so many times as fast
    racks = ["a", "b"]              # worker i stands in rack i modulo 2
    from_s = 0                      # it comes then …
    until_s = 300                   # … and drains then

    [links]                         # bytes per second between two workers, and what they begin with
    host = { gb_s = 100, latency_ms = 0.1 }

    [policy]
    placement = "score"

With ``router = "round-robin"`` there is no mesh: workers of both roles, each alone, take requests
by turns and share nothing.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from infra.parse import process_name
from pipeline.cost_model import scaled
from pipeline.profile_files import find_profile
from schemas.errors import ConfigError
from schemas.profiles import StepCosts, WorkerProfile

MAX_WORKERS = 4096
MAX_ROUTERS = 64
_FIELD = "fleet"

Role = Literal["prefill", "decode", "both"]
PlacementPolicy = Literal["score", "random", "least-loaded", "power-of-two"]
EarlyRejection = Literal["predicted", "now", "off"]


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of way between two workers."""

    gb_s: float  # 10^9 bytes per second
    latency_ms: float = 0.5


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ways by how near two workers are. The defaults are those of a usual cluster, not measured:
    NVLink in a host, 400 Gb/s in a rack, less beyond."""

    host: LinkSpeed = LinkSpeed(gb_s=100.0, latency_ms=0.1)
    rack: LinkSpeed = LinkSpeed(gb_s=40.0, latency_ms=0.3)
    zone: LinkSpeed = LinkSpeed(gb_s=20.0, latency_ms=0.5)
    far: LinkSpeed = LinkSpeed(gb_s=5.0, latency_ms=2.0)
    host_memory: LinkSpeed = LinkSpeed(gb_s=25.0, latency_ms=0.1)  # from a worker's host tier


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How it is decided; the command line may say otherwise.

    ``waiting_room``: requests wait in the control process until a worker has room soon. None: with
    the placement ``score``, for the others are there to be compared with, and stand for routers
    that place whatever comes at once.
    """

    placement: PlacementPolicy = "score"
    early_rejection: EarlyRejection = "off"
    slo_ttft_ms: float = 0.0  # 0: none
    slo_tbt_ms: float = 0.0
    waiting_room: bool | None = None

    @property
    def has_waiting_room(self) -> bool:
        """Whether requests wait."""
        return self.placement == "score" if self.waiting_room is None else self.waiting_room


class WorkerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that are alike."""

    name: str
    role: Role
    count: int = 1
    profile: str = ""  # the name of a shipped one
    costs: StepCosts | None = None  # or its own
    kv_tokens: int = 0  # 0: as the profile says
    kv_token_bytes: int = 0  # 0: as the profile says
    host_tokens: int = 0  # of a tier in host memory; 0: none
    speed: float = 1.0
    per_host: int = 8  # workers of one machine
    racks: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    from_s: float = 0.0
    until_s: float = math.inf
    max_num_sequences: int = 256
    max_batch_tokens: int = 2048


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    name: str
    role: Role
    costs: StepCosts
    kv_tokens: int
    kv_token_bytes: int
    host_tokens: int
    host: str
    rack: str
    zone: str
    from_s: float
    until_s: float
    max_num_sequences: int
    max_batch_tokens: int
    profile: str = ""

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues that it pulls from."""
        return _roles(self.role)


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet file."""

    workers: tuple[WorkerGroup, ...]
    name: str = ""  # "": that of the file
    model: str = "simulated-model"
    router: Literal["mesh", "round-robin"] = "mesh"
    routers: int = 1
    block_size: int = 16
    beat_s: float = 0.5
    hop_ms: float = 0.5  # of a message; the work queue's median in ``mesh bench bus``
    kv_events_ms: float = 50.0  # how long changes of a cache are gathered
    links: Links = Links()
    policy: Policy = Policy()

    def specs(self) -> tuple[WorkerSpec, ...]:
        """Each worker.

        Raises:
            ConfigError: a profile that there is not, or that does not say what is needed.
        """
        return tuple(spec for group in self.workers for spec in _specs(group))


def read_fleet(path: Path) -> FleetPlan:
    """The plan in a file.

    Raises:
        ConfigError: it can't be read; or the field that is wrong, with its place.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", param=_FIELD) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}", param=_FIELD) from error
    try:
        plan = msgspec.convert(document, FleetPlan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", param=_FIELD) from error
    return check_fleet(msgspec.structs.replace(plan, name=plan.name or path.stem), str(path))


def check_fleet(plan: FleetPlan, where: str = _FIELD) -> FleetPlan:
    """The same plan, if it can be run.

    Raises:
        ConfigError: the field that is wrong, with its place.
    """
    for wrong in _faults(plan):
        raise ConfigError(f"{where}: {wrong}", param=_FIELD)
    return plan


def _faults(plan: FleetPlan) -> Iterator[str]:
    yield from _bounds("$", plan, (("routers", 1, MAX_ROUTERS), ("block_size", 1, 512)))
    yield from _bounds("$", plan, (("beat_s", 0.001, 60), ("hop_ms", 0, 1e4)))
    yield from _bounds("$", plan, (("kv_events_ms", 0, 1e5),))
    if plan.block_size & (plan.block_size - 1):
        yield f"$.block_size: {plan.block_size} is no power of two"
    for name in Links.__struct_fields__:
        link = getattr(plan.links, name)
        yield from _bounds(f"$.links.{name}", link, (("gb_s", 1e-6, 1e6), ("latency_ms", 0, 1e5)))
    yield from _bounds("$.policy", plan.policy, (("slo_ttft_ms", 0, 1e7), ("slo_tbt_ms", 0, 1e7)))
    names: set[str] = set()
    for position, group in enumerate(plan.workers):
        place = f"$.workers[{position}]"
        yield from (f"{place}.{fault}" for fault in _group_faults(group, plan))
        if group.name in names:
            yield f"{place}.name: {group.name!r} is there twice"
        names.add(group.name)
    if not 0 < (number := sum(group.count for group in plan.workers)) <= MAX_WORKERS:
        yield f"$.workers: there are {number}, of at most {MAX_WORKERS}"
    roles = {role for group in plan.workers for role in _roles(group.role)}
    for missing in {"prefill", "decode"} - roles:
        yield f"$.workers: nobody has the role {missing}"


def _group_faults(group: WorkerGroup, plan: FleetPlan) -> Iterator[str]:
    try:
        process_name(group.name)
    except ValueError as error:
        yield f"name: {error}"
    for fault in _bounds(
        "",
        group,
        (
            ("count", 1, MAX_WORKERS), ("kv_tokens", 0, 1e9), ("kv_token_bytes", 0, 1e9),
            ("host_tokens", 0, 1e10), ("speed", 1e-3, 1e3), ("per_host", 1, MAX_WORKERS),
            ("from_s", 0, 1e6), ("max_num_sequences", 1, 65536),
            ("max_batch_tokens", group.max_num_sequences, 1e6),
        ),
    ):  # fmt: skip
        yield fault.removeprefix(".")
    if not group.until_s > group.from_s:
        yield f"until_s: {group.until_s:g} is not after from_s"
    if bool(group.profile) == (group.costs is not None):
        yield "profile: give either a profile or costs"
    for field in StepCosts.__struct_fields__ if group.costs is not None else ():
        if not 0 <= (ms := getattr(group.costs, field)) < math.inf:
            yield f"costs.{field}: {ms} is no time"
    if group.costs is not None and not group.kv_tokens:
        yield "kv_tokens: how many fit must be said where there is no profile"
    if plan.router == "round-robin" and group.role != "both":
        yield "role: behind round-robin every worker has both"


def _bounds(
    place: str, value: object, bounds: tuple[tuple[str, float, float], ...]
) -> Iterator[str]:
    for name, low, high in bounds:
        if not low <= (told := getattr(value, name)) <= high:
            yield f"{place}.{name}: {told:g} is not from {low:g} to {high:g}"


def _roles(role: Role) -> tuple[str, ...]:
    return ("prefill", "decode") if role == "both" else (role,)


def _specs(group: WorkerGroup) -> Iterator[WorkerSpec]:
    profile = _profile(group)
    for number in range(group.count):
        yield WorkerSpec(
            name=f"{group.name}-{number}",
            role=group.role,
            costs=scaled(profile.costs, 1 / group.speed),
            kv_tokens=group.kv_tokens or profile.kv_tokens,
            kv_token_bytes=group.kv_token_bytes or profile.kv_token_bytes,
            host_tokens=group.host_tokens,
            host=f"{group.name}-host-{number // group.per_host}",
            rack=group.racks[number % len(group.racks)] if group.racks else "",
            zone=group.zones[number % len(group.zones)] if group.zones else "",
            from_s=group.from_s,
            until_s=group.until_s,
            max_num_sequences=group.max_num_sequences,
            max_batch_tokens=group.max_batch_tokens,
            profile=group.profile,
        )


def _profile(group: WorkerGroup) -> WorkerProfile:
    if group.costs is not None:
        return WorkerProfile(name=group.name, costs=group.costs)
    profile = find_profile(group.profile)
    if not (group.kv_tokens or profile.kv_tokens):
        raise ConfigError(f"{group.name}: kv_tokens is not in its profile", param=_FIELD)
    return profile

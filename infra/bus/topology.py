"""What lies on the broker: streams, buckets, consumers. The only file that names their settings.

    MESH_WORK        work queue   admission, prefill, kv-ready, decode; gone when acked
    MESH_TOKENS      limits       records, claim chains, token streams; republished to mesh.v1.live
    MESH_DEAD        limits       dead letters
    KV_mesh_models   bucket       models, revisions, rollouts
    OBJ_mesh_objects bucket       payloads too large for a message

Everything is created or updated, nothing is ever deleted. Work has no time limit: that would drop
requests silently. Consumers keep their state in memory: with traffic over hundreds of them this
is three times as fast, and after a broker restart whoever pulls adds its consumer again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import structlog
from nats.js.api import ConsumerConfig, RePublish, StreamConfig

from infra.bus.connection import Bus
from infra.bus.errors import BrokerRefused
from infra.bus.names import DEAD, MODELS, MODELS_BUCKET, OBJECTS, OBJECTS_BUCKET, TOKENS, WORK
from infra.times import Times
from schemas import subjects
from schemas.errors import ConfigError

_MIB, _GIB = 1 << 20, 1 << 30
_NO_STREAM = 10059
_IDLE_CONSUMER_S = 600.0  # a worker's consumer that nobody pulls on or reaps
_MAX_NAME = 128
_MAX_IN_WORK = 1024  # messages of one queue that are delivered and not acked
_MAX_WAITING = 65_536  # requests that admission lets wait, of all models and in all processes
MAX_QUEUED = 4096  # messages per subject, unless configured otherwise

log = structlog.get_logger("bus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the broker keeps. The sum must fit in the broker's ``max_file_store``."""

    work_bytes: int = 4 * _GIB
    tokens_bytes: int = 6 * _GIB
    dead_bytes: int = 256 * _MIB
    models_bytes: int = 64 * _MIB
    objects_bytes: int = 4 * _GIB
    queue_msgs: int = MAX_QUEUED  # per subject: one worker's queue, one model's admissions
    replicas: int = 1


def stream_configs(times: Times, limits: Limits) -> list[StreamConfig]:
    """All streams, buckets included, in the order in which they are made.

    Every role may look for the last one, ``KV_mesh_models``: when that is there, all are.
    """
    return [
        StreamConfig(
            name=WORK,
            subjects=[f"{subjects.ROOT}.{stage}.>" for stage in _STAGES],
            retention="workqueue",  # type: ignore[arg-type]
            discard="new",  # type: ignore[arg-type]
            max_bytes=limits.work_bytes,
            max_msgs_per_subject=limits.queue_msgs,
            discard_new_per_subject=True,
            **_common(times, limits),
        ),
        StreamConfig(
            name=TOKENS,
            subjects=[f"{subjects.ROOT}.token-stream.>", f"{subjects.ROOT}.request.>"],
            max_age=times.token_stream_age_s,
            max_bytes=limits.tokens_bytes,
            allow_direct=True,
            republish=RePublish(
                src=f"{subjects.ROOT}.token-stream.>", dest=f"{subjects.ROOT}.live.token-stream.>"
            ),
            **_common(times, limits),
        ),
        StreamConfig(
            name=DEAD,
            subjects=[subjects.DEAD],
            max_age=7 * 86400.0,
            max_bytes=limits.dead_bytes,
            allow_direct=True,
            **_common(times, limits),
        ),
        StreamConfig(
            name=OBJECTS,
            subjects=[f"$O.{OBJECTS_BUCKET}.C.>", f"$O.{OBJECTS_BUCKET}.M.>"],
            max_age=times.token_stream_age_s,
            max_bytes=limits.objects_bytes,
            allow_direct=True,
            allow_rollup_hdrs=True,
            discard="new",  # type: ignore[arg-type]
            **_common(times, limits),
        ),
        StreamConfig(
            name=MODELS,
            subjects=[f"$KV.{MODELS_BUCKET}.>"],
            max_msgs_per_subject=8,
            max_bytes=limits.models_bytes,
            allow_direct=True,
            allow_rollup_hdrs=True,
            deny_delete=True,
            discard="new",  # type: ignore[arg-type]
            **_common(times, limits),
        ),
    ]


_STAGES = ("admission", "prefill", "kv-ready", "decode")


def _common(times: Times, limits: Limits) -> dict[str, Any]:
    return {
        "storage": "file",
        "num_replicas": limits.replicas,
        "duplicate_window": times.duplicate_window_s,
    }


async def ensure_topology(bus: Bus, limits: Limits | None = None) -> None:
    """Create what is missing, change settings that differ; any number of processes at once.

    Raises:
        ConfigError: the broker has a stream of ours with settings that can't be changed in place,
            or not enough storage; ``param`` is the stream.
        BusUnavailable, BusForbidden: as :meth:`Bus.api`.
    """
    for config in stream_configs(bus.times, limits or Limits()):
        try:
            await _ensure_stream(bus, config)
        except BrokerRefused as error:
            raise ConfigError(f"stream {config.name}: {error}", param=config.name) from error
    await bus.sync_clock()


async def _ensure_stream(bus: Bus, config: StreamConfig) -> None:
    # Look first: to create a stream that is there already asks for its storage a second time.
    wanted = config.as_dict()
    try:
        present = (await bus.api(f"STREAM.INFO.{config.name}"))["config"]
    except BrokerRefused as error:
        if error.err_code != _NO_STREAM:
            raise
        await bus.api(f"STREAM.CREATE.{config.name}", wanted)
        return
    wanted["subjects"] = sorted({*present["subjects"], *(config.subjects or [])})
    present["subjects"].sort()
    if any((present.get(key) or 0) != (value or 0) for key, value in wanted.items()):
        await bus.api(f"STREAM.UPDATE.{config.name}", present | wanted)
        log.info("stream_updated", stream=config.name)


async def ensure_consumer(bus: Bus, stream: str, config: ConsumerConfig) -> dict[str, Any]:
    """Create a consumer or change its settings; returns the broker's description of it.

    Raises:
        BrokerRefused: for instance 10100, another consumer reads an overlapping subject.
        BusUnavailable, BusForbidden: as :meth:`Bus.api`.
    """
    subject = f"CONSUMER.CREATE.{stream}.{config.name}"
    if config.filter_subject:
        subject = f"{subject}.{config.filter_subject}"
    return await bus.api(subject, {"stream_name": stream, "config": config.as_dict()})


async def delete_consumer(bus: Bus, stream: str, name: str) -> None:
    """Delete a consumer; one that is not there is fine.

    Raises:
        BusUnavailable, BusForbidden, BrokerRefused: as :meth:`Bus.api`.
    """
    try:
        await bus.api(f"CONSUMER.DELETE.{stream}.{name}")
    except BrokerRefused as error:
        if error.status != 404:
            raise


def worker_consumer(stage: str, served: str, worker: str, times: Times) -> ConsumerConfig:
    """A worker's own queue of one stage, ``prefill`` or ``decode``."""
    return _work_consumer(
        f"{stage}-{worker}",
        _stage_subject(stage, served, worker),
        ack_wait=times.own_ack_wait_s,
        inactive_threshold=_IDLE_CONSUMER_S,
    )


def any_consumer(stage: str, served: str, times: Times) -> ConsumerConfig:
    """The queue that all workers of a model share: whoever pulls first has the task."""
    return _work_consumer(
        f"any-{stage}-{served}",
        _stage_subject(stage, served, subjects.ANY),
        ack_wait=times.ack_wait_s,
    )


def admission_consumer(times: Times) -> ConsumerConfig:
    """All requests, shared by the admission processes. Those that wait for a worker are un-acked
    meanwhile."""
    return _work_consumer(
        "admission",
        f"{subjects.ROOT}.admission.>",
        ack_wait=times.ack_wait_s,
        max_ack_pending=_MAX_WAITING,
    )


def kv_ready_consumer(times: Times) -> ConsumerConfig:
    """All finished prefills, shared by the routers."""
    return _work_consumer("kv-ready", f"{subjects.ROOT}.kv-ready.>", ack_wait=times.ack_wait_s)


def reap_consumer(subject: str, worker_consumer_name: str, times: Times) -> ConsumerConfig:
    """Reads what a dead worker left on ``subject``; shared by the routers that reap it."""
    return _work_consumer(
        f"reap-{worker_consumer_name}",
        subject,
        ack_wait=times.ack_wait_s,
        inactive_threshold=_IDLE_CONSUMER_S,
    )


def _stage_subject(stage: str, served: str, worker: str) -> str:
    if stage == "prefill":
        return subjects.prefill(served, worker)
    if stage == "decode":
        return subjects.decode(served, worker)
    raise ValueError(f"{stage!r} has no workers")


def _work_consumer(name: str, subject: str, **settings: Any) -> ConsumerConfig:
    legal = _legal_name(name)
    settings.setdefault("max_ack_pending", _MAX_IN_WORK)
    return ConsumerConfig(
        name=legal,
        durable_name=legal,
        filter_subject=subject,
        ack_policy="explicit",  # type: ignore[arg-type]
        max_deliver=-1,  # attempts are counted in our own header
        mem_storage=True,
        **settings,
    )


def _legal_name(name: str) -> str:
    """``name``, or when it is long a hash of it: the broker takes 255 bytes."""
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:32]}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"

"""Bridge: OpenAI's HTTP API in front, the bus behind.

Consumes   HTTP
           mesh.v1.live.token-stream.bridge.<process>.> tokens and ends, through MeshClient
           mesh.v1.adopt.*                              Adopt: what other bridges read on
Publishes  mesh.v1.admission.<model>                     InferenceRequest
           mesh.v1.tokenize.<model>                      Tokenize, Detokenize: questions
           mesh.v1.token-stream.bridge.<process>.claim.<id> Cancelled, when a client leaves
           mesh.v1.adopt.<process>                       Adopt: what is read on here
Keeps      open connections; nothing that another bridge would need
Twice?     every HTTP request gets a request id of its own; a client that repeats, pays twice
Fails      MeshError -> its HTTP status, or an error event once the answer has begun
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Sequence

from infra.bus import Msg
from infra.config import BridgeConfig
from infra.health import Health
from infra.http_protocol import HttpBounds
from infra.http_server import LISTEN_FD, http_server
from infra.log import Logger
from infra.process import RoleContext
from infra.task_scope import task_scope
from infra.tls import Tls
from pipeline.access.door import open_door
from pipeline.bridge.cors import Cors
from pipeline.bridge.endpoints import Services
from pipeline.bridge.limits import Limits
from pipeline.bridge.listener import listen
from pipeline.bridge.routes import Bridge
from pipeline.bridge.windows import Windows
from pipeline.client import MeshClient
from pipeline.registry import Registry
from pipeline.tokenize_service import TokenizerClient
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Adopt
from schemas.errors import ConfigError, SchemaError

_CUT_SHARE = 0.8  # of the grace time; the rest is for error events and cancels to leave


def limits_of(config: BridgeConfig, max_deadline_s: float) -> Limits:
    """The bridge's bounds as configured."""
    return Limits(
        max_body_bytes=config.max_body_bytes,
        max_open_requests=config.max_open_requests,
        body_s=config.body_timeout_s,
        accept_s=config.accept_timeout_s,
        default_deadline_s=min(config.request_timeout_s, max_deadline_s),
        max_deadline_s=max_deadline_s,
    )


def http_bounds_of(config: BridgeConfig) -> HttpBounds:
    """The bounds that hold before there is a request."""
    return HttpBounds(
        max_connections=config.max_connections,
        max_head_bytes=config.max_header_bytes,
        head_s=config.header_timeout_s,
        idle_s=config.idle_timeout_s,
    )


async def serve_bridge(ctx: RoleContext, config: BridgeConfig) -> None:
    """Serve until ``ctx.draining``: then nothing new, and what runs has ``grace_s`` to end.

    Ready once it listens and knows a model: before that every request would get 404.

    Raises:
        ConfigError: the port, the certificate or the API keys can't be used.
    """
    tls = Tls(config.tls_cert, config.tls_key) if config.tls_cert else None
    limits = limits_of(config, ctx.times.max_deadline_s)
    with (
        open_door(config, config.bus.data, ctx.log) as door,
        listen(config.host, config.port, limits.stall_s) as bound,
    ):
        registry = Registry(ctx.bus)
        await registry.start()
        ctx.health.set("models", False, "no control process has registered one yet")
        async with MeshClient(
            ctx.bus,
            user=ctx.kind,
            name=ctx.process,
            is_direct=True,
            max_waiting=config.max_waiting_deltas,
        ) as client:
            windows = await open_windows(ctx, client, config)
            services = Services(
                client=client,
                models=registry,
                ask_tokenizer=TokenizerClient(ctx.bus, limits.accept_s).ask,
                metrics=ctx.metrics,
                log=ctx.log,
                now_unix_ms=ctx.bus.now_unix_ms,
                limits=limits,
                windows=windows,
                cors=Cors(config.cors_origins),
                door=door,
            )
            bridge = Bridge(ctx.process, ctx.health, services, is_shared=LISTEN_FD in os.environ)
            async with task_scope() as tasks:
                tasks.create_task(registry.run(), name="registry")
                tasks.create_task(_tell_of_models(registry, ctx.health), name="first model")
                tasks.create_task(windows.run(), name="resume windows")
                tasks.create_task(door.run(ctx.times.beat_s), name="API keys")
                await _serve_http(ctx, config, bridge, bound, tls)


async def _serve_http(
    ctx: RoleContext, config: BridgeConfig, bridge: Bridge, bound: socket.socket, tls: Tls | None
) -> None:
    server = http_server(
        bridge,
        bound,
        drain_s=config.grace_s,
        bounds=http_bounds_of(config),
        tls=tls.context if tls else None,
    )
    async with task_scope() as tasks, server, read_again_on_hangup(tls, ctx.log):
        host, port = bound.getsockname()[:2]
        ctx.log.info("bridge_listening", host=host, port=port, scheme=config.scheme)
        ctx.ready()
        await ctx.draining.wait()
        bridge.drain()
        tasks.create_task(_cut_later(bridge, _CUT_SHARE * config.grace_s), name="cut")


async def _tell_of_models(registry: Registry, health: Health) -> None:
    await registry.until_any()
    health.set("models", True)


async def open_windows(ctx: RoleContext, client: MeshClient, config: BridgeConfig) -> Windows:
    """The requests without a client of their own, told of what other bridges adopt."""

    async def announce(request_ids: Sequence[str]) -> None:
        adopt = Adopt(process=ctx.process, request_ids=tuple(request_ids))
        await ctx.bus.publish(subjects.adopt(ctx.process), encode(adopt))

    windows = Windows(
        announce, client.cancel, ctx.times, ctx.log, max_waiting=config.max_open_requests
    )

    def hear(message: Msg) -> None:
        with contextlib.suppress(SchemaError):  # a newer peer's
            windows.hear(decode(message.data, Adopt).request_ids)

    await ctx.bus.subscribe(subjects.ALL_ADOPTIONS, hear)
    return windows


@contextlib.asynccontextmanager
async def read_again_on_hangup(tls: Tls | None, log: Logger) -> AsyncGenerator[None, None]:
    """While the block runs, SIGHUP reads the certificate again; a bad one is told and not taken.
    Without a certificate SIGHUP ends the process, as it does by default."""
    if tls is None:
        yield
        return

    def read() -> None:
        try:
            tls.reload()
        except ConfigError as error:
            log.error("certificate_refused", reason=error.message, key=error.param)
        else:
            log.info("certificate_read")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, read)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _cut_later(bridge: Bridge, after_s: float) -> None:
    await asyncio.sleep(after_s)
    bridge.cut()

"""The control process: admission, router, take-over and tokenizers, in one event loop.

Any number of control processes may run: they share their consumers, and whatever two of them
decide at once is settled by record and claim.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from infra.bus import admission_consumer, kv_ready_consumer
from infra.config import ControlConfig
from infra.model_folder import ModelFolder, open_model_folder
from infra.process import RoleContext
from infra.task_scope import task_scope
from pipeline.admission import Admission
from pipeline.backlog import Backlog
from pipeline.claim_chain import ClaimChain
from pipeline.fleet import Fleet
from pipeline.index_feed import IndexFeed
from pipeline.outlook import Outlook
from pipeline.placed_feed import PlacedFeed
from pipeline.placement import Placement, RouteSettings, make_placement
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from pipeline.registry import Registry
from pipeline.router import Router
from pipeline.stage import Stage, StageContext, parse_as
from pipeline.takeover import TakeOver, redeliver_to_control
from pipeline.tokenize_service import TokenizeService
from pipeline.tokenizing import ChatTokenizer
from pipeline.unclaimed import Unclaimed
from schemas.control import Beat
from schemas.kv import KvReady
from schemas.models import ModelCard
from schemas.requests import InferenceRequest
from schemas.subjects import served
from schemas.tokens import Claim


async def serve_control(ctx: RoleContext, config: ControlConfig) -> None:
    """Run until the process drains.

    Raises:
        ModelUnsupported: a model folder can't be served.
    """
    bus = ctx.bus
    stage_ctx = StageContext(
        bus=bus, chain=ClaimChain(bus), metrics=ctx.metrics, log=ctx.log, process=ctx.process
    )
    fleet = Fleet(bus.times.dead_s, time.monotonic())
    index = RadixIndex(config.kv_index_blocks)
    feed = IndexFeed(bus, index, fleet, ctx.metrics, ctx.log)
    outlook = Outlook(fleet, beat_s=bus.times.beat_s)
    placed = PlacedFeed(bus, outlook.hear_placed, ctx.process, ctx.log)
    prefixes = Prefixes(index, fleet, ctx.metrics)
    placement = _placement(ctx, config, fleet, prefixes, outlook, placed)

    def hear_beat(beat: Beat) -> None:
        feed.hear_beat(beat)
        outlook.hear_beat(beat, time.monotonic())

    def hear_claim(claim: Claim) -> None:
        backlog.note_claim(claim)
        outlook.hear_claim(claim, time.monotonic())

    def hear_end(request_id: str, num_tokens: int | None) -> None:
        outlook.hear_end(request_id, num_tokens, time.monotonic())

    registry = Registry(bus)
    backlog = Backlog(bus, config.max_queued_requests)
    admission = Admission(stage_ctx, registry, placement, backlog)
    await registry.start()
    for source in config.models:
        await _register(registry, admission, source.name, Path(source.source))
    admit: Stage[InferenceRequest] = Stage(
        stage_ctx,
        "admission",
        admission_consumer(bus.times),
        admission.parse,
        admission.reader_of,
        admission.handle,
        when_full=admission.when_full,
    )
    route: Stage[KvReady] = Stage(
        stage_ctx,
        "kv-ready",
        kv_ready_consumer(bus.times),
        parse_as(KvReady),
        lambda ready: ready.reader,
        Router(stage_ctx, placement, outlook).handle,
    )
    takeover = TakeOver(
        bus,
        stage_ctx.chain,
        fleet,
        ctx.metrics,
        ctx.log,
        placement=placement,
        on_claim=hear_claim,
        on_end=hear_end,
        on_beat=hear_beat,
    )
    unclaimed = Unclaimed(bus, stage_ctx.chain, takeover.attendance, ctx.log)
    questions = TokenizeService(bus, registry, admission.tokenizer_of, ctx.log)
    async with task_scope() as tasks:
        tasks.create_task(questions.run(), name="tokenize")
        tasks.create_task(feed.run(), name="kv index")
        tasks.create_task(placed.run(), name="placed")
        tasks.create_task(takeover.run(), name="take-over")
        tasks.create_task(registry.run(), name="registry")
        tasks.create_task(unclaimed.run(), name="unclaimed")
        tasks.create_task(_stop_when_draining(ctx, admit, route), name="drain")
        await redeliver_to_control(bus)  # of the one that we replace, perhaps
        ctx.ready()
        async with asyncio.TaskGroup() as stages:
            stages.create_task(admit.run(), name="admission")
            stages.create_task(route.run(), name="kv-ready")


def _placement(
    ctx: RoleContext,
    config: ControlConfig,
    fleet: Fleet,
    prefixes: Prefixes,
    outlook: Outlook,
    placed: PlacedFeed,
) -> Placement:
    settings = RouteSettings.of(config)
    return make_placement(
        settings.policy,
        fleet,
        prefixes,
        outlook,
        clock=time.monotonic,
        rng=random.Random(),
        settings=settings,
        process=ctx.process,
        on_placed=placed.say,
        on_decision=lambda role, reason: ctx.metrics.placements.labels(role, reason).inc(),
    )


async def _stop_when_draining(
    ctx: RoleContext, admit: Stage[InferenceRequest], route: Stage[KvReady]
) -> None:
    await ctx.draining.wait()
    admit.stop()
    route.stop()


async def _register(registry: Registry, admission: Admission, name: str, folder: Path) -> None:
    facts = await asyncio.to_thread(open_model_folder, folder)
    tokenizer = await asyncio.to_thread(ChatTokenizer, folder)
    card = _card(name, facts, tokenizer)
    admission.load(card, tokenizer)
    await registry.register(card)


def _card(name: str, facts: ModelFolder, tokenizer: ChatTokenizer) -> ModelCard:
    return ModelCard(
        name=name,
        revision=facts.revision,
        served=served(name, facts.revision),
        folder=str(facts.path),
        architecture=facts.architecture,
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        has_chat_template=tokenizer.has_chat_template,
        created_unix_s=int(time.time()),
    )

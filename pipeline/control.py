"""The control process: admission, router, take-over and tokenizers, in one event loop.

Any number of control processes may run: they share their consumers, and whatever two of them
decide at once is settled by record and claim.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from infra.bus import admission_consumer, kv_ready_consumer
from infra.config import ControlConfig
from infra.model_folder import ModelFolder, open_model_folder
from infra.process import RoleContext
from infra.task_scope import task_scope
from pipeline.admission import Admission
from pipeline.claim_chain import ClaimChain
from pipeline.decisions import Decisions
from pipeline.dispatch import Dispatch
from pipeline.policies import PolicyFile
from pipeline.prompt_reader import PromptReader
from pipeline.reaping import redeliver_to_control
from pipeline.registry import Registry
from pipeline.router import Router
from pipeline.stage import Stage, StageContext, parse_as
from pipeline.takeover import TakeOver
from pipeline.tokenize_service import TokenizeService
from pipeline.tokenizing import ChatTokenizer
from pipeline.unclaimed import Unclaimed
from schemas.control import Beat
from schemas.kv import KvReady
from schemas.models import ModelCard
from schemas.requests import InferenceRequest
from schemas.subjects import ALL_ADMISSION, direct, served
from schemas.tokens import Claim

MAX_WAITING = 32_768  # requests, of all models, that one process keeps un-acked


class _Ears:
    """Who wants to know what chains and beats tell."""

    def __init__(self, decisions: Decisions, dispatch: Dispatch) -> None:
        self._decisions = decisions
        self._dispatch = dispatch

    def hear_claim(self, claim: Claim) -> None:
        """A worker has claimed a request."""
        self._dispatch.heard(claim.request_id)
        self._decisions.hear_claim(claim)

    def hear_end(self, request_id: str, num_tokens: int | None) -> None:
        """A request has ended."""
        self._dispatch.heard(request_id)
        self._decisions.hear_end(request_id, num_tokens)

    def hear_beat(self, beat: Beat) -> None:
        """A process told of itself, or who saw it die."""
        if beat.state == "gone":
            self._dispatch.lost(beat.worker)
        self._decisions.hear_beat(beat)


async def serve_control(ctx: RoleContext, config: ControlConfig) -> None:
    """Run until the process drains.

    Raises:
        ModelUnsupported: a model folder can't be served.
        ConfigError: the policy file can't be used.
    """
    bus = ctx.bus
    stage_ctx = StageContext(
        bus=bus, chain=ClaimChain(bus), metrics=ctx.metrics, log=ctx.log, process=ctx.process
    )
    registry = Registry(bus)
    await registry.start()
    own = {source.name for source in config.models}
    policies = PolicyFile(
        config.policies, ctx.log, models=lambda: own | {card.name for card in registry.cards()}
    )
    decisions = Decisions(ctx, config, policies)
    reader = PromptReader(decisions.placement.max_sequence_tokens)
    dispatch = Dispatch(bus, stage_ctx.chain, ctx.log)
    admission = Admission(
        stage_ctx,
        registry,
        reader,
        backlog=decisions.backlog,
        door=decisions.door,
        policies=decisions.policies,
        dispatch=dispatch,
    )
    admit: Stage[InferenceRequest] = Stage(
        stage_ctx,
        "admission",
        admission_consumer(bus.times),
        admission.parse,
        admission.reader_of,
        admission.handle,
        max_waiting=MAX_WAITING,
        when_full=admission.when_full,
        direct=direct(ALL_ADMISSION),
        direct_queue="control",
        told_elsewhere=("admitted",),  # by the worker, when it has been executed
    )
    route: Stage[KvReady] = Stage(
        stage_ctx,
        "kv-ready",
        kv_ready_consumer(bus.times),
        parse_as(KvReady),
        lambda ready: ready.reader,
        Router(stage_ctx, decisions.placement, decisions.outlook).handle,
    )

    ears = _Ears(decisions, dispatch)
    takeover = TakeOver(
        bus,
        stage_ctx.chain,
        decisions.fleet,
        ctx.metrics,
        ctx.log,
        placement=decisions.placement,
        on_claim=ears.hear_claim,
        on_end=ears.hear_end,
        on_stored=decisions.hear_stored,
        on_beat=ears.hear_beat,
    )
    unclaimed = Unclaimed(
        bus, stage_ctx.chain, takeover.attendance, ctx.log, waiting=decisions.door.waiting
    )
    questions = TokenizeService(bus, registry, reader.tokenizer_of, ctx.log)
    async with task_scope() as tasks:
        tasks.create_task(takeover.run(), name="take-over")
        for source in config.models:  # beats are heard meanwhile
            await _register(registry, reader, source.name, Path(source.source))
        tasks.create_task(questions.run(), name="tokenize")
        tasks.create_task(decisions.index_feed.run(), name="kv index")
        tasks.create_task(decisions.placed_feed.run(), name="placed")
        if config.policies is not None:
            tasks.create_task(policies.run(bus.times.beat_s), name="policies")
        tasks.create_task(registry.run(), name="registry")
        tasks.create_task(unclaimed.run(), name="unclaimed")
        tasks.create_task(dispatch.run(), name="dispatch")
        tasks.create_task(_stop_when_draining(ctx, admit, route), name="drain")
        await redeliver_to_control(bus)  # of the one that we replace, perhaps
        await takeover.until_all_heard()
        ctx.ready()
        async with asyncio.TaskGroup() as stages:
            stages.create_task(admit.run(), name="admission")
            stages.create_task(route.run(), name="kv-ready")
        await dispatch.finish()


async def _stop_when_draining(
    ctx: RoleContext, admit: Stage[InferenceRequest], route: Stage[KvReady]
) -> None:
    await ctx.draining.wait()
    admit.stop()
    route.stop()


async def _register(registry: Registry, reader: PromptReader, name: str, folder: Path) -> None:
    facts = await asyncio.to_thread(open_model_folder, folder)
    tokenizer = await asyncio.to_thread(ChatTokenizer, folder)
    card = _card(name, facts, tokenizer)
    reader.load(card, tokenizer)
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

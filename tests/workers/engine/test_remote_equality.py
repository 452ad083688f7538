"""fp32: whatever is fetched from another worker, evicted, brought back or found to be wrong, the
tokens are those of an engine that keeps nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import structlog
import torch

from infra.metrics import Metrics
from pipeline.prefix_hash import request_salt
from schemas.codec import pack_ids
from schemas.kv import KvSource
from schemas.requests import RequestRecord, SamplingParams
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.test_tiers_equality import asked_prompts, drain, tiered_engine
from tests.workers.engine.torch_engines import Run, greedy, small_engine
from tests.workers.kv.fakes import FakeLenders, FakeReader
from workers.engine.engine import Engine
from workers.kv.host_tier import HostPool
from workers.kv.pace import PrefillSpeed
from workers.kv.prefetch import Prefetch
from workers.kv.prefix import make_prefetch
from workers.kv.prompt import prompt_of
from workers.kv.tiers import Tiers


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def record_of(prompt: tuple[int, ...]) -> RequestRecord:
    return RequestRecord(
        request_id="0" * 32,
        model="tiny",
        revision="1",
        served="tiny@1",
        prompt_ids=pack_ids(prompt),
        sampling=SamplingParams(),
        reader="client.tests",
        admitted_unix_ms=0,
        deadline_unix_ms=0,
    )


class Side:
    """One of two workers: an engine whose pool holds two conversations, and what is below it."""

    def __init__(self, folder: Path) -> None:
        engine, tiers = tiered_engine(folder, 22)
        engine.pace.prefill = PrefillSpeed(2.0)  # everything is worth fetching
        self.engine: Engine = engine
        self.tiers: Tiers = tiers
        self.run = Run(engine)

    @property
    def host(self) -> HostPool:
        assert self.tiers.host is not None
        return self.tiers.host

    def step_to_end(self) -> None:
        for _ in range(500):
            drain(self.tiers)
            if not self.engine.has_work():
                return
            self.run.step()
        raise AssertionError("the engine found no end")

    def num_held(self, record: RequestRecord) -> int:
        blocks = prompt_of(record, self.engine.info).blocks
        return self.host.num_leading([block.block_hash for block in blocks])

    def damage(self, rng: random.Random) -> None:
        """A bit of some slot of the host tier is not what it was."""
        slot = rng.randrange(self.engine.blocks.num_blocks, self.engine.pool.num_blocks)
        self.engine.pool.slots[slot, rng.randrange(64)] ^= 1


async def answers_of_two(folder: Path, rng: random.Random, *, flip: bool) -> dict[str, list[int]]:
    """Conversations whose turns go to either worker, which asks the other for what it has."""
    sides = {"a": Side(folder), "b": Side(folder)}
    hosts = {name: side.host for name, side in sides.items()}
    lenders = FakeLenders(hosts, sides["a"].engine.info.fingerprint)
    reader, log = FakeReader(hosts), structlog.get_logger("test")
    ways: dict[str, Prefetch] = {}
    for name, side in sides.items():
        way = make_prefetch(side.engine, side.tiers, reader, Metrics(), log)  # type: ignore[arg-type]
        assert way is not None
        ways[name] = way
    num_remote = 0
    for number, prompt in enumerate(asked_prompts()):
        here, there = rng.sample(["a", "b"], 2)
        side, record = sides[here], record_of(prompt)
        if flip:
            sides[there].damage(rng)
        source = KvSource(worker=there, num_blocks=sides[there].num_held(record))
        brought = await ways[here].bring(record, [source], lenders)
        num_remote += brought.num_remote_tokens
        salt = request_salt(record, side.engine.info.fingerprint)
        side.run.add(str(number), prompt, greedy(9), salt=salt)
        if number % 3 == 0:
            side.run.step()  # begins while the other's is still to come
        brought.let_go()
        side.step_to_end()
        ways[here].links = type(ways[here].links)()  # nobody is left alone for what he did
    for name, side in sides.items():
        side.host.check_invariants()
        counts = side.host.counts()
        assert counts.filling == counts.pinned == 0
        ways[name].close()
    assert not lenders.leases
    assert num_remote > 0
    assert sum(side.tiers.tally.count("host", "hit") for side in sides.values()) > 0
    return sides["a"].run.to_end() | sides["b"].run.to_end()


@pytest.mark.parametrize(("architecture", "flip"), [("gemma2", True), ("llama", False)])
async def test_what_comes_from_another_worker_does_not_change_a_token(
    tiny_folder: TinyFolder, architecture: str, flip: bool
) -> None:
    """Twelve turns over two workers with small pools: fetched, promoted, evicted, and with ``flip``
    damaged in between; every answer is that of one engine that has room for all, or keeps none."""
    folder = tiny_folder(architecture)
    plain = Run(small_engine(folder, num_blocks=400))
    for number, prompt in enumerate(asked_prompts()):
        plain.add(str(number), prompt, greedy(9), salt=str(number).encode())  # nothing is shared
        plain.to_end()
    found = await answers_of_two(folder, random.Random(3), flip=flip)
    assert found == plain.tokens

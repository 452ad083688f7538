"""Bringing a prompt's prefix into the host tier while its task still waits.

    plan      which parts to fetch, and from where: only what is faster than computing
    fetch     disk -> host tier, or another worker's host tier -> ours
    hold      what is there now stays until the engine has taken it

Nothing here fails a request: what can't be fetched in time is computed. Two prompts with the same
beginning fetch it once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infra.log import Logger
from infra.metrics import Metrics
from schemas.kv import KvSource
from schemas.requests import RequestRecord
from workers.engine.api import EngineInfo
from workers.kv.api import BlockName, HostTier
from workers.kv.borrowing import Lenders
from workers.kv.fetching import BlockReader, Fetching, Moved, NotFetched, Outcome
from workers.kv.prompt import Prompt, prompt_of
from workers.kv.worth import DISK, Fetch, Holder, LinkSpeeds, Need, plan

_MAX_PARTS = 4  # fetches, and waits for those of others, for one prompt
_HASHED_AT_ONCE_BYTES = 16 << 10  # 4,096 tokens: under a millisecond
_LEFT_ALONE_S = 10.0  # a link that failed; about as long as a dead worker is still in the index


class Disk(Protocol):
    """The disk tier and its way up; see :class:`workers.kv.disk_mover.DiskMover`."""

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes`` it has. Waits for nothing."""

    def read_s(self, num_blocks: int) -> float:
        """How long so many blocks will take."""

    async def load(self, blocks: Sequence[BlockName], timeout_s: float) -> int:
        """Bring the first of ``blocks`` to the host tier; how many came."""


class Engine(Protocol):
    """What is asked of the engine, from the event loop: books as they are just now."""

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes`` it has on the device."""

    def prefill_s(self, start: int, end: int) -> float:
        """How long the positions ``[start, end)`` of a prompt will take."""


@dataclass(eq=False, slots=True, kw_only=True)
class Brought:
    """What was done for one prompt: tokens by where they came from, and a hold on them."""

    num_disk_tokens: int = 0
    num_remote_tokens: int = 0
    _unpin: Callable[[], None] | None = None

    def let_go(self) -> None:
        """The engine has them, or nobody wants them any more. Twice is fine."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()


class Bringing:
    """A :meth:`Prefetch.bring` under way."""

    def __init__(self, task: asyncio.Task[Brought]) -> None:
        self._task = task

    async def complete(self) -> Brought:
        """What it brought."""
        return await self._task

    def drop(self) -> None:
        """Nobody wants it any more: end it, and let go of what it holds."""
        self._task.cancel()
        self._task.add_done_callback(_let_go)


def _let_go(task: asyncio.Task[Brought]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().let_go()


class Prefetch:
    """The way into one process's host tier.

    Attributes:
        links: what is known of the ways to other workers.
    """

    def __init__(
        self,
        tier: HostTier,
        disk: Disk | None,
        reader: BlockReader,
        engine: Engine,
        info: EngineInfo,
        metrics: Metrics,
        log: Logger,
    ) -> None:
        self.links = LinkSpeeds()
        self._tier = tier
        self._disk = disk
        self._engine = engine
        self._info = info
        self._metrics = metrics
        self._log = log
        self._fetching = Fetching(tier, reader, info.fingerprint)
        self._under_way: dict[bytes, asyncio.Event] = {}  # by block, while it is fetched
        self._held: set[Brought] = set()

    def close(self) -> None:
        """Wait for the reads that run, drop those that wait."""
        self._fetching.close()

    def let_all_go(self) -> None:
        """Whoever wanted prefixes is gone."""
        for brought in list(self._held):
            brought.let_go()

    def has_use(self, sources: Sequence[KvSource]) -> bool:
        """Whether there is anything beside the host tier to look into."""
        return self._disk is not None or bool(sources)

    async def bring(
        self, record: RequestRecord, sources: Sequence[KvSource], lenders: Lenders
    ) -> Brought:
        """Fetch what is worth it of a request's prompt, and hold it until the engine has it.
        Takes no longer than half of what computing it would; raises nothing."""
        prompt = await self._prompt_of(record)
        hashes = [block.block_hash for block in prompt.blocks]
        brought, tried = Brought(), set[str]()
        for _ in range(_MAX_PARTS):
            num_here = self._num_here(hashes)
            if num_here == len(hashes):
                break
            if (other := self._under_way.get(hashes[num_here])) is not None:
                await other.wait()  # it is bounded as ours would be
                continue
            holders = [
                one for one in self._holders(hashes, num_here, sources) if one.name not in tried
            ]
            fetches = plan(self._need(prompt, num_here), holders)
            if not fetches:
                break
            tried.add(fetches[0].holder)
            await self._fetch(fetches[0], prompt, lenders, brought)
        self._hold(hashes, brought)
        return brought

    async def _prompt_of(self, record: RequestRecord) -> Prompt:
        if len(record.prompt_ids) <= _HASHED_AT_ONCE_BYTES:
            return prompt_of(record, self._info)
        return await asyncio.to_thread(prompt_of, record, self._info)

    # ---- what to fetch -------------------------------------------------------------------

    def _num_here(self, hashes: Sequence[bytes]) -> int:
        on_device = self._engine.num_cached(hashes)
        return on_device + self._tier.num_leading(hashes[on_device:])

    def _need(self, prompt: Prompt, num_here: int) -> Need:
        return Need(
            num_here=num_here,
            num_usable=len(prompt.blocks),
            num_tokens=prompt.num_tokens,
            block_size=self._info.block_size,
            computing=self._engine.prefill_s,
        )

    def _holders(
        self, hashes: Sequence[bytes], num_here: int, sources: Sequence[KvSource]
    ) -> Iterator[Holder]:
        now_s = time.monotonic()
        for one in sources:
            if not self.links.is_left_alone(one.worker, now_s):
                seconds = self._seconds(one.worker)
                yield Holder(name=one.worker, num_blocks=one.num_blocks, seconds=seconds)
        if self._disk is not None:
            num_on_disk = num_here + self._disk.num_leading(hashes[num_here:])
            yield Holder(name=DISK, num_blocks=num_on_disk, seconds=self._disk.read_s)

    def _seconds(self, worker: str) -> Callable[[int], float]:
        block_bytes = self._info.block_bytes
        return lambda num_blocks: self.links.seconds(worker, num_blocks * block_bytes)

    def _hold(self, hashes: Sequence[bytes], brought: Brought) -> None:
        """Pin what the host tier has beyond the device: eviction must not take it back before
        the engine comes to it."""
        pin = self._tier.pin(hashes[self._engine.num_cached(hashes) :])

        def unpin() -> None:
            self._held.discard(brought)
            self._tier.unpin(pin)

        brought._unpin = unpin
        self._held.add(brought)

    # ---- fetching ------------------------------------------------------------------------

    async def _fetch(
        self, fetch: Fetch, prompt: Prompt, lenders: Lenders, brought: Brought
    ) -> None:
        blocks = prompt.blocks[fetch.start : fetch.end]
        began_s = time.monotonic()
        if fetch.holder == DISK:
            work = self._from_disk(blocks, fetch.limit_s)
        else:
            work = self._fetching.fetch(fetch.holder, blocks, began_s + fetch.limit_s, lenders)
        moved = await self._guarded(fetch.holder, blocks, work)
        if moved is None:
            return
        num_tokens = moved.num_blocks * self._info.block_size
        if fetch.holder == DISK:
            brought.num_disk_tokens += num_tokens
        else:
            brought.num_remote_tokens += num_tokens
        if moved.num_blocks == len(blocks):  # else another part than was predicted
            self._metrics.kv_fetch_seconds.labels("predicted").observe(fetch.predicted_s)
            self._metrics.kv_fetch_seconds.labels("seen").observe(time.monotonic() - began_s)

    async def _from_disk(self, blocks: Sequence[BlockName], limit_s: float) -> Moved:
        assert self._disk is not None, "nothing is planned without a disk"
        began_s = time.monotonic()
        num_blocks = await self._disk.load(blocks, limit_s)
        read_s = time.monotonic() - began_s
        if not num_blocks:
            raise NotFetched("late" if read_s >= limit_s else "lost", "the disk gave nothing")
        return Moved(num_blocks=num_blocks, ask_s=0.0, read_s=read_s)

    async def _guarded(
        self, holder: str, blocks: Sequence[BlockName], work: Coroutine[Any, Any, Moved]
    ) -> Moved | None:
        """Do ``work``, and learn from it; others that need ``blocks`` wait for its end. None: it
        brought nothing."""
        done = asyncio.Event()
        self._under_way |= dict.fromkeys((block.block_hash for block in blocks), done)
        outcome: Outcome = "cancelled"
        moved = None
        try:
            moved = await work
            outcome = "fetched"
        except NotFetched as why:
            outcome = why.outcome
            self._log.info("kv_not_fetched", source=holder, outcome=outcome, reason=str(why))
        except Exception:  # a bug: of this fetch alone
            outcome = "failed"
            self._log.exception("kv_fetch_failed", source=holder)
        finally:
            for block in blocks:
                if self._under_way.get(block.block_hash) is done:
                    del self._under_way[block.block_hash]
            done.set()
            self._learn(holder, outcome, moved)
        return moved

    def _learn(self, holder: str, outcome: Outcome, moved: Moved | None) -> None:
        source = "disk" if holder == DISK else "remote"
        self._metrics.kv_fetches.labels(source, outcome).inc()
        if outcome in ("late", "lost", "failed") and holder != DISK:
            self.links.fail(holder, time.monotonic() + _LEFT_ALONE_S)
        if moved is None:
            return
        num_bytes = moved.num_blocks * self._info.block_bytes
        self._metrics.kv_fetched_blocks.labels(source).inc(moved.num_blocks)
        self._metrics.kv_fetched_bytes.labels(source).inc(num_bytes)
        if holder != DISK:  # which measures itself
            self.links.observe(holder, num_bytes, moved.ask_s, moved.read_s)

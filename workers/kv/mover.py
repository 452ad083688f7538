"""The way of blocks between the engine's slots and the host tier, on a thread of its own.

    engine's thread            mover's thread
    demote(blocks)       --->  reserve, copy, is the generation still the same? checksum, commit
    promote(...)         --->  checksum, copy
    ended()              <---  promotions that have ended; ``on_ended`` is called for each

A demotion holds nothing: like a reader in another process it copies first, and looks at the slot's
generation afterwards. A slot that the engine needed in between is lost to the host tier, never to
the engine. Promotions go first: somebody waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog
import xxhash

from workers.engine.api import Runner
from workers.kv.api import BlockName, HostTier, Pin
from workers.kv.pace import Pace
from workers.kv.tally import TierTally

_log = structlog.get_logger(__name__)

MAX_DEMOTIONS = 8192  # blocks in the queue: 128k tokens; beyond that the thread can't follow
_BATCH_BYTES = 4 << 20  # demoted between two looks for promotions: about a millisecond
_MAX_BATCH = 64
# What is demoted may wait so long for more: each wake of this thread takes the interpreter from the
# engine's. A slot is rarely needed again so soon, and only a pool that is full needs it.
_GATHER_S = 0.01


class _Demotion(msgspec.Struct, frozen=True, eq=False):
    block: int
    generation: int
    name: BlockName


@dataclass(eq=False, slots=True, kw_only=True)
class Promotion:
    """Blocks of the host tier on their way into the engine's slots.

    ``num_right``, once ``is_done``: how many of the first are there and are right.
    """

    hashes: tuple[bytes, ...]  # asked for
    blocks: tuple[int, ...]
    pin: Pin
    num_right: int = 0
    is_done: bool = False

    @property
    def names(self) -> tuple[BlockName, ...]:
        """What is copied into ``blocks``."""
        return self.pin.blocks


class BlockMover:
    """Moves blocks for one engine.

    Args:
        host: the tier below the engine's slots, in the memory that the engine has.
        runner: of that engine.

    Attributes:
        on_ended: called on the mover's thread when a promotion has ended.
        holds: whether the host tier has a block.
    """

    def __init__(self, host: HostTier, runner: Runner, tally: TierTally, pace: Pace) -> None:
        self.on_ended: Callable[[], None] = lambda: None
        self.holds = host.holds
        self._host = host
        self._memory = host.memory
        self._runner = runner
        self._tally = tally
        self._pace = pace
        self._demotions: deque[_Demotion] = deque()
        self._promotions: deque[Promotion] = deque()
        self._ended: deque[Promotion] = deque()
        self._has_work = threading.Event()
        self._is_urgent = threading.Event()  # somebody waits for it
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=False)
        self._batch = min(_MAX_BATCH, max(1, _BATCH_BYTES // self._memory.block_bytes))

    # ---- for the engine's thread ---------------------------------------------------------

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes`` the host tier has."""
        return self._host.num_leading(hashes)

    def is_worth_it(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to promote so many blocks rather than to compute their tokens."""
        return self._pace.is_copying_faster(num_blocks, num_tokens)

    def demote(self, blocks: Sequence[tuple[int, BlockName]]) -> None:
        """Have blocks that are full copied to the host tier, those that are not needed before."""
        room = max(0, MAX_DEMOTIONS - len(self._demotions))
        if len(blocks) > room:
            self._tally.add("device", "dropped", len(blocks) - room)
            blocks = blocks[:room]
        generations = self._memory.generations[[block for block, _ in blocks]].tolist()
        for (block, name), generation in zip(blocks, generations, strict=True):
            self._demotions.append(_Demotion(block, generation, name))
        if not self._has_work.is_set():
            self._has_work.set()

    def promote(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Promotion:
        """Begin to copy ``hashes`` into ``blocks``, which are nobody's until it has ended. It may
        end with less: what the host tier lost in between, and whatever is wrong there."""
        pin = self._host.pin(hashes)
        promotion = Promotion(hashes=tuple(hashes), blocks=tuple(blocks), pin=pin)
        self._promotions.append(promotion)
        self._has_work.set()
        self._is_urgent.set()
        return promotion

    @property
    def has_ended(self) -> bool:
        """Whether ``ended`` would return something."""
        return bool(self._ended)

    def ended(self) -> list[Promotion]:
        """Promotions that have ended since it was last asked."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    # ---- life ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread when the copy that runs has ended. What waits is not done any more."""
        self._is_closing = True
        self._has_work.set()
        self._is_urgent.set()
        if self._thread.ident is not None:
            self._thread.join()

    def work(self) -> bool:
        """Do one thing that waits; False: nothing does. The thread does this; whoever has not
        started it may do it himself."""
        if self._promotions:
            self._promote(self._promotions.popleft())
            return True
        if self._demotions:
            count = min(self._batch, len(self._demotions))
            self._demote([self._demotions.popleft() for _ in range(count)])
            return True
        return False

    def _run(self) -> None:
        while not self._is_closing:
            self._has_work.wait()
            self._is_urgent.wait(_GATHER_S)
            self._has_work.clear()
            self._is_urgent.clear()
            while not self._is_closing and self.work():
                pass

    # ---- the copies ----------------------------------------------------------------------

    def _promote(self, promotion: Promotion) -> None:
        started_s = self._pace.clock()
        try:
            self._fill(promotion)
        except Exception:  # of the device, mostly: what is missing is computed
            _log.error("promotion_failed", exc_info=True)
        finally:
            self._host.unpin(promotion.pin)
            promotion.is_done = True
            self._ended.append(promotion)
            self.on_ended()
        self._tally.add("host", "promoted", promotion.num_right)
        if promotion.num_right:
            self._pace.promotion.note(promotion.num_right, self._pace.clock() - started_s)

    def _fill(self, promotion: Promotion) -> None:
        pin = promotion.pin
        for block, slot, checksum in zip(promotion.blocks, pin.slots, pin.checksums, strict=False):
            data = self._memory.slots[slot]
            if xxhash.xxh3_64_intdigest(data) != checksum:
                name = pin.blocks[promotion.num_right]
                _log.error("corrupt_block", tier="host", slot=slot, block=name.block_hash.hex())
                self._host.discard(name.block_hash)
                return
            self._runner.write_block(block, data)
            promotion.num_right += 1

    def _demote(self, batch: Sequence[_Demotion]) -> None:
        left = {one.name.block_hash: one for one in self._unchanged(batch)}
        filling = self._host.reserve([one.name for one in left.values()])
        taken = [left[name.block_hash] for name in filling.blocks]
        checksums: list[int] = []
        try:
            for demotion, slot in zip(taken, filling.slots, strict=True):
                into = self._memory.slots[slot]
                self._runner.read_block(demotion.block, into)
                checksums.append(xxhash.xxh3_64_intdigest(into))
        except Exception:  # of the device; the engine will notice by itself
            _log.error("demotion_failed", exc_info=True)
        right = set(self._unchanged(taken[: len(checksums)]))
        numbers = [number for number, demotion in enumerate(taken) if demotion in right]
        wrong = [number for number, demotion in enumerate(taken) if demotion not in right]
        self._host.commit(filling.part(numbers), [checksums[number] for number in numbers])
        if wrong:
            self._host.abort(filling.part(wrong))
        self._tally.add("device", "dropped", len(batch) - len(left) + len(wrong))

    def _unchanged(self, demotions: Sequence[_Demotion]) -> list[_Demotion]:
        """Those whose slots still have what they had when they were queued: what was copied out
        of them before this is right."""
        now = self._memory.generations[[one.block for one in demotions]].tolist()
        pairs = zip(demotions, now, strict=True)
        return [one for one, generation in pairs if generation == one.generation]

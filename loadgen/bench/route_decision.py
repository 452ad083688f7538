"""Section ``decision`` of ``mesh bench route``: CPU time of one placement, by the real code.

256 workers beat; 16 of them hold a system prompt that prompts of 64k tokens begin with, two hold
most of the prompt. A router places prompts that came before (their hashes are remembered), prompts
that it sees for the first time although workers hold them, prompts that nobody holds, and such
whose beginning all 256 hold.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from dataclasses import dataclass, replace

from infra.metrics import Metrics
from loadgen.bench.route import RoutePlan, RouteSection
from pipeline.fleet import Fleet
from pipeline.outlook import Outlook
from pipeline.placement import Placement, make_placement
from pipeline.prefix_hash import iter_prefix_hashes, request_salt
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from schemas.control import Beat, Load
from schemas.profiles import StepCosts
from schemas.requests import RequestRecord, SamplingParams

NUM_WORKERS = 256
PROMPT_TOKENS = 65_536
_BLOCK_SIZE = 16
_SERVED = "bench@r1"
_FINGERPRINT = "bench"
_NUM_PROMPTS = 16  # of 64 pieces each: what a router remembers (pipeline/hash_memo.py)
_NUM_SYSTEMS = 8
_SYSTEM_TOKENS = 8_192
_HOLDERS = 16  # workers that hold a system prompt
_FILL_BLOCKS = 500_000  # of other prompts, in the same index
_PLACEMENTS = 40  # per turn and kind
_COSTS = StepCosts(
    prefill_base_ms=5.0,
    prefill_token_ms=0.04,
    prefill_square_ms=1e-7,
    decode_base_ms=8.0,
    decode_context_ms=2e-5,
    decode_sequence_ms=0.02,
)


def measure(plan: RoutePlan) -> RouteSection:
    """``decision_us``: the median of placements of prompts that came before; beside it those of
    others, all in microseconds of CPU time."""
    rig = Rig.make(random.Random(5), _HOLDERS)
    crowd = Rig.make(random.Random(6), NUM_WORKERS)
    known, first, new, everywhere = [], [], [], []
    for router in (rig, crowd):
        router.place_all_us(router.held)  # so that their hashes are remembered
    for turn in range(plan.turns):
        known += rig.place_all_us(rig.held)
        everywhere += crowd.place_all_us(crowd.held)
        first += rig.fresh_router().place_all_us(rig.held)
        new += rig.place_all_us([_record(f"{turn}-{one}", _ids(rig.rng)) for one in range(10)])
    return RouteSection(
        figures={
            "decision_us": round(statistics.median(known), 1),
            "decision": {
                "known_p99_us": round(statistics.quantiles(known, n=100)[98], 1),
                "first_seen_us": round(statistics.median(first), 1),
                "held_by_nobody_us": round(statistics.median(new), 1),
                "held_by_all_us": round(statistics.median(everywhere), 1),
            },
        },
        notes=(
            f"decision: CPU time of place_prefill, {NUM_WORKERS} workers, {PROMPT_TOKENS} tokens, "
            f"index of {rig.index.num_blocks} blocks; first_seen: the held part is hashed, too",
        ),
    )


@dataclass(slots=True, kw_only=True)
class Rig:
    """A router's knowledge, filled; and the prompts that workers hold most of."""

    rng: random.Random
    fleet: Fleet
    index: RadixIndex
    outlook: Outlook
    placement: Placement
    held: list[RequestRecord]

    @classmethod
    def make(cls, rng: random.Random, num_holders: int, fill_blocks: int = _FILL_BLOCKS) -> Rig:
        """Workers with loads of all sizes; system prompts that ``num_holders`` of them hold."""
        fleet, index = Fleet(1e9, 0.0), RadixIndex(4 * fill_blocks)
        outlook = Outlook(fleet)
        for number in range(NUM_WORKERS):
            beat = _beat(number, rng)
            fleet.hear(beat, 0.0)
            outlook.hear_beat(beat, 0.0)
        systems = [_ids(rng, _SYSTEM_TOKENS) for _ in range(_NUM_SYSTEMS)]
        held = []
        for number in range(_NUM_PROMPTS):
            system = rng.choice(systems)
            record = _record(f"held-{number}", system + _ids(rng, PROMPT_TOKENS - len(system) // 4))
            held.append(record)
            hashes = _hashes(record)
            for worker in range(0, NUM_WORKERS, NUM_WORKERS // num_holders):
                index.stored(_name(worker), "device", hashes[: _SYSTEM_TOKENS // _BLOCK_SIZE])
            for worker in rng.sample(range(NUM_WORKERS), 2):
                index.stored(_name(worker), "device", hashes[: rng.randrange(2_000, 4_000)])
        number = 0
        while index.num_blocks < fill_blocks:
            other = [rng.randbytes(16) for _ in range(512)]
            index.stored(_name(number % NUM_WORKERS), "host", other)
            number += 1
        placement = _router(fleet, index, outlook)
        return cls(
            rng=rng, fleet=fleet, index=index, outlook=outlook, placement=placement, held=held
        )

    def fresh_router(self) -> Rig:
        """Of the same knowledge, which has not seen a prompt yet."""
        return replace(self, placement=_router(self.fleet, self.index, self.outlook))

    def place_all_us(self, records: list[RequestRecord]) -> list[float]:
        """What each placement took, one after the other."""
        return [self._place_us(record) for record in records]

    def _place_us(self, record: RequestRecord) -> float:
        started_ns = time.thread_time_ns()
        self.placement.place_prefill(record)
        return (time.thread_time_ns() - started_ns) / 1000


def _router(fleet: Fleet, index: RadixIndex, outlook: Outlook) -> Placement:
    prefixes = Prefixes(index, fleet, Metrics())
    return make_placement(
        "score", fleet, prefixes, outlook, clock=lambda: 0.1, rng=random.Random(1)
    )


def _beat(number: int, rng: random.Random) -> Beat:
    num_waiting = rng.randrange(8)
    return Beat(
        process=f"bench-{number}",
        kind="worker",
        state="ready",
        host=f"host-{number // 8}",
        pid=1,
        started_unix_ms=0,
        worker=_name(number),
        roles=("prefill",),
        served=_SERVED,
        fingerprint=_FINGERPRINT,
        block_size=_BLOCK_SIZE,
        kv_token_bytes=131_072,
        costs=_COSTS,
        load=Load(
            num_running=rng.randrange(4),
            num_waiting=num_waiting,
            num_free_slots=64,
            num_blocks=40_000,
            num_free_blocks=rng.randrange(1_000, 40_000),
            waiting_tokens=2_000 * num_waiting,
            waiting_ms=80.0 * num_waiting,
        ),
    )


def _name(number: int) -> str:
    return f"worker-{number:03}"


def _ids(rng: random.Random, num_tokens: int = PROMPT_TOKENS) -> bytes:
    return array("I", rng.choices(range(100_000), k=num_tokens)).tobytes()


def _record(request_id: str, packed_ids: bytes) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        model="bench",
        revision="r1",
        served=_SERVED,
        prompt_ids=packed_ids,
        sampling=SamplingParams(max_tokens=100, seed=1),
        reader="bench",
        admitted_unix_ms=0,
        deadline_unix_ms=2**50,
    )


def _hashes(record: RequestRecord) -> list[bytes]:
    salt = request_salt(record, _FINGERPRINT)
    return list(iter_prefix_hashes(record.prompt_ids, _BLOCK_SIZE, salt))

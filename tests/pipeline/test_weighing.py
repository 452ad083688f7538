"""All workers at once are weighed as each would be alone, written plainly; and chosen alike."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.metrics import Metrics
from pipeline.fleet import Fleet
from pipeline.outlook import Outlook
from pipeline.prefix_hash import prefix_hashes, request_salt
from pipeline.prefix_walk import Found, Match
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from pipeline.route_policies import Score
from pipeline.scoring import Weights, scores
from pipeline.topology import Distances, Links, where
from pipeline.weighing import Pool, Weighed
from schemas.codec import pack_ids
from schemas.control import Beat, Load, Placed
from schemas.profiles import StepCosts
from tests.pipeline.rig import SERVED, record

NUM_BLOCKS, SIZE = 24, 4
PROMPT = range(NUM_BLOCKS * SIZE + 1)
NUM_PROMPT = len(PROMPT)
NOW_S = 1.6
LINKS = Links()
NOBODY_YET = Beat(
    process="", kind="worker", state="ready", host="", pid=1, started_unix_ms=0, served=SERVED,
    block_size=SIZE, zone="z",
)  # fmt: skip

times = st.sampled_from((0.0, 0.5, 3.0, 40.0))
costs = st.builds(
    StepCosts,
    prefill_base_ms=times,
    prefill_token_ms=st.sampled_from((0.01, 0.3, 1.0)),
    prefill_square_ms=st.sampled_from((0.0, 1e-3)),
    decode_base_ms=times,
    decode_context_ms=st.just(1e-3),
    decode_sequence_ms=times,
)
loads = st.builds(
    Load,
    num_running=st.integers(0, 3),
    num_waiting=st.integers(0, 3),
    num_free_slots=st.sampled_from((0, 4, 8, 8)),
    num_blocks=st.just(100),
    num_free_blocks=st.integers(0, 100),
    waiting_tokens=st.integers(0, 2000),
    waiting_ms=st.sampled_from((0.0, 10.0, 900.0)),
    age_ms=st.sampled_from((0.0, 200.0)),
)
held = st.tuples(
    st.sampled_from(("device", "host", "disk")), st.integers(0, NUM_BLOCKS), st.booleans()
)
workers = st.fixed_dictionaries(
    {
        "load": loads,
        "costs": st.one_of(costs, costs, costs, st.none()),
        "roles": st.sampled_from((("prefill",), ("prefill",), ("prefill", "decode"), ("decode",))),
        "host": st.sampled_from(("h1", "h2", "h3")),
        "rack": st.sampled_from(("r1", "r2")),
        "fingerprint": st.sampled_from(("f1", "f1", "f1", "f2")),
        "kv_token_bytes": st.sampled_from((0, 100_000, 10_000_000)),
        "heard_s": st.sampled_from((0.1, 1.0, 1.5, 1.5)),
        "held": st.lists(held, max_size=2),
        "sent_ms": st.lists(st.sampled_from((1.0, 50.0)), max_size=2),
    }
)


def pool_of(facts: Mapping[str, Mapping[str, Any]]) -> tuple[Pool, Found]:
    """A router's knowledge of workers by name, and what it finds of one prompt."""
    fleet, index = Fleet(3.0, 0.0), RadixIndex(10_000)
    outlook = Outlook(fleet)
    asked = msgspec.structs.replace(record("asked"), prompt_ids=pack_ids(tuple(PROMPT)))
    for name, one in facts.items():
        told = {key: one[key] for key in Beat.__struct_fields__ if key in one}
        beat = msgspec.structs.replace(NOBODY_YET, process=f"of-{name}", worker=name, **told)
        fleet.hear(beat, one["heard_s"])
        outlook.hear_beat(beat, one["heard_s"])
        hashes = prefix_hashes(PROMPT, SIZE, request_salt(asked, beat.fingerprint))
        for tier, num, is_rest in one["held"]:
            index.stored(name, tier, hashes[num:] if is_rest else hashes[:num])
    for name, one in facts.items():
        for number, ms in enumerate(one["sent_ms"]):
            placed = Placed(
                process="p", request_id=f"{name}-{number}", served=SERVED, worker=name,
                role="prefill", prefill_ms=ms, num_tokens=10,
            )  # fmt: skip
            outlook.hear_placed(placed, 1.55)
    outlook.check_invariants()
    pool = Pool(outlook, Distances(LINKS), SERVED, "prefill", NOW_S)
    return pool, Prefixes(index, fleet, Metrics()).find(asked)


@dataclass
class Alone:
    """One worker, and what is known of it, as plain numbers."""

    beat: Beat
    figures: Mapping[str, float]
    match: Match | None

    @property
    def held(self) -> float:
        if self.match is None:
            return 0.0
        return SIZE * (0.5 * self.match.num_memory + 0.5 * self.match.num_blocks)

    @property
    def cached(self) -> float:
        return min(self.held, NUM_PROMPT - 1)

    @property
    def wait_ms(self) -> float:
        passed_ms = 1000 * max(0.0, NOW_S - self.figures["wait_s"])
        return max(0.0, self.figures["wait_ms"] - passed_ms)

    @property
    def recent(self) -> float:
        age_s = max(0.0, NOW_S - self.figures["recent_s"])
        return self.figures["recent_ms"] * math.exp(-age_s / 10.0)

    def compute_ms(self, cached: float) -> float:
        assert self.beat.costs is not None
        return (
            self.beat.costs.prefill_base_ms
            + self.beat.costs.prefill_token_ms * (NUM_PROMPT - cached)
            + self.beat.costs.prefill_square_ms * (NUM_PROMPT**2 - cached**2)
        )

    def travel_ms(self, num_tokens: float, there: Beat) -> float:
        """Of so many tokens from there to here."""
        if there.worker == self.beat.worker:
            return 0.0
        speed = LINKS.between(where(there), where(self.beat))
        return num_tokens * self.beat.kv_token_bytes * 1e-6 / speed


def candidates(pool: Pool, found: Found) -> tuple[list[Alone], list[Alone]]:
    """Everybody, in the order of the table; and who may be asked, by worker id."""
    everybody = []
    for row, beat in enumerate(pool.table.beats):
        names = ("wait_ms", "wait_s", "recent_ms", "recent_s", "slots", "heard_s", "since")
        figures = {name: float(pool.table.column(name)[row]) for name in names}
        everybody.append(Alone(beat, figures, found.get(beat.worker)))
    able = [
        one
        for one in everybody
        if "prefill" in one.beat.roles
        and NOW_S - one.figures["heard_s"] <= 1.2
        and one.figures["slots"] > 0
    ]
    return everybody, sorted(able, key=lambda one: one.beat.worker)


def plain(pool: Pool, found: Found) -> list[dict[str, float]]:
    """The terms of each candidate, one after the other."""
    everybody, able = candidates(pool, found)
    if not all(one.beat.costs for one in able):
        return by_sequences(able)
    unit_ms = max(1e-6, sum(one.compute_ms(0.0) for one in able) / len(able))
    lender = max(everybody, key=lambda one: one.held)  # the first of equals
    decoders = [one.beat for one in everybody if "decode" in one.beat.roles]
    terms = []
    for one in able:
        most = min(lender.held, NUM_PROMPT - 1)
        work_ms, travel_ms = one.compute_ms(one.cached), 0.0
        fetch_ms = one.travel_ms(max(0.0, most - one.cached), lender.beat)
        is_readable = one.beat.fingerprint == lender.beat.fingerprint
        if is_readable and fetch_ms + one.compute_ms(most) < work_ms:
            work_ms, travel_ms = one.compute_ms(most), fetch_ms
        away_ms = [one.travel_ms(NUM_PROMPT, beat) for beat in decoders]
        terms.append(
            {
                "hit": one.cached / NUM_PROMPT,
                "wait": one.wait_ms / unit_ms,
                "work": work_ms / unit_ms,
                "transfer": (travel_ms + min(away_ms, default=0.0)) / unit_ms,
                "recent": one.recent + 4 * unit_ms,
            }
        )
    return of_mean(terms)


def by_sequences(able: list[Alone]) -> list[dict[str, float]]:
    terms = []
    for one in able:
        load = one.beat.load
        num = load.num_running + load.num_waiting + one.figures["since"]
        terms.append(
            {
                "hit": one.cached / NUM_PROMPT,
                "wait": num + load.waiting_tokens / 256,
                "work": -min(one.cached / 256, 4.0),
                "transfer": 0.0,
                "recent": one.recent + 8,
            }
        )
    return of_mean(terms)


def of_mean(terms: list[dict[str, float]]) -> list[dict[str, float]]:
    mean = sum(one["recent"] for one in terms) / max(1, len(terms))
    return [{**one, "recent": one["recent"] / mean} for one in terms]


def plain_scores(weighed: Weighed, weights: Weights) -> list[float]:
    """The formula of ``pipeline/scoring.py``, of one candidate after the other."""
    it = weighed.candidates
    columns = [it.hit, it.wait, it.work, it.transfer, it.used, it.recent]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    best = min(wait + work + transfer for _, wait, work, transfer, _, _ in rows)
    hit_weight = weights.hit + weights.backlog * min(it.backlog, 4.0)
    return [
        hit_weight * hit
        + weights.queue / (1 + wait)
        + weights.load * (1 - used)
        - weights.transfer * transfer
        - weights.finish * (wait + work + transfer - best)
        - weights.spread * max(0.0, recent - weights.share)
        for hit, wait, work, transfer, used, recent in rows
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(workers, min_size=1, max_size=9), st.permutations(range(9)), st.integers(0, 99))
def test_all_at_once_are_weighed_as_each_alone(
    facts: list[dict[str, Any]], order: list[int], seed: int
) -> None:
    """Workers of all roles, layouts and places, heard in any order, holding anything in any tier:
    each has the terms that plain arithmetic gives it, and the same chance takes the same one."""
    named = {f"w{number}": one for number, one in zip(order, facts, strict=False)}
    pool, found = pool_of(named)
    weighed = pool.weigh_prefill(NUM_PROMPT, found)
    _, able = candidates(pool, found)
    assert [weighed.worker(at) for at in range(len(weighed))] == [one.beat.worker for one in able]
    assert weighed.cached.tolist() == [one.cached for one in able]
    if not able:
        return
    for name in ("hit", "wait", "work", "transfer", "recent"):
        told = getattr(weighed.candidates, name).tolist()
        assert told == pytest.approx([one[name] for one in plain(pool, found)], abs=1e-9), name
    weights = Weights(temperature=0.5)
    values = plain_scores(weighed, weights)
    assert scores(weighed.candidates, weights).tolist() == pytest.approx(values, abs=1e-9)
    at = Score(weights).prefill(weighed, random.Random(seed))
    chances = [math.exp((value - max(values)) / 0.5) for value in values]
    drawn = random.Random(seed).random() * sum(chances)
    assert sum(chances[:at]) - 1e-9 <= drawn <= sum(chances[: at + 1]) + 1e-9

"""Who is said to hold a prompt: who computed the very same, and can be read by who asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.metrics import Metrics
from pipeline.fleet import Fleet
from pipeline.prefix_hash import prefix_hashes, request_salt
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from schemas.codec import pack_ids
from schemas.control import Beat
from schemas.requests import RequestRecord, SamplingParams
from tests.pipeline.rig import beat, record

PROMPT = tuple(range(40))
SIZE = 4


def asks(prompt: Sequence[int] = PROMPT, **facts: str) -> RequestRecord:
    asked = record("request-1")
    return msgspec.structs.replace(asked, prompt_ids=pack_ids(list(prompt)), **facts)


def holder(worker: str, fingerprint: str = "f00d", **facts: Any) -> Beat:
    told = beat(worker, fingerprint=fingerprint, num_free_slots=8)
    return msgspec.structs.replace(told, **{"block_size": SIZE, **facts})


class Known:
    """An index and a fleet."""

    def __init__(self, *beats: Beat) -> None:
        self.index = RadixIndex(1000)
        self.fleet = Fleet(3.0, 0.0)
        self.metrics = Metrics()
        for one in beats:
            self.fleet.hear(one, 1.0)
        self.prefixes = Prefixes(self.index, self.fleet, self.metrics)

    def holds(self, worker: str, asked: RequestRecord, fingerprint: str = "f00d") -> None:
        hashes = prefix_hashes(PROMPT, SIZE, request_salt(asked, fingerprint))
        self.index.stored(worker, "host", hashes)

    def found(self, asked: RequestRecord) -> dict[str, int]:
        return {w: match.num_blocks for w, match in self.prefixes.find(asked).items()}

    def lookups(self, outcome: str) -> float:
        name = "mesh_kv_index_lookups_total"
        return self.metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


def test_the_longest_prefix_is_found() -> None:
    """As far as prompts are equal, in full blocks."""
    known = Known(holder("w1"))
    known.holds("w1", asks())
    assert known.found(asks()) == {"w1": 10}
    assert known.found(asks((*PROMPT[:22], 99, 99))) == {"w1": 5}
    assert known.found(asks(PROMPT[:3])) == {}
    assert (known.lookups("hit"), known.lookups("miss")) == (2, 1)


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"cache_salt": "s"}, {"revision": "r2"}], ids=lambda one: str(one)
)
def test_what_differs_in_anything_is_never_shared(other: dict[str, str]) -> None:
    """Two tenants, two salts, two revisions with the same prompt have no block in common."""
    known = Known(holder("w1"))
    known.holds("w1", asks(tenant="a"))
    assert known.found(asks(tenant="a")) == {"w1": 10}
    assert known.found(asks(**{"tenant": "a", **other})) == {}


@given(
    st.fixed_dictionaries({k: st.sampled_from("ab") for k in ("tenant", "cache_salt", "revision")}),
    st.fixed_dictionaries({k: st.sampled_from("ab") for k in ("tenant", "cache_salt", "revision")}),
)
def test_equal_identities_match_and_no_others(one: dict[str, str], other: dict[str, str]) -> None:
    """Differing in any one never matches, equal always does."""
    known = Known(holder("w1"))
    known.holds("w1", asks(**one))
    assert bool(known.found(asks(**other))) == (one == other)


def test_of_two_layouts_each_hears_of_its_own() -> None:
    """Workers of both fingerprints hold the prompt under their own hashes, and only those count;
    one that holds the other's by mistake is not named."""
    known = Known(holder("w1"), holder("w2", "beef"), holder("w3", "beef"))
    known.holds("w1", asks())
    known.holds("w2", asks(), "beef")
    known.holds("w3", asks(), "f00d")
    assert known.found(asks()) == {"w1": 10, "w2": 10}


def test_only_live_workers_of_the_model_are_named() -> None:
    """One that drains, one of another model and one that was never heard of are not."""
    known = Known(
        holder("w1"), holder("w2", state="draining"), holder("w3", served="other@r1"),
        holder("w4", roles=("decode",)),
    )  # fmt: skip
    for number in range(1, 6):
        known.holds(f"w{number}", asks())
    assert known.found(asks()) == {"w1": 10, "w4": 10}


def test_with_an_empty_index_nothing_is_looked_up() -> None:
    """A mesh whose workers say nothing pays nothing."""
    known = Known(holder("w1"))
    assert known.prefixes.is_empty
    assert known.found(asks()) == {}
    assert known.lookups("miss") == 0
    known.holds("w1", asks())
    assert not known.prefixes.is_empty


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    """Its logprobs come of computing it: who holds it is of no use."""
    known = Known(holder("w1"))
    known.holds("w1", asks())
    scored = msgspec.structs.replace(
        asks(), sampling=SamplingParams(max_tokens=1, seed=1, prompt_logprobs=0)
    )
    assert known.found(scored) == {}


def test_a_worker_that_does_not_say_its_block_size_is_left_alone() -> None:
    """An older one; its hashes can't be known."""
    known = Known(holder("w1", block_size=0))
    known.holds("w1", asks())
    assert known.found(asks()) == {}

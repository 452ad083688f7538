"""Our eviction beside LRU: on traces that are the same every time."""

from __future__ import annotations

import pytest

from loadgen.bench.kv_eviction import compare_all, hit_rate
from loadgen.bench.kv_traces import KINDS, make_trace, working_set
from workers.kv.eviction import LrfuPolicy, LruPolicy


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_the_same_every_time(kind: str) -> None:
    """The same seed gives the same requests, another seed others; each chain hangs together, and
    all that is asked for is what the request has."""
    trace = make_trace(kind, 1, 100)
    assert trace == make_trace(kind, 1, 100)
    assert trace != make_trace(kind, 2, 100)
    for request in trace:
        assert 0 < request.num_prompt <= request.num_blocks <= len(request.blocks)
        for before, after in zip(request.blocks, request.blocks[1:], strict=False):
            assert after.parent == before.block_hash


def test_our_policy_is_no_worse_than_lru() -> None:
    """Where there are scans beside conversations, better; nowhere much worse."""
    found = compare_all(seeds=(1,), num_requests=250)
    assert found["mixed"]["ratio"] >= 1.0
    assert min(one["ratio"] for one in found.values()) > 0.95


@pytest.mark.parametrize("policy", [LrfuPolicy, LruPolicy])
def test_a_pool_that_holds_everything_misses_only_what_is_new(
    policy: type[LrfuPolicy | LruPolicy],
) -> None:
    """Then both hit what was ever asked for, and the rate is that of the trace."""
    trace = make_trace("chats", 3, 200)
    made = policy()
    seen: set[bytes] = set()
    num_asked = num_known = 0
    for request in trace:
        prompt = [one.block_hash for one in request.blocks[: request.num_prompt]]
        num_asked += len(prompt)
        num_known += sum(one in seen for one in prompt)
        seen.update(one.block_hash for one in request.blocks[: request.num_blocks])
    assert hit_rate(made, trace, working_set(trace)) == num_known / num_asked
    made.check_invariants()

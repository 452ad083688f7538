"""Fetch or compute: what is predicted to be sooner, and never a wait that computing would beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.kv.worth import DISK, WAIT_SHARE, Holder, LinkSpeeds, Need, plan

MEGABYTE = 1_000_000


def computing(token_s: float) -> Callable[[int, int], float]:
    """A model that takes so long per token."""
    return lambda start, end: token_s * (end - start)


def holder(name: str, num_blocks: int, block_s: float, ask_s: float = 0.001) -> Holder:
    return Holder(name=name, num_blocks=num_blocks, seconds=lambda count: ask_s + count * block_s)


NEED = Need(num_here=0, num_usable=64, num_tokens=1056, block_size=16, computing=computing(1e-3))


def links_of(**bytes_per_s: float) -> LinkSpeeds:
    links = LinkSpeeds()
    for link, rate in bytes_per_s.items():
        for _ in range(40):
            links.observe(link, 10 * MEGABYTE, 0.001, 10 * MEGABYTE / rate)
    return links


def test_each_link_has_its_own_speed() -> None:
    """A fast neighbour says nothing against a slow one; one never read is taken to be usual."""
    links = links_of(near=10e9, far=50e6)
    assert links.seconds("near", MEGABYTE) < 0.01 < links.seconds("far", MEGABYTE)
    assert links.seconds("far", MEGABYTE) == pytest.approx(0.021, rel=0.1)
    assert links.seconds("near", MEGABYTE) < links.seconds("new", MEGABYTE)


def test_the_number_of_links_is_bounded() -> None:
    """Worker ids come and go; what was learned of the oldest is forgotten."""
    links = LinkSpeeds()
    for number in range(1000):
        links.observe(f"worker-{number}", 1000, 0.1, 0.1)
        links.fail(f"other-{number}", 1e9)
    assert len(links._links) <= 256
    assert len(links._left_alone) <= 256


def test_a_link_that_failed_is_left_alone_until_it_is_time_or_it_works() -> None:
    """A frozen owner costs one request its wait, not all of them."""
    links = LinkSpeeds()
    links.fail("owner", 10.0)
    assert links.is_left_alone("owner", 9.9)
    assert not links.is_left_alone("owner", 10.0)
    links.fail("owner", 20.0)
    links.observe("owner", 1000, 0.1, 0.1)
    assert not links.is_left_alone("owner", 11.0)


def test_a_prefix_is_fetched_where_that_is_sooner() -> None:
    """1 ms per token against 10 µs per block: fetch. A model that computes as fast as the link
    carries, or a link that is slow: compute."""
    (fetch,) = plan(NEED, [holder("owner", 64, 1e-5)])
    assert (fetch.holder, fetch.start, fetch.end) == ("owner", 0, 64)
    assert fetch.limit_s == pytest.approx(WAIT_SHARE * 1.024)
    assert plan(replace(NEED, computing=computing(1e-6)), [holder("owner", 64, 1e-5)]) == ()
    assert plan(NEED, [holder("owner", 64, 1e-2)]) == ()


def test_nothing_is_fetched_that_is_here_or_of_no_use() -> None:
    """Neither what we have, nor blocks behind the prompt's last usable one."""
    here = replace(NEED, num_here=40)
    assert plan(here, [holder("owner", 40, 1e-5)]) == ()
    (fetch,) = plan(here, [holder("owner", 900, 1e-5)])
    assert (fetch.start, fetch.end) == (40, 64)


def test_what_another_has_beyond_the_disk_is_fetched_after_it() -> None:
    """The disk is faster, the other has more: each gives its part."""
    first, second = plan(NEED, [holder("owner", 60, 1e-3), holder(DISK, 50, 1e-4, 0.0)])
    assert (first.holder, first.start, first.end) == (DISK, 0, 50)
    assert (second.holder, second.start, second.end) == ("owner", 50, 60)


@given(
    num_here=st.integers(0, 70),
    num_tokens=st.integers(1, 2000),
    holders=st.lists(
        st.tuples(st.sampled_from(["disk", "a", "b"]), st.integers(0, 200), st.floats(1e-7, 1e-1)),
        max_size=4,
    ),
    token_s=st.floats(1e-6, 1e-2),
)
def test_a_plan_is_never_slower_than_computing(
    num_here: int, num_tokens: int, holders: list[tuple[str, int, float]], token_s: float
) -> None:
    """Predicted: parts in order without a gap, each within its limit, and in all sooner."""
    need = Need(
        num_here=min(num_here, num_tokens // 16),
        num_usable=num_tokens // 16,
        num_tokens=num_tokens,
        block_size=16,
        computing=computing(token_s),
    )
    fetches = plan(need, [holder(*one) for one in holders])
    ready = need.num_here
    for fetch in fetches:
        assert fetch.start == ready < fetch.end <= need.num_usable
        assert fetch.predicted_s <= fetch.limit_s
        ready = fetch.end
    total_s = sum(one.predicted_s for one in fetches) + need.computing(ready * 16, num_tokens)
    assert total_s <= need.computing(need.num_here * 16, num_tokens)

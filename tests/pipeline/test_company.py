"""Whether several kinds of requests come to a pool."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.company import COMPANY_S, Company


def test_one_kind_alone_is_no_company() -> None:
    """However many requests it sends, and before the first one."""
    company = Company()
    assert not company.is_mixed(0.0)
    for at_s in range(5):
        company.come(("a", 0), float(at_s))
    assert not company.is_mixed(4.0)


def test_another_priority_of_one_tenant_is_another_kind() -> None:
    """The fair order tells them apart."""
    company = Company()
    company.come(("a", 0), 1.0)
    company.come(("a", 2), 2.0)
    assert company.is_mixed(2.0)


def test_who_has_not_come_for_long_is_forgotten() -> None:
    """From the last request of the others it takes ``COMPANY_S``."""
    company = Company()
    company.come(("a", 0), 1.0)
    company.come(("b", 0), 2.0)
    company.come(("a", 0), 3.0)
    assert company.is_mixed(2.0 + COMPANY_S)
    assert not company.is_mixed(2.1 + COMPANY_S)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 20.0)), max_size=30))
def test_two_facts_say_what_the_whole_list_does(steps: list[tuple[str, float]]) -> None:
    """Against who came when, all of it kept."""
    company, now_s, came = Company(), 0.0, {}
    for tenant, pause_s in steps:
        now_s += pause_s
        company.come((tenant, 0), now_s)
        came[tenant] = now_s
        assert company.is_mixed(now_s) == (
            sum(now_s - at_s <= COMPANY_S for at_s in came.values()) > 1
        )

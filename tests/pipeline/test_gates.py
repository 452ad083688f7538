"""Hysteresis: what is over stays over until it is left."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.gates import MAX_OVER, GateKey, Gates


def key(tenant: str = "") -> GateKey:
    return GateKey("m@1", "ttft", "chat", 1.0, tenant)


@settings(deadline=None)
@given(st.lists(st.floats(0, 2), max_size=60))
def test_a_gate_changes_only_across_the_whole_band(loads: list[float]) -> None:
    """Between two changes of a gate the load has crossed from over ``enter`` to ``leave``, or
    back: a load that wavers in between changes nothing."""
    gates, state = Gates(), False
    for load in loads:
        is_over = gates.tell(key(), load, enter=1.0, leave=0.8)
        if is_over != state:
            assert load > 1.0 if is_over else load <= 0.8
        else:
            assert load > 0.8 if is_over else load <= 1.0
        assert gates.is_over(key()) == is_over
        state = is_over


def test_gates_are_bounded_and_apart() -> None:
    """One group's gate is not another's; only so many are kept."""
    gates = Gates()
    assert gates.tell(key("a"), 1.1, 1.0, 0.8)
    assert not gates.tell(key("b"), 0.9, 1.0, 0.8)
    for number in range(MAX_OVER):
        gates.tell(key(f"t{number}"), 1.1, 1.0, 0.8)
    assert len(gates) == MAX_OVER
    assert not gates.is_over(key("a"))

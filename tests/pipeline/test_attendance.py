"""The rule by which requests of bridges are given up, event by event and against an oracle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.attendance import Attendance
from pipeline.ownership import Holding
from schemas import subjects
from schemas.control import Adopt, Beat
from tests.pipeline.rig import claim

WINDOW_S = 30.0
A, B = "bridge-a-1", "bridge-b-1"


def beat(process: str, kind: str = "bridge") -> Beat:
    return Beat(
        process=process, kind=kind, state="ready", host="here", pid=1, started_unix_ms=1
    )  # type: ignore[arg-type]  # fmt: skip


def holding(request_id: str, reader: str = subjects.bridge_reader(A)) -> Holding:
    return Holding(request_id=request_id, reader=reader, claim=claim(request_id, "w"), seq=1)


def ids(found: list[Holding]) -> list[str]:
    return [one.request_id for one in found]


def test_a_request_is_abandoned_a_window_after_its_bridges_last_beat() -> None:
    """Not a moment sooner, and each beat begins the window anew."""
    roll = Attendance(WINDOW_S, 0.0)
    roll.hear_beat(beat(A), 100.0)
    assert roll.abandoned([holding("r-1")], 100.0 + WINDOW_S) == []
    roll.hear_beat(beat(A), 110.0)
    assert roll.abandoned([holding("r-1")], 110.0 + WINDOW_S) == []
    assert ids(roll.abandoned([holding("r-1")], 110.1 + WINDOW_S)) == ["r-1"]


def test_an_adopted_request_has_a_reader() -> None:
    """Whoever adopts it keeps it, request by request, for a window after its last word."""
    roll = Attendance(WINDOW_S, 0.0)
    roll.hear_beat(beat(A), 100.0)
    roll.hear_adopt(Adopt(process=B, request_ids=("r-1",)), 125.0)
    both = [holding("r-1"), holding("r-2")]
    assert ids(roll.abandoned(both, 131.0)) == ["r-2"]
    assert ids(roll.abandoned(both, 155.1)) == ["r-1", "r-2"]


def test_who_knows_nothing_of_a_bridge_waits_a_whole_window() -> None:
    """A restarted control process, or one that was away, has not heard what was said."""
    roll = Attendance(WINDOW_S, 50.0)
    assert roll.abandoned([holding("r-1")], 80.0) == []
    assert ids(roll.abandoned([holding("r-1")], 80.1)) == ["r-1"]
    roll.listen_anew(90.0)
    assert roll.abandoned([holding("r-1")], 120.0) == []
    assert ids(roll.abandoned([holding("r-1")], 120.1)) == ["r-1"]


def test_other_readers_are_never_judged() -> None:
    """Direct clients send no beats; a worker's beat is no bridge's, whatever it is called."""
    roll = Attendance(WINDOW_S, 0.0)
    assert roll.abandoned([holding("r-1", "client.bridge-a-1")], 1e9) == []
    roll.hear_beat(beat(A, "worker"), 100.0)
    assert ids(roll.abandoned([holding("r-1")], 125.0)) == ["r-1"]


def test_what_is_old_is_forgotten() -> None:
    """Memory follows the bridges and requests of one window."""
    roll = Attendance(WINDOW_S, 0.0)
    roll.hear_adopt(Adopt(process=B, request_ids=("r-1", "r-2")), 10.0)
    roll.hear_adopt(Adopt(process=B, request_ids=("r-2",)), 20.0)
    roll.hear_beat(beat(A), 10.0)
    roll.forget(20.0 + WINDOW_S)
    assert len(roll._adoptions) == 1
    assert roll._bridges == {}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["beat a", "beat b", "adopt 1", "adopt 2", "away", "forget"]),
        st.floats(0.1, 25.0),
    ),
    max_size=30,
)


@given(events=EVENTS)
def test_the_roll_agrees_with_its_history(events: list[tuple[str, float]]) -> None:
    """Abandoned is exactly: over a window since the last beat of its bridge, the last adoption,
    and since the listener came (back), whatever was forgotten in between."""
    roll, now_s = Attendance(WINDOW_S, 0.0), 0.0
    last = {"beat a": 0.0, "beat b": 0.0, "adopt 1": 0.0, "adopt 2": 0.0, "away": 0.0}
    requests = {
        "1": ("beat a", holding("1")),
        "2": ("beat b", holding("2", subjects.bridge_reader(B))),
    }
    for event, pause_s in events:
        now_s += pause_s
        match event.split():
            case ["beat", name]:
                roll.hear_beat(beat(A if name == "a" else B), now_s)
            case ["adopt", number]:
                roll.hear_adopt(Adopt(process=B, request_ids=(number,)), now_s)
            case ["away"]:
                roll.listen_anew(now_s)
            case ["forget"]:
                roll.forget(now_s)
        if event in last:
            last[event] = now_s
        found = ids(roll.abandoned([one for _, one in requests.values()], now_s))
        expected = [
            number
            for number, (bridge, _) in requests.items()
            if now_s - max(last[bridge], last[f"adopt {number}"], last["away"]) > WINDOW_S
        ]
        assert found == expected

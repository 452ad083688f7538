from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.fleet import Fleet
from tests.pipeline.rig import SERVED, beat

DEAD_S = 3.0
WORKERS = ("w1", "w2", "w3")
some_worker = st.sampled_from(WORKERS)


class Listening(RuleBasedStateMachine):
    """One listener, some workers, and what it may say about them.

    The model knows for each worker when it was last heard, and since when the listener listens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.fleet = Fleet(DEAD_S, self.now_s)
        self.since_s = self.now_s
        self.heard: dict[str, float] = {}
        self.num_beats = 0
        self.last_beat: dict[str, int] = {}
        self.buried: list[str] = []

    def silent_s(self, worker: str) -> float:
        return self.now_s - max(self.heard.get(worker, self.since_s), self.since_s)

    @rule(seconds=st.floats(0, 2.5))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(worker=some_worker, role=st.sampled_from(("prefill", "decode")))
    def worker_beats(self, worker: str, role: str) -> None:
        """Also one that was given up and does not know it yet: it is not heard any more."""
        self.num_beats += 1
        self.fleet.hear(beat(worker, roles=(role,), num_running=self.num_beats), self.now_s)
        if worker not in self.buried:
            self.heard[worker] = self.now_s
            self.last_beat[worker] = self.num_beats

    @rule(worker=some_worker)
    def worker_says_gone(self, worker: str) -> None:
        self.fleet.hear(beat(worker, state="gone"), self.now_s)
        self.heard.pop(worker, None)
        if worker not in self.buried:
            self.buried.append(worker)

    @rule()
    def listener_was_away(self) -> None:
        self.fleet.listen_anew(self.now_s)
        self.since_s = self.now_s

    @rule()
    def listener_judges(self) -> None:
        expected = [w for w in self.heard if self.silent_s(w) > DEAD_S]
        self.fleet.judge(self.now_s)
        for worker in expected:
            del self.heard[worker]
            self.buried.append(worker)

    @precondition(lambda self: self.buried)
    @rule()
    def verdicts_come_once(self) -> None:
        taken = [one.worker for one in self.fleet.take_verdicts()]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(self.buried)
        assert self.fleet.take_verdicts() == []

    @invariant()
    def alive_are_those_heard_and_not_given_up(self) -> None:
        """By role, and as they spoke last."""
        by_role = [self.fleet.workers(SERVED, role) for role in ("prefill", "decode")]
        for role, beats in zip(("prefill", "decode"), by_role, strict=True):
            assert all(one.roles == (role,) for one in beats)
            names = [one.worker for one in beats]
            assert names == sorted(names)
        alive = {one.worker: one.load.num_running for beats in by_role for one in beats}
        assert alive == {worker: self.last_beat[worker] for worker in self.heard}

    @invariant()
    def verdicts_stand_and_nobody_else_is_dead_too_early(self) -> None:
        for worker in WORKERS:
            is_dead = self.fleet.is_dead(worker, self.now_s)
            if worker in self.buried:
                assert is_dead
            elif worker in self.heard:
                assert not is_dead  # not judged yet
            else:
                assert is_dead == (self.now_s - self.since_s > DEAD_S)


Listening.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, database=None
)
TestListening = Listening.TestCase


def dead_after(fleet: Fleet, now_s: float) -> list[str]:
    fleet.judge(now_s)
    return [one.worker for one in fleet.take_verdicts()]


def test_silent_for_too_long_is_dead() -> None:
    """Exactly ``dead_s`` is not yet too long; a hair more is."""
    fleet = Fleet(DEAD_S, 0.0)
    fleet.hear(beat("w1"), 1.0)
    assert dead_after(fleet, 4.0) == []
    assert dead_after(fleet, 4.001) == ["w1"]
    assert dead_after(fleet, 9.0) == []


def test_who_was_away_judges_nobody() -> None:
    """Everybody gets the whole time again to be heard."""
    fleet = Fleet(DEAD_S, 0.0)
    fleet.hear(beat("w1"), 1.0)
    fleet.listen_anew(60.0)
    assert dead_after(fleet, 62.9) == []
    assert not fleet.is_dead("never-heard", 62.9)
    assert dead_after(fleet, 63.1) == ["w1"]
    assert fleet.is_dead("never-heard", 63.1)


def test_gone_is_gone_at_once() -> None:
    """Its own word: nobody waits for silence; its last facts are the verdict's."""
    fleet = Fleet(DEAD_S, 0.0)
    fleet.hear(beat("w1", roles=("prefill", "decode")), 1.0)
    fleet.hear(beat("w1", state="gone", roles=("prefill", "decode")), 1.1)
    (verdict,) = fleet.take_verdicts()
    assert (verdict.worker, verdict.roles) == ("w1", ("prefill", "decode"))
    assert fleet.workers(SERVED, "prefill") == []


def test_a_given_up_id_never_comes_back() -> None:
    """A frozen worker that wakes is not heard under its old id; under a new one it is."""
    fleet = Fleet(DEAD_S, 0.0)
    fleet.hear(beat("w1", process="p"), 1.0)
    assert dead_after(fleet, 5.0) == ["w1"]
    fleet.hear(beat("w1", process="p"), 5.1)
    assert fleet.members() == []
    assert fleet.is_dead("w1", 5.1)
    fleet.hear(beat("w1-again", process="p"), 5.2)
    assert [one.worker for one in fleet.members()] == ["w1-again"]


def test_a_process_that_changes_its_worker_id_gave_up_the_old_one() -> None:
    """It fenced itself before anybody noticed: what the old id held is to be placed again."""
    fleet = Fleet(DEAD_S, 0.0)
    fleet.hear(beat("old", process="p"), 1.0)
    fleet.hear(beat("new", process="p"), 1.2)
    assert [one.worker for one in fleet.take_verdicts()] == ["old"]
    assert fleet.is_dead("old", 1.2)
    assert not fleet.is_dead("new", 1.2)
    fleet.hear(beat("old", process="p"), 1.3)
    assert fleet.is_dead("old", 1.3)


def test_only_ready_workers_take_tasks() -> None:
    """Of the right role and model; one that starts or drains lives, and gets nothing new."""
    fleet = Fleet(DEAD_S, 0.0)
    for worker, state in (("w1", "starting"), ("w2", "ready"), ("w3", "draining")):
        fleet.hear(beat(worker, state=state), 1.0)
    assert [one.worker for one in fleet.workers(SERVED, "prefill")] == ["w2"]
    assert fleet.workers(SERVED, "decode") == []
    assert fleet.workers("other@1", "prefill") == []
    assert len(fleet.members()) == 3
    assert fleet.worker("w3") is not None
    assert fleet.worker("w4") is None


def test_verdicts_are_forgotten_in_the_end() -> None:
    """Memory is bounded; a worker that nobody has heard for ever is dead all the same."""
    fleet = Fleet(DEAD_S, 0.0)
    fleet.hear(beat("w1", state="gone"), 1.0)
    fleet.forget_verdicts(0.5)
    assert fleet.is_dead("w1", 1.0)
    fleet.forget_verdicts(2.0)
    assert not fleet.is_dead("w1", 2.0)
    assert fleet.is_dead("w1", 4.0)


def test_leaving_is_no_death() -> None:
    """Only who said before that it would go has drained; a killed one has not."""
    fleet = Fleet(DEAD_S, 0.0)
    for worker, states in {
        "left": ("ready", "draining", "gone"),
        "died": ("ready", "gone"),
    }.items():
        for state in states:
            fleet.hear(beat(worker, state=state), 1.0)
    assert (fleet.has_drained("left"), fleet.has_drained("died")) == (True, False)
    fleet.forget_verdicts(2.0)
    assert not fleet.has_drained("left")


def test_the_smallest_worker_says_how_long_a_sequence_may_be() -> None:
    """Of the live ones of that model; those that say nothing, or drain, do not count."""
    fleet = Fleet(DEAD_S, 0.0)
    assert fleet.max_sequence_tokens(SERVED) is None
    for worker, state, tokens in (
        ("big", "ready", 90), ("small", "starting", 60), ("mute", "ready", 0),
        ("leaving", "draining", 30),
    ):  # fmt: skip
        told = msgspec.structs.replace(beat(worker, state=state), max_sequence_tokens=tokens)
        fleet.hear(told, 1.0)
    assert fleet.max_sequence_tokens(SERVED) == 60
    assert fleet.max_sequence_tokens("other@r1") is None


def test_control_processes_that_die_are_told_of() -> None:
    """What they held of the shared queues is to be delivered again at once."""
    fleet = Fleet(dead_s=1.0, now_s=0.0)
    control = msgspec.structs.replace(beat("control-a"), kind="control", worker="", roles=())
    fleet.hear(control, 0.0)
    fleet.judge(0.9)
    assert fleet.take_verdicts() == []
    fleet.judge(1.1)
    assert fleet.take_verdicts() == [control]
    gone = msgspec.structs.replace(control, process="control-b", state="gone")
    fleet.hear(gone, 1.2)
    assert fleet.take_verdicts() == [gone]


def test_layouts_follow_who_comes_changes_and_goes() -> None:
    """What is kept between two questions is never older than what was heard."""
    fleet = Fleet(DEAD_S, 0.0)

    def hear(worker: str, state: str = "ready", fingerprint: str = "f00d") -> None:
        told = beat(worker, state=state, fingerprint=fingerprint)
        fleet.hear(msgspec.structs.replace(told, block_size=16), 0.0)

    hear("w1")
    assert fleet.layouts(SERVED) == {"w1": ("f00d", 16)}
    hear("w2", fingerprint="beef")
    assert fleet.layouts(SERVED) == {"w1": ("f00d", 16), "w2": ("beef", 16)}
    hear("w2", fingerprint="cafe")
    hear("w1", state="draining")
    assert fleet.layouts(SERVED) == {"w2": ("cafe", 16)}
    fleet.judge(DEAD_S + 1)
    assert fleet.layouts(SERVED) == {}

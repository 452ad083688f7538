"""Faults, points and settings: what there is, and what is refused."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import pytest

from loadgen.chaos.answer import Answer
from loadgen.chaos.cases import lasting_case, make_cases, with_stop
from loadgen.chaos.fault import Fault, Scene, Stream, register
from loadgen.chaos.faults import FAULTS
from loadgen.chaos.jumping_clock import JUMP_S, JumpingClock
from loadgen.chaos.mesh import Target
from loadgen.chaos.points import POINTS
from loadgen.chaos.rounds import plan
from loadgen.chaos.settings import QUICK_FAULTS, QUICK_TORCH_FAULTS, ChaosSettings
from schemas.errors import ConfigError

PROMISED = {
    *(f"{verb}-{role}" for verb in ("kill", "freeze", "term")
      for role in ("prefill", "decode", "control", "bridge", "broker")),
    "kill-workers", "freeze-workers", "client-leaves", "slow-reader", "clock-jump",
    "cut-ucx", "limp-decode", "disk-full", "disk-slow", "disk-corrupt",
}  # fmt: skip


def settings(**changes: object) -> ChaosSettings:
    values: dict[str, object] = {"faults": ("kill-decode",), "model": "m=folder"}
    return ChaosSettings(**(values | changes))  # type: ignore[arg-type]


def test_every_fault_that_was_promised_is_there() -> None:
    """Each process of the mesh in each way, and clients, and clocks."""
    assert FAULTS.keys() >= PROMISED
    assert set(POINTS) == {
        "queued", "mid-prefill", "kv-ready", "mid-transfer", "decoding", "last-token",
    }  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_strikes_at_points_that_exist(fault: type[Fault]) -> None:
    """At one at least; it can be made without arguments and says what it is."""
    assert fault.points
    assert set(fault.points) <= set(POINTS)
    assert fault.__doc__
    assert FAULTS[fault().name] is fault


def test_one_small_class_makes_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, points and what it does: then it can be planned like any other."""
    monkeypatch.setattr("loadgen.chaos.fault.FAULTS", dict(FAULTS))

    @register
    class PullCable(Fault):
        """A cable is pulled."""

        name = "pull-cable"
        points = ("mid-transfer",)

        async def inject(self, scene: Scene, target: Target | None, marked: Stream) -> None:
            pass

    [[blow]] = plan([PullCable], 1, "random", 1, random.Random(0))
    assert (blow.fault.name, blow.point) == ("pull-cable", "mid-transfer")


def test_a_plan_takes_faults_in_turn() -> None:
    """Every fault equally often, at points of its own; a seed repeats it."""
    kinds = list(FAULTS.values())
    rounds = plan(kinds, 3 * len(kinds), "random", 1, random.Random(5))
    counts = Counter(blow.fault.name for blows in rounds for blow in blows)
    assert set(counts.values()) == {3}
    assert all(len(blows) == 1 for blows in rounds)
    assert all(blow.point in blow.fault.points for blows in rounds for blow in blows)
    again = plan(kinds, 3 * len(kinds), "random", 1, random.Random(5))
    assert [b.point for blows in rounds for b in blows] == [
        b.point for blows in again for b in blows
    ]


def test_faults_overlap_only_when_told() -> None:
    """--overlap puts so many into one round."""
    rounds = plan([FAULTS["kill-decode"]], 5, "decoding", 2, random.Random(0))
    assert [len(blows) for blows in rounds] == [2, 2, 1]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"faults": ()}, "fault"),
        ({"faults": ("unplug",)}, "fault"),
        ({"point": "nowhere"}, "point"),
        ({"point": "mid-prefill"}, "point"),  # a decode worker has nothing to do with it
        ({"count": 0}, "count"),
        ({"overlap": 9}, "overlap"),
        ({"kv_transports": "pigeons"}, "kv-transports"),
        ({"nats_url": "nats://client@localhost"}, "bridge"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], param: str) -> None:
    """By the name of the flag, before anything is started."""
    with pytest.raises(ConfigError) as caught:
        settings(**changes)
    assert caught.value.param == param


def test_quick_has_some_of_each_kind() -> None:
    """Kill, freeze, and more than signals to workers; the real engine's is a part of it."""
    assert set(QUICK_TORCH_FAULTS) <= set(QUICK_FAULTS) <= set(FAULTS)
    for names in (QUICK_FAULTS, QUICK_TORCH_FAULTS):
        assert {FAULTS[name].kind for name in names} >= {"kill", "freeze", "other"}
    assert {FAULTS[name].role for name in QUICK_FAULTS} >= {
        "prefill", "decode", "control", "bridge", "broker",
    }  # fmt: skip


def test_cases_fit_small_models_and_cover_the_ways_to_sample() -> None:
    """Greedy and seeded, n > 1, logprobs, penalties, long prompts: none longer than the context
    even where each character is a token."""
    cases = make_cases(seed=1, context_length=512, num_tokens=60)
    assert all(len(case.prompt) + 60 < 512 for case in cases)
    assert len({case.name for case in cases}) == len(cases)
    samplings = [case.sampling for case in cases]
    assert {one.temperature > 0 for one in samplings} == {True, False}
    assert any(one.n > 1 for one in samplings)
    assert any(one.logprobs for one in samplings)
    assert any(one.presence_penalty for one in samplings)
    assert any(case.is_long for case in cases)
    assert all(one.seed is not None for one in samplings if one.temperature > 0)


@pytest.mark.parametrize(("context_length", "num_tokens"), [(512, 60), (2048, 60), (2048, 1000)])
def test_an_answer_whose_client_leaves_lasts_as_the_context_lets_it(
    context_length: int, num_tokens: int
) -> None:
    """Several times as many tokens as others have, none fewer, and prompt and answer fit in."""
    case = lasting_case(1, context_length, num_tokens)
    asked = case.sampling.max_tokens or 0
    assert len(case.prompt) + asked < context_length
    assert asked >= max(num_tokens, min(4 * num_tokens, context_length // 2))
    assert case.is_long, "it can be met in its prefill"


def test_a_stop_string_is_one_that_comes() -> None:
    """It is taken from the undisturbed answer, so the request ends by it."""
    case = make_cases(seed=1, context_length=512, num_tokens=60)[0]
    undisturbed = Answer(1)
    undisturbed.texts[0] = "abcdefghijklmnopqrstuvwxyz"
    [stop] = with_stop(case, undisturbed).sampling.stop
    assert stop in undisturbed.texts[0]


def test_the_wall_clock_jumps_at_the_signal_and_back() -> None:
    """An hour forward, then back; the monotonic clock knows nothing of it."""
    clock = JumpingClock()
    before_s, monotonic_s = time.time(), time.monotonic()
    clock.install()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert time.time() - before_s >= JUMP_S
        assert time.time_ns() / 1e9 - before_s >= JUMP_S
        assert time.monotonic() - monotonic_s < JUMP_S / 2
        os.kill(os.getpid(), signal.SIGUSR1)
        assert time.time() - before_s < JUMP_S / 2
    finally:
        clock.remove()

"""What ``mesh bench engine`` shows, and the peer's command."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli import app
from loadgen.bench.engine import make_result
from loadgen.bench.peer_command import PeerFailed, PeerSpeed, median_speed, run_peer
from loadgen.machine import MachineNote, OthersMeter, cpu_flags
from schemas.errors import ConfigError
from workers.engine.bench.fidelity import Fidelity
from workers.engine.bench.measure import EngineFigures
from workers.engine.bench.plan import EnginePlan

MACHINE = MachineNote(num_cores=2, load_1min=0.1, is_busy=False, system="s", python="3")
FIGURES = EngineFigures(
    kind="native",
    dtype="bf16",
    decode_ms={
        1: {"ours": 10.0, "bf16": 40.0, "fp32": 60.0},
        8: {"ours": 20.0, "bf16": 90.0, "fp32": 80.0},
    },
    prefill_ms={"ours": 400.0, "bf16": 500.0, "fp32": 800.0},
    sampling_ms=4.0,
    fidelity={
        "ours": Fidelity(kl_mean=0.0002, argmax_agree=1.0, num_positions=9),
        "bf16": Fidelity(kl_mean=0.002, argmax_agree=0.9, num_positions=9),
    },
)


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_the_faster_of_transformers_counts() -> None:
    """At each size the faster dtype is compared with, and named; both stand beside it."""
    shown = make_result(EnginePlan(folder=Path("m")), FIGURES, None, MACHINE).figures
    assert shown["decode_ms"] == {"1": 10.0, "8": 20.0}
    assert shown["hf_decode_ms"] == {"1": 40.0, "8": 80.0}
    assert shown["hf_fastest"] == "1: bf16, 8: fp32, prefill: bf16"
    assert shown["ratio"] == {"decode_1": 4.0, "decode_8": 4.0, "prefill": 1.25}
    assert shown["prefill_tok_s"] == 1280.0
    assert shown["hf_prefill_tok_s"] == 1024.0
    assert shown["hf_fp32_decode_ms"] == {"1": 60.0, "8": 80.0}
    assert (shown["kl_mean"], shown["argmax_agree"]) == (0.0002, 1.0)
    assert shown["hf_bf16_kl_mean"] == 0.002
    assert (shown["sampling_ms"], shown["kernels"], shown["dtype"]) == (4.0, "native", "bf16")
    assert "peer_ratio" not in shown


def test_without_references_nothing_is_compared() -> None:
    """Fidelity stays; times of transformers and ratios are not there."""
    figures = EngineFigures(
        kind="torch",
        dtype="fp32",
        decode_ms={8: {"ours": 20.0}},
        prefill_ms={"ours": 400.0},
        sampling_ms=4.0,
        fidelity={"ours": FIGURES.fidelity["ours"]},
    )
    peer = PeerSpeed(prefill_tok_s=640.0, decode_tok_s=50.0)
    plan = EnginePlan(folder=Path("m"), references=())
    shown = make_result(plan, figures, peer, MACHINE).figures
    assert not [name for name in shown if name.startswith("hf_")]
    assert shown["peer_ratio"] == {"prefill": 2.0}  # batch 1 was not measured


def test_a_peers_speed_is_compared_stream_by_stream() -> None:
    """Its decode is that of one stream: beside ours at batch 1."""
    peer = PeerSpeed(prefill_tok_s=640.0, decode_tok_s=50.0)
    shown = make_result(EnginePlan(folder=Path("m")), FIGURES, peer, MACHINE).figures
    assert shown["peer_ratio"] == {"prefill": 2.0, "decode_1": 2.0}


def test_a_peers_figures_can_bear_its_name() -> None:
    """So that several runs can be told apart, and put side by side."""
    peer = PeerSpeed(prefill_tok_s=640.0, decode_tok_s=50.0)
    plan = EnginePlan(folder=Path("m"))
    shown = make_result(plan, FIGURES, peer, MACHINE, "llama").figures
    assert (shown["llama_decode_tok_s"], shown["llama_prefill_tok_s"]) == (50.0, 640.0)
    assert shown["llama_ratio"] == {"prefill": 2.0, "decode_1": 2.0}
    assert "peer_ratio" not in shown


def test_shares_of_a_step_are_shown_part_by_part() -> None:
    """Where the runner knows them; elsewhere there is no such figure."""
    shares = {"1": {"linear": 0.9, "rows": 0.1}, "prefill": {"linear": 0.75, "rows": 0.25}}
    plan = EnginePlan(folder=Path("m"))
    shown = make_result(plan, replace(FIGURES, shares=shares), None, MACHINE).figures
    assert shown["share_linear"] == {"1": 0.9, "prefill": 0.75}
    assert shown["share_rows"] == {"1": 0.1, "prefill": 0.25}
    without = make_result(plan, FIGURES, None, MACHINE).figures
    assert not [name for name in without if name.startswith("share_")]


def test_the_peers_last_line_counts() -> None:
    """What it prints before is talk."""
    speed = run_peer(python("print('hi'); print('{\"prefill_tok_s\": 2, \"decode_tok_s\": 1.5}')"))
    assert speed == PeerSpeed(prefill_tok_s=2.0, decode_tok_s=1.5)


def test_of_a_peers_rounds_the_medians_count() -> None:
    """Each figure's own."""
    rounds = [
        PeerSpeed(prefill_tok_s=prefill, decode_tok_s=decode)
        for prefill, decode in ((5.0, 1.0), (4.0, 3.0), (6.0, 2.0))
    ]
    assert median_speed(rounds) == PeerSpeed(prefill_tok_s=5.0, decode_tok_s=2.0)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('no numbers')", "no numbers"),
        ("print('{\"prefill_tok_s\": 2}')", "decode_tok_s"),
        ('print(\'{"prefill_tok_s": 2, "decode_tok_s": 0}\')', "zero"),
        ("print('gone'); raise SystemExit(3)", "ended with 3: gone"),
    ],
)
def test_a_peer_that_fails_says_what_it_printed(code: str, says: str) -> None:
    """No figure is made up for it."""
    with pytest.raises(PeerFailed, match=says):
        run_peer(python(code))


@pytest.mark.parametrize("command", ["no-such-program-anywhere", "'open"])
def test_a_command_that_cannot_run_is_the_callers_fault(command: str) -> None:
    """A usage error, with the option's name."""
    with pytest.raises(ConfigError) as caught:
        run_peer(command)
    assert caught.value.param == "peer"


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        (("--batches", "1,x"), "batches"),
        (("--references", "fp64"), "references"),
        (("--peer-name", "llama.cpp"), "peer_name"),
        (("--model", "/no/such/folder"), "model"),
    ],
)
def test_bad_flags_end_with_two(flags: tuple[str, ...], param: str) -> None:
    """One line on stderr names the option; nothing is measured."""
    result = CliRunner().invoke(app, ["bench", "engine", *flags])
    assert result.exit_code == 2
    assert f"({param})" in result.stderr
    assert result.stdout == ""


def test_others_are_told_from_ourselves() -> None:
    """A machine on which others used a tenth of the cores is busy; our own work is not others'."""
    assert OthersMeter().cores() >= 0
    assert not MACHINE.meanwhile(0.1).is_busy
    assert MACHINE.meanwhile(0.3).is_busy
    assert "others used 0.30" in MACHINE.meanwhile(0.3).text
    assert "others" not in MACHINE.text


def test_flags_are_those_of_the_processor() -> None:
    """None that was not asked for, none that it does not have."""
    assert set(cpu_flags(("fpu", "asimd", "no_such_flag"))) <= {"fpu", "asimd"}

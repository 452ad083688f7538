"""What a fleet on the bus is made of, before anything is started."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from infra.config import ControlConfig
from infra.model_folder import open_model_folder
from infra.room_config import RoomConfig
from infra.settings import settings_of
from loadgen.machine import MachineNote
from loadgen.measure import RequestResult
from loadgen.recorder import Recorder
from loadgen.simulate.fleet_plan import FleetPlan, Policy, WorkerGroup, check_fleet
from loadgen.simulate.options import SimulationOptions
from loadgen.simulate_bus.crew import crew_of
from loadgen.simulate_bus.model import FIRST_ID, VOCAB_SIZE, write_model
from loadgen.simulate_bus.policy import control_flags
from loadgen.simulate_bus.report import fleet_warnings, lines_of, report_of
from loadgen.simulate_bus.run import Ran, fleet_time, load_settings
from loadgen.simulate_bus.settings import BusOptions, BusRun, bus_run
from loadgen.traces import TraceEntry
from pipeline.policies import read_policies
from schemas.errors import ConfigError
from schemas.tokens import Usage
from tests.loadgen.simulate_bus.fleets import COSTS, FLEET, TRACE
from workers.crew.figures import WorkerFigures

GROUP = WorkerGroup(
    name="prefill", role="prefill", count=5, costs=COSTS, kv_tokens=4096, racks=("a", "b"),
    kv_token_bytes=1000,
)  # fmt: skip
DECODE = WorkerGroup(name="decode", role="decode", count=2, costs=COSTS, kv_tokens=8192)
PLAN = check_fleet(FleetPlan(name="f", workers=(GROUP, DECODE)))
ENTRIES = (TraceEntry(timestamp=0, input_length=40, output_length=4),)


def run_of(plan: FleetPlan = PLAN, **options: object) -> BusRun:
    return BusRun(
        plan=plan,
        trace=ENTRIES,
        trace_name="t",
        options=BusOptions(**options),  # type: ignore[arg-type]
    )


def replaced(**fields: object) -> FleetPlan:
    return FleetPlan(**{"name": "f", "workers": (GROUP, DECODE), **fields})  # type: ignore[arg-type]


def test_each_worker_of_the_file_is_one_of_a_crew() -> None:
    """Costs, memory and place are those of the file; tokens become blocks."""
    workers = crew_of(PLAN)
    assert [one.name for one in workers[:2]] == ["prefill-0", "prefill-1"]
    assert {one.role for one in workers} == {"prefill", "decode"}
    first = workers[1]
    assert (first.num_blocks, first.kv_token_bytes) == (256, 1000)
    assert (first.rack, first.host, first.costs) == ("b", "prefill-host-0", COSTS)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (replaced(workers=(GROUP, WorkerGroup(name="d", role="decode", costs=COSTS,
                                              kv_tokens=4096, from_s=3))), "d-0"),
        (replaced(router="round-robin", workers=(WorkerGroup(name="b", role="both", costs=COSTS,
                                                             kv_tokens=4096),)), "round-robin"),
        (replaced(routers=17), "routers"),
    ],
)  # fmt: skip
def test_what_only_virtual_time_can_do_is_refused_by_name(plan: FleetPlan, complaint: str) -> None:
    """Workers that come and go, no mesh at all, more routers than processes."""
    with pytest.raises(ConfigError, match=complaint):
        run_of(plan)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"speed": 0.0}, "speed"),
        ({"workers_per_process": 0}, "workers_per_process"),
        ({"time_scale": 0.001}, "time_scale"),
        ({"trace_scale": 1000.0}, "scale"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, float], param: str) -> None:
    """By the name it has on the command line."""
    with pytest.raises(ConfigError) as caught:
        run_of(**options)
    assert caught.value.param == param


def test_options_of_virtual_time_alone_are_refused(tmp_path: Path) -> None:
    """On the bus a request says itself how long its answer is."""
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "trace.toml").write_text(TRACE)
    files = (tmp_path / "fleet.toml", tmp_path / "trace.toml")
    with pytest.raises(ConfigError) as caught:
        bus_run(*files, None, 10, SimulationOptions(max_tokens=8), BusOptions())
    assert caught.value.param == "max_tokens"
    run = bus_run(*files, None, 3, SimulationOptions(routers=1), BusOptions())
    assert (len(run.trace), run.plan.routers) == (3, 1)


def test_a_process_has_some_of_each_role() -> None:
    """Workers are dealt out; none is lost, and no process has more than it may."""
    run = run_of(workers_per_process=4)
    assert sorted(one.name for crew in run.crews for one in crew) == sorted(
        one.name for one in run.workers
    )
    assert [len(crew) for crew in run.crews] == [4, 3]
    assert all({one.role for one in crew} == {"prefill", "decode"} for crew in run.crews)


def test_every_core_has_a_process_unless_workers_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no process has more than a hundred."""
    monkeypatch.setattr("loadgen.simulate_bus.settings.num_cores", lambda: 4)
    nums = []
    for count in (5, 12, 200, 1000):
        group = WorkerGroup(name="b", role="both", count=count, costs=COSTS, kv_tokens=4096)
        nums.append(run_of(replaced(workers=(group,))).num_processes)
    assert nums == [1, 2, 4, 10]


def test_beats_go_with_the_fleet_and_not_faster_than_the_machine_can() -> None:
    """Slow motion slows beats as well; a thousand workers beat no faster than it is good for."""
    assert run_of().time_scale == 1.0
    assert run_of(speed=0.1).time_scale == pytest.approx(10.0)
    assert run_of(speed=100).time_scale == 0.25
    assert run_of(speed=100, time_scale=3.0).time_scale == 3.0
    many = replaced(workers=(WorkerGroup(name="b", role="both", count=1000, costs=COSTS,
                                         kv_tokens=4096),))  # fmt: skip
    assert run_of(many).time_scale == 5.0


def test_control_is_told_what_the_file_says(tmp_path: Path) -> None:
    """Every flag is a setting of control, with a value that it takes; times are those of workers
    that are faster."""
    policy = Policy(placement="random", early_rejection="predicted", slo_ttft_ms=500, slo_tbt_ms=40)
    flags = dict(flag.split("=", 1) for flag in control_flags(replaced(policy=policy), tmp_path, 2))
    known = {found.flag: found for _, found in settings_of(ControlConfig)}
    values = {flag: known[flag].parse(text) for flag, text in flags.items()}
    assert values["--route-policy"] == "random"
    assert values["--ahead-ms"] == values["--mixed-ahead-ms"] == 60_000, "random lets nobody wait"
    found = read_policies(values["--policies"]).of("any")
    assert (found.default_slo.ttft_ms, found.default_slo.tbt_ms) == (250, 20)
    usual = dict(flag.split("=", 1) for flag in control_flags(PLAN, tmp_path, 0.5))
    assert float(usual["--ahead-ms"]) == 2 * RoomConfig().ahead_ms
    assert float(usual["--mixed-ahead-ms"]) == 2 * RoomConfig().mixed_ahead_ms
    assert "--policies" not in usual


def test_the_model_is_a_folder_that_is_served(tmp_path: Path) -> None:
    """Of any context length, with ids for prompts, and no weights."""
    write_model(tmp_path / "model", 100_000)
    facts = open_model_folder(tmp_path / "model")
    assert (facts.context_length, facts.vocab_size) == (100_000, VOCAB_SIZE)
    assert facts.eos_token_ids == {0}
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    text = "any text, größer"
    ids = tokenizer.encode(text).ids
    assert all(FIRST_ID <= token_id < VOCAB_SIZE for token_id in ids)
    assert tokenizer.decode(ids) == text


def test_times_become_those_of_the_fleet() -> None:
    """In slow motion a second of the machine is half of one of the fleet."""
    recorder = Recorder(started_s=100.0, ended_s=110.0)
    result = RequestResult(
        number=0, output_len=2, due_s=101.0, sent_s=102.0, event_s=array("d", [104.0, 106.0]),
        end_s=106.0,
    )  # fmt: skip
    recorder.results.append(result)
    fleet_time(recorder, 0.5)
    assert (result.due_s, result.sent_s, list(result.event_s)) == (100.5, 101.0, [102.0, 103.0])
    assert (result.end_s, recorder.wall_s) == (103.0, 5.0)


def ran() -> Ran:
    result = RequestResult(number=0, output_len=2, sent_s=100.0,
                           event_s=array("d", [101.0, 102.0]))  # fmt: skip
    result.num_counted_tokens = 2
    result.complete(Usage(prompt_tokens=40, completion_tokens=2), is_count_exact=True)
    recorder = Recorder(results=[result], started_s=100.0, ended_s=110.0, num_output_tokens=2)
    workers = (
        WorkerFigures(name="p", role="prefill", busy_s=5.0, num_requests=3,
                      prompt_tokens={"computed": 30, "device": 90}),
        WorkerFigures(name="q", role="prefill", num_requests=1, late_s=1.0),
        WorkerFigures(name="d", role="decode", busy_s=5.0, num_requests=4,
                      prompt_tokens={"handed_over": 100}),
    )  # fmt: skip
    return Ran(
        settings=load_settings(run_of(), "nats://127.0.0.1", Path("t")),
        recorder=recorder,
        wall_s=10.0,
        cpu_s={"workers": 4.0, "broker": 1.0},
        workers=workers,
        notes=("crew-1 was ended by SIGKILL",),
    )


def test_the_report_tells_what_the_fleet_did_and_that_it_is_simulated() -> None:
    """By role and worker; what the machine added to the steps is a warning."""
    report = report_of(run_of(), ran(), MachineNote.now(), is_interrupted=False)
    prefill, decode = report.roles["prefill"], report.roles["decode"]
    assert (prefill.num_requests, prefill.busy_mean, prefill.busy_max) == (4, 0.25, 0.5)
    assert (prefill.most_over_mean, prefill.hit_rate) == (1.5, 0.75)
    assert (decode.busy_mean, decode.hit_rate) == (0.5, None)
    assert report.cores == {"broker": 0.1, "workers": 0.4}
    assert report.cpu_us_per_token == 2.5e6
    assert (report.settings["target"], report.settings["trace"]) == ("fleet f on the bus", "t")
    assert lines_of(report)[0].startswith("simulated engines on the real bus")
    assert [line.split(" ")[0] for line in fleet_warnings(report)] == ["crew-1", "the"]

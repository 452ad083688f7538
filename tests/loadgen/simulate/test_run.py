"""Whole simulated runs: what must hold whatever the figures are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from loadgen.simulate.fleet_plan import FleetPlan, Links, LinkSpeed, Policy, WorkerGroup
from loadgen.simulate.mesh import SimulatedMesh
from loadgen.simulate.options import SimulationOptions
from loadgen.simulate.result import SimulationResult
from loadgen.simulate.run import simulate
from loadgen.synthetic import SyntheticSettings, synthesize
from loadgen.traces import TraceEntry
from schemas.control import Beat
from schemas.errors import ConfigError
from schemas.profiles import StepCosts

COSTS = StepCosts(
    prefill_base_ms=5.0,
    prefill_token_ms=0.05,
    prefill_square_ms=1e-6,
    decode_base_ms=8.0,
    decode_context_ms=2e-5,
    decode_sequence_ms=0.1,
)


def group(name: str, role: str, count: int = 2, **fields: object) -> WorkerGroup:
    told = {"costs": COSTS, "kv_tokens": 65536, "kv_token_bytes": 131072, "racks": ("a",), **fields}
    return WorkerGroup(name=name, role=role, count=count, **told)  # type: ignore[arg-type]


def fleet(*groups: WorkerGroup, **fields: object) -> FleetPlan:
    groups = groups or (group("p", "prefill"), group("d", "decode"))
    return FleetPlan(workers=groups, **fields)  # type: ignore[arg-type]


def trace(number: int = 120, rate: float = 20.0, kind: str = "shared-prefix") -> tuple[
    TraceEntry, ...
]:  # fmt: skip
    return synthesize(
        SyntheticSettings(
            kind=kind,  # type: ignore[arg-type]
            num_requests=number,
            rate=rate,
            input_len=2048,
            output_len=40,
            seed=3,
        )
    )


def figures(result: SimulationResult) -> Sequence[object]:
    """All that is of virtual time."""
    results = result.recorder.results
    return (
        [(one.number, one.state, one.error_kind, one.event_s.tobytes()) for one in results],
        result.workers,
        result.samples,
        result.num_cached_tokens,
        result.num_events,
    )


@pytest.fixture
def meshes(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedMesh]:
    """The meshes of the runs to come."""
    made: list[SimulatedMesh] = []
    run = SimulatedMesh.run

    def noted(mesh: SimulatedMesh, *args: object) -> None:
        made.append(mesh)
        run(mesh, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedMesh, "run", noted)
    return made


def check(mesh: SimulatedMesh) -> None:
    """After the last message has arrived nothing is held, and all books are right."""
    mesh.queue.run(mesh.queue.now_s + 5.0, lambda: False)
    for worker in mesh.everyone:
        worker.engine.check_invariants()
        worker.host_tier.check_invariants()
        pool = worker.engine.pool
        assert pool.num_available == pool.num_blocks, f"{worker.spec.name} holds something"
    for control in mesh.controls:
        control.outlook.check_invariants()
        control.index.check_invariants()
        for worker in mesh.everyone:
            if worker.state != "gone":
                held = control.index.held_by(worker.spec.name)
                told = sum(map(len, held.values()))  # tiers of each block
                assert told == worker.num_findable_blocks, "the index knows otherwise"


@pytest.mark.parametrize("policy", ["score", "random", "least-loaded", "power-of-two"])
def test_every_answer_comes_whole_and_nothing_is_left(
    policy: str, meshes: list[SimulatedMesh]
) -> None:
    """Under every policy each request gets each of its tokens once, in rising order of time; then
    no block is held, and every index knows exactly what the workers' caches hold."""
    options = SimulationOptions(placement=policy, routers=2)  # type: ignore[arg-type]
    result = simulate(fleet(), trace(), options)
    for one in result.recorder.results:
        assert one.state == "completed"
        assert len(one.event_s) == one.output_len
        assert list(one.event_s) == sorted(one.event_s)
        assert one.ttft_s > 0
    assert result.kv_bytes_moved > 0
    check(meshes[0])


def test_the_same_seed_is_the_same_run() -> None:
    """Two runs differ in CPU times alone; another seed is another run."""
    plan = fleet(policy=Policy(placement="power-of-two"), routers=3)
    runs = [simulate(plan, trace(), SimulationOptions(seed=seed)) for seed in (1, 1, 2)]
    assert figures(runs[0]) == figures(runs[1])
    assert figures(runs[0]) != figures(runs[2])


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Beat]]:
    """What workers say of themselves in the runs to come, and when."""
    said: list[tuple[float, Beat]] = []
    say = SimulatedMesh.say_beat

    def noted(mesh: SimulatedMesh, beat: Beat) -> None:
        said.append((mesh.queue.now_s, beat))
        say(mesh, beat)

    monkeypatch.setattr(SimulatedMesh, "say_beat", noted)
    return said


def test_a_beat_tells_the_load_that_was_measured_last(beats: list[tuple[float, Beat]]) -> None:
    """Also of a worker whose steps are longer than a beat waits for them: what it says is a beat
    old at most, and not that it has nothing to do."""
    plan = fleet(group("p", "prefill", 1), group("d", "decode", 1))
    simulate(plan, trace(number=60, rate=30.0, kind="no-reuse"))
    loads = [beat.load for _, beat in beats]
    assert max(load.age_ms for load in loads) > 0, "no step was so long"
    assert max(load.age_ms for load in loads) <= 1000 * plan.beat_s + 50 + 1e-6
    assert {load.num_blocks for load in loads} == {65536 // plan.block_size}


def test_a_worker_beats_early_with_news_alone(beats: list[tuple[float, Beat]]) -> None:
    """One that has told of prompts says at once that none are left: routers would leave it idle.
    One with nothing of the kind to tell beats when it is due, however many steps it makes."""
    plan = fleet(group("p", "prefill", 1), group("d", "decode", 1))
    simulate(plan, trace(number=12, rate=100.0, kind="no-reuse"))
    told = [(at_s, beat.load.waiting_tokens) for at_s, beat in beats if beat.worker == "p-0"]
    pairs = pairwise(told)
    ends_s = [(after_s - at_s) for (at_s, busy), (after_s, left) in pairs if busy and not left]
    assert ends_s, "it never told of prompts"
    assert min(ends_s) < plan.beat_s - 0.05, "it waited for its next beat"
    due_s = [at_s for at_s, beat in beats if beat.worker == "d-0"]
    assert due_s == pytest.approx([number * plan.beat_s for number in range(len(due_s))])


def test_a_worker_that_leaves_finishes_and_one_that_comes_is_used(
    meshes: list[SimulatedMesh],
) -> None:
    """Workers drain in the middle of the run and others come: no request is lost, and what was
    left on a queue is placed again."""
    plan = fleet(
        group("p", "prefill"),
        group("early", "decode", until_s=3.0),
        group("late", "decode", from_s=2.0),
        policy=Policy(placement="score"),
    )
    result = simulate(plan, trace())
    assert all(one.state == "completed" for one in result.recorder.results)
    taken = {worker.name: worker.num_taken for worker in result.workers}
    assert taken["early-0"] + taken["early-1"] > 10
    assert taken["late-0"] + taken["late-1"] > 10
    gone = [worker for worker in meshes[0].everyone if worker.spec.name.startswith("early")]
    assert all(worker.state == "gone" for worker in gone)
    check(meshes[0])


def test_slow_links_are_shared_by_all_who_decode() -> None:
    """What was sent to a worker and has not come counts there, and takes the way to it: the fastest
    decode worker does not get everything, however fast it is."""
    roomy = {"kv_tokens": 400_000, "per_host": 1}
    plan = fleet(
        group("p", "prefill", 4),
        group("fast", "decode", 1, speed=2.0, **roomy),
        group("slow", "decode", 3, **roomy),
        links=Links(rack=LinkSpeed(gb_s=1.0)),
    )
    result = simulate(plan, trace(number=100, rate=25.0, kind="no-reuse"))
    taken = {worker.name: worker.num_taken for worker in result.workers}
    assert taken["fast-0"] < 40
    assert min(taken[f"slow-{number}"] for number in range(3)) > 15


def test_a_pool_that_goes_altogether_is_waited_for() -> None:
    """With nobody there, requests lie in the queue and start when a worker comes."""
    plan = fleet(
        group("first", "both", 1, until_s=2.0),
        group("second", "both", 1, from_s=6.0),
    )
    result = simulate(plan, trace(number=60))
    assert all(one.state == "completed" for one in result.recorder.results)
    waited = [one for one in result.recorder.results if one.ttft_s > 2.0]
    assert waited, "nobody had to wait"


def test_separate_servers_share_nothing() -> None:
    """Behind round robin requests go by turns, nothing is handed over or fetched, and less is
    found in caches than where the mesh decides."""
    groups = (group("b", "both", 4),)
    alone = simulate(fleet(*groups, router="round-robin"), trace())
    mesh = simulate(fleet(*groups), trace())
    taken = [worker.num_taken for worker in alone.workers]
    assert max(taken) - min(taken) <= 1
    assert alone.kv_bytes_moved == 0
    assert alone.hit_rate < mesh.hit_rate


def test_what_cannot_be_served_in_time_is_refused_early() -> None:
    """At several times the capacity a budget refuses some, and of what it lets in more is in time
    than where everybody is let in; refused requests count against goodput."""
    plan = fleet(group("p", "prefill", 1), group("d", "decode", 1))
    slo = {"slo_ttft_ms": 600.0, "slo_tbt_ms": 60.0}
    some = trace(number=400, rate=60.0, kind="no-reuse")
    off, predicted = (
        simulate(plan, some, SimulationOptions(early_rejection=mode, **slo))  # type: ignore[arg-type]
        for mode in ("off", "predicted")
    )
    refused = [one for one in predicted.recorder.results if one.error_kind == "refused"]
    assert 50 < len(refused) < 400
    assert all(one.error_message for one in refused)
    assert predicted.goodput_share() > off.goodput_share()
    met = sum(one.meets(predicted.slo_ms) for one in predicted.recorder.results)
    assert predicted.goodput_share() == pytest.approx(met / 400)


def test_lengths_may_be_scaled_and_too_long_ones_are_told() -> None:
    """Shared pieces shrink with their prompts, so as much is found; a request that fits no worker
    is an error, not a run without end."""
    small = simulate(fleet(), trace(number=60), SimulationOptions(scale=0.5))
    usage = small.recorder.results[0].usage
    assert usage is not None
    assert usage.prompt_tokens == 1024
    assert small.hit_rate > 0.3
    with pytest.raises(ConfigError, match="a worker holds"):
        simulate(fleet(), trace(number=5), SimulationOptions(scale=40.0))
    with pytest.raises(ConfigError, match="no requests"):
        simulate(fleet(), ())


def test_tenants_never_share_a_prefix() -> None:
    """Hashes are salted with the tenant: equal prompts of two tenants are computed twice."""
    entry = TraceEntry(timestamp=0.0, input_length=2048, output_length=4, hash_ids=(1, 2, 3, 4))
    plan = fleet(group("b", "both", 1))
    for second, expected in (("a", True), ("b", False)):
        later = msgspec.structs.replace(entry, timestamp=2000.0, tenant=second)
        result = simulate(plan, (msgspec.structs.replace(entry, tenant="a"), later))
        assert (result.num_cached_tokens > 0) is expected


def test_a_full_pool_evicts_and_tells(meshes: list[SimulatedMesh]) -> None:
    """Caches of a few prompts: pieces go, the indexes hear of it, and all answers come."""
    small = {"kv_tokens": 8192}
    plan = fleet(group("p", "prefill", **small), group("d", "decode", **small))
    result = simulate(plan, trace(number=120, rate=10.0))
    assert all(one.state == "completed" for one in result.recorder.results)
    check(meshes[0])


def test_host_memory_keeps_what_the_device_has_no_room_for(meshes: list[SimulatedMesh]) -> None:
    """With a host tier more of the prompts is found than on small devices alone, and the indexes
    know what lies in which tier."""
    some = trace(number=120, rate=10.0)
    alone, tiered = (
        simulate(fleet(group("b", "both", 1, kv_tokens=8192, host_tokens=host)), some)
        for host in (0, 131072)
    )
    assert tiered.hit_rate > alone.hit_rate + 0.05
    assert all(one.state == "completed" for one in tiered.recorder.results)
    check(meshes[1])

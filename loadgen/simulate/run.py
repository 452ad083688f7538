"""A whole run: a trace through a fleet, on virtual time.

    trace -> hop -> control -> 2 hops -> prefill worker -> hop -> control -> hop -> decode worker
                     (record, task)         token 0 -> hop               tokens -> hop

Control processes take requests by turns, as they would from the queue that they share. Behind
``router = "round-robin"`` there is one hop to a worker, and nothing else.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Sequence
from random import Random

import msgspec

from loadgen.measure import RequestResult
from loadgen.recorder import Recorder
from loadgen.simulate.fleet_plan import FleetPlan, check_fleet
from loadgen.simulate.mesh import SimulatedMesh
from loadgen.simulate.options import SimulationOptions
from loadgen.simulate.prompts import piece_names, piece_tokens
from loadgen.simulate.request import Request, salt_of_tenant
from loadgen.simulate.result import SimulationResult, WorkerFigures, token_times
from loadgen.simulate.worker import SimulatedWorker
from loadgen.traces import TraceEntry
from schemas.errors import ConfigError
from schemas.requests import Slo
from schemas.tokens import Usage


def simulate(
    plan: FleetPlan, trace: Sequence[TraceEntry], options: SimulationOptions | None = None
) -> SimulationResult:
    """Run ``trace`` through the fleet. The same arguments give the same result, but for the CPU
    times.

    Raises:
        ConfigError: the plan can't be run, or no worker could hold a request of the trace.
    """
    options = options or SimulationOptions()
    plan = told(check_fleet(plan), options)
    begun_s, frozen = time.process_time(), gc.isenabled()
    gc.disable()  # requests are no cycles, and looking for some takes a third of the time
    try:
        mesh = SimulatedMesh(plan, Random(options.seed), options.sample_s)
        requests = make_requests(plan, trace, options)
        horizon_s = requests[-1].due_s + options.drain_s
        mesh.run(requests, horizon_s)
    finally:
        if frozen:
            gc.enable()
    token_times(requests, mesh.network.hop_s)
    for request in requests:
        _conclude(request)
    return _result(plan, options, mesh, requests, time.process_time() - begun_s)


def told(plan: FleetPlan, options: SimulationOptions) -> FleetPlan:
    """The plan with what the options say instead."""
    said = {
        name: value
        for name, value in (
            ("placement", options.placement),
            ("early_rejection", options.early_rejection),
            ("slo_ttft_ms", options.slo_ttft_ms),
            ("slo_tbt_ms", options.slo_tbt_ms),
            ("waiting_room", options.waiting_room),
        )
        if value is not None
    }
    policy = msgspec.structs.replace(plan.policy, **said)
    routers = plan.routers if options.routers is None else options.routers
    return msgspec.structs.replace(plan, policy=policy, routers=routers)


def make_requests(
    plan: FleetPlan, trace: Sequence[TraceEntry], options: SimulationOptions
) -> list[Request]:
    """The requests of a trace, in the order of their time.

    Raises:
        ConfigError: one is longer than what any worker can hold.
    """
    if not trace:
        raise ConfigError("the trace has no requests", param="trace")
    piece = piece_tokens(options.scale, plan.block_size)
    salts = {tenant: salt_of_tenant(tenant) for tenant in {one.tenant for one in trace}}
    longest = max(1, max(round(one.output_length * options.scale) for one in trace))
    room = min(spec.kv_tokens for spec in plan.specs()) - plan.block_size
    first = trace[0].timestamp
    requests = []
    for number, entry in enumerate(trace):
        num_prompt = max(1, round(entry.input_length * options.scale))
        num_output = max(1, round(entry.output_length * options.scale))
        if num_prompt + num_output > room:
            raise ConfigError(
                f"request {number} has {num_prompt + num_output} tokens, a worker holds {room}",
                param="trace",
            )
        due_s = (entry.timestamp - first) / 1e3
        requests.append(
            Request(
                number=number,
                request_id=f"r{number}",
                due_s=due_s,
                num_prompt=num_prompt,
                num_output=num_output,
                max_tokens=min(options.max_tokens or longest, room - num_prompt),
                tenant=entry.tenant,
                pieces=piece_names(entry, number, -(-num_prompt // piece), salts[entry.tenant]),
                blocks_per_piece=piece // plan.block_size,
                block_size=plan.block_size,
                slo=Slo(ttft_ms=plan.policy.slo_ttft_ms, tbt_ms=plan.policy.slo_tbt_ms),
                result=RequestResult(
                    number=number,
                    output_len=num_output,
                    tenant=entry.tenant,
                    due_s=due_s,
                    sent_s=due_s,
                ),
            )
        )
    return requests


def _conclude(request: Request) -> None:
    """Its end, where it has all its tokens; else it was refused, or is still under way."""
    result = request.result
    if result.state == "failed" or len(result.event_s) < request.num_output:
        return
    result.end_s = result.event_s[-1]
    usage = Usage(
        prompt_tokens=request.num_prompt,
        completion_tokens=len(result.event_s),
        cached_tokens=request.num_cached,
    )
    result.complete(usage, is_count_exact=True)


def _result(
    plan: FleetPlan,
    options: SimulationOptions,
    mesh: SimulatedMesh,
    requests: list[Request],
    cpu_s: float,
) -> SimulationResult:
    done = [request for request in requests if request.result.state == "completed"]
    ends_s = [request.result.event_s[-1] for request in requests if request.result.event_s]
    virtual_s = max([requests[-1].due_s, *ends_s])
    recorder = Recorder(results=[request.result for request in requests])
    recorder.started_s, recorder.ended_s = 0.0, virtual_s
    recorder.num_ended = len(done)
    recorder.num_output_tokens = sum(len(request.result.event_s) for request in done)
    slo_ms = {"ttft": plan.policy.slo_ttft_ms, "tbt": plan.policy.slo_tbt_ms}
    return SimulationResult(
        plan=plan,
        options=options,
        slo_ms={key: limit for key, limit in slo_ms.items() if limit},
        recorder=recorder,
        workers=tuple(_figures(one, virtual_s) for one in mesh.everyone),
        samples=mesh.samples,
        decisions_s=array("d", (s for control in mesh.controls for s in control.door.decisions_s)),
        cpu_s=cpu_s,
        virtual_s=virtual_s,
        offered_s=requests[-1].due_s,
        num_events=mesh.queue.num_events,
        num_prompt_tokens=sum(request.num_prompt for request in done),
        num_cached_tokens=sum(request.num_cached for request in done),
        kv_bytes_moved=mesh.network.num_bytes,
    )


def _figures(worker: SimulatedWorker, end_s: float) -> WorkerFigures:
    engine, spec = worker.engine, worker.spec
    left_s = end_s if worker.left_s is None else min(worker.left_s, end_s)
    present_s = max(1e-9, left_s - worker.came_s)
    return WorkerFigures(
        name=spec.name,
        role=spec.role,
        profile=spec.profile,
        present_s=round(present_s, 3),
        busy_share=round((engine.prefill_s + engine.decode_s) / present_s, 4),
        prefill_share=round(engine.prefill_s / present_s, 4),
        num_taken=worker.num_taken,
        num_computed_tokens=engine.num_computed_tokens,
        num_fetches=worker.num_fetches,
        num_preemptions=engine.num_preemptions,
    )

"""Benches: each measures one part of the mesh on this machine, and prints people's text or JSON.

    bus     what one hop costs over work queue, core NATS and TCP; tokens of many to many
    crowd   thousands of requests that wait, a thousand streams at once: memory, errors
    engine  steps of the engine beside the same steps by transformers
    hop     how long a message takes from stage to stage, without load
    serve   answers of a real engine through the bridge, beside another server
    kv      how blocks move between workers, tiers and turns, section by section
    route   what placing, admitting and sharing out requests brings, on simulated fleets
    slow    what clients that do not read cost those who do
    idle    what a mesh at rest costs
    stream  what a streamed token costs in CPU, and how fast many streams are

``BENCHES`` maps the name of a bench to its module, which is imported when the bench is asked for.
The module has a function ``command``, whose parameters are the bench's flags (as typer reads
them); it measures, then shows a ``loadgen.bench.result.BenchResult``. A bench that needs a mesh
and was given none starts its own with ``loadgen.bench.own_mesh``.
"""

from __future__ import annotations

BENCHES: dict[str, str] = {
    "bus": "loadgen.bench.bus",
    "crowd": "loadgen.bench.crowd",
    "engine": "loadgen.bench.engine",
    "hop": "loadgen.bench.hop",
    "kv": "loadgen.bench.kv",
    "route": "loadgen.bench.route",
    "serve": "loadgen.bench.serve",
    "slow": "loadgen.bench.slow",
    "idle": "loadgen.bench.idle",
    "stream": "loadgen.bench.stream",
}

__all__ = ["BENCHES"]

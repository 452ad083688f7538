"""``mesh bench engine``: one step of the engine beside one step of transformers.

No mesh, no queue: a runner with its sampler, and transformers' own modules, in one process with
the same number of threads, by turns. What computes is in ``workers.engine.bench``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.failure import EXIT_INTERRUPTED, report
from infra.log import set_up_process
from loadgen.bench.peer_command import PeerSpeed, median_speed, run_peer
from loadgen.bench.result import BenchResult, Figure
from loadgen.machine import MachineNote, OthersMeter, cpu_flags
from schemas.errors import ConfigError, MeshError
from workers.engine.bench.plan import EnginePlan

if TYPE_CHECKING:
    from workers.engine.bench.measure import EngineFigures

_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "bf16")


def command(
    model: Annotated[
        str, typer.Option(help="built-in name, folder, .gguf file or hub id")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="numbers of our engine, as of a worker")] = "auto",
    kernels: Annotated[str, typer.Option(help="of our engine, as of a worker")] = "auto",
    device: Annotated[str, typer.Option(help="of our engine, as of a worker")] = "auto",
    threads: Annotated[int, typer.Option(help="threads of each; default: all cores")] = 0,
    batches: Annotated[str, typer.Option(help="sequences in a decode step")] = "1,8,32",
    context: Annotated[int, typer.Option(help="tokens before a decode")] = 250,
    prompt_len: Annotated[int, typer.Option(help="tokens of a prefill")] = 512,
    rounds: Annotated[
        int, typer.Option(help="how often all of it is measured, the peer too; medians count")
    ] = 3,
    turns: Annotated[int, typer.Option(help="steps of each in a round, at least")] = 3,
    references: Annotated[
        str, typer.Option(help="dtypes of transformers to compare with; empty: only fidelity")
    ] = "bf16,fp32",
    peer: Annotated[
        str,
        typer.Option(
            help="a command to measure another engine with, such as llama.cpp: run in each round, "
            'it prints {"prefill_tok_s": …, "decode_tok_s": …} of one stream'
        ),
    ] = "",
    peer_name: Annotated[
        str, typer.Option(help="what its figures begin with: llama for llama_decode_tok_s")
    ] = "peer",
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Time decode steps and prefill of the engine beside transformers, and compare their logits."""
    machine = MachineNote.now()
    num_threads = threads or machine.num_cores
    # Read once, when torch is imported. Waiting threads spin, unlike a worker's: that is the
    # setting in which transformers is fastest.
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    try:
        if not peer_name.isidentifier():
            raise ConfigError(f"{peer_name!r} can't begin a name", param="peer_name")
        plan = EnginePlan(
            folder=_folder(model),
            dtype=dtype,
            kernels=kernels,
            device=device,
            threads=num_threads,
            batches=_numbers(batches),
            context=context,
            prompt_len=prompt_len,
            rounds=rounds,
            turns=turns,
            references=tuple(filter(None, references.split(","))),
        )
        set_up_process("bench-engine", format="console", stream=sys.stderr)  # stdout: figures
        from workers.engine.bench.measure import measure_engine

        meter = OthersMeter()
        speeds: list[PeerSpeed] = []
        figures = measure_engine(plan, lambda: speeds.append(run_peer(peer)) if peer else None)
        machine = machine.meanwhile(meter.cores())
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except MeshError as error:
        raise typer.Exit(report("mesh bench engine", error)) from error
    peer_speed = median_speed(speeds) if speeds else None
    make_result(plan, figures, peer_speed, machine, peer_name).show(as_json=json)


def make_result(
    plan: EnginePlan,
    figures: EngineFigures,
    peer: PeerSpeed | None,
    machine: MachineNote,
    peer_name: str = "peer",
) -> BenchResult:
    """The figures under the names that people look for: ours, the faster of transformers' (named
    in ``hf_fastest``), how many times faster we are, and each of transformers' dtypes."""
    fidelity = dict(figures.fidelity)
    ours = fidelity.pop("ours")
    tok_s = plan.prompt_len * 1e3
    decode = {str(batch): dict(ms) for batch, ms in figures.decode_ms.items()}
    decode_ms = {batch: ms.pop("ours") for batch, ms in decode.items()}
    prefill = dict(figures.prefill_ms)
    prefill_ms = prefill.pop("ours")
    shown: dict[str, Figure] = {
        "decode_ms": _rounded(decode_ms),
        "prefill_tok_s": round(tok_s / prefill_ms, 1),
        "sampling_ms": round(figures.sampling_ms, 3),
        "kl_mean": float(f"{ours.kl_mean:.3g}"),
        "argmax_agree": round(ours.argmax_agree, 4),
        "kernels": figures.kind,
        "dtype": figures.dtype,
    }
    for part in sorted({part for parts in figures.shares.values() for part in parts}):
        of_steps = {step: parts[part] for step, parts in figures.shares.items()}
        shown[f"share_{part}"] = _rounded(of_steps)
    if plan.references:
        fastest = {batch: min(ms, key=ms.__getitem__) for batch, ms in decode.items()}
        hf_ms = {batch: ms[fastest[batch]] for batch, ms in decode.items()}
        hf_prefill_ms = min(prefill.values())
        fastest["prefill"] = min(prefill, key=prefill.__getitem__)
        ratios = {f"decode_{batch}": ms / decode_ms[batch] for batch, ms in hf_ms.items()}
        shown |= {
            "hf_decode_ms": _rounded(hf_ms),
            "hf_prefill_tok_s": round(tok_s / hf_prefill_ms, 1),
            "hf_fastest": ", ".join(f"{what}: {name}" for what, name in fastest.items()),
            "ratio": _rounded({**ratios, "prefill": hf_prefill_ms / prefill_ms}),
        }
    for name in plan.references:
        shown[f"hf_{name}_decode_ms"] = _rounded({batch: ms[name] for batch, ms in decode.items()})
        shown[f"hf_{name}_prefill_tok_s"] = round(tok_s / prefill[name], 1)
    for name, other in fidelity.items():
        shown[f"hf_{name}_kl_mean"] = float(f"{other.kl_mean:.3g}")
    if peer is not None:
        shown |= _beside(peer_name, peer, decode_ms.get("1"), tok_s / prefill_ms)
    return BenchResult(
        bench="engine", figures=shown, settings=_settings(plan), machine=machine, notes=_NOTES
    )


_NOTES = (
    "times of one process, by turns, medians of all rounds; greedy sampling included",
    "share: of a step of ours, by what is done; linear: products, rows: norms, rotations, gates",
    "hf: transformers' own modules, the faster dtype at each size; kl and argmax: against fp32",
)


def _beside(
    name: str, peer: PeerSpeed, decode_ms: float | None, prefill_tok_s: float
) -> dict[str, Figure]:
    """Ours over the peer's: above 1 we are faster. Decode only where batch 1 was measured."""
    ratio = {"prefill": prefill_tok_s / peer.prefill_tok_s}
    if decode_ms is not None:
        ratio["decode_1"] = 1e3 / decode_ms / peer.decode_tok_s
    return {
        f"{name}_prefill_tok_s": peer.prefill_tok_s,
        f"{name}_decode_tok_s": peer.decode_tok_s,
        f"{name}_ratio": _rounded(ratio),
    }


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} is not of the form 1,8,32", param="batches") from None


def _folder(model: str) -> Path:
    from infra.config import BusConfig
    from workers.engine.sources import resolve_source

    return resolve_source(model, BusConfig().model_cache, lambda line: print(line, file=sys.stderr))


def _settings(plan: EnginePlan) -> dict[str, object]:
    return {
        "model": plan.folder.name,
        "dtype": plan.dtype,
        "kernels": plan.kernels,
        "device": plan.device,
        "threads": plan.threads,
        "context": plan.context,
        "prompt_len": plan.prompt_len,
        "rounds": plan.rounds,
        "turns": plan.turns,
        "cpu_flags": cpu_flags(_CPU_FLAGS),
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}

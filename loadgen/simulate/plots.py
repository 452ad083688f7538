"""What only a simulation can show: its pools from inside, over time."""

from __future__ import annotations

from loadgen.plots import new_figure, to_svg
from loadgen.simulate.pool_samples import PoolSamples


def pools_plot(samples: PoolSamples, slo_ms: dict[str, float], title: str = "") -> str:
    """How loaded prefill and decode were. With an SLO as shares of it, as Mooncake draws them: 1 is
    where it begins to be missed; else prompts that wait and sequences that run, per worker."""
    figure, axes = new_figure(title or "Load of the pools over time, simulated")
    if slo_ms.get("ttft") and slo_ms.get("tbt"):
        prefill = [value / slo_ms["ttft"] for value in samples.prefill_wait_ms]
        decode = [value / slo_ms["tbt"] for value in samples.decode_step_ms]
        axes.axhline(1.0, linestyle="--", color="tab:red")
        axes.set_ylabel("load, share of the SLO")
        names = ("prefill: wait", "decode: step")
    else:
        prefill, decode = samples.prefill_waiting, samples.decode_running
        axes.set_ylabel("per worker")
        names = ("prompts that wait", "sequences that decode")
    axes.plot(samples.time_s, prefill, label=names[0])
    axes.plot(samples.time_s, decode, label=names[1])
    axes.set_xlabel("seconds from the start")
    axes.set_ylim(bottom=0)
    axes.legend()
    return to_svg(figure)

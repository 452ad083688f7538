"""The plots of a load report, as SVG text that stands inside a page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from loadgen.measure import RequestResult, gaps_s
from loadgen.recorder import Recorder
from loadgen.stages import StageTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_IN = (7.0, 3.2)
_MAX_POINTS = 2000  # of one curve: more can't be told apart
_BINS = 60  # of a time series


def cdf_plot(name: str, values_s: Sequence[float] | np.ndarray, limit_ms: float | None) -> str:
    """Which share of the observations took at most how long, on a logarithmic axis.

    Args:
        values_s: seconds, in any order.
        limit_ms: an SLO to be marked.
    """
    figure, axes = new_figure(f"{name}, {len(values_s)} observations")
    values_ms = np.sort(np.asarray(values_s, dtype=np.float64)) * 1e3
    if len(values_ms):
        shares = np.arange(1, len(values_ms) + 1) / len(values_ms)
        kept = np.unique(np.linspace(0, len(values_ms) - 1, _MAX_POINTS).astype(int))
        axes.step(values_ms[kept], shares[kept], where="post")
        axes.set_xscale("log")
    if limit_ms is not None:
        axes.axvline(limit_ms, linestyle="--", color="tab:red", label=f"SLO {limit_ms:g} ms")
        axes.legend()
    axes.set_xlabel("ms")
    axes.set_ylabel("share of observations")
    axes.set_ylim(0, 1.01)
    return to_svg(figure)


def rates_plot(recorder: Recorder) -> str:
    """Requests sent and ended, and tokens, per second over the run."""
    edges, width_s = _edges(recorder)
    figure, axes = new_figure("Rates over time")
    starts = edges[:-1]
    sent, ended = _times(recorder, [r.sent_s for r in recorder.results]), _ends(recorder)
    for values, label in ((sent, "sent"), (ended, "completed")):
        axes.step(starts, np.histogram(values, edges)[0] / width_s, where="post", label=label)
    axes.set_xlabel("seconds from the start")
    axes.set_ylabel("requests/s")
    tokens = axes.twinx()
    events = [t for result in recorder.results for t in result.event_s]
    counts = np.histogram(_times(recorder, events), edges)[0] / width_s
    tokens.step(starts, counts, where="post", color="tab:green", alpha=0.6, label="token events")
    tokens.set_ylabel("token events/s")
    tokens.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    tokens.legend(loc="upper right")
    return to_svg(figure)


def ttft_plot(recorder: Recorder, limit_ms: float | None) -> str:
    """Each request's TTFT at the time at which it was sent, and how many were in flight."""
    figure, axes = new_figure("TTFT and requests in flight over time")
    done = [result for result in recorder.results if result.event_s]
    axes.scatter(
        _times(recorder, [result.sent_s for result in done]),
        [result.ttft_s * 1e3 for result in done],
        s=6,
        alpha=0.6,
    )
    if limit_ms is not None:
        axes.axhline(limit_ms, linestyle="--", color="tab:red")
    axes.set_xlabel("sent, seconds from the start")
    axes.set_ylabel("TTFT, ms")
    axes.set_ylim(bottom=0)
    flight = axes.twinx()
    edges, _ = _edges(recorder)
    flight.plot(edges, _in_flight(recorder, edges), color="tab:gray", alpha=0.7)
    flight.set_ylabel("in flight")
    flight.set_ylim(bottom=0)
    return to_svg(figure)


def stages_plot(stages: Mapping[str, StageTime]) -> str:
    """Mean time of each stage, on a logarithmic axis."""
    figure, axes = new_figure("Inside the mesh: mean time")
    names = list(stages)[::-1]
    axes.barh(names, [max(stages[name].mean_ms, 1e-3) for name in names])
    axes.set_xscale("log")
    axes.set_xlim(left=1e-2)
    axes.set_xlabel("ms")
    return to_svg(figure)


def itl_s(results: Sequence[RequestResult]) -> np.ndarray:
    """The gaps of all completed requests, in seconds."""
    return gaps_s([result for result in results if result.state == "completed"])


def new_figure(title: str) -> tuple[Figure, Axes]:
    """An empty one; matplotlib is imported when it is called."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def to_svg(figure: Figure) -> str:
    """Without the XML head, so that it can stand inside HTML."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _edges(recorder: Recorder) -> tuple[np.ndarray, float]:
    wall_s = max(recorder.wall_s, 1e-3)
    return np.linspace(0, wall_s, _BINS + 1), wall_s / _BINS


def _times(recorder: Recorder, moments_s: Sequence[float]) -> np.ndarray:
    return np.asarray(moments_s, dtype=np.float64) - (recorder.started_s or 0.0)


def _ends(recorder: Recorder) -> np.ndarray:
    done = [result for result in recorder.results if result.state == "completed"]
    return _times(recorder, [result.sent_s + result.e2e_s for result in done])


def _in_flight(recorder: Recorder, moments: np.ndarray) -> np.ndarray:
    """How many were sent, and not known to have ended, at each moment."""
    starts = np.sort(_times(recorder, [result.sent_s for result in recorder.results]))
    known = [r for r in recorder.results if r.state != "running"]
    last = [r.event_s[-1] if r.event_s else r.sent_s for r in known]
    ends = np.sort(_times(recorder, last))
    begun = np.searchsorted(starts, moments, side="right")
    return np.asarray(begun - np.searchsorted(ends, moments, side="right"))

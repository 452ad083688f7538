"""The page and the plots of ``mesh bench route --html``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, select_autoescape
from markupsafe import Markup

from loadgen.bench.result import BenchResult
from loadgen.plots import new_figure, to_svg
from schemas.errors import ConfigError

_MAX_POINTS = 2000  # of one curve: more can't be told apart
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>mesh bench route</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }
  .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(32em, 1fr)); gap: 1em }
  .plots svg { width: 100%; height: auto }
  .note { color: #666 }
  pre { background: #f4f4f4; padding: 1em; overflow-x: auto }
</style>
<h1>mesh bench route</h1>
<div class="plots">
{% for plot in plots %}<figure>{{ plot }}</figure>
{% endfor %}</div>
{% for note in notes %}<p class="note">{{ note }}</p>
{% endfor %}
<h2>Figures</h2>
<pre>{{ figures }}</pre>
</html>
"""


def write_page(result: BenchResult, plots: Sequence[str], path: Path) -> None:
    """Write figures, notes and plots to ``path``.

    Raises:
        ConfigError: it can't be written.
    """
    environment = Environment(autoescape=select_autoescape(default=True, default_for_string=True))
    page = environment.from_string(_PAGE).render(
        plots=[Markup(plot) for plot in plots],  # our own SVG
        notes=(*result.notes, result.machine.text),
        figures=result.to_json(),
    )
    try:
        path.write_text(page)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", param="html") from error


def cdfs_plot(title: str, curves_ms: Mapping[str, Sequence[float]], limit_ms: float) -> str:
    """Which share of each curve's requests took at most how long, on a logarithmic axis.

    Args:
        curves_ms: milliseconds by name, in any order; one that never came is infinite, and leaves
            its curve short of 1.
        limit_ms: an SLO to be marked.
    """
    figure, axes = new_figure(title)
    for name, values in curves_ms.items():
        ordered = np.sort(np.asarray(values, dtype=np.float64))
        shares = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
        came = np.isfinite(ordered)
        ordered, shares = ordered[came], shares[came]
        if not len(ordered):
            continue
        kept = np.unique(np.linspace(0, len(ordered) - 1, _MAX_POINTS).astype(int))
        axes.step(np.maximum(ordered[kept], 1e-3), shares[kept], where="post", label=name)
    axes.set_xscale("log")
    axes.axvline(limit_ms, linestyle="--", color="tab:red", label=f"SLO {limit_ms:g} ms")
    axes.set_xlabel("ms, simulated")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.01)
    axes.legend()
    return to_svg(figure)


def loads_plot(
    title: str, times_s: Sequence[float], lines: Mapping[str, Sequence[float]], label: str
) -> str:
    """Several loads over the time of a simulation.

    Args:
        lines: by name, as many values as there are times.
    """
    figure, axes = new_figure(title)
    for name, values in lines.items():
        axes.plot(times_s, values, label=name, linewidth=1)
    axes.set_xlabel("seconds from the start, simulated")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.legend()
    return to_svg(figure)

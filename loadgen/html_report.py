"""The report of a load run as one HTML page: tables and plots, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, select_autoescape
from markupsafe import Markup

from loadgen.plots import cdf_plot, itl_s, rates_plot, stages_plot, ttft_plot
from loadgen.recorder import Recorder
from loadgen.report import COLUMNS, LoadReport, cells, latency_rows, rate_lines, warnings_of

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }
  table { border-collapse: collapse; margin: 1em 0 }
  td, th { padding: .2em .9em; text-align: right; border-bottom: 1px solid #ccc }
  td:first-child, th:first-child { text-align: left }
  .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(32em, 1fr)); gap: 1em }
  .plots svg { width: 100%; height: auto }
  .warning { background: #fff3cd; padding: .3em .8em; border-left: .3em solid #e0a800 }
  .note { color: #666 }
  pre { background: #f4f4f4; padding: 1em; overflow-x: auto }
</style>
<h1>{{ title }}</h1>
{% for line in warnings %}<p class="warning">{{ line }}</p>
{% endfor %}
<p>{% for line in rates %}{{ line }}<br>{% endfor %}</p>
{{ table("ms", columns, latencies) }}
{% if tenants %}{{ table("tenant: TTFT, ms", columns, tenants) }}{% endif %}
{% if errors %}{{ table("error", ["count", "first message"], errors) }}{% endif %}
<div class="plots">
{% for plot in plots %}<figure>{{ plot }}</figure>
{% endfor %}</div>
{% if stages %}{{ table("inside the mesh", ["times", "mean ms", "s in all"], stages) }}{% endif %}
<p class="note">Measured at the {{ measured }}.</p>
<details><summary>Settings</summary><pre>{{ settings }}</pre></details>
</html>
"""
_TABLE = """<table><tr><th>{{ corner }}</th>{% for name in columns %}<th>{{ name }}</th>{% endfor %}
</tr>{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>"""


def html_report(report: LoadReport, recorder: Recorder, more_plots: Sequence[str] = ()) -> str:
    """The page of ``report``, with plots of what ``recorder`` holds, and behind them others."""
    environment = Environment(autoescape=select_autoescape(default=True, default_for_string=True))

    def table(corner: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Markup:
        template = environment.from_string(_TABLE)
        return Markup(template.render(corner=corner, columns=columns, rows=rows))

    summary, settings = report.summary, report.settings
    return environment.from_string(_PAGE).render(
        title=f"{settings['model']} at {settings['target']}",
        table=table,
        warnings=warnings_of(report),
        rates=rate_lines(report),
        columns=COLUMNS,
        latencies=[(name, *cells(spread)) for name, spread in latency_rows(summary)],
        tenants=[(name or "-", *cells(one.ttft_ms)) for name, one in report.by_tenant.items()],
        errors=[(kind, str(one.num), one.example) for kind, one in summary.errors.items()],
        plots=[Markup(plot) for plot in (*_plots(report, recorder), *more_plots)],
        stages=[
            (row, str(time.num), f"{time.mean_ms:.2f}", f"{time.total_s:.2f}")
            for row, time in report.stages.items()
        ],
        measured=f"{report.measuring_point}; {report.machine.text}",
        settings=json.dumps(settings, indent=2),
    )


def write_html(
    report: LoadReport, recorder: Recorder, path: Path, more_plots: Sequence[str] = ()
) -> None:
    """Write the page to ``path``."""
    path.write_text(html_report(report, recorder, more_plots))


def _plots(report: LoadReport, recorder: Recorder) -> list[str]:
    slo = report.slo_ms
    done = [result for result in recorder.results if result.state == "completed"]
    plots = [
        cdf_plot("TTFT", [result.ttft_s for result in done], slo.get("ttft")),
        cdf_plot("ITL", itl_s(recorder.results), None),
        rates_plot(recorder),
        ttft_plot(recorder, slo.get("ttft")),
    ]
    return [*plots, stages_plot(report.stages)] if report.stages else plots

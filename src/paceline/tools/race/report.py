"""The race as one HTML page: no script, nothing fetched, readable on a phone, light and dark.

The plots are SVG inside the page, drawn in svg.py and timeline.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from paceline.errors import UsageError
from paceline.telemetry.tape import Trace
from paceline.tools.race import score, timeline
from paceline.tools.race.result import RaceResult
from paceline.tools.race.score import FLOOR, SINGLE, ContenderRecord, MetricPoint, RaceRow, Target, bytes_column
from paceline.tools.race.svg import GRID, INK, new_figure, to_svg
from paceline.tools.race.table import cells, headings, in_order

_LINES = ["#3b82d6", "#e0702a", "#2f9e62", "#c23f8e", "#8a63d2", "#b8860b", "#1a9aa8", "#d64545", "#7a8f2a"]
_GREY = "#8c8c8c"

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2430; --soft: #5d6778; --line: #dfe3ea; --page: #ffffff; --card: #f6f7f9; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #9aa4b4; --line: #333b48; --page: #14181f; --card: #1c222c; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 44rem; }
.soft, dt, figcaption, li { color: var(--soft); }
.soft, figcaption, li, dl { font-size: .9rem; }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: 1.25rem 0; }
dl div { min-width: 7rem; } dt, dd { margin: 0; } dd { font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .95rem; }
th, td { text-align: right; padding: .4rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: .8rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { font-weight: 600; } tr.aside td { color: var(--soft); font-weight: 400; }
.bad { color: var(--bad); } td.bad { white-space: normal; text-align: left; }
figure { margin: 1rem 0 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .9rem 1rem; }
figure > div { overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 30rem; height: auto; color: var(--ink); }
figcaption { margin-top: .4rem; }
ul { margin: .75rem 0; padding-left: 1.1rem; }
code { font: .85rem ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, kw_only=True)
class RaceReport:
    """Everything that the page shows."""

    result: RaceResult
    records: Sequence[ContenderRecord]  # what the plots are drawn from
    notes: Sequence[str]
    warmup: int
    target: Target | None = None
    traces: Mapping[str, Sequence[Trace]] = field(default_factory=dict)  # of each contender


def check_plots() -> None:
    """Raise if there is nothing to draw with. To be called before the race, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--html needs matplotlib, which is not installed",
            why="the page's plots are drawn with it",
            do="pip install 'paceline[report]'",
        ) from None


def page(report: RaceReport) -> str:
    """The whole page as HTML."""
    result = report.result
    title = f"{result.task}: {result.workers} workers, {result.link} link"
    figures = "".join(_figures(report))
    facts = {
        "task": result.task,
        "workers": f"{result.workers} × {result.threads} thread{'s' * (result.threads > 1)}",
        "link": result.link,
        "machine": f"{result.machine.cores} cores, {result.machine.memory_gb:.0f} GB",
        "processor": result.machine.cpu or "not known",
        "versions": f"paceline {result.paceline}, torch {result.torch}",
        "date": result.date.replace("T", " ").replace("+00:00", " UTC"),
        "commit": (result.commit or "not known")[:12],
    }
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    said = "".join(f"<li>{escape(line)}</li>" for line in report.notes)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Paceline race · {escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body><main>
<h1>{escape(title)}</h1>
<p class="soft">A Paceline race: the same script under every method, taking turns on the same machine.</p>
<dl>{items}</dl>
<div class="wide">{_table(result.rows, report.target)}</div>
<ul>{said}</ul>
{figures}
<h2>Run it again</h2>
<p><code>{escape(result.command)}</code></p>
</main></body>
</html>
"""


def _table(rows: Sequence[RaceRow], target: Target | None) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in headings(target))
    column = bytes_column(rows)
    body = []
    for row in in_order(rows):
        words = [f"<td>{escape(word)}</td>" for word in cells(row, column, target)]
        if row.error:
            words[1:] = [f'<td class="bad" colspan="{len(words) - 1}">{escape(row.error)}</td>']
        body.append(f"<tr{' class=aside' * (row.method in (SINGLE, FLOOR))}>{''.join(words)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


# ---------------------------------------------------------------------------------------------------- plots


def _figures(report: RaceReport) -> list[str]:
    """The plots, without those that would be empty."""
    records, target = report.records, report.target
    wire = bytes_column(report.result.rows) == "wire_bytes_per_step"

    def over_time(record: ContenderRecord, series: Sequence[MetricPoint]) -> list[float]:
        return [point.busy_s for point in series]

    def over_bytes(record: ContenderRecord, series: Sequence[MetricPoint]) -> list[float]:
        return _megabytes(record, series, wire=wire)

    # The floor's workers each train a model of their own: their losses mean little.
    raced = [record for record in records if record.method != FLOOR]
    colours = _colours(records)
    bars = _bars(report)
    figures = [
        _figure("steps", "Where a step's time goes", bars, "Milliseconds of a mean step."),
        _figure("timeline", "One step of each", timeline.draw(report.traces), timeline.CAPTION),
    ]
    for metric, label in (
        ("loss", "loss (mean of 5 steps)"),
        ("eval_loss", "held-out loss"),
        ("accuracy", "accuracy"),
    ):
        line = target if target and target.name == metric else None
        curves = {record.method: (record, score.progress(record.events, metric)) for record in raced}
        name = label.partition(" (")[0].capitalize()
        drawn = _curves(curves, over_time, colours, ("the job's own seconds", label), line)
        figures.append(_figure(metric, f"{name} over time", drawn, "Time in which the others ran does not count."))
        if metric == "accuracy":
            caption = "Counted by the kernel." if wire else "Payload bytes; not known for peers."
            drawn = _curves(curves, over_bytes, colours, ("MB sent by a worker", label), line)
            figures.append(_figure("bytes", f"{name} over bytes sent", drawn, caption))
    return [figure for figure in figures if figure]


def _figure(name: str, title: str, drawn: str | None, caption: str) -> str:
    if drawn is None:
        return ""
    own = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", drawn)  # ids must be unique in the whole page
    return f"<h2>{escape(title)}</h2><figure><div>{own}</div><figcaption>{escape(caption)}</figcaption></figure>"


def _colours(records: Sequence[ContenderRecord]) -> dict[str, str]:
    """The colour of each method, the same in every plot."""
    raced = [record.method for record in records if record.method not in (SINGLE, FLOOR)]
    return {name: _LINES[i % len(_LINES)] for i, name in enumerate(raced)} | {SINGLE: _GREY, FLOOR: _GREY}


def _megabytes(record: ContenderRecord, series: Sequence[MetricPoint], *, wire: bool) -> list[float]:
    """The megabytes that a worker had sent when each value was reported; empty where that is not known."""
    known = score.bytes_by_step(record.events, wire=wire) if wire or record.counts_payload else []
    if not known or record.workers < 2:
        return []
    steps, sent = zip(*known, strict=True)
    return [float(mb) for mb in np.interp([point.step for point in series], steps, sent) / 1e6]


def _curves(
    curves: dict[str, tuple[ContenderRecord, list[MetricPoint]]],
    x_of: Callable[[ContenderRecord, Sequence[MetricPoint]], list[float]],
    colours: dict[str, str],
    labels: tuple[str, str],
    target: Target | None,
) -> str | None:
    figure, axes = new_figure(4.2)
    drawn = 0
    for method, (record, series) in curves.items():
        x = x_of(record, series)
        if not series or not x:
            continue
        peer = "--" if method.startswith("torch:") else "-"
        style = ":" if method == SINGLE else peer
        dot = "o" if len(series) < 12 else ""
        axes.plot(x, [point.value for point in series], style + dot, color=colours[method], lw=1.8, ms=4, label=method)
        drawn += 1
    if not drawn:
        return None
    if target:
        axes.axhline(target.value, color=INK, lw=0.8, ls=(0, (2, 3)))
        axes.annotate(
            str(target), (0, target.value), xycoords=("axes fraction", "data"), xytext=(4, 4),
            textcoords="offset points", ha="left", color=INK, fontsize=9,
        )  # fmt: skip
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_xlim(left=0)
    axes.grid(color=GRID, lw=0.7)
    return to_svg(figure, columns=min(drawn, 4))


def _bars(report: RaceReport) -> str | None:
    """The mean step of each contender as a bar: computing (the floor's step), exposed communication, and the rest."""
    means = {}
    for record in report.records:
        if ms := [step.ms for step in score.measured_steps(record.events, report.warmup)]:
            means[record.method] = score.typical(ms)
    shown = sorted(
        (row for row in report.result.rows if row.method in means and row.method != SINGLE),
        key=lambda row: -means[row.method],
    )
    if not shown or FLOOR not in means:
        return None
    figure, axes = new_figure(0.9 + 0.42 * len(shown))
    total = np.array([means[row.method] for row in shown])
    compute = np.minimum(means[FLOOR], total)
    exposed = np.minimum([row.exposed_comm_ms or 0.0 for row in shown], total - compute)
    left = np.zeros(len(shown))
    for label, width, colour in (
        ("compute (the floor's)", compute, "#7c93b2"),
        ("exposed communication", exposed, "#e0702a"),
        ("rest", total - compute - exposed, "#c9b458"),
    ):
        axes.barh([row.method for row in shown], width, left=left, color=colour, label=label, height=0.66)
        left = left + width
    for i, width in enumerate(total):
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{width:.1f}", (width, i), color=INK, **place)
    axes.set_xlim(0, float(total.max()) * 1.12)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", color=GRID, lw=0.7)
    axes.tick_params(axis="y", length=0)
    return to_svg(figure, columns=3)

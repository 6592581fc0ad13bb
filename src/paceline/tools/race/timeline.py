"""A picture of one step of each contender: what worker 0 computed, which exchanges ran, and what it waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.telemetry.exchanges import TracedExchange, exchanges, in_rows
from paceline.telemetry.tape import COMPUTE, WAITS, Span, Trace
from paceline.tools.race.score import SINGLE
from paceline.tools.race.svg import GRID, new_figure, to_svg

CAPTION = (
    "Worker 0's step of median length, among those in which something travels. Above: the training thread. Below: a "
    "bucket's bytes, from when they leave until their mean has landed. Of a peer only the training thread is seen."
)
_COLOURS = {
    "data": "#b9b9b9",
    "forward": "#8fb0d9",
    "backward": "#3f6fa8",
    "optimizer": "#2f9e62",
    "wait": "#e0702a",
    "exchange": "#c9a227",
}
_ASIDE = ("control", "user")  # lanes of the loader, the gate and paceline.mean: no part of a step
_SOME = 0.1  # of the busiest step's exchanges: a step with less only sees the end of an earlier exchange
_LINES = 4  # exchanges under way at a time that are drawn apart; more share the last line


class TimelineBar(NamedTuple):
    """One bar of the picture, in milliseconds from the beginning of the step. Line 0 is the training thread."""

    what: str
    begin: float
    length: float
    line: int


def draw(traces: Mapping[str, Sequence[Trace]]) -> str | None:
    """A typical step of each contender as an <svg> element; None where no trace has one."""
    steps = {name: list(bars(those[0])) for name, those in traces.items() if those and name != SINGLE}
    shown = sorted((name for name, found in steps.items() if found), key=lambda name: -_length(steps[name]))
    if not shown:
        return None
    figure, axes = new_figure(0.9 + 0.6 * len(shown))
    named: set[str] = set()
    for i, name in enumerate(shown):
        for bar in steps[name]:
            place = (i + 0.06, 0.3) if bar.line == 0 else (i - 0.07 * bar.line, 0.055)
            label = None if bar.what in named else bar.what
            named.add(bar.what)
            axes.broken_barh([(bar.begin, bar.length)], place, color=_COLOURS[bar.what], lw=0, label=label)
    axes.set_yticks(range(len(shown)), shown)
    axes.set_xlim(0, max(_length(found) for found in steps.values()) * 1.02)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", color=GRID, lw=0.7)
    axes.tick_params(axis="y", length=0)
    return to_svg(figure, columns=len(named))


def bars(trace: Trace) -> Iterator[TimelineBar]:
    """The bars of a typical step, the outer ones first."""
    step = typical(trace)
    if step is None:
        return
    own = [span for span in trace.spans if span.track in (COMPUTE, WAITS) and span.name in _COLOURS]
    zero = min([span.begin for span in own if span.name == "data" and span.step == step.step], default=step.begin)

    def bar(what: str, begin: float, end: float, line: int) -> Iterator[TimelineBar]:
        begin, end = max(begin, zero), min(end, step.end)
        if end > begin:
            yield TimelineBar(what, (begin - zero) * 1e3, (end - begin) * 1e3, line)

    for span in sorted(own, key=lambda span: (span.begin, -span.end)):
        yield from bar(span.name, span.begin, span.end, 0)
    for row, exchange in in_rows(_travelled(trace)):
        yield from bar("exchange", exchange.begin, exchange.end, min(row, _LINES - 1) + 1)


def typical(trace: Trace) -> Span | None:
    """The step of median length, of those in which something travels: some methods communicate in few steps only."""
    steps = [span for span in trace.spans if span.track == COMPUTE and span.name == f"step {span.step}"]
    travelled = _travelled(trace)
    busy = {s.step: sum(max(0.0, min(s.end, x.end) - max(s.begin, x.begin)) for x in travelled) for s in steps}
    most = max(busy.values(), default=0.0)
    chosen = sorted((s for s in steps if busy[s.step] >= _SOME * most), key=lambda span: span.end - span.begin)
    return chosen[len(chosen) // 2] if chosen else None


def _travelled(trace: Trace) -> list[TracedExchange]:
    return [exchange for exchange in exchanges(trace) if exchange.lane not in _ASIDE]


def _length(found: Sequence[TimelineBar]) -> float:
    return max((bar.begin + bar.length for bar in found), default=0.0)

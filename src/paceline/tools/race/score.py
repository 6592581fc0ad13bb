"""The numbers of a race, from the events that the workers wrote. Pure functions: events in, rows out.

A step takes as long as its slowest worker: the maximum over the workers of wall and data time. Warm-up
steps do not count, and neither does the first step of a turn: TCP has forgotten the speed of the link while
other contenders ran.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from paceline.errors import UsageError
from paceline.telemetry.events import AnyEvent, Barrier, Bye, Metric, Step, Wire

WorkerEvents = Sequence[Sequence[AnyEvent]]  # one sequence for each worker, in its own order

SINGLE, FLOOR = "single", "floor"
BASELINES = ("exact", "torch:ddp")  # the exact mean: ours where it runs, else torch's
_FEWER = 0.99  # a method saves bytes if it sends less than this share of the baseline's: counters jitter
_LAST = 5  # the loss is the mean of so many reports: one batch says little


class RaceRow(msgspec.Struct, kw_only=True):
    """The result of one contender. None means not known. docs/race.md says how each value is measured."""

    method: str
    workers: int
    link: str
    steps: int  # that were measured
    step_ms_median: float | None = None
    samples_per_s: float | None = None  # of all workers together
    speedup: float | None = None  # over one worker with the whole batch
    efficiency: float | None = None
    sent_bytes_per_step: float | None = None  # payload, by one worker
    wire_bytes_per_step: float | None = None  # by the interface's counter, by one worker
    exposed_comm_ms: float | None = None
    cpu_ms_per_step: float | None = None  # of the main thread, mean over the workers
    break_even_mbit: float | Literal["any"] | None = None  # it beats the exact mean on slower links; 0: on none
    barrier_ms_p50: float | None = None
    barrier_ms_p99: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    target_s: float | None = None
    peak_rss_mb: float | None = None
    error: str | None = None


class Target(NamedTuple):
    """A value to be reached by a reported metric."""

    name: str
    value: float
    falls: bool  # True: it is reached from above

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target that a text such as `loss=2.0` or `accuracy=0.85` stands for. A loss falls, an accuracy rises."""
        name, _, number = (part.strip() for part in text.partition("="))
        falls, rises = "loss" in name, "acc" in name
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if falls == rises or not math.isfinite(value):
            raise UsageError(
                f"--target {text!r} is not a target",
                why="it needs the name of a reported metric with `loss` or `acc` in it, and a number to reach",
                do="write it as loss=2.0 or accuracy=0.85",
            )
        return cls(name, value, falls)

    def met(self, value: float) -> bool:
        return value <= self.value if self.falls else value >= self.value

    def __str__(self) -> str:
        return f"{self.name} {'<=' if self.falls else '>='} {self.value:g}"


class MeasuredStep(NamedTuple):
    """One step that counts, over all workers."""

    step: int
    ms: float  # of the slowest worker
    cpu_ms: float  # processor time of the main thread, mean over the workers
    blocked_ms: float  # wall minus processor time of the main thread, mean over the workers
    samples: int  # of all workers
    sent: float  # payload bytes, mean over the workers


class MetricPoint(NamedTuple):
    """The value of a metric after a step: the mean over the workers that reported it."""

    step: int
    busy_s: float  # the job's own time so far, of the slowest worker
    value: float


@dataclass(frozen=True)
class ContenderRecord:
    """What is known of one contender: its name, its size, and the events that its workers wrote."""

    method: str
    workers: int
    events: WorkerEvents = field(default=(), repr=False)
    counts_payload: bool = True  # our Comm counts its bytes; nothing counts those of a peer
    error: str | None = None


def measured_steps(events: WorkerEvents, warmup: int) -> list[MeasuredStep]:
    """The steps that count and that every worker has finished."""
    by_step: dict[int, list[Step]] = defaultdict(list)
    dropped: set[int] = set()
    for worker in events:
        opens_turn = False
        for event in worker:
            if isinstance(event, Barrier | Wire):
                opens_turn = True  # the gate writes these between turns and at no other time
            elif isinstance(event, Step):
                by_step[event.step].append(event)
                if opens_turn or event.step < warmup:
                    dropped.add(event.step)
                opens_turn = False
    return [
        MeasuredStep(
            step=number,
            ms=max(s.wall_ms + s.data_ms for s in steps),
            cpu_ms=_mean(s.cpu_ms for s in steps),
            blocked_ms=_mean(max(0.0, s.wall_ms - s.cpu_ms) for s in steps),
            samples=sum(s.samples for s in steps),
            sent=_mean(s.sent for s in steps),
        )
        for number, steps in sorted(by_step.items())
        if len(steps) == len(events) and number not in dropped
    ]


def points(events: WorkerEvents, name: str) -> list[MetricPoint]:
    """The values of a reported metric over the run. A script may report it on one worker or on all of them."""
    by_step: dict[int, list[Metric]] = defaultdict(list)
    for worker in events:
        for event in worker:
            if isinstance(event, Metric) and event.name == name:
                by_step[event.step].append(event)
    series: list[MetricPoint] = []
    for step, metrics in sorted(by_step.items()):
        values = [m.value for m in metrics if m.value is not None]
        if len(values) < len(metrics):
            series.clear()  # it is not finite any more: earlier values say nothing about this model
        else:
            series.append(MetricPoint(step, max(m.busy_s for m in metrics), _mean(values)))
    return series


def smooth(series: Sequence[MetricPoint], last: int = _LAST) -> list[MetricPoint]:
    """The series with each value replaced by the mean of itself and the ones before it, `last` values in all."""
    smoothed = []
    for i, point in enumerate(series):
        window = series[max(0, i + 1 - last) : i + 1]
        smoothed.append(point._replace(value=_mean(earlier.value for earlier in window)))
    return smoothed


def progress(events: WorkerEvents, name: str) -> list[MetricPoint]:
    """A metric as the table shows it and as it is compared with the target: the loss of a step is smoothed."""
    series = points(events, name)
    return smooth(series) if name == "loss" else series


def reached_s(events: WorkerEvents, target: Target) -> float | None:
    """The job's own seconds until the target was first met; None if it never was."""
    return next((point.busy_s for point in progress(events, target.name) if target.met(point.value)), None)


def typical(values: Sequence[float]) -> float:
    """The mean, with single stalls cut at twice the 95th percentile.

    The median would not do: it shows nothing of a method that communicates in every eighth step only.
    """
    cap = 2 * float(np.percentile(values, 95))
    return _mean(min(v, cap) for v in values)


def bytes_by_step(events: WorkerEvents, *, wire: bool) -> list[tuple[int, float]]:
    """(steps done, bytes that one worker has sent by then), as the network interface counts, or as Comm does."""
    sums: dict[int, float] = defaultdict(float)
    for worker in events:
        done, total = 0, 0.0
        for event in worker:
            if wire and isinstance(event, Wire):
                done, total = done + event.steps, total + event.sent
            elif not wire and isinstance(event, Step):
                done, total = event.step + 1, total + event.sent
            else:
                continue
            sums[done] += total / len(events)
    return [(0, 0.0), *sorted(sums.items())] if sums else []


def rows(records: Sequence[ContenderRecord], *, link: str, warmup: int, target: Target | None = None) -> list[RaceRow]:
    """A row for each contender, in the order given."""
    measured = {record.method: measured_steps(record.events, warmup) for record in records}
    floor = measured.get(FLOOR)
    floor_blocked_ms = typical([step.blocked_ms for step in floor]) if floor else None
    scored = []
    for record in records:
        row = RaceRow(
            method=record.method,
            workers=record.workers,
            link=link if record.workers > 1 else "none",
            steps=len(measured[record.method]),
            error=record.error,
        )
        _add_steps(row, record, measured[record.method], floor_blocked_ms)
        _add_events(row, record, warmup, target)
        scored.append(row)
    _add_ratios(scored)
    _add_break_even(scored)
    return scored


def bytes_column(rows: Sequence[RaceRow]) -> str:
    """The name of the bytes column of the whole race: the interface's counters where all contenders have them.

    Otherwise it is our own payload: workers that share memory send nothing that an interface would count.
    """
    raced = [row for row in rows if row.workers > 1 and row.step_ms_median is not None]
    known = bool(raced) and all(
        row.wire_bytes_per_step is not None and row.wire_bytes_per_step >= 0.5 * (row.sent_bytes_per_step or 0)
        for row in raced
    )
    return "wire_bytes_per_step" if known else "sent_bytes_per_step"


def baseline(rows: Sequence[RaceRow]) -> RaceRow | None:
    """The row of the exact mean in this race, which every other method is to beat."""
    raced = {row.method: row for row in rows if row.step_ms_median is not None}
    return next((raced[name] for name in BASELINES if name in raced), None)


def saves_bytes(row: RaceRow, rows: Sequence[RaceRow]) -> bool:
    """Whether a contender sends less than the exact mean. False where that is not known."""
    column, exact = bytes_column(rows), baseline(rows)
    mine, theirs = getattr(row, column), getattr(exact, column) if exact else None
    return mine is not None and theirs is not None and mine < _FEWER * theirs


def saves_no_time(rows: Sequence[RaceRow]) -> list[str]:
    """Our methods that send less than the exact mean and are no faster here, by the mean step."""
    exact = baseline(rows)
    if exact is None or exact.samples_per_s is None:
        return []
    ours = [row for row in rows if row.workers > 1 and row.sent_bytes_per_step is not None and row.samples_per_s]
    slow = [row for row in ours if (row.samples_per_s or 0.0) <= exact.samples_per_s and row.method not in BASELINES]
    return [row.method for row in slow if saves_bytes(row, rows)]


def _add_steps(
    row: RaceRow, record: ContenderRecord, measured: Sequence[MeasuredStep], floor_blocked_ms: float | None
) -> None:
    if not measured:
        return
    ms = [step.ms for step in measured]
    row.step_ms_median = _tidy(float(np.median(ms)))
    if (mean_ms := typical(ms)) > 0:
        row.samples_per_s = _tidy(_mean(step.samples for step in measured) / mean_ms * 1e3)
    if record.counts_payload:
        row.sent_bytes_per_step = _tidy(_mean(step.sent for step in measured))
    if floor_blocked_ms is not None and record.workers > 1:
        blocked_ms = typical([step.blocked_ms for step in measured])
        row.exposed_comm_ms = _tidy(max(0.0, blocked_ms - floor_blocked_ms))
    row.cpu_ms_per_step = _tidy(typical([step.cpu_ms for step in measured]))


def _add_events(row: RaceRow, record: ContenderRecord, warmup: int, target: Target | None) -> None:
    every = [event for worker in record.events for event in worker]
    wire = _wire_turns(record.events, warmup) or _wire_turns(record.events, 0)
    if steps := sum(event.steps for event in wire):
        row.wire_bytes_per_step = _tidy(sum(event.sent for event in wire) / steps)
    barriers = [event.ms for event in every if isinstance(event, Barrier)]
    if barriers and record.workers > 1:
        row.barrier_ms_p50, row.barrier_ms_p99 = (_tidy(float(np.percentile(barriers, q))) for q in (50, 99))
    if loss := progress(record.events, "loss"):
        row.loss = _tidy(loss[-1].value)
    if accuracy := progress(record.events, "accuracy"):
        row.accuracy = _tidy(accuracy[-1].value)
    if target is not None and (seconds := reached_s(record.events, target)) is not None:
        row.target_s = _tidy(seconds)
    if peaks := [event.peak_rss_mb for event in every if isinstance(event, Bye)]:
        row.peak_rss_mb = _tidy(max(peaks))


def _wire_turns(events: WorkerEvents, warmup: int) -> list[Wire]:
    """The counters of the turns that began after the warm-up: some methods send everything in their first steps."""
    kept = []
    for worker in events:
        done = 0
        for event in worker:
            if isinstance(event, Wire):
                if done >= warmup:
                    kept.append(event)
                done += event.steps
    return kept


def _add_ratios(scored: Sequence[RaceRow]) -> None:
    alone = next((row.samples_per_s for row in scored if row.method == SINGLE), None)
    for row in scored:
        if alone and row.samples_per_s is not None:
            row.speedup = _tidy(row.samples_per_s / alone)
            row.efficiency = _tidy(row.samples_per_s / alone / row.workers)


def _add_break_even(scored: Sequence[RaceRow]) -> None:
    """Fill in the link speed below which each contender beats the exact mean.

    A step is taken to be its processor time and then its bytes over the link, 8·bytes/link + cpu, which is equal
    on both sides at link = 8·(bytes of the baseline - own bytes) / (own cpu - cpu of the baseline). docs/race.md
    says what this leaves out.
    """
    exact, column = baseline(scored), bytes_column(scored)
    if exact is None or exact.cpu_ms_per_step is None or getattr(exact, column) is None:
        return
    for row in scored:
        sent, cpu = getattr(row, column), row.cpu_ms_per_step
        if row is exact or row.workers < 2 or row.method == FLOOR or sent is None or cpu is None:
            continue
        dearer_ms = cpu - exact.cpu_ms_per_step
        if not saves_bytes(row, scored):
            # A method that is cheaper, but not for its bytes, has no such speed.
            row.break_even_mbit = 0.0 if dearer_ms > 0 else None
        elif dearer_ms <= 0:
            row.break_even_mbit = "any"
        else:
            row.break_even_mbit = _tidy(8e-3 * (getattr(exact, column) - sent) / dearer_ms)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _tidy(value: float) -> float | None:
    """The value as the result shows it: four decimals are enough, and JSON has no NaN."""
    return round(value, 4) if math.isfinite(value) else None

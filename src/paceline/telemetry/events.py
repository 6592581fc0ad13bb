"""One stream of typed events for each worker, as JSON lines. Race, progress and dashboard read this and nothing else.

A run directory holds `worker-0.jsonl`, `worker-1.jsonl`, ... Events are buffered and written at most every half
second (and at the end), so that a step costs a few microseconds of encoding. Of a long run the oldest are not kept:
event_file.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.telemetry.event_file import older


class TelemetryEvent(msgspec.Struct, tag_field="event", tag=str.lower, omit_defaults=False):
    """The base of all events. `t` is this worker's monotonic clock in seconds."""

    t: float


class Hello(TelemetryEvent):
    """The first line: who writes."""

    rank: int
    world_size: int
    method: str
    host: str
    pid: int
    unix: float  # wall-clock time of `t`
    torch: str
    threads: int
    parameters: int


class Step(TelemetryEvent):
    """One step: from the moment a batch was handed out until the next one was asked for."""

    step: int
    wall_ms: float  # without time spent in `untimed` blocks and at the gate
    cpu_ms: float  # of the main thread: the rest of wall_ms it was blocked
    data_ms: float  # waiting for the loader; not part of wall_ms
    wait_ms: float  # blocked on other workers, as measured by the engine (0 where the engine is not ours)
    sent: int  # payload bytes in this step, counted by Comm (0 where the engine is not ours)
    samples: int  # of this worker


class Metric(TelemetryEvent):
    """A value the job reported with `paceline.log`."""

    step: int
    busy_s: float  # the sum of wall_ms and data_ms so far: the job's own time, whoever else ran in between
    name: str
    value: float | None  # none: it was not finite, which JSON cannot say


class Barrier(TelemetryEvent):
    """One barrier over all workers."""

    ms: float


class Wire(TelemetryEvent):
    """The network interface's own counter over a stretch of steps."""

    steps: int
    sent: int  # bytes this worker's interface sent, headers included
    received: int
    interface: str


class Skip(TelemetryEvent):
    """A step that did not count."""

    step: int
    workers: list[int]  # whose gradients were not finite
    why: str


class Choice(TelemetryEvent):
    """A policy has chosen a setting for a layer or for steps, the old one or another. All workers choose alike."""

    step: int  # so many had counted
    layer: str  # the parameter's name; empty: it is about whole steps
    knob: str
    value: float
    critical: bool  # in the regime that compresses less, or takes smaller steps
    ratio: float | None  # how much the gradient's norm has changed; none: another reason decided


class Rebalance(TelemetryEvent):
    """The workers have told each other their speeds, and have changed their shares of a batch, or left them."""

    batch: int  # from which on, as this loader has handed them out
    changed: bool
    shares: list[int]  # by the speeds
    per_sample_ms: list[float]
    per_step_ms: list[float]
    exposed_ms: float  # communication that nothing hides
    before_ms: float  # a step, as predicted with the shares that were valid
    after_ms: float  # ... and with these


class Cut(TelemetryEvent):
    """Batches are dealt in micro-batches of another size from now on."""

    step: int
    samples: int  # the most in a micro-batch
    workers: list[int]  # whose memory did not suffice; empty where a larger size is tried
    why: str


class Note(TelemetryEvent):
    """Something a person should read once."""

    text: str


class Bye(TelemetryEvent):
    """The last line of a run that ended on purpose, by success or by a named failure."""

    steps: int
    peak_rss_mb: float
    error: str = ""


AnyEvent = Hello | Step | Metric | Barrier | Wire | Skip | Choice | Rebalance | Cut | Note | Bye
_decoder = msgspec.json.Decoder(AnyEvent)


def read(path: Path) -> Iterator[AnyEvent]:
    """A worker's events, as far as they are kept. A line that is not whole yet, or broken, is passed over."""
    for part in (older(path), path):
        with contextlib.suppress(FileNotFoundError), part.open("rb") as lines:
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                    yield _decoder.decode(line)

"""One stream of typed events for each worker, as JSON lines. Race, progress and dashboard read this and nothing else.

A run directory holds `worker-0.jsonl`, `worker-1.jsonl`, ... Events are buffered and written at most every half
second (and at the end), so that a step costs a few microseconds of encoding.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class Event(msgspec.Struct, tag_field="event", tag=str.lower, omit_defaults=False):
    """The base of all events. `t` is this worker's monotonic clock in seconds."""

    t: float


class Hello(Event):
    """The first line: who writes."""

    rank: int
    world: int
    method: str
    host: str
    pid: int
    unix: float  # wall-clock time of `t`
    torch: str
    threads: int
    parameters: int


class Step(Event):
    """One step: from the moment a batch was handed out until the next one was asked for."""

    step: int
    wall_ms: float  # without time spent in `untimed` blocks and at the gate
    cpu_ms: float  # of the main thread: the rest of wall_ms it was blocked
    data_ms: float  # waiting for the loader; not part of wall_ms
    wait_ms: float  # blocked on other workers, as measured by the engine (0 where the engine is not ours)
    sent: int  # payload bytes in this step, counted by Comm (0 where the engine is not ours)
    samples: int  # of this worker


class Metric(Event):
    """A value the job reported with `paceline.log`."""

    step: int
    busy_s: float  # the sum of wall_ms and data_ms so far: the job's own time, whoever else ran in between
    name: str
    value: float | None  # none: it was not finite, which JSON cannot say


class Barrier(Event):
    """One barrier over all workers."""

    ms: float


class Wire(Event):
    """The network interface's own counter over a stretch of steps."""

    steps: int
    sent: int  # bytes this worker's interface sent, headers included
    received: int
    interface: str


class Skip(Event):
    """A step that did not count."""

    step: int
    workers: list[int]  # whose gradients were not finite
    why: str


class Note(Event):
    """Something a person should read once."""

    text: str


class Bye(Event):
    """The last line of a run that ended on purpose, by success or by a named failure."""

    steps: int
    peak_rss_mb: float
    error: str = ""


AnyEvent = Hello | Step | Metric | Barrier | Wire | Skip | Note | Bye
_decoder = msgspec.json.Decoder(AnyEvent)
_FLUSH_S = 0.5


def read(path: Path) -> Iterator[AnyEvent]:
    """A worker's events so far. A line that is not whole yet, or broken, is passed over."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                yield _decoder.decode(line)


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Moment(NamedTuple):
    """A point in a job's own time."""

    step: int  # steps completed
    busy_s: float


class Recorder:
    """Times this worker's steps and writes its events (to nowhere when there is no directory)."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self.path = directory / f"worker-{rank}.jsonl" if directory else None
        self._out = self.path.open("ab") if self.path else None
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._written = time.monotonic()
        self.step = 0  # steps completed
        self.busy_s = 0.0
        self.wait_s = 0.0  # added to by the engine
        self.sent = 0  # added to by the engine
        self._wall = self._cpu = 0.0  # when the lap began; 0: not in a lap
        self._paused = 0.0  # when `untimed` began; 0: not inside
        self._paused_cpu, self._paused_sent = 0.0, 0  # ... and what these were then
        self._data_s = 0.0
        self._samples = 0

    def emit(self, event: AnyEvent) -> None:
        if self._out is None:
            return
        self._encoder.encode_into(event, self._buffer, -1)
        self._buffer += b"\n"
        if event.t - self._written > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        if self._out is not None:
            self._out.write(self._buffer)
            self._out.flush()
            self._buffer.clear()
            self._written = time.monotonic()

    def start_lap(self, samples: int, data_s: float) -> None:
        """A batch is handed out."""
        self._samples, self._data_s = samples, data_s
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def end_lap(self) -> None:
        """The next batch is asked for, or the loop was left: the step is over."""
        if not self._wall:
            return
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        self.busy_s += wall + self._data_s
        self.emit(
            Step(
                t=time.monotonic(),
                step=self.step,
                wall_ms=wall * 1e3,
                cpu_ms=cpu * 1e3,
                data_ms=self._data_s * 1e3,
                wait_ms=self.wait_s * 1e3,
                sent=self.sent,
                samples=self._samples,
            )
        )
        self.step += 1
        self._wall, self.wait_s, self.sent = 0.0, 0.0, 0

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """What happens inside is not part of the step: evaluation, saving, printing."""
        if self._paused:  # inside another one, which takes out the whole time
            yield
            return
        self._paused, self._paused_cpu, self._paused_sent = time.perf_counter(), time.thread_time(), self.sent
        try:
            yield
        finally:
            self._cpu += time.thread_time() - self._paused_cpu
            self.sent = self._paused_sent
            if self._wall:
                self._wall += time.perf_counter() - self._paused
            self._paused = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What happens inside is part of the step, inside `untimed` too: it had been put off."""
        wall, cpu, sent = time.perf_counter(), time.thread_time(), self.sent
        yield
        if self._paused:
            self._paused += time.perf_counter() - wall
            self._paused_cpu += time.thread_time() - cpu
            self._paused_sent += self.sent - sent

    def moment(self) -> Moment:
        """Now, in the job's own time."""
        now = self._paused or time.perf_counter()  # what is untimed is not busy
        return Moment(self.step, self.busy_s + (now - self._wall + self._data_s if self._wall else 0.0))

    def log(self, metrics: dict[str, Any], at: Moment | None = None) -> None:
        """Values of the step just finished, or of the one in progress, or of an earlier moment."""
        step, busy = at or self.moment()
        for name, value in metrics.items():
            number = float(value)
            known = number if math.isfinite(number) else None
            self.emit(Metric(t=time.monotonic(), step=step, busy_s=busy, name=name, value=known))

    def close(self, error: str = "") -> None:
        self.emit(Bye(t=time.monotonic(), steps=self.step, peak_rss_mb=peak_rss_mb(), error=error))
        self.flush()
        if self._out is not None:
            self._out.close()
            self._out = None

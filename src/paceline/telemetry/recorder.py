"""This worker's clock: times its steps, counts its bytes and writes its events."""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.telemetry.event_file import EventFile
from paceline.telemetry.events import AnyEvent, Bye, Hello, Metric, Step
from paceline.telemetry.pace import Pace

_FLUSH_S = 0.5


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Moment(NamedTuple):
    """A point in a job's own time."""

    step: int  # steps completed
    busy_s: float


class Lap(NamedTuple):
    """From one batch to the next, on this worker."""

    compute_s: float  # with waiting for the loader, without waiting for other workers
    wait_s: float  # for other workers
    samples: int


_LAPS = 200  # that are kept


class Recorder:
    """Times this worker's steps and writes its events (to nowhere when there is no directory)."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self.path = directory / f"worker-{rank}.jsonl" if directory else None
        self._out = EventFile(self.path) if self.path else None
        self._hello = b""  # the line that says who writes
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._written = time.monotonic()
        self.step = 0  # steps completed
        self.busy_s = 0.0
        self.wait_s = 0.0  # waited for other workers in this lap
        self.backwards = 0  # backwards that have ended, in the whole job
        self.pace: Pace | None = None  # of the loader whose batch is in hand, where one wants to know
        self.sent = 0  # added to by the engine
        self._wall = self._cpu = 0.0  # when the lap began; 0: not in a lap
        self._paused = 0.0  # when `untimed` began; 0: not inside
        self._paused_cpu, self._paused_sent, self._paused_wait = 0.0, 0, 0.0  # ... and what these were then
        self._data_s = 0.0
        self._samples = 0
        self.laps: deque[Lap] = deque(maxlen=_LAPS)  # the last ones

    def emit(self, event: AnyEvent) -> None:
        if self._out is None:
            return
        self._encoder.encode_into(event, self._buffer, -1)
        self._buffer += b"\n"
        if isinstance(event, Hello):
            self._hello = self._encoder.encode(event) + b"\n"
        if event.t - self._written > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        if self._out is not None:
            self._out.write(bytes(self._buffer), first=self._hello)
            self._buffer.clear()
            self._written = time.monotonic()

    def start_lap(self, samples: int, data_s: float) -> None:
        """A batch is handed out."""
        self._end_pace()
        self._samples, self._data_s = samples, data_s
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def go_on(self, samples: int, data_s: float) -> None:
        """Another batch of the same step is handed out."""
        self._samples += samples
        self._data_s += data_s
        self._wall += data_s  # waiting for data counts by itself
        if self.pace is not None:
            self.pace.more(samples)

    def end_lap(self) -> None:
        """The next batch is asked for, or the loop was left: the step is over."""
        self._end_pace()
        if not self._wall:
            return
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        self.busy_s += wall + self._data_s
        self.laps.append(Lap(wall + self._data_s - self.wait_s, self.wait_s, self._samples))
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

    def follow(self, pace: Pace) -> None:
        """In this lap, which has just begun, have `pace` told how long the worker computes."""
        self.pace = pace
        pace.begin(max(self._samples, 1))  # a worker that has none computes on a borrowed one

    def _end_pace(self) -> None:
        if self.pace is not None:
            self.pace.end()
            self.pace = None

    def _without(self, *, waiting: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.pace is None else self.pace.without(waiting=waiting)

    def backward_ended(self) -> None:
        """The gradients of the batch in hand have been computed."""
        self.backwards += 1
        if self.pace is not None:
            self.pace.backward_ended()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside is a wait for other workers."""
        began = time.perf_counter()
        with self._without(waiting=True):
            yield
        self.wait_s += time.perf_counter() - began

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """What happens inside is not part of the step: evaluation, saving, printing."""
        if self._paused:  # inside another one, which takes out the whole time
            yield
            return
        self._paused, self._paused_cpu = time.perf_counter(), time.thread_time()
        self._paused_sent, self._paused_wait = self.sent, self.wait_s
        try:
            with self._without(waiting=False):
                yield
        finally:
            self._cpu += time.thread_time() - self._paused_cpu
            self.sent, self.wait_s = self._paused_sent, self._paused_wait
            if self._wall:
                self._wall += time.perf_counter() - self._paused
            self._paused = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What happens inside is part of the step, inside `untimed` too: it had been put off."""
        wall, cpu, sent, wait = time.perf_counter(), time.thread_time(), self.sent, self.wait_s
        yield
        if self._paused:
            self._paused += time.perf_counter() - wall
            self._paused_cpu += time.thread_time() - cpu
            self._paused_sent += self.sent - sent
            self._paused_wait += self.wait_s - wait

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

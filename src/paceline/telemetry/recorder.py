"""This worker's clock: times its steps, counts its bytes and writes its events."""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.telemetry.event_file import EventFile
from paceline.telemetry.events import AnyEvent, Bye, Hello, Metric, Step

_FLUSH_S = 0.5


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
        self._out = EventFile(self.path) if self.path else None
        self._hello = b""  # the line that says who writes
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
        self._samples, self._data_s = samples, data_s
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def go_on(self, samples: int, data_s: float) -> None:
        """Another batch of the same step is handed out."""
        self._samples += samples
        self._data_s += data_s
        self._wall += data_s  # waiting for data counts by itself

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

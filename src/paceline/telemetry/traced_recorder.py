"""A Recorder that also keeps the timeline: steps, data, waits and what is untimed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.telemetry.events import AnyEvent, Hello
from paceline.telemetry.recorder import Recorder
from paceline.telemetry.tape import COMPUTE, WAITS, Span, Tape


class TracedRecorder(Recorder):
    """Its events are the plain Recorder's. The spans are written once, when it is closed."""

    def __init__(self, directory: Path | None, rank: int, *, tape: Tape, traces: Path) -> None:
        self.tape, self.traces = tape, traces
        self._worker: Hello | None = None
        self._waited = 0.0
        self._began = 0.0
        super().__init__(directory, rank)

    @property
    def wait_s(self) -> float:
        return self._waited

    @wait_s.setter
    def wait_s(self, value: float) -> None:
        """The engine adds each wait when it is over."""
        waited, self._waited = value - self._waited, value
        if waited > 0:
            now = time.monotonic()
            self._add(WAITS, "wait", now - waited, now)

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, Hello) and self._worker is None:
            self._worker = event
        super().emit(event)

    def start_lap(self, samples: int, data_s: float) -> None:
        self.tape.running = True
        self._began = time.monotonic()
        if data_s > 0:
            self._add(COMPUTE, "data", self._began - data_s, self._began)
        super().start_lap(samples, data_s)

    def end_lap(self) -> None:
        before = self.step
        super().end_lap()
        if self.step > before:
            self._add(COMPUTE, f"step {before}", self._began, time.monotonic())
            self.tape.next_step()

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        began = time.monotonic()
        with super().untimed():
            yield
        self._add(COMPUTE, "untimed", began, time.monotonic())

    def close(self, error: str = "") -> None:
        super().close(error)
        if self._worker is not None:
            self.tape.write(self.traces, self._worker)

    def _add(self, track: str, name: str, begin: float, end: float) -> None:
        self.tape.add(Span(track, name, self.tape.step, begin, end))

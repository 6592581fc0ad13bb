"""How long a worker computes on a batch, without what it waits for others.

A lap goes from the moment in which a batch is handed out to the end of the last backward before the next one is asked
for. Time spent in waits for other workers and in `untimed` blocks is taken out: it says nothing about this worker. A
lap without a backward (an evaluation) is not reported.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch


class Clock(Protocol):
    """Marks on the time line of whatever computes."""

    def mark(self) -> Any:
        """Now."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """The time between two marks; None as long as it is not known."""


class HostClock:
    """The host's time, for workers that compute on CPUs."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin


class DeviceClock:
    """The GPU's time. The host runs ahead of it, so a time is known a step later, and nobody waits for it."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        return begin.elapsed_time(end) * 1e-3 if end.query() else None


def clock_of(device: torch.device) -> Clock:
    """The clock of a worker that computes there."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class ComputedBatch(NamedTuple):
    """One batch."""

    samples: int
    computed_s: float  # to the end of backward
    waited_s: float  # for other workers, over the whole lap


@dataclass
class _Marks:
    samples: int
    begin: Any
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    computed: Any = None  # the end of the last backward
    before: tuple[int, int] = (0, 0)  # how many waits and pauses lie before it


class Pace:
    """The laps of one loader's batches."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or HostClock()
        self._open: _Marks | None = None
        self._over: deque[_Marks] = deque()
        self._inside = False  # of a wait or a pause

    def begin(self, samples: int) -> None:
        """A batch is handed out."""
        self._open = _Marks(samples, self.clock.mark())

    def more(self, samples: int) -> None:
        """Another micro-batch of the same batch is handed out."""
        if self._open is not None:
            self._open.samples += samples

    def backward_ended(self) -> None:
        """The gradients of this batch are there, or more of them."""
        if (lap := self._open) is not None and not self._inside:
            lap.computed, lap.before = self.clock.mark(), (len(lap.waits), len(lap.pauses))

    @contextlib.contextmanager
    def without(self, *, waiting: bool) -> Iterator[None]:
        """What happens inside is no computing. waiting: it is a wait for other workers."""
        lap = self._open
        if lap is None or self._inside:
            yield
            return
        begin, self._inside = self.clock.mark(), True
        try:
            yield
        finally:
            self._inside = False
            (lap.waits if waiting else lap.pauses).append((begin, self.clock.mark()))

    def end(self) -> None:
        """The next batch is asked for, of this loader or of another one."""
        if self._open is not None and self._open.computed is not None:
            self._over.append(self._open)
        self._open = None

    def take(self) -> list[ComputedBatch]:
        """The laps that are over and whose times are known by now, oldest first."""
        known = []
        while self._over and (lap := self._read(self._over[0])) is not None:
            known.append(lap)
            self._over.popleft()
        return known

    def _read(self, lap: _Marks) -> ComputedBatch | None:
        waits = [self.clock.seconds(*pair) for pair in lap.waits]
        pauses = [self.clock.seconds(*pair) for pair in lap.pauses]
        whole = self.clock.seconds(lap.begin, lap.computed)
        if whole is None or None in waits or None in pauses:
            return None
        waited, paused = [s or 0.0 for s in waits], [s or 0.0 for s in pauses]
        computed = whole - sum(waited[: lap.before[0]]) - sum(paused[: lap.before[1]])
        return ComputedBatch(lap.samples, max(computed, 1e-9), sum(waited))

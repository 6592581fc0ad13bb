"""Spans: from when to when something went on. A worker keeps those of its last steps, and writes them when it leaves.

Times are this host's monotonic clock, which all its processes share; `Tape.write` adds what is needed to compare them
with another host's.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from paceline.comm.protocol import Handle
from paceline.telemetry import files
from paceline.telemetry.events import Hello

COMPUTE, WAITS = "compute", "waits"  # tracks of the training thread; every lane has one of its own name


class Span(msgspec.Struct):
    """One thing that went on for a while."""

    track: str
    name: str
    step: int  # in which it began
    begin: float
    end: float = 0.0  # 0: not yet
    sent: int | None = None  # payload bytes, of an operation
    bucket: int | None = None
    first: str = ""  # the bucket's parameters, from this one ...
    last: str = ""  # ... to this one


class Trace(msgspec.Struct):
    """A worker's last steps, as it leaves them behind."""

    worker: Hello
    clock: str  # workers with the same one share a monotonic clock
    written: float  # what has no end had not ended by then
    spans: list[Span]


class Tape:
    """The spans of the last steps; older ones are forgotten. Any thread may add to it."""

    def __init__(self, steps: int) -> None:
        self.step = 0
        self._subject: object = None  # what the coroutine that is running is about
        self.running = False  # from the first batch on: setting up is not part of any step
        self._laps: deque[list[Span]] = deque([[]], maxlen=steps + 1)  # the last one is under way

    def add(self, span: Span) -> Span:
        if self.running:
            self._laps[-1].append(span)
        return span

    def about(self, subject: object) -> None:
        """From now on operations are about this bucket; None: about none."""
        self._subject = subject

    def label(self, span: Span) -> None:
        """Say which bucket a span is about."""
        slots = getattr(self._subject, "slots", None)
        if slots:
            span.bucket, span.first, span.last = self._subject.index, slots[0].name, slots[-1].name  # type: ignore[attr-defined]

    def servers(self, lane: str) -> Callable[[str, int, Handle], None]:
        """What keeps a span of every vector that goes to a server or comes from one."""

        def keep(way: str, sent: int, handle: Handle) -> None:
            span = self.add(Span(f"servers of {lane}", way, self.step, time.monotonic(), sent=sent))

            def landed() -> None:
                span.end = span.end or time.monotonic()

            handle.notify(landed)

        return keep

    def next_step(self) -> None:
        self.step += 1
        self._laps.append([])

    def spans(self) -> Iterator[Span]:
        for lap in self._laps:
            yield from lap

    def write(self, directory: Path, worker: Hello) -> None:
        trace = Trace(worker, _clock(), time.monotonic(), list(self.spans()))
        files.write(directory / f"trace-{worker.rank}.json", msgspec.json.encode(trace).decode())


def read(directory: Path) -> list[Trace]:
    """What the workers left there, by rank. One that was killed has left nothing."""
    traces = [msgspec.json.decode(path.read_bytes(), type=Trace) for path in directory.glob("trace-*.json")]
    return sorted(traces, key=lambda trace: trace.worker.rank)


def _clock() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()

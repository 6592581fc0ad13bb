"""Traces as one JSON document in Chrome's Trace Event Format, for ui.perfetto.dev and chrome://tracing.

A worker is a process there, and a track a thread. Exchanges overlap, which slices of one thread must not: a lane has
as many threads as were ever under way at a time. Times are whole microseconds since 1970. Rounding down keeps what lies
within something else within it, and files that several hosts wrote fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from paceline._version import __version__
from paceline.telemetry.exchanges import TracedExchange, exchanges, in_rows
from paceline.telemetry.tape import COMPUTE, WAITS, Span, Trace

_MOST_WORKERS = 10_000  # process numbers of the next group begin here

TraceEvent = dict[str, Any]


def document(groups: Mapping[str, Sequence[Trace]]) -> str:
    """All workers of all groups (the contenders of a race, by name; or one without a name)."""
    clocks: dict[str, float] = {}
    events: list[TraceEvent] = []
    for number, (name, traces) in enumerate(groups.items()):
        for trace in traces:
            # Workers that share a clock get one offset: a difference of their wall clocks is not a delay.
            offset = clocks.setdefault(trace.clock, trace.worker.unix - trace.worker.t)
            events += _Process(trace, offset, number * _MOST_WORKERS + trace.worker.rank).events(name)
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"paceline": __version__},
    }
    return msgspec.json.encode(whole).decode() + "\n"


class _Process:
    """One worker, as events."""

    def __init__(self, trace: Trace, offset: float, pid: int) -> None:
        self.trace, self.offset, self.pid = trace, offset, pid
        self.tracks = {COMPUTE: 0, WAITS: 1}  # by the name that is shown; numbered as they come

    def events(self, group: str) -> list[TraceEvent]:
        slices = sorted(self._slices(), key=lambda e: (e["tid"], e["ts"], -e["dur"]))  # the outer ones first
        worker = self.trace.worker
        name = f"{group or worker.method} · worker {worker.rank} of {worker.world_size}"
        about = [
            self._about("process_name", 0, name=name),
            self._about("process_labels", 0, labels=worker.host),
            self._about("process_sort_index", 0, sort_index=self.pid),
        ]
        for track, tid in self.tracks.items():
            about += [
                self._about("thread_name", tid, name=track),
                self._about("thread_sort_index", tid, sort_index=tid),
            ]
        return about + slices

    def _about(self, what: str, tid: int, **args: Any) -> TraceEvent:
        return {"name": what, "ph": "M", "pid": self.pid, "tid": tid, "args": args}

    def _slices(self) -> Iterator[TraceEvent]:
        for span in self.trace.spans:
            if span.track in self.tracks:
                yield self._slice(span.track, span.name, span, step=span.step)
        for lane, these in _by_lane(exchanges(self.trace)).items():
            for row, exchange in in_rows(these):
                track = lane if row == 0 else f"{lane} ({row + 1})"
                yield self._slice(track, exchange.name, exchange, **_args(exchange))
                for op in exchange.rounds:
                    yield self._slice(track, op.name, op, step=op.step, bytes=op.sent)

    def _slice(self, track: str, name: str, of: Span | TracedExchange, **args: Any) -> TraceEvent:
        tid = self.tracks.setdefault(track, len(self.tracks))
        begin, end = self._us(of.begin), self._us(of.end)
        return {"name": name, "ph": "X", "ts": begin, "dur": end - begin, "pid": self.pid, "tid": tid, "args": args}

    def _us(self, t: float) -> int:
        return int((t + self.offset) * 1e6)


def _by_lane(all_: Iterable[TracedExchange]) -> dict[str, list[TracedExchange]]:
    lanes: dict[str, list[TracedExchange]] = {}
    for exchange in all_:
        lanes.setdefault(exchange.lane, []).append(exchange)
    return lanes


def _args(exchange: TracedExchange) -> dict[str, Any]:
    first = exchange.operations[0]
    args: dict[str, Any] = {"step": first.step, "bytes": exchange.sent}
    if first.bucket is not None:
        names = first.first if first.first == first.last else f"{first.first} … {first.last}"
        args |= {"bucket": first.bucket, "parameters": names}
    if len(exchange.operations) > 1 or first.bucket is not None:
        args["operations"] = [op.name for op in exchange.operations]
    return args if exchange.landed else args | {"landed": False}

"""What travelled, for a timeline: all operations of a bucket in a step are one exchange."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from paceline.telemetry.tape import COMPUTE, WAITS, Span, Trace


@dataclass
class TracedExchange:
    """The operations of one bucket in one step, from the first bytes that leave until the last result has landed."""

    operations: list[Span]
    end: float

    @property
    def begin(self) -> float:
        return self.operations[0].begin

    @property
    def lane(self) -> str:
        return self.operations[0].track

    @property
    def name(self) -> str:
        bucket = self.operations[0].bucket
        return self.operations[0].name if bucket is None else f"bucket {bucket}"

    @property
    def sent(self) -> int:
        return sum(op.sent or 0 for op in self.operations)

    @property
    def landed(self) -> bool:
        return all(op.end for op in self.operations)

    @property
    def rounds(self) -> list[Span]:
        """The operations, if there are several and each began after the one before had landed; otherwise none."""
        ops = self.operations
        apart = len(ops) > 1 and self.landed and all(a.end <= b.begin for a, b in pairwise(ops))
        return ops if apart else []


def exchanges(trace: Trace) -> list[TracedExchange]:
    """All exchanges of a trace in the order they began. One that had not landed ends when the trace was written."""
    found: dict[object, TracedExchange] = {}
    for span in sorted(trace.spans, key=lambda span: span.begin):
        if span.track in (COMPUTE, WAITS):
            continue
        # By name and not by number: the module's buffers have buckets of their own.
        key = id(span) if span.bucket is None else (span.track, span.step, span.first, span.last)
        exchange = found.setdefault(key, TracedExchange([], 0.0))
        exchange.operations.append(span)
        exchange.end = max(exchange.end, span.end or trace.written)
    return list(found.values())


def in_rows(all_: Iterable[TracedExchange]) -> Iterator[tuple[int, TracedExchange]]:
    """Each exchange with the first row of a timeline in which no other one is under way."""
    ends: list[float] = []
    for exchange in all_:
        row = next((i for i, end in enumerate(ends) if end <= exchange.begin), len(ends))
        ends[row : row + 1] = [exchange.end]
        yield row, exchange

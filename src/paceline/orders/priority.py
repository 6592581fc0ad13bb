"""Gradients that the next forward needs first are sent first, and the step does not wait for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from paceline.core.facts import Fact
from paceline.core.parts import Event, Order
from paceline.knobs import knob
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket

_MB = 1 << 20
_GAIN = 0.2  # share of the backlog's error corrected after each step: one measurement is noisy


@register
@dataclass(kw_only=True)
class Priority(Order):
    """ByteScheduler: a chunk's priority is how soon the next forward needs it; a credit bounds what is in flight.

    Backward makes first the gradients that the next forward needs last. A chunk that was sent cannot be overtaken, so
    during backward no more is sent than the network can carry: sent ≤ pace · ready + credit, the most urgent first. At
    the end of backward the rest is sent, the most urgent first, and travels while the optimizer and the next forward
    run: see [Note: crossing] in overlap.py.

    ByteScheduler gives credit back when bytes have arrived, which workers see at different times, so one worker decides
    for all. Here all workers decide alike, from logical events: `pace`, the share of the bytes that the network carries
    while backward makes them, is learned. After every backward the workers learn, with their vote, how many of the
    sent bytes had not arrived at its end; `pace` then moves part of the way to the value that would have left `credit`
    chunks.
    """

    name: ClassVar[str] = "priority"
    paper: ClassVar[str] = "Peng et al., A generic communication scheduler for distributed DNN training, SOSP 2019"
    crosses: ClassVar[bool] = True
    tunes: ClassVar[dict[str, tuple[float, float]]] = {"partition": (0.25, 16.0), "credit": (0.25, 8.0)}
    needs: ClassVar[dict[Fact, str]] = {
        Fact.GRADIENTS_AGREE: "buckets are updated by this step's mean gradients; use the sync every_step",
        Fact.WHOLE_GRADIENTS: "every worker updates every bucket; use the layout replicated",
    }

    partition: float = knob(4.0, "a larger bucket travels in chunks of about this size", unit="MB", above=0.0)
    credit: float = knob(
        1.5,
        "in flight at the end of backward: less lets urgent ones pass, more keeps the wire busy",
        unit="chunks",
        low=0.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pace = 1.0  # learned, and not saved: a few steps are enough to learn it again
        self._made = self._chunks = 0  # bytes and chunks made when `next` was last called: after a backward, all

    def chunk_bytes(self) -> int:
        return int(self.partition * _MB)

    def next(self, ready: Sequence[Bucket], sent: Sequence[Bucket], event: Event) -> Sequence[Bucket]:
        urgent = sorted(ready, key=lambda b: self.urgency(b.whole))  # stable: the chunks of a bucket stay in order
        out = sum(b.flat.nbytes for b in sent)
        self._made, self._chunks = out + sum(b.flat.nbytes for b in ready), len(sent) + len(ready)
        if event is Event.END:
            return urgent
        limit = self.pace * self._made + self._credit_bytes()
        after = accumulate((b.flat.nbytes for b in urgent), initial=out)
        return [b for b, before in zip(urgent, after, strict=False) if before < limit]

    def urgency(self, b: Bucket) -> int:
        return -b.index

    def hear(self, backlog: float) -> None:
        if self._made:
            self.pace += _GAIN * (self._credit_bytes() - backlog) / self._made
            self.pace = min(max(self.pace, 0.0), 1.0)

    def _credit_bytes(self) -> float:
        return self.credit * self._made / max(self._chunks, 1)

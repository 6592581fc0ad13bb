"""What the next forward needs first goes first, and the step does not wait for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from paceline.knobs import knob
from paceline.parts import Event, Order
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket

_MB = 1 << 20
_GAIN = (
    0.2  # how much of an error in the backlog is put right at once: one backlog says little, workers differ by chance
)


@register
@dataclass(kw_only=True)
class Priority(Order):
    """ByteScheduler: a piece's priority is how soon the next forward needs it; a credit bounds what is in flight.

    Backward makes gradients in the order in which they are needed last. What has left cannot be overtaken, so during
    backward no more leaves than the wire is about to carry: sent ≤ pace · ready + credit, the most urgent first. At the
    end of backward the rest leaves, the most urgent first, and travels while the optimizer and the next forward run:
    see [Note: crossing] in crossing.py.

    ByteScheduler gives credit back when bytes have landed, which workers see at different times; there one of them
    decides for all. Here all decide alike, from logical events: `pace`, the share of the bytes that the wire carries
    while backward makes them, is learned. After every backward the workers hear, with their vote, how much of what was
    sent had not landed at its end; the next one goes some of the way to what would have left `credit` pieces.
    """

    name: ClassVar[str] = "priority"
    paper: ClassVar[str] = "Peng et al., A generic communication scheduler for distributed DNN training, SOSP 2019"
    crosses: ClassVar[bool] = True
    tunes: ClassVar[dict[str, tuple[float, float]]] = {"partition": (0.25, 16.0), "credit": (0.25, 8.0)}
    needs: ClassVar[dict[str, str]] = {
        "gradients agree": "updates are made of this step's mean gradients, bucket by bucket; use the sync every_step",
        "whole gradients": "every worker updates every bucket; use the layout replicated",
    }

    partition: float = knob(4.0, "a larger bucket travels in pieces of about this size", unit="MB", above=0.0)
    credit: float = knob(
        1.5,
        "in flight at the end of backward: less lets urgent ones pass, more keeps the wire busy",
        unit="pieces",
        low=0.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pace = 1.0  # learned, and not worth saving: it is known again after a few steps
        self._made = self._pieces = 0  # bytes and pieces that were ready when `next` was asked: after a backward, all

    def piece_bytes(self) -> int:
        return int(self.partition * _MB)

    def next(self, ready: Sequence[Bucket], sent: Sequence[Bucket], event: Event) -> Sequence[Bucket]:
        urgent = sorted(ready, key=lambda b: self.urgency(b.whole))  # stable: the pieces of a bucket stay in order
        out = sum(b.flat.nbytes for b in sent)
        self._made, self._pieces = out + sum(b.flat.nbytes for b in ready), len(sent) + len(ready)
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
        return self.credit * self._made / max(self._pieces, 1)

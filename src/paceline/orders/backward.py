"""First full, first out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.parts import Event, Order
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class Backward(Order):
    """Buckets leave by index, which is the order backward fills them in; nobody overtakes.

    A bucket that is full early waits for those before it: the workers then send in one order even when their graphs
    differ. What is still not full at the end of backward leaves as it is.
    """

    name: ClassVar[str] = "backward"
    paper: ClassVar[str] = "Li et al., PyTorch Distributed, VLDB 2020"

    def next(self, ready: Sequence[Bucket], sent: Sequence[Bucket], event: Event) -> Sequence[Bucket]:
        return ready

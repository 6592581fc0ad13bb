"""Buckets are sent in the order in which backward fills them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.core.parts import Event, Order
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class Backward(Order):
    """Buckets are sent by index, which is the order backward fills them in; no bucket overtakes another.

    A bucket that is full early waits for those before it, so that all workers send in one order even when their graphs
    differ. A bucket that is still not full at the end of backward is sent as it is.
    """

    name: ClassVar[str] = "backward"
    paper: ClassVar[str] = "Li et al., PyTorch Distributed, VLDB 2020"

    def next(self, ready: Sequence[Bucket], sent: Sequence[Bucket], event: Event) -> Sequence[Bucket]:
        return ready

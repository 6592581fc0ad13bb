"""Everyone holds everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.parts import Layout
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


@register
@dataclass(kw_only=True)
class Replicated(Layout):
    """Parameters, gradients and optimizer state whole on every worker, as in torch DDP."""

    name: ClassVar[str] = "replicated"
    gives: ClassVar[frozenset[str]] = frozenset({"whole gradients", "whole parameters"})

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        mean = await ex.mean(b, b.flat)
        if mean.data_ptr() != b.flat.data_ptr():  # else it came back in place
            b.flat.copy_(mean)

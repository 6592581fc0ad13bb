"""Every worker holds everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.core.facts import Fact
from paceline.core.parts import Layout
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class Replicated(Layout):
    """Parameters, gradients and optimizer state whole on every worker, as in torch DDP."""

    name: ClassVar[str] = "replicated"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.WHOLE_GRADIENTS, Fact.WHOLE_PARAMETERS})

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        mean = await ex.mean(b, b.flat)
        if mean.data_ptr() != b.flat.data_ptr():  # else it came back in place
            b.flat.copy_(mean)

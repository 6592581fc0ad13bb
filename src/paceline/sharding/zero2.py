"""Every worker holds all parameters, and a shard of the gradients and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.registry import register
from paceline.sharding.zero1 import Zero1

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class Zero2(Zero1):
    """Stage 2 of ZeRO: as stage 1, and a bucket's memory is given back as soon as its shard of the mean is there.

    With 16-bit parameters and Adam a worker holds 2 + 14/W bytes a parameter between steps; during backward, beside
    them, the buckets whose gradients are on their way. A window of micro-batches that is held back (`accumulate`,
    `no_sync`) needs its whole gradients until it is exchanged.
    """

    name: ClassVar[str] = "zero2"
    paper: ClassVar[str] = "Rajbhandari et al., ZeRO, SC20"
    formula: ClassVar[str] = "as zero1"

    def own(self, b: Bucket, ex: Exchange) -> None:
        super().own(b, ex)
        b.free()
        b.keep(b.flat[b.own])

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        await self.keep_shard(b, ex)
